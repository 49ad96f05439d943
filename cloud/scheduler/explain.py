"""Why a waiting request is not further: the first thing that keeps it where it is."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum

from cloud.scheduler.bucket import TokenBucket
from cloud.scheduler.config import SchedulerConfig
from cloud.scheduler.queues import FairQueue
from cloud.scheduler.replica import Replica
from cloud.scheduler.request_state import LiveRequest, Stage
from headway.outcome import RequestClass

__all__ = ["Hold", "hold_of"]

_BATCH = int(RequestClass.BATCH)


class Hold(Enum):
    """What keeps a request from being in a batch."""

    NOTHING = "NOTHING"  # It is in one.
    NO_ENGINE = "NO_ENGINE"  # No replica is up that could take it.
    DRAINING = "DRAINING"  # Every replica that could take it is drained.
    QUOTA = "QUOTA"  # Its tenant's token bucket is empty.
    QUEUE = "QUEUE"  # Others of its queue come first.
    SHARE = "SHARE"  # Tenants that were served less come first.
    SLOTS = "SLOTS"  # As many requests run as may.
    KV = "KV"  # There is not enough KV memory.
    STEP = "STEP"  # The step that runs has to end first.
    TIME = "TIME"  # The next step has no time for it.


def hold_of(
    live: LiveRequest,
    num_ahead: int,
    replicas: Collection[Replica],
    fair: FairQueue,
    buckets: Mapping[str, TokenBucket],
    config: SchedulerConfig,
    *,
    is_long: bool,
    now_ns: int,
) -> Hold:
    """What keeps a live request where it is.

    Args:
        live: the request.
        num_ahead: waiting requests of its queue that come before it.
        replicas: that are up.
        fair: the queue of unpromised work.
        buckets: by tenant.
        config: the scheduler's.
        is_long: whether it belongs to the long-context pool.
        now_ns: the time.
    """
    if live.stage is not Stage.WAITING:
        return Hold.NOTHING
    if live.rank != _BATCH:
        return Hold.QUEUE if num_ahead else _room(live, [live.home], config)
    takers = [one for one in replicas if one.takes(live.tenant, is_long)]
    if not takers:
        is_drained = any(one.is_draining and one.is_meant_for(live.tenant) for one in replicas)
        return Hold.DRAINING if is_drained else Hold.NO_ENGINE
    bucket = buckets.get(live.tenant)
    if bucket is not None and bucket.level(now_ns) <= 0:
        return Hold.QUOTA
    if num_ahead:
        return Hold.QUEUE
    found = _room(live, takers, config)
    if found is Hold.TIME and _is_others_turn(live, takers, fair):
        return Hold.SHARE
    return found


def _room(live: LiveRequest, replicas: list[Replica], config: SchedulerConfig) -> Hold:
    """What lacks at every one of `replicas`."""
    free = [one for one in replicas if one.num_running < config.max_running]
    if not free:
        return Hold.SLOTS
    free = [one for one in free if one.need(live, config)[2] <= 0]
    if not free:
        return Hold.KV
    # With a step under way at each one, nobody can have joined since.
    if all(one.flight is not None and one.flight.started_ns <= live.arrival_ns for one in free):
        return Hold.STEP
    return Hold.TIME


def _is_others_turn(live: LiveRequest, replicas: list[Replica], fair: FairQueue) -> bool:
    return any(
        head.account.counter < live.account.counter
        for replica in replicas
        for head in fair.heads(replica.takes)
    )
