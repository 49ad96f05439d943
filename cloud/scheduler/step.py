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
from collections.abc import Iterator, Mapping
from typing import Protocol

from cloud.scheduler.bucket import TokenBucket
from cloud.scheduler.config import SchedulerConfig
from cloud.scheduler.draft import StepDraft
from cloud.scheduler.kv import blocks_for
from cloud.scheduler.preemption import Preemption
from cloud.scheduler.queues import FairQueue
from cloud.scheduler.replica import GUARD, Replica
from cloud.scheduler.request_state import LiveRequest
from headway.outcome import RequestClass

__all__ = ["Join", "StepComposer"]

_BATCH = int(RequestClass.BATCH)
# A waiting prefill is taken for shorter by this share of its wait.
_AGING = 1 / 8
# Share of what promises can spare that lower work never gets.
_KEPT = 1 / 8


class Join(Protocol):
    """Moves a waiting request into a replica's batch."""

    def __call__(
        self, replica: Replica, live: LiveRequest, cached: list[int], reserve: int, now_ns: int
    ) -> None:
        """Carries it out."""


class StepComposer:
    """Fills step drafts. Owns no state of its own."""

    __slots__ = ("_buckets", "_config", "_fair", "_join", "_preemption")

    def __init__(
        self,
        config: SchedulerConfig,
        fair_queue: FairQueue,
        buckets: Mapping[str, TokenBucket],
        preemption: Preemption,
        join: Join,
    ) -> None:
        self._config = config
        self._fair = fair_queue
        self._buckets = buckets
        self._preemption = preemption
        self._join = join

    def compose(self, replica: Replica, now_ns: int) -> StepDraft:
        """The replica's next step. May evict, and lets waiting requests join."""
        stalled = self._grow_decodes(replica, now_ns)
        draft = StepDraft(replica, self._config.min_chunk_tokens)
        is_blocked = False  # Promised work is left over, for want of room.
        promise_ns = math.inf  # Longest step with which all promises in it are kept.
        for rank in range(_BATCH):
            ceiling_ns = self._ceiling_ns(replica, rank, now_ns)
            self._add_decodes(replica, draft, rank, -1.0 if is_blocked else ceiling_ns, stalled)
            draft.hard_ns = min(ceiling_ns, self._spared_ns(replica, rank, now_ns))
            is_blocked |= self._add_promised_prefills(
                replica, draft, rank, now_ns, may_join=not is_blocked
            )
            promise_ns = min(promise_ns, draft.hard_ns)
        draft.hard_ns = promise_ns
        self._add_batch(replica, draft, stalled, is_blocked, now_ns)
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

    def _add_decodes(
        self,
        replica: Replica,
        draft: StepDraft,
        rank: int,
        limit_ns: float,
        stalled: list[LiveRequest],
    ) -> None:
        """The class's decodes: all of them, or those that fit, who waited longest first."""
        decoding = replica.decoding[rank]
        if not decoding:
            return
        cost = replica.cost
        if not stalled and draft.spent_ns + replica.decode_cost_ns(rank) <= limit_ns:
            draft.add_decodes(decoding, len(decoding), replica.decode_kv[rank])
            return
        spent_ns = draft.spent_ns
        chosen: list[LiveRequest] = []
        for live in decoding:
            if live.computed == live.capacity:
                continue
            spent_ns += cost.decode_ns + cost.kv_ns * live.computed
            if spent_ns > limit_ns:
                break
            chosen.append(live)
        draft.add_decodes(chosen, len(chosen), sum(live.computed for live in chosen))
        for live in chosen:  # To the end: next time it is the others' turn.
            del decoding[live]
            decoding[live] = None

    def _break_stall(
        self, replica: Replica, draft: StepDraft, stalled: list[LiveRequest], now_ns: int
    ) -> None:
        """Everybody waits for a block: the newest gives way, whatever the rate."""
        first = min(stalled, key=lambda live: live.key)
        if self._preemption.make_room_to_grow(replica, first, now_ns, is_last_resort=True):
            replica.grow(first, first.computed + 1)
            draft.add_decodes((first,), 1, first.computed)

    # --- bounds on the step's time ---

    def _ceiling_ns(self, replica: Replica, rank: int, now_ns: int) -> float:
        """Longest step beside which every open promise above class `rank` is kept.

        The least slack per remaining step of those promises. Of what they can
        spare, lower work gets the share that interactive arrivals leave on
        average: the rest is room for the promises to come.
        """
        least_ns = float("inf")
        above_ns = replica.cost.t0_ns
        trust = (1 - 2 * GUARD) / (replica.margin.value + replica.margin.step_excess)
        for upper in range(rank):
            above_ns += replica.decode_cost_ns(upper)
            for live in replica.decoding[upper]:
                if not live.is_met:
                    slack_ns = (live.deadline_ns - now_ns) * trust
                    least_ns = min(least_ns, slack_ns / live.promised_output_left)
            for live in replica.prefilling[upper]:
                if not live.is_met:
                    own_ns = replica.cost.chunk_ns(live.computed, live.prefill_left)
                    slack_ns = (live.deadline_ns - now_ns) * trust - own_ns
                    least_ns = min(least_ns, slack_ns / live.promised_output_left)
        if least_ns == float("inf"):
            return least_ns
        return above_ns + (least_ns - above_ns) * (1 - max(_KEPT, replica.interactive_load))

    def _target_ns(self, replica: Replica, rank: int) -> float:
        """Longest step by the settings, as far as classes down to `rank` are concerned."""
        target_ns = self._config.max_step_ns
        for upper in range(rank + 1):
            own_ns = self._config.of_class(RequestClass(upper)).tpot_target_ns
            if own_ns is not None and (replica.decoding[upper] or replica.prefilling[upper]):
                target_ns = min(target_ns, own_ns)
        return target_ns

    def _spared_ns(self, replica: Replica, rank: int, now_ns: int) -> float:
        """Longest step with prefills of class `rank` in it: those that decode
        already keep their promises even if all laxity is used at once.
        """
        decode_ns = self._decode_ns(replica, rank)
        return decode_ns + min(
            (
                replica.spared_ns(live, decode_ns, now_ns)
                for live in replica.decoding[rank]
                if not live.is_met
            ),
            default=float("inf"),
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
        target_ns = self._target_ns(replica, rank)
        if not may_join:
            prefilling = replica.prefilling[rank]
            is_short = self._go_on(replica, draft, prefilling, target_ns, now_ns)
            return is_short or replica.waiting[rank].head is not None
        for live in self._by_deadline(replica, rank):
            if live not in replica.running:
                if not draft.fitting(live, target_ns, has_floor=True):
                    return True
                if not self._join_promised(replica, live, now_ns):
                    # No later one may take the room that comes free for it; those
                    # that have room already go on.
                    later = [one for one in replica.prefilling[rank] if one.key > live.key]
                    self._go_on(replica, draft, later, target_ns, now_ns)
                    return True
            if self._go_on(replica, draft, [live], target_ns, now_ns):
                return True
        return False

    def _go_on(
        self,
        replica: Replica,
        draft: StepDraft,
        lives: list[LiveRequest],
        target_ns: float,
        now_ns: int,
    ) -> bool:
        """Gives step time to running prefills, in order. Returns whether it was too little."""
        for live in lives:
            left = live.prefill_left
            num = draft.fitting(live, target_ns, has_floor=True)
            if num:
                self._add_chunk(replica, draft, live, num)
            if num < left:
                return True
            if not live.is_met:
                # Its token comes when the step ends: no later one may delay that.
                decode_ns = self._decode_ns(replica, live.rank) + replica.cost.decode_ns
                spared_ns = replica.spared_ns(live, decode_ns, now_ns)
                draft.hard_ns = min(draft.hard_ns, decode_ns + spared_ns)
        return False

    @staticmethod
    def _decode_ns(replica: Replica, rank: int) -> float:
        """Time of a step with the decodes of classes down to `rank` alone."""
        return replica.cost.t0_ns + sum(map(replica.decode_cost_ns, range(rank + 1)))

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

    def _join_promised(self, replica: Replica, live: LiveRequest, now_ns: int) -> bool:
        if replica.num_running < self._config.max_running:
            cached, reserve, lacking = self._need(replica, live)
            if lacking <= 0:
                self._join(replica, live, cached, reserve, now_ns)
                return True
        num_slots = max(0, replica.num_running + 1 - self._config.max_running)
        cached, reserve, lacking = self._need(replica, live)
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
        cached, reserve, lacking = self._need(replica, live)
        if lacking > 0:
            return False
        self._join(replica, live, cached, reserve, now_ns)
        return True

    def _need(self, replica: Replica, live: LiveRequest) -> tuple[list[int], int, int]:
        """What joining takes: cached blocks to share, tokens to reserve, blocks lacking."""
        pool = replica.pool
        cached: list[int] = []
        if self._config.use_prefix_cache and live.request.prefix_hashes:
            cached = pool.match(live.request.prefix_hashes, live.prompt_tokens)
        reserve = live.tokens_to_join
        wanted = blocks_for(reserve, pool.block_tokens) - len(cached) + pool.num_unheld(cached)
        return cached, reserve, wanted - pool.num_available

    @staticmethod
    def _add_chunk(replica: Replica, draft: StepDraft, live: LiveRequest, num: int) -> None:
        replica.grow(live, live.computed + num)
        draft.add_chunk(live, num)

    # --- batch ---

    def _add_batch(
        self,
        replica: Replica,
        draft: StepDraft,
        stalled: list[LiveRequest],
        is_blocked: bool,
        now_ns: int,
    ) -> None:
        limit_ns = min(
            float(self._target_ns(replica, _BATCH)), self._ceiling_ns(replica, _BATCH, now_ns)
        )
        if is_blocked:
            limit_ns = -1.0
        lane_ns = replica.lane.accrue(now_ns, is_starving=self._is_starving(replica, now_ns))
        before_ns = draft.spent_ns
        with_lane_ns = limit_ns
        if lane_ns:
            with_lane_ns = max(limit_ns, min(before_ns + lane_ns, draft.hard_ns))
        self._add_decodes(replica, draft, _BATCH, with_lane_ns, stalled)
        self._add_batch_prefills(replica, draft, with_lane_ns, is_blocked, now_ns)
        used_ns = draft.spent_ns - before_ns
        if used_ns > 0:
            replica.lane.spend(min(used_ns, max(lane_ns, draft.spent_ns - limit_ns)))
            replica.batch_served_ns = now_ns
        elif not (replica.decoding[_BATCH] or replica.prefilling[_BATCH]):
            replica.batch_served_ns = now_ns

    def _is_starving(self, replica: Replica, now_ns: int) -> bool:
        """Whether batch work has waited longer than its patience."""
        since_ns = now_ns - self._config.batch.patience_ns
        if replica.batch_served_ns < since_ns:
            return True
        return any(head.arrival_ns < since_ns for head in self._heads(replica))

    def _heads(self, replica: Replica) -> list[LiveRequest]:
        return self._fair.heads(replica.takes)

    def _add_batch_prefills(
        self,
        replica: Replica,
        draft: StepDraft,
        limit_ns: float,
        is_blocked: bool,
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
                self._add_chunk(replica, draft, live, num)
            elif long is None:
                long = replica.long_prefill = live
        if not is_blocked:
            self._join_batch(replica, draft, limit_ns, held_ns, now_ns)
        long = replica.long_prefill
        if long is not None:
            # With nothing else in the step a little of it goes on in any case.
            num = draft.fitting(long, limit_ns, has_floor=draft.is_empty)
            if num:
                self._add_chunk(replica, draft, long, num)

    def _aged_ns(self, replica: Replica, live: LiveRequest, now_ns: int) -> float:
        """What is left of a prefill, less a share of how long it has waited."""
        left_ns = replica.cost.chunk_ns(live.computed, live.prefill_left)
        return left_ns - _AGING * (now_ns - live.arrival_ns)

    def _join_batch(
        self,
        replica: Replica,
        draft: StepDraft,
        limit_ns: float,
        held_ns: float,
        now_ns: int,
    ) -> None:
        """Lets waiting batch requests join while they fit."""
        decode_ns = self._decode_ns(replica, _BATCH)
        smallest_ns = replica.cost.chunk_ns(0, self._config.min_chunk_tokens)
        while replica.num_running < self._config.max_running:
            joined = None
            for head in self._heads(replica):
                bucket = self._buckets.get(head.tenant)
                if bucket is not None and bucket.level(now_ns) <= 0:
                    continue
                if not replica.fits_alone(head.prompt_tokens, head.max_output):
                    continue
                own_ns = replica.cost.decode_ns + replica.cost.kv_ns * head.total_tokens
                if replica.running and decode_ns + own_ns + smallest_ns > limit_ns:
                    return
                cached, reserve, lacking = self._need(replica, head)
                if lacking > 0:
                    return  # Whoever is next waits for the room that this one needs.
                left = head.total_tokens - len(cached) * replica.pool.block_tokens
                left_ns = replica.cost.chunk_ns(head.total_tokens - left, left)
                is_short = left_ns <= limit_ns - held_ns - draft.spent_ns
                if not is_short and replica.long_prefill is not None:
                    continue  # One long prefill at a time.
                self._join(replica, head, cached, reserve, now_ns)
                if is_short:
                    self._add_chunk(replica, draft, head, head.prefill_left)
                else:
                    replica.long_prefill = head
                    held_ns = self._config.long_prefill_share * max(0.0, limit_ns - draft.spent_ns)
                decode_ns += own_ns
                joined = head
                break
            if joined is None:
                return
