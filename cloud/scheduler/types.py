"""What goes into the scheduler and what comes out: frozen values only.

The three of which every step has one a request are named tuples: they are made
three times as fast as frozen dataclasses, which is most of a step's host time.

Instants (`deadline_ns`) and spans (`budget_ns`) are integer nanoseconds of one
monotonic clock, which the caller reads and passes in.
"""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from headway.cost_model import CostModel
from headway.outcome import Outcome, Reason, RequestClass

__all__ = [
    "Admitted",
    "DeadlineCovers",
    "Ended",
    "Event",
    "FinishReason",
    "Rejected",
    "ReplicaSpec",
    "Request",
    "ScheduledItem",
    "StepOutput",
    "StepPlan",
    "StepResult",
    "TokenEmitted",
]


class DeadlineCovers(Enum):
    """Which token a deadline is about."""

    FIRST_TOKEN = "first_token"  # Generate: a person reads along.
    LAST_TOKEN = "last_token"  # NextAction: a robot needs the whole chunk.


class FinishReason(Enum):
    """Why a completed request gave no further token."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Request:
    """One piece of work, as the scheduler sees it.

    The scheduler never learns what the tokens are, nor how many a request will
    give: only `max_output_tokens` bounds that.
    """

    request_id: str
    tenant: str
    request_class: RequestClass
    prompt_tokens: int
    max_output_tokens: int
    # None: no deadline. Required for INTERACTIVE, none for BATCH.
    deadline_ns: int | None = None
    deadline_covers: DeadlineCovers = DeadlineCovers.LAST_TOKEN
    # True where the engine can only end the request at max_output_tokens (an
    # action chunk): its length is then known.
    has_fixed_output: bool = False
    # Chained hashes of the prompt's full KV blocks, salted by tenant and
    # adapter (see prefix hashing in kv). Empty: the prefix cache is not used.
    prefix_hashes: tuple[bytes, ...] = ()
    adapter: str = ""
    # The queued or running request of the same robot whose place this takes.
    supersedes: str = ""


@dataclass(frozen=True, slots=True)
class Admitted:
    """The request is in. For a promised class this is a promise."""

    request_id: str
    replica_id: str  # Empty where the request is not bound to one yet.
    predicted_ns: int  # Instant of the token that the deadline covers.
    max_output_tokens: int  # Lower than asked for where the tenant is degraded.
    # What the admission ended: a superseded request.
    events: tuple["Event", ...] = ()


@dataclass(frozen=True, slots=True)
class Rejected:
    """The request is not in, and nothing was spent on it."""

    request_id: str
    reason: Reason
    message: str
    # Earliest span after which the same request may be admitted. None: never.
    retry_after_ns: int | None = None
    # Span until the covered token would have come. Present for LATE.
    predicted_ns: int | None = None


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """An engine as the scheduler sees it."""

    replica_id: str
    num_blocks: int
    block_tokens: int
    max_context_tokens: int
    cost_model: CostModel
    # Host memory for swapped KV, in blocks, and the predicted time to copy one of them
    # either way. Without both, victims are computed again.
    num_swap_blocks: int = 0
    swap_block_ns: float = 0.0
    # Tenants that this replica is reserved for. Empty: everybody.
    tenants: frozenset[str] = frozenset()
    # Whether this replica belongs to the pool for long contexts.
    is_long_context: bool = False


class ScheduledItem(NamedTuple):
    """One request's share of a step.

    After the step `context_tokens + num_tokens` of the request's tokens (prompt,
    then its own output) are in KV memory.
    """

    request_id: str
    context_tokens: int  # In KV memory before the step.
    num_tokens: int  # Computed in the step; 1 for a decode.
    is_prefill: bool
    samples: bool  # The last computed position gives an output token.
    new_blocks: tuple[int, ...] = ()  # Appended to the request's block table.
    resets_table: bool = False  # The table is emptied first.


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What a replica is to do next. A plan without items is legal: do nothing.

    The executor applies, in this order: `closed`, `swap_out`, `swap_in`, `items`.
    """

    replica_id: str
    step_id: int
    items: tuple[ScheduledItem, ...]
    # Since the last plan: requests that the engine can forget.
    closed: tuple[str, ...] = ()
    # (device block, host block) copies.
    swap_out: tuple[tuple[int, int], ...] = ()
    # (host block, device block) copies.
    swap_in: tuple[tuple[int, int], ...] = ()
    # What the replica's cost model says, with its margin left out.
    predicted_ns: int = 0
    # Requests that ended while planning: expired before they were executed.
    events: tuple["Event", ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing for the engine to do."""
        return not (self.items or self.swap_out or self.swap_in)


class StepOutput(NamedTuple):
    """One request's token of a step."""

    request_id: str
    token: int
    is_stop: bool = False  # The engine says that the output ends here.


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a replica gives back for a plan."""

    step_id: int
    outputs: tuple[StepOutput, ...]
    elapsed_ns: int


class TokenEmitted(NamedTuple):
    """A request gave a token."""

    request_id: str
    token: int
    index: int  # type: ignore[assignment]  # 0 for the first one.


@dataclass(frozen=True, slots=True)
class Ended:
    """A request's one end."""

    request_id: str
    outcome: Outcome
    reason: Reason | None = None  # None for COMPLETED.
    finish: FinishReason | None = None  # Present for COMPLETED.
    at_ns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    queue_ns: int = 0  # Arrival to the first step with the request.
    prefill_ns: int = 0  # From there to the first token.
    decode_ns: int = 0  # From there to the end.


Event = TokenEmitted | Ended
