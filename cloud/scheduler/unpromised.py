"""Batch work in a step: what promises leave, and what the starvation lane adds to it.

Decodes first, then short prefills, then one long one. Who joins is the first request of
the tenant with the smallest counter; it is waited for, so that small ones behind it do
not keep a large one out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from cloud.scheduler.bucket import TokenBucket
from cloud.scheduler.config import SchedulerConfig
from cloud.scheduler.draft import StepDraft
from cloud.scheduler.queues import FairQueue
from cloud.scheduler.replica import Replica
from cloud.scheduler.request_state import LiveRequest
from headway.outcome import RequestClass

__all__ = ["Join", "Unpromised", "longest_by_settings_ns"]

_BATCH = int(RequestClass.BATCH)
# A waiting prefill is taken for shorter by this share of its wait.
_AGING = 1 / 8


class Join(Protocol):
    """Moves a waiting request into a replica's batch."""

    def __call__(
        self, replica: Replica, live: LiveRequest, cached: list[int], reserve: int, now_ns: int
    ) -> None:
        """Carries it out."""


def longest_by_settings_ns(replica: Replica, config: SchedulerConfig, rank: int) -> float:
    """Longest step by the settings, as far as classes down to `rank` are concerned."""
    target_ns = config.max_step_ns
    for upper in range(rank + 1):
        own_ns = config.of_class(RequestClass(upper)).tpot_target_ns
        if own_ns is not None and (replica.decoding[upper] or replica.prefilling[upper]):
            target_ns = min(target_ns, own_ns)
    return target_ns


