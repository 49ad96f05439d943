"""The scheduler's state at one instant, for operators."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cloud.scheduler.bucket import TokenBucket
from cloud.scheduler.explain import Hold
from cloud.scheduler.fairness import Accounts
from cloud.scheduler.replica import Replica
from cloud.scheduler.request_state import LiveRequest
from headway.cost_model import CostModel
from headway.outcome import Reason, RequestClass

__all__ = [
    "ReplicaSnapshot",
    "RequestSnapshot",
    "Snapshot",
    "TenantSnapshot",
    "describe_request",
    "take_snapshot",
]


@dataclass(frozen=True, slots=True)
class TenantSnapshot:
    """One tenant in one class. Counts are since the start."""

    request_class: RequestClass
    tenant: str
    num_waiting: int
    num_running: int
    counter: float  # Weighted tokens served, over the weight, lifts included.
    admitted: int
    completed: int  # In time where there is a deadline.
    missed: int  # Deadlines not kept, whatever the reason save the client's cancel.
    cancelled: int
    failed: int
    rejected: tuple[tuple[Reason, int], ...]
    prompt_tokens: int  # Computed.
    output_tokens: int
    preemptions: int
    # Of the missed: standard promises that ended while interactive work ran.
    yielded: int = 0


@dataclass(frozen=True, slots=True)
class RequestSnapshot:
    """Where one live request stands, and why it is not further."""

    request_id: str
    request_class: RequestClass
    stage: str  # "waiting" or "running".
    hold: Hold  # What keeps it from running.
    replica_id: str  # Empty where it is bound to none.
    num_ahead: int  # Waiting requests of its queue that come before it.
    waited_ns: int
    slack_ns: int | None  # Until its deadline; None where nothing (more) is promised.
    prefill_tokens_left: int
    output_tokens: int
    kv_blocks: int
    preemptions: int


@dataclass(frozen=True, slots=True)
class ReplicaSnapshot:
    """One replica that is up."""

    replica_id: str
    is_draining: bool
    cost_model: CostModel
    num_running: int
    num_waiting: int  # Promised requests bound to it.
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    blocks_held: int
    steps: int
    margin: float
    level: float  # Actual over predicted step time of late.
    interactive_load: float  # Share of time that interactive work takes.
    predicted_wait_ns: int  # Until a request that came now would get step time.


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything."""

    at_ns: int
    is_draining: bool
    tenants: tuple[TenantSnapshot, ...]
    replicas: tuple[ReplicaSnapshot, ...]
    # Weighted tokens that each tenant with a rate limit can have now, once it asked.
    bucket_levels: tuple[tuple[str, float], ...] = ()
    # Prompt and largest output of what waits, by class.
    waiting_tokens: tuple[int, int, int] = (0, 0, 0)


def take_snapshot(
    now_ns: int,
    accounts: Accounts,
    replicas: Iterable[Replica],
    buckets: Mapping[str, TokenBucket],
    *,
    waiting_tokens: tuple[int, int, int],
    is_draining: bool,
) -> Snapshot:
    """Copies the state; sorted by class and tenant."""
    tenants = tuple(
        TenantSnapshot(
            request_class=RequestClass(one.rank),
            tenant=one.tenant,
            num_waiting=one.num_waiting,
            num_running=one.num_running,
            counter=one.counter,
            admitted=one.admitted,
            completed=one.completed,
            missed=one.missed,
            cancelled=one.cancelled,
            failed=one.failed,
            rejected=tuple(sorted(one.rejected.items())),
            prompt_tokens=one.prompt_tokens,
            output_tokens=one.output_tokens,
            preemptions=one.preemptions,
            yielded=one.yielded,
        )
        for one in sorted(accounts, key=lambda one: (one.rank, one.tenant))
    )
    return Snapshot(
        now_ns,
        is_draining,
        tenants,
        tuple(_of_replica(one, now_ns) for one in replicas),
        tuple((tenant, bucket.level(now_ns)) for tenant, bucket in sorted(buckets.items())),
        waiting_tokens,
    )


def describe_request(live: LiveRequest, num_ahead: int, hold: Hold, now_ns: int) -> RequestSnapshot:
    """Where a request stands."""
    return RequestSnapshot(
        request_id=live.request_id,
        request_class=RequestClass(live.rank),
        stage=live.stage.value,
        hold=hold,
        replica_id=live.replica.replica_id if live.replica is not None else "",
        num_ahead=num_ahead,
        waited_ns=now_ns - live.arrival_ns,
        slack_ns=None if live.is_met else live.deadline_ns - now_ns,
        prefill_tokens_left=live.prefill_left,
        output_tokens=live.num_output,
        kv_blocks=len(live.blocks),
        preemptions=live.num_preemptions,
    )


def _of_replica(replica: Replica, now_ns: int) -> ReplicaSnapshot:
    queues: list[Iterable[LiveRequest]] = [*replica.prefilling[:2], *replica.waiting]
    ahead_ns = sum(
        replica.cost.chunk_ns(live.computed, live.prefill_left)
        for queue in queues
        for live in queue
    )
    pool = replica.pool
    return ReplicaSnapshot(
        replica_id=replica.replica_id,
        is_draining=replica.is_draining,
        cost_model=replica.cost,
        num_running=replica.num_running,
        num_waiting=sum(map(len, replica.waiting)),
        blocks_total=pool.num_blocks,
        blocks_free=pool.num_free,
        blocks_cached=pool.num_cached,
        blocks_held=pool.num_held,
        steps=replica.num_steps,
        margin=replica.margin.value,
        level=replica.margin.level,
        interactive_load=replica.interactive_load,
        predicted_wait_ns=replica.step_end_ns(now_ns) - now_ns + round(ahead_ns),
    )
