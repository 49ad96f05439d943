"""What a decision log says has become of every request, replica and block.

Rebuilt from the log's records alone. Rules over it are in `verifier`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = ["BATCH", "INTERACTIVE", "Item", "LogReplica", "LogRequest", "LogState", "blocks_for"]

INTERACTIVE, STANDARD, BATCH = range(3)

Record = Mapping[str, Any]


def blocks_for(tokens: int, block_tokens: int) -> int:
    """Blocks of `block_tokens` that hold `tokens`."""
    return (tokens + block_tokens - 1) // block_tokens


class Item(NamedTuple):
    """One request's share of a step, as it stands in a plan record."""

    request_id: str
    context: int
    num: int
    is_prefill: bool
    samples: bool
    new_blocks: Sequence[int]
    resets_table: bool


@dataclass(slots=True)
class LogRequest:
    """A request that was admitted."""

    request_id: str
    tenant: str
    rank: int
    prompt: int
    max_output: int
    deadline_ns: int | None
    covers_last: bool
    place: int  # Its place among equals; that of the request it superseded.
    arrival_ns: int
    replica: str  # Bound to, or running on; empty for none.
    is_running: bool = False
    computed: int = 0
    outputs: int = 0
    table: list[int] = field(default_factory=list)
    num_preemptions: int = 0
    was_charged: bool = False
    served_ns: int = 0  # When a step last worked for it, or it began to wait.
    first_token_ns: int | None = None

    @property
    def key(self) -> tuple[float, int]:
        """Order inside its class."""
        deadline = float("inf") if self.deadline_ns is None else self.deadline_ns
        return deadline, self.place

    @property
    def prefill_left(self) -> int:
        """Tokens to compute before the next output token."""
        return self.prompt + self.outputs - self.computed

    def prefill_at(self, context: int) -> int:
        """Tokens to compute before the next output token with `context` in KV."""
        return self.prompt + self.outputs - context

    @property
    def is_decoding(self) -> bool:
        """Whether only its last token is not computed yet."""
        return self.outputs > 0 and self.prefill_left == 1

    @property
    def is_open_promise(self) -> bool:
        """Whether its deadline is about a token that is not out yet."""
        return self.deadline_ns is not None and (self.covers_last or not self.outputs)

    @property
    def most_tokens(self) -> int:
        """Tokens of KV at its end; the last output token is never computed."""
        return self.prompt + self.max_output - 1


@dataclass(slots=True)
class LogReplica:
    """A replica that is up."""

    replica_id: str
    num_blocks: int
    block_tokens: int
    max_context: int
    tenants: frozenset[str]
    is_long_context: bool
    cost: Mapping[str, float]
    num_swap_blocks: int = 0
    swap_block_ns: float = 0.0
    last_step: int = 0
    is_draining: bool = False
    flight: Record | None = None
    idle_since_ns: int = 0
    # Content that is known: block -> (tenant, place in a prompt).
    content: dict[int, tuple[str, int]] = field(default_factory=dict)
    lane_ns: float = 0.0
    lane_at_ns: int = 0

    def predict_ns(self, chunks: Sequence[tuple[int, int]], decodes: Sequence[int]) -> float:
        """Step time by the cost formula of the design.

        Args:
            chunks: (context, tokens) of each prefill.
            decodes: context of each decode.
        """
        cost = self.cost
        tokens = sum(num for _, num in chunks)
        pairs = sum(num * (context + (num + 1) / 2) for context, num in chunks)
        kv = sum(context for context, _ in chunks) + sum(decodes)
        return (
            cost["t0_ns"]
            + cost["prefill_ns"] * tokens
            + cost["pair_ns"] * pairs
            + cost["decode_ns"] * len(decodes)
            + cost["kv_ns"] * kv
        )