class Unpromised:
    """Fills what is left of a step with batch work. Owns no state of its own."""

    __slots__ = ("_buckets", "_config", "_fair", "_join")

    def __init__(
        self,
        config: SchedulerConfig,
        fair_queue: FairQueue,
        buckets: Mapping[str, TokenBucket],
        join: Join,
    ) -> None:
        self._config = config
        self._fair = fair_queue
        self._buckets = buckets
        self._join = join

    # --- the starvation lane ---

    def lane_ns(self, replica: Replica, now_ns: int) -> float:
        """What may be added to the step for those who starve.

        In each step its share of the longest one, which promised prefills leave out, or
        the smallest piece that is worth a place in a step.
        """
        credit_ns = replica.lane.accrue(now_ns, is_starving=self._is_starving(replica, now_ns))
        smallest_ns = replica.cost.chunk_ns(0, self._config.min_chunk_tokens)
        most_ns = max(self._config.lane_share * self._config.max_step_ns, smallest_ns)
        return min(credit_ns, most_ns)

    def _is_starving(self, replica: Replica, now_ns: int) -> bool:
        """Whether batch work has waited longer than its patience."""
        since_ns = now_ns - self._config.batch.patience_ns
        if replica.batch_served_ns < since_ns:
            return True
        return any(head.arrival_ns < since_ns for head in self._heads(replica))

    def _heads(self, replica: Replica) -> list[LiveRequest]:
        return self._fair.heads(replica.takes)

    # --- the step ---

    def fill(
        self,
        replica: Replica,
        draft: StepDraft,
        stalled: list[LiveRequest],
        ceiling_ns: float,
        lane_ns: float,
        now_ns: int,
    ) -> None:
        """Batch work into a step that holds everything promised already.

        Args:
            replica: whose step it is.
            draft: the step.
            stalled: who decodes and has no block for it.
            ceiling_ns: longest step beside the promises; below zero where some were
                left over.
            lane_ns: what may be added beyond that.
            now_ns: the time.
        """
        is_blocked = ceiling_ns < 0
        limit_ns = min(longest_by_settings_ns(replica, self._config, _BATCH), ceiling_ns)
        before_ns = draft.spent_ns
        with_lane_ns = limit_ns
        if lane_ns:
            with_lane_ns = max(limit_ns, min(before_ns + lane_ns, draft.bound.longest_ns))
        draft.add_class_decodes(_BATCH, with_lane_ns, stalled)
        kept = (0, 0)  # Slots and blocks for promises that are left over.
        if is_blocked:
            kept = replica.waiting_room()
        self._add_prefills(replica, draft, with_lane_ns, kept, now_ns)
        used_ns = draft.spent_ns - before_ns
        if used_ns > 0:
            replica.lane.spend(min(used_ns, max(lane_ns, draft.spent_ns - limit_ns)))
            replica.batch_served_ns = now_ns
        elif not (replica.decoding[_BATCH] or replica.prefilling[_BATCH]):
            replica.batch_served_ns = now_ns

    def _add_prefills(
        self,
        replica: Replica,
        draft: StepDraft,
        limit_ns: float,
        kept: tuple[int, int],
        now_ns: int,
    ) -> None:
        if limit_ns <= draft.spent_ns and not draft.is_empty:
            return
        long = replica.long_prefill
        share = self._config.long_prefill_share
        held_ns = share * max(0.0, limit_ns - draft.spent_ns) if long else 0.0
        shorts = [live for live in replica.prefilling[_BATCH] if live is not long]
        shorts.sort(key=lambda live: self._aged_ns(replica, live, now_ns))
        for live in shorts:
            num = draft.fitting(live, limit_ns - held_ns)
            if num == live.prefill_left:
                draft.add_chunk(live, num)
            elif long is None:
                long = replica.long_prefill = live
        self._let_join(replica, draft, limit_ns, held_ns, kept, now_ns)
        long = replica.long_prefill
        if long is not None:
            # With nothing else in the step a little of it goes on in any case.
            num = draft.fitting(long, limit_ns, has_floor=draft.is_empty)
            if num:
                draft.add_chunk(long, num)

    def _aged_ns(self, replica: Replica, live: LiveRequest, now_ns: int) -> float:
        """What is left of a prefill, less a share of how long it has waited."""
        left_ns = replica.cost.chunk_ns(live.computed, live.prefill_left)
        return left_ns - _AGING * (now_ns - live.arrival_ns)

    def _let_join(
        self,
        replica: Replica,
        draft: StepDraft,
        limit_ns: float,
        held_ns: float,
        kept: tuple[int, int],
        now_ns: int,
    ) -> None:
        """Lets waiting requests join while they fit beside what is kept for promises."""
        kept_slots, kept_blocks = kept
        # Whoever joins now may be evicted again at once: one at a time, lest it lie idle.
        is_capped = replica.evictions.level(now_ns) < 0
        decode_ns = replica.cost.t0_ns + sum(map(replica.decode_cost_ns, range(_BATCH + 1)))
        smallest_ns = replica.cost.chunk_ns(0, self._config.min_chunk_tokens)
        while replica.num_running + kept_slots < self._config.max_running:
            if is_capped and replica.running:
                return
            joined = None
            for head in self._heads(replica):
                bucket = self._buckets.get(head.tenant)
                if bucket is not None and bucket.level(now_ns) <= 0:
                    continue
                if not replica.fits_alone(head.prompt_tokens, head.max_output):
                    continue
                if draft.has_given_way(head):
                    return
                own_ns = replica.cost.decode_ns + replica.cost.kv_ns * head.total_tokens
                if replica.running and decode_ns + own_ns + smallest_ns > limit_ns:
                    return
                cached, reserve, lacking = replica.need(head, self._config)
                if lacking + kept_blocks > 0:
                    return  # Whoever is next waits for the room that this one needs.
                known = replica.known_tokens(head, self._config)
                left_ns = replica.cost.chunk_ns(known, head.total_tokens - known)
                is_short = left_ns <= limit_ns - held_ns - draft.spent_ns
                if not is_short and replica.long_prefill is not None:
                    continue  # One long prefill at a time.
                self._join(replica, head, cached, reserve, now_ns)
                if is_short:
                    draft.add_chunk(head, head.prefill_left)
                else:
                    replica.long_prefill = head
                    held_ns = self._config.long_prefill_share * max(0.0, limit_ns - draft.spent_ns)
                decode_ns += own_ns
                joined = head
                break
            if joined is None:
                return
