"""A request while it lives: the one mutable record that the parts share."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from cloud.scheduler.types import DeadlineCovers, Request

if TYPE_CHECKING:
    from cloud.scheduler.bucket import TokenBucket
    from cloud.scheduler.fairness import Account
    from cloud.scheduler.replica import Replica
    from cloud.scheduler.swap import HostMemory

__all__ = ["NEVER_NS", "LiveRequest", "Stage"]

# Later than every instant: the deadline of work that has none.
NEVER_NS = 1 << 62


class Stage(Enum):
    """Where a live request stands."""

    WAITING = "waiting"  # In a queue, or pushed back to it.
    RUNNING = "running"  # In a replica's batch.
    ENDED = "ended"


class LiveRequest:
    """A request and what has become of it so far.

    Its tokens are the prompt and then its own output; `computed` of them are in
    KV memory. Compared by identity.
    """

    __slots__ = (
        "account",
        "arrival_ns",
        "blocks",
        "bucket",
        "cached_tokens",
        "capacity",
        "computed",
        "covers_last",
        "deadline_ns",
        "demand_ns",
        "expiry_ns",
        "first_step_ns",
        "first_token_ns",
        "fresh_blocks",
        "gave_way",
        "host",
        "host_blocks",
        "is_met",
        "is_prompt_charged",
        "key",
        "max_output",
        "num_output",
        "num_preemptions",
        "opened_at",
        "output_charge",
        "promised_ns",
        "prompt_tokens",
        "rank",
        "replica",
        "request",
        "request_id",
        "reserved_blocks",
        "reserved_tokens",
        "resets_table",
        "seq",
        "serial",
        "stage",
        "tenant",
    )

    def __init__(
        self,
        request: Request,
        *,
        seq: int,
        serial: int,
        now_ns: int,
        deadline_ns: int,
        max_output: int,
        account: Account,
    ) -> None:
        self.request = request
        self.request_id = request.request_id
        self.tenant = request.tenant
        self.rank = int(request.request_class)
        self.account = account
        # Its place among equals: kept through preemptions, taken over from a
        # request that it supersedes.
        self.seq = seq
        self.serial = serial  # Of this request alone.
        self.arrival_ns = now_ns
        self.deadline_ns = deadline_ns
        self.covers_last = request.deadline_covers is DeadlineCovers.LAST_TOKEN
        self.key = (self.rank, deadline_ns, seq)
        self.prompt_tokens = request.prompt_tokens
        self.max_output = max_output

        self.stage = Stage.WAITING
        # The replica that it is bound to or runs on.
        self.replica: Replica | None = None
        # The replica whose engine knows it.
        self.opened_at: Replica | None = None
        self.computed = 0
        self.num_output = 0
        self.cached_tokens = 0
        self.is_met = deadline_ns == NEVER_NS  # Nothing (more) is promised.

        self.blocks: list[int] = []
        self.capacity = 0  # Tokens that `blocks` hold.
        self.reserved_blocks = 0
        # Where its KV is while it waits as a victim, `computed` tokens of it.
        self.host: HostMemory | None = None
        self.host_blocks: list[int] = []
        # For the next plan: blocks to append, and whether the table starts anew.
        self.fresh_blocks: tuple[int, ...] = ()
        self.resets_table = False

        self.num_preemptions = 0
        # In which step of which replica it gave way last.
        self.gave_way: tuple[Replica, int] | None = None
        self.is_prompt_charged = False
        self.bucket: TokenBucket | None = None  # Drawn from as it runs.
        self.output_charge = 0.0  # What an output token adds to the account.
        self.demand_ns = 0.0  # Its prefill, as the queue's demand counts it.
        self.promised_ns = 0.0  # What it adds to the account's promised work.
        self.reserved_tokens = 0.0  # Of the token bucket.
        self.expiry_ns = NEVER_NS  # When `advance` looks at it.
        self.first_step_ns = -1
        self.first_token_ns = -1

    @property
    def home(self) -> Replica:
        """The replica that it is bound to or runs on.

        Raises:
            RuntimeError: there is none; a bug in the caller.
        """
        if self.replica is None:
            raise RuntimeError(f"request '{self.request_id}' is bound to no replica")
        return self.replica

    @property
    def total_tokens(self) -> int:
        """Tokens that exist: the prompt and the output so far."""
        return self.prompt_tokens + self.num_output

    @property
    def prefill_left(self) -> int:
        """Tokens to compute before the next output token."""
        return self.prompt_tokens + self.num_output - self.computed

    @property
    def kv_tokens_at_most(self) -> int:
        """Tokens of KV at its end: the last output token is never computed."""
        return self.prompt_tokens + self.max_output - 1

    @property
    def tokens_to_join(self) -> int:
        """Tokens of KV that must be there for it to join a batch.

        All that it can ever need for interactive work and every promise of a
        last token, so that no promise fails for want of memory, and for a
        victim, so that it is not evicted again at once. Else what exists of it.
        """
        is_promise = self.deadline_ns != NEVER_NS and (self.rank == 0 or self.covers_last)
        if is_promise or self.num_preemptions:
            return self.kv_tokens_at_most
        return self.prompt_tokens + self.num_output

    @property
    def promised_output_left(self) -> int:
        """Output tokens until the promise is kept, the largest output assumed."""
        if self.covers_last:
            return self.max_output - self.num_output
        return 1 if self.num_output == 0 else 0