class LogState:
    """Follows a log, record by record. Rules look at it before a record is applied."""

    def __init__(self) -> None:
        self.config: Mapping[str, Any] = {}
        self.live: dict[str, LogRequest] = {}
        self.ended: dict[str, tuple[str, str | None]] = {}  # Outcome and reason.
        self.places: dict[str, int] = {}
        self.replicas: dict[str, LogReplica] = {}
        self.is_draining = False
        self.now_ns = 0
        self._count = 0

    # --- questions ---

    def on(self, replica_id: str) -> Iterator[LogRequest]:
        """Live requests bound to a replica or running on it."""
        return (one for one in self.live.values() if one.replica == replica_id)

    def running_on(self, replica_id: str) -> list[LogRequest]:
        """The replica's batch."""
        return [one for one in self.on(replica_id) if one.is_running]

    def waiting_batch(self, replica: LogReplica) -> list[LogRequest]:
        """Waiting unpromised work that may run on the replica."""
        return [
            one
            for one in self.live.values()
            if one.rank == BATCH and not one.is_running and self.may_run(one, replica)
        ]

    def may_run(self, one: LogRequest, replica: LogReplica) -> bool:
        """Whether a request fits a replica at all, alone and by its reservation."""
        if replica.tenants and one.tenant not in replica.tenants:
            return False
        if one.prompt + one.max_output > replica.max_context:
            return False
        if blocks_for(one.most_tokens, replica.block_tokens) > replica.num_blocks:
            return False
        if one.replica == replica.replica_id:
            return True  # Bound before it was drained, or before the pools were as they are.
        if replica.is_draining:
            return False
        threshold = self.config.get("long_context_tokens")
        if threshold is None:
            return True
        is_long = one.prompt + one.max_output > int(threshold)
        if is_long == replica.is_long_context:
            return True
        # The other pool's work, unless nobody there is open to it and large enough.
        own = _capacity(replica)
        needed = own if is_long else min(int(threshold), own)
        return not any(
            other.is_long_context == is_long
            and not other.is_draining
            and (not other.tenants or one.tenant in other.tenants)
            and _capacity(other) >= needed
            for other in self.replicas.values()
        )

    def tpot_ns(self, rank: int) -> int | None:
        """The class's TPOT target."""
        value = self.config[("interactive", "standard", "batch")[rank]]["tpot_target_ns"]
        return None if value is None else int(value)

    def weight(self, tenant: str) -> float:
        """A tenant's weight."""
        settings = self.config["tenants"].get(tenant, self.config["default_tenant"])
        return float(settings["weight"])

    def has_bucket(self, tenant: str) -> bool:
        """Whether a tenant's rate is limited."""
        settings = self.config["tenants"].get(tenant, self.config["default_tenant"])
        return float(settings["tokens_per_s"]) > 0

    # --- records ---

    def apply(self, record: Record) -> None:
        """Takes a record in."""
        self.now_ns = max(self.now_ns, record.get("at", 0))
        apply = getattr(self, f"_{record['kind']}", None)
        if apply is not None:
            apply(record)

    def _config(self, record: Record) -> None:
        self.config = record["config"]

    def _drain(self, record: Record) -> None:
        self.is_draining = True

    def _undrain(self, record: Record) -> None:
        self.is_draining = False

    def _replica_drain(self, record: Record) -> None:
        self.replicas[record["replica"]].is_draining = True

    def _replica_undrain(self, record: Record) -> None:
        self.replicas[record["replica"]].is_draining = False

    def _replica_up(self, record: Record) -> None:
        self.replicas[record["replica"]] = LogReplica(
            record["replica"],
            record["blocks"],
            record["block_tokens"],
            record["max_context"],
            frozenset(record["tenants"]),
            record["is_long_context"],
            record["cost"],
            record["swap_blocks"],
            record["swap_block_ns"],
            idle_since_ns=record["at"],
            lane_at_ns=record["at"],
        )

    def _refit(self, record: Record) -> None:
        if record["replica"] in self.replicas:
            self.replicas[record["replica"]].cost = record["cost"]

    def _replica_down(self, record: Record) -> None:
        self.replicas.pop(record["replica"], None)

    def _submit(self, record: Record) -> None:
        if record["decision"] != "ADMITTED":
            return
        self._count += 1
        request_id, older = record["id"], record["supersedes"]
        takes_over = self.ended.get(older, ("", None))[1] == "SUPERSEDED"
        place = self.places[older] if takes_over else self._count
        self.places[request_id] = place
        self.live[request_id] = LogRequest(
            request_id,
            record["tenant"],
            record["class"],
            record["prompt"],
            record["max_output"],
            record["deadline"],
            record["covers"] == "last_token",
            place,
            record["at"],
            record["replica"],
            served_ns=record["at"],
        )

    def _plan(self, record: Record) -> None:
        replica = self.replicas.get(record["replica"])
        if replica is None:
            return
        replica.flight = record
        replica.last_step = record["step"]
        loaded = {device for _, device in record["swap_in"]}
        for item in map(Item._make, record["items"]):
            one = self.live.get(item.request_id)
            if one is None:
                continue
            if not one.is_running:
                one.is_running, one.replica = True, replica.replica_id
            if item.resets_table:
                one.table = []
                one.computed = item.context
            is_shared = item.resets_table and not loaded.intersection(item.new_blocks)
            num_known = item.context // replica.block_tokens if is_shared else 0
            for block in item.new_blocks[num_known:]:
                replica.content.pop(block, None)
            one.table = [*one.table, *item.new_blocks]
            one.was_charged = True
            one.served_ns = record["at"]

    def _commit(self, record: Record) -> None:
        replica = self.replicas.get(record["replica"])
        if replica is None or replica.flight is None:
            return
        items = {item.request_id: item for item in map(Item._make, replica.flight["items"])}
        replica.flight = None
        replica.idle_since_ns = record["at"]
        for item in items.values():
            one = self.live.get(item.request_id)
            # One that ended in mid-step and came again by the same id is not in the step.
            if one is None or not one.is_running:
                continue
            one.computed = item.context + item.num
            num_full = min(one.computed, one.prompt) // replica.block_tokens
            for place, block in enumerate(one.table[:num_full]):
                replica.content[block] = (one.tenant, place)
        for request_id, _ in record["outputs"]:
            one = self.live.get(request_id)
            if one is not None and one.is_running and request_id in items:
                one.outputs += 1
                if one.first_token_ns is None:
                    one.first_token_ns = record["at"]

    def _preempt(self, record: Record) -> None:
        one = self.live.get(record["id"])
        if one is not None:
            one.num_preemptions += 1
            one.served_ns = record["at"]
            self._leave(one)
            if one.rank == BATCH:
                one.replica = ""

    def _requeue(self, record: Record) -> None:
        one = self.live.get(record["id"])
        if one is not None:
            one.served_ns = record["at"]
            self._leave(one)
            one.replica = record["replica"]

    @staticmethod
    def _leave(one: LogRequest) -> None:
        one.is_running = False
        one.table = []
        one.computed = 0

    def _end(self, record: Record) -> None:
        self.live.pop(record["id"], None)
        self.ended[record["id"]] = (record["outcome"], record["reason"])


def _capacity(replica: LogReplica) -> int:
    """Tokens of the longest request that a replica takes."""
    return min(replica.max_context, replica.num_blocks * replica.block_tokens)
