"""The fluid demand test: a long queue as a fluid, in the order in which `step` serves it.

The processor-demand criterion of earliest-deadline-first scheduling (Baruah, Rosier
and Howell 1990): for each deadline, the work that must be done by then fits into the
time until then.
"""

from __future__ import annotations

from cloud.scheduler.config import SchedulerConfig
from cloud.scheduler.demand import Due, bucket_start_ns
from cloud.scheduler.forecast import Forecast
from cloud.scheduler.load import load_of
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
    view = _View(replica, config, newcomer, now_ns, stretch, target_ns)
    own = Due(
        work_ns=replica.cost.chunk_ns(0, newcomer.total_tokens),
        outputs=newcomer.max_output,
        held=newcomer.max_output * newcomer.kv_tokens_at_most,
    )
    own_start_ns = bucket_start_ns(newcomer.deadline_ns)
    before = Due()
    buckets = replica.waiting[newcomer.rank].demand.cumulative()
    for due in buckets:
        if due.start_ns <= own_start_ns:
            before = due
            continue
        with_it_ns = view.done_ns(due.plus(own))
        if with_it_ns > due.start_ns >= view.done_ns(due):
            victim = replica.waiting[newcomer.rank].first_due_from(due.start_ns)
            return Forecast(NEVER_NS, victim, with_it_ns)
    behind_ns = (buckets[-1].work_ns if buckets else 0.0) - before.work_ns
    # Its own output comes after its prefill; before that only its room counts.
    first_ns = view.done_ns(before.plus(own._replace(outputs=0, held=0)))
    return Forecast(first_ns + view.decode_ns(newcomer, behind_ns))


class _View:
    """A replica's load as a fluid, as far as it can delay a newcomer."""

    __slots__ = (
        "_ahead",
        "_base_ns",
        "_cost",
        "_full_ns",
        "_room",
        "_running",
        "_slots",
        "_start_ns",
        "_stretch",
        "_target_ns",
    )

    def __init__(
        self,
        replica: Replica,
        config: SchedulerConfig,
        newcomer: LiveRequest,
        now_ns: int,
        stretch: float,
        target_ns: float,
    ) -> None:
        ranks = range(newcomer.rank + 1)
        self._cost = cost = replica.cost
        self._slots = config.max_running
        self._stretch = stretch
        self._target_ns = target_ns
        self._start_ns = replica.step_end_ns(now_ns)
        # A step with decodes alone: as they are now, and with every slot taken.
        self._base_ns = cost.t0_ns + sum(map(replica.decode_cost_ns, ranks))
        self._full_ns = cost.t0_ns + self._slots * (
            cost.decode_ns + cost.kv_ns * newcomer.total_tokens
        )
        # Requests do not fill the memory to the brim: on average half of one is left.
        room = replica.pool.num_blocks * replica.pool.block_tokens
        self._room = max(1, room - newcomer.kv_tokens_at_most // 2)
        self._ahead = Due()
        load = load_of(replica, newcomer.rank)
        self._running = Due(0, load.prefill_ns, load.outputs, load.held)
        for queue in replica.waiting[: newcomer.rank]:
            buckets = queue.demand.cumulative()
            if buckets:
                self._ahead = self._ahead.plus(buckets[-1])

    def done_ns(self, due: Due) -> int:
        """When the prefills of all that is due are done."""
        due = due.plus(self._ahead)
        work_ns = due.work_ns + self._running.work_ns
        # Those ahead decode meanwhile, but never more of them than there are slots.
        decoded_ns = work_ns + due.outputs * self._cost.decode_ns
        by_time_ns = min(
            decoded_ns / self._speed(self._base_ns), work_ns / self._speed(self._full_ns)
        )
        # Each slot gives a token a step, KV is held for as many steps, and the
        # prefills make these steps longer.
        by_slots = (due.outputs + self._running.outputs) / self._slots
        by_room = (due.held + self._running.held) / self._room
        steps_ns = max(by_slots, by_room) * self._base_ns + work_ns
        return self._start_ns + int(self._stretch * max(by_time_ns, steps_ns))

    def decode_ns(self, newcomer: LiveRequest, behind_ns: float) -> int:
        """Its decodes, beside which prefills of those behind it go on."""
        if not newcomer.covers_last:
            return 0
        steps = newcomer.max_output - newcomer.num_output - 1
        step_ns = min(self._full_ns, self._base_ns + self._slots * self._cost.decode_ns)
        room_ns = max(0.0, self._target_ns - step_ns)
        return int(self._stretch * (steps * step_ns + min(behind_ns, steps * room_ns)))

    def _speed(self, decodes_ns: float) -> float:
        """Share of a full step that is left for prefills; a tenth where there is little."""
        return max(0.1, 1 - decodes_ns / self._target_ns)
