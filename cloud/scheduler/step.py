"""Puts a step together: who decodes, who prefills how much, who joins the batch.

In a step, in this order:
1. Decodes that need a block get one; see `preemption`.
2. For INTERACTIVE, then STANDARD: its decodes, then its prefills by deadline, the
   waiting among them joining the batch, over lower work if need be.
3. BATCH: its decodes, then short prefills, then one long one; who joins is the
   first request of the tenant with the smallest counter.

How long the step may get for a class is bounded by the TPOT targets, by `max_step`
and by the unmet promises above it: lower work has only what they can spare.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

from cloud.scheduler.bucket import TokenBucket
from cloud.scheduler.config import SchedulerConfig
from cloud.scheduler.draft import StepDraft
from cloud.scheduler.laxity import GUARD, StepBound, open_promises
from cloud.scheduler.preemption import Preemption
from cloud.scheduler.queues import FairQueue
from cloud.scheduler.replica import Replica
from cloud.scheduler.request_state import LiveRequest
from cloud.scheduler.unpromised import Join, Unpromised, longest_by_settings_ns
from headway.outcome import RequestClass

__all__ = ["StepComposer"]

_BATCH = int(RequestClass.BATCH)
# Share of what promises can spare that lower work never gets.
_KEPT = 1 / 8


class StepComposer:
    """Fills step drafts. Owns no state of its own."""

    __slots__ = ("_config", "_give_up", "_join", "_preemption", "_unpromised")

    def __init__(
        self,
        config: SchedulerConfig,
        fair_queue: FairQueue,
        buckets: Mapping[str, TokenBucket],
        preemption: Preemption,
        join: Join,
        give_up: Callable[[LiveRequest, int], bool],
    ) -> None:
        self._config = config
        self._give_up = give_up  # Ends a request that is hopeless at an instant.
        self._preemption = preemption
        self._join = join
        self._unpromised = Unpromised(config, fair_queue, buckets, join)

    def compose(self, replica: Replica, now_ns: int) -> StepDraft:
        """The replica's next step. May evict, and lets waiting requests join."""
        stalled = self._grow_decodes(replica, now_ns)
        draft = StepDraft(replica, self._config.min_chunk_tokens)
        draft.lane_ns = lane_ns = self._unpromised.lane_ns(replica, now_ns)
        is_blocked = False  # Promised work is left over, for want of room.
        promise_ns = math.inf  # Longest step with which all promises in it are kept.
        due: list[dict[int, int]] = []  # Open promises of each class that decode.
        for rank in range(_BATCH):
            ceiling_ns = self._ceiling_ns(replica, due, now_ns)
            due.append(open_promises(replica.decoding[rank], now_ns, replica.alone_step_ns))
            draft.add_class_decodes(rank, -1.0 if is_blocked else ceiling_ns, stalled)
            draft.bound = self._bound(replica, rank, due[rank], ceiling_ns, now_ns)
            is_blocked |= self._add_promised_prefills(
                replica, draft, rank, now_ns, may_join=not is_blocked
            )
            promise_ns = min(promise_ns, draft.bound.longest_ns)
        draft.bound, draft.lane_ns = StepBound(ceiling_ns=promise_ns), 0.0
        ceiling_ns = self._ceiling_ns(replica, due, now_ns)
        self._unpromised.fill(
            replica, draft, stalled, -1.0 if is_blocked else ceiling_ns, lane_ns, now_ns
        )
        if draft.is_empty and stalled:
            self._break_stall(replica, draft, stalled, now_ns)
        return draft

    # --- decodes ---

    def _grow_decodes(self, replica: Replica, now_ns: int) -> list[LiveRequest]:
        """Blocks for the decodes that need one; returns those that got none."""
        stalled: list[LiveRequest] = []
        for decoding in replica.decoding:
            for live in [one for one in decoding if one.computed == one.capacity]:
                if live not in replica.running:
                    continue  # Evicted for one before it.
                if (
                    live.reserved_blocks
                    or replica.pool.num_available > 0
                    or self._preemption.make_room_to_grow(replica, live, now_ns)
                ):
                    replica.grow(live, live.computed + 1)
                elif live in replica.running:
                    stalled.append(live)
        return [live for live in stalled if live in replica.running]

    def _break_stall(
        self, replica: Replica, draft: StepDraft, stalled: list[LiveRequest], now_ns: int
    ) -> None:
        """Everybody waits for a block: the newest gives way, whatever the rate."""
        first = min(stalled, key=lambda live: live.key)
        if self._preemption.make_room_to_grow(replica, first, now_ns, is_last_resort=True):
            replica.grow(first, first.computed + 1)
            draft.add_decodes((first,), 1, first.computed)

    # --- bounds on the step's time ---

    @staticmethod
    def _ceiling_ns(replica: Replica, due: list[dict[int, int]], now_ns: int) -> float:
        """Longest step beside which every open promise of the classes above is kept.

        The least slack per remaining step of those promises. Of what they can
        spare, lower work gets the share that interactive arrivals leave on
        average: the rest is room for the promises to come.

        Args:
            replica: whose step it is.
            due: for each class above, its promises that decode.
            now_ns: the time.
        """
        least_ns = math.inf
        above_ns = replica.cost.t0_ns
        trust = (1 - 2 * GUARD) / (replica.margin.value + replica.margin.step_excess)
        for upper, decoding in enumerate(due):
            above_ns += replica.decode_cost_ns(upper)
            for steps, deadline_ns in decoding.items():
                least_ns = min(least_ns, (deadline_ns - now_ns) * trust / steps)
            for live in replica.prefilling[upper]:
                if not live.is_met:
                    own_ns = replica.cost.chunk_ns(live.computed, live.prefill_left)
                    slack_ns = (live.deadline_ns - now_ns) * trust - own_ns
                    least_ns = min(least_ns, slack_ns / live.promised_output_left)
        if least_ns == math.inf:
            return least_ns
        return above_ns + (least_ns - above_ns) * (1 - max(_KEPT, replica.interactive_load))

    @staticmethod
    def _bound(
        replica: Replica, rank: int, due: dict[int, int], ceiling_ns: float, now_ns: int
    ) -> StepBound:
        """What prefills of class `rank` may make of the step: those that decode
        already keep their promises even if all laxity is used at once.
        """
        return StepBound(
            due.items(),
            now_ns=now_ns,
            later_ns=replica.cost.t0_ns + sum(map(replica.decode_cost_ns, range(rank + 1))),
            growth_ns=replica.cost.kv_ns * sum(map(len, replica.decoding[: rank + 1])),
            stretch=replica.margin.value,
            excess=replica.margin.step_excess,
            ceiling_ns=ceiling_ns,
        )

    # --- promised prefills ---

    def _add_promised_prefills(
        self,
        replica: Replica,
        draft: StepDraft,
        rank: int,
        now_ns: int,
        *,
        may_join: bool,
    ) -> bool:
        """The class's prefills by deadline. Returns whether some are left over."""
        target_ns = longest_by_settings_ns(replica, self._config, rank)
        if replica.lane.is_open:
            target_ns *= 1 - self._config.lane_share
        if not may_join:
            prefilling = replica.prefilling[rank]
            is_short = self._go_on(replica, draft, prefilling, target_ns)
            return is_short or replica.waiting[rank].head is not None
        for live in self._by_deadline(replica, rank):
            if live not in replica.running:
                if live.request.prefix_hashes and self._give_up(live, now_ns):
                    continue  # The prefix it counted on is gone.
                if not draft.fitting(live, target_ns, has_floor=True):
                    return True
                if not self._join_promised(replica, draft, live, now_ns):
                    # No later one may take the room that comes free for it; those
                    # that have room already go on.
                    later = [one for one in replica.prefilling[rank] if one.key > live.key]
                    self._go_on(replica, draft, later, target_ns)
                    return True
            if self._go_on(replica, draft, [live], target_ns):
                return True
        return False

    def _go_on(
        self,
        replica: Replica,
        draft: StepDraft,
        lives: list[LiveRequest],
        target_ns: float,
    ) -> bool:
        """Gives step time to running prefills, in order. Returns whether it was too little."""
        for live in lives:
            left = live.prefill_left
            num = draft.fitting(live, target_ns, has_floor=True)
            if num:
                draft.add_chunk(live, num)
            if num < left:
                return True
            # Its token comes when the step ends, and it decodes from then on: later
            # ones must leave room for both.
            draft.end_prefill(live)
        return False

    @staticmethod
    def _by_deadline(replica: Replica, rank: int) -> Iterator[LiveRequest]:
        """Running prefills and waiting requests of a class, merged by deadline.

        The queue may lose its head between two steps of the iteration, when
        that joins the batch.
        """
        prefilling = list(replica.prefilling[rank])
        queue = replica.waiting[rank]
        place = num_skipped = 0
        while True:
            waiting = queue.at(num_skipped)
            running = prefilling[place] if place < len(prefilling) else None
            if running is not None and (waiting is None or running.key < waiting.key):
                place += 1
                yield running
            elif waiting is not None:
                yield waiting
                num_skipped += waiting is queue.at(num_skipped)
            else:
                return

    def _join_promised(
        self, replica: Replica, draft: StepDraft, live: LiveRequest, now_ns: int
    ) -> bool:
        if draft.has_given_way(live):
            return False
        if replica.num_running < self._config.max_running:
            cached, reserve, lacking = replica.need(live, self._config)
            if lacking <= 0:
                self._join(replica, live, cached, reserve, now_ns)
                return True
        num_slots = max(0, replica.num_running + 1 - self._config.max_running)
        cached, reserve, lacking = replica.need(live, self._config)
        if not self._preemption.make_room(
            replica,
            live.rank,
            num_slots=num_slots,
            num_blocks=lacking + replica.pool.num_available,
            kept=cached,
            now_ns=now_ns,
        ):
            return False
        # A victim may have held blocks of the same prefix: count again.
        cached, reserve, lacking = replica.need(live, self._config)
        if lacking > 0:
            return False
        self._join(replica, live, cached, reserve, now_ns)
        return True
