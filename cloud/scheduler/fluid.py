"""The fluid demand test: a long queue as a fluid, in the order in which `step` serves it.

The processor-demand criterion of earliest-deadline-first scheduling (Baruah, Rosier
and Howell 1990): for each deadline, the work that must be done by then fits into the
time until then.
"""

from __future__ import annotations

from cloud.scheduler.config import SchedulerConfig
from cloud.scheduler.demand import bucket_start_ns
from cloud.scheduler.forecast import Forecast
from cloud.scheduler.replica import Replica
from cloud.scheduler.request_state import NEVER_NS, LiveRequest

__all__ = ["fluid_forecast"]


def fluid_forecast(
    replica: Replica,
    config: SchedulerConfig,
    newcomer: LiveRequest,
    now_ns: int,
    *,
    stretch: float,
    target_ns: float,
) -> Forecast:
    """As `forecast`, for any number of waiting requests: steps at the target, filled
    to the brim, and slots that each output token holds for one of them.
    """
    rank = newcomer.rank
    base_ns = replica.cost.t0_ns + sum(map(replica.decode_cost_ns, range(rank + 1)))
    # Of a full step this share is left for prefills; a tenth where decodes fill it.
    speed = max(0.1, 1 - base_ns / target_ns)
    start_ns = replica.step_end_ns(now_ns)
    ahead_ns, outputs = 0.0, 0
    for upper in range(rank + 1):
        for live in replica.prefilling[upper]:
            ahead_ns += replica.cost.chunk_ns(live.computed, live.prefill_left)
            outputs += live.max_output - live.num_output
        outputs += sum(live.max_output - live.num_output for live in replica.decoding[upper])
    for queue in replica.waiting[:rank]:
        _, work, tokens = queue.demand.cumulative()
        ahead_ns += work[-1] if work else 0.0
        outputs += tokens[-1] if tokens else 0

    def done_ns(work_ns: float, tokens: int) -> int:
        by_time_ns = work_ns / speed
        by_slots_ns = max(0, tokens // config.max_running - 1) * target_ns
        return start_ns + int(stretch * max(by_time_ns, by_slots_ns))

    starts, work, tokens = replica.waiting[rank].demand.cumulative()
    own_key = bucket_start_ns(newcomer.deadline_ns)
    before_ns, before_tokens = 0.0, 0
    for start, work_ns, num in zip(starts, work, tokens, strict=True):
        if start <= own_key:
            before_ns, before_tokens = work_ns, num
            continue
        with_it = done_ns(
            ahead_ns + work_ns + newcomer.demand_ns, outputs + num + newcomer.max_output
        )
        if with_it > start >= done_ns(ahead_ns + work_ns, outputs + num):
            victim = replica.waiting[rank].first_due_from(start)
            return Forecast(NEVER_NS, victim, with_it)
    tail_ns = (newcomer.max_output - 1) * target_ns if newcomer.covers_last else 0.0
    finish_ns = done_ns(ahead_ns + before_ns + newcomer.demand_ns, outputs + before_tokens)
    return Forecast(finish_ns + int(stretch * tail_ns))
