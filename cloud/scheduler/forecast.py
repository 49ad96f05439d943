"""Rolls a replica's promised work forward, in the order in which `step` will do it.

Between two events (a prefill is complete, a request ends) all steps are alike and
are taken at once. Only work that can delay the newcomer is in it: its own class and
those above, as lower work gives way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from types import MappingProxyType

from cloud.scheduler.config import SchedulerConfig
from cloud.scheduler.kv import blocks_for
from cloud.scheduler.laxity import GUARD, StepBound
from cloud.scheduler.replica import Replica
from cloud.scheduler.request_state import NEVER_NS, LiveRequest

__all__ = ["Forecast", "forecast", "lost_anyway"]


@dataclass(frozen=True, slots=True)
class Forecast:
    """When a newcomer would keep its promise, and whether it would break another's."""

    finish_ns: int  # NEVER_NS where a promise of another breaks before.
    # The first other request that would miss its deadline, and when it would
    # be done.
    victim: LiveRequest | None = None
    victim_finish_ns: int = 0


class _Job:
    """One request in the roll-forward."""

    __slots__ = (
        "blocks",
        "context",
        "deadline_ns",
        "decode_ns",
        "decodes",
        "is_running",
        "live",
        "prefill",
    )

    def __init__(
        self,
        live: LiveRequest,
        *,
        prefill: int,
        context: int,
        decodes: int,
        blocks: int,
        is_running: bool,
    ) -> None:
        self.live = live
        self.prefill = prefill  # Prompt tokens to compute.
        self.context = context  # Tokens of KV before them.
        self.decodes = decodes  # After the token that the prefill gives.
        self.blocks = blocks  # To be had when it joins, given back when it ends.
        self.is_running = is_running
        self.deadline_ns = NEVER_NS if live.is_met else live.deadline_ns
        self.decode_ns = 0.0  # What it adds to each step in which it decodes.


def forecast(
    replica: Replica,
    config: SchedulerConfig,
    newcomer: LiveRequest,
    now_ns: int,
    *,
    stretch: float,
    without: LiveRequest | None = None,
    lost: Mapping[LiveRequest, float] = MappingProxyType({}),
) -> Forecast:
    """When `newcomer` would keep its promise on `replica`.

    Args:
        replica: where.
        config: the scheduler's settings.
        newcomer: not yet in any queue.
        now_ns: the time.
        stretch: what predicted times are multiplied with.
        without: a live request that would be gone.
        lost: promises that are late without the newcomer too, and when they would be
            kept: they break by it only where it delays them.
    """
    roll = _Roll(replica, config, newcomer.rank, now_ns, stretch)
    roll.take_in(newcomer, without)
    finish_ns = NEVER_NS
    for job, at_ns in roll.run():
        if job.live is newcomer:
            finish_ns = int(at_ns + (at_ns - now_ns) * GUARD)
            if finish_ns > newcomer.deadline_ns:
                break
        elif at_ns > job.deadline_ns and at_ns > lost.get(job.live, 0.0):
            return Forecast(finish_ns, job.live, int(at_ns))
    return Forecast(finish_ns)


def lost_anyway(
    replica: Replica,
    config: SchedulerConfig,
    rank: int,
    now_ns: int,
    *,
    stretch: float,
    without: LiveRequest | None = None,
) -> dict[LiveRequest, float]:
    """Promises of class `rank` and above that are late with no newcomer, and when they
    would be kept.
    """
    roll = _Roll(replica, config, rank, now_ns, stretch)
    roll.take_in(None, without)
    # A little later is not later: what is rounded.
    return {
        job.live: at_ns + (at_ns - now_ns) * GUARD
        for job, at_ns in roll.run()
        if at_ns > job.deadline_ns
    }


class _Roll:
    """The state of one roll-forward."""

    __slots__ = (
        "_blocks",
        "_config",
        "_cost",
        "_decode_ns",
        "_decoding",
        "_due",
        "_excess",
        "_lane_ns",
        "_longest_ns",
        "_num_prefilling",
        "_pending",
        "_rank",
        "_replica",
        "_slots",
        "_step",
        "_stretch",
        "_target_ns",
        "_time_ns",
    )

    def __init__(
        self, replica: Replica, config: SchedulerConfig, rank: int, now_ns: int, stretch: float
    ) -> None:
        self._replica = replica
        self._config = config
        self._cost = replica.cost
        self._rank = rank
        self._stretch = stretch
        self._time_ns = float(replica.step_end_ns(now_ns))
        self._excess = replica.margin.step_excess
        self._longest_ns = float(replica.flight.predicted_ns if replica.flight else 0)
        self._step = 0  # Steps after the running one.
        self._slots = config.max_running
        self._blocks = replica.pool.num_blocks
        # (last step, place, job): who decodes, first to end first.
        self._decoding: list[tuple[int, int, _Job]] = []
        # Last step of those who decode -> earliest deadline of a promise that is kept then.
        self._due: dict[int, int] = {}
        self._decode_ns = replica.cost.t0_ns  # A step with decodes alone.
        self._pending: list[_Job] = []  # Prefills by class and deadline.
        self._num_prefilling = 0  # Of those, who is in the batch.
        self._target_ns = float(config.longest_step_ns(rank))
        self._lane_ns = 0.0
        if replica.lane.is_open:  # The rest of each step is the lane's, which `stretch` adds.
            self._target_ns *= 1 - config.lane_share
            self._lane_ns = config.lane_share * config.max_step_ns

    # --- what there is ---

    def take_in(self, newcomer: LiveRequest | None, without: LiveRequest | None) -> None:
        """Everything of the class and above, as it will be after the running step."""
        replica, flight = self._replica, self._replica.flight
        chunks = {chunk.live: chunk.num_tokens for chunk in flight.chunks} if flight else {}
        waiting = [newcomer] if newcomer is not None else []
        jobs: list[_Job] = []
        for rank in range(self._rank + 1):
            self._slots -= len(replica.decoding[rank]) + len(replica.prefilling[rank])
            for live in replica.decoding[rank]:
                decodes = live.max_output - live.num_output - (flight is not None)
                jobs.append(self._running(live, 0, live.computed, decodes))
            for live in replica.prefilling[rank]:
                num = chunks.get(live, 0)
                decodes = live.max_output - live.num_output - 1
                jobs.append(
                    self._running(live, live.prefill_left - num, live.computed + num, decodes)
                )
            waiting.extend(replica.waiting[rank])
        for job in jobs:
            if job.live is without:
                self._give_back(job)
            elif job.prefill:
                self._num_prefilling += 1
                self._pending.append(job)
            else:
                if not job.live.covers_last:
                    job.deadline_ns = NEVER_NS  # Its first token is out, or on its way.
                self._start_decoding(job)
        self._pending += [self._waiting(live) for live in waiting if live is not without]
        self._pending.sort(key=lambda job: job.live.key)
        heapify(self._decoding)

    def _running(self, live: LiveRequest, prefill: int, context: int, decodes: int) -> _Job:
        # What it holds and has reserved, and what it may still grow to.
        blocks = max(
            len(live.blocks) + live.reserved_blocks,
            blocks_for(live.kv_tokens_at_most, self._replica.pool.block_tokens),
        )
        self._blocks -= blocks
        return _Job(
            live,
            prefill=prefill,
            context=context,
            decodes=decodes,
            blocks=blocks,
            is_running=True,
        )

    def _waiting(self, live: LiveRequest) -> _Job:
        pool = self._replica.pool
        context = self._replica.known_tokens(live, self._config)
        return _Job(
            live,
            prefill=live.total_tokens - context,
            context=context,
            decodes=live.max_output - live.num_output - 1,
            blocks=blocks_for(live.kv_tokens_at_most, pool.block_tokens),
            is_running=False,
        )

    # --- rolling ---

    def run(self) -> Iterator[tuple[_Job, float]]:
        """Each request with the instant at which its promised token is out."""
        while self._pending or self._decoding:
            completed = self._advance()
            if completed is None:
                return  # Room that never comes free.
            for job in completed:
                if job.decodes:
                    self._start_decoding(job, into_heap=True)
                else:
                    self._give_back(job)
                if not (job.decodes and job.live.covers_last):
                    yield job, self._safe_ns()
            while self._decoding and self._decoding[0][0] <= self._step:
                last, _, job = heappop(self._decoding)
                self._due.pop(last, None)
                self._decode_ns -= job.decode_ns
                self._give_back(job)
                if job.live.covers_last:
                    yield job, self._safe_ns()

    def _advance(self) -> list[_Job] | None:
        """One step with prefills, or all steps until somebody ends.

        Returns the prefills that are complete; None where nothing can move.
        """
        chunk_ns, completed = self._fill() if self._pending else (0.0, [])
        if chunk_ns or completed:
            self._take_step(self._decode_ns + chunk_ns, 1)
            return completed
        if not self._decoding:
            return None
        self._take_step(self._decode_ns, self._decoding[0][0] - self._step)
        return completed

    def _take_step(self, step_ns: float, count: int) -> None:
        self._time_ns += step_ns * self._stretch * count
        self._step += count
        self._longest_ns = max(self._longest_ns, step_ns)

    def _safe_ns(self) -> float:
        """The instant, with what a single step may be longer."""
        return self._time_ns + self._excess * self._longest_ns

    def _fill(self) -> tuple[float, list[_Job]]:
        """Prefills into one step, in order. Returns their time and those that end in it."""
        bound = self._bound()
        base_ns = self._decode_ns
        target_ns = self._target_ns
        spent_ns = 0.0
        floor = self._config.min_chunk_tokens
        completed: list[_Job] = []
        is_blocked = False
        num_running = self._num_prefilling
        for job in self._pending:
            if job.is_running:
                num_running -= 1
            elif is_blocked or self._slots <= 0 or self._blocks < job.blocks:
                if not num_running:
                    break
                is_blocked = True  # Nobody overtakes it to the room that it needs.
                continue
            if not spent_ns:  # The first one gets a little beyond the target.
                floor_ns = self._cost.chunk_ns(job.context, min(floor, job.prefill))
                target_ns = max(target_ns, base_ns + floor_ns)
            own_ns = self._cost.chunk_ns(job.context, job.prefill)
            later_ns = self._later_ns(job)
            num = job.prefill
            so_far_ns = base_ns + spent_ns
            if so_far_ns + own_ns > min(target_ns, bound.with_decode_ns(later_ns)):
                spare_ns = min(target_ns, bound.longest_ns - self._lane_ns) - so_far_ns
                most = num - (own_ns <= spare_ns)  # See StepDraft.fitting.
                num = self._cost.prefill_budget(
                    max(0, int(spare_ns + self._cost.t0_ns)), context_tokens=job.context
                )
                num = min(num, most)
                if num < min(floor, job.prefill):
                    break
                own_ns = self._cost.chunk_ns(job.context, num)
            if not job.is_running:
                job.is_running = True
                self._num_prefilling += 1
                self._slots -= 1
                self._blocks -= job.blocks
            spent_ns += own_ns
            if num == job.prefill:
                completed.append(job)
                deadline_ns = None if job.deadline_ns == NEVER_NS else job.deadline_ns
                bound.end_prefill(later_ns, self._steps_left(job), deadline_ns)
                continue
            job.prefill -= num
            job.context += num
            break
        self._num_prefilling -= len(completed)
        for job in completed:
            self._pending.remove(job)  # Near the front: they are in order.
        return spent_ns, completed

    def _bound(self) -> StepBound:
        """What those that decode make of the next step's length."""
        step = self._step
        return StepBound(
            [(last - step, deadline_ns) for last, deadline_ns in self._due.items()],
            now_ns=self._time_ns,
            later_ns=self._decode_ns,
            stretch=self._stretch,
            excess=self._excess,
        )

    def _later_ns(self, job: _Job) -> float:
        """What a job adds to each step once its prefill is done."""
        if job.decodes <= 0:
            return 0.0
        context = job.context + job.prefill + job.decodes / 2
        return self._cost.decode_ns + self._cost.kv_ns * context

    @staticmethod
    def _steps_left(job: _Job) -> int:
        """Steps until the promised token, from that which completes the prefill."""
        return job.decodes + 1 if job.live.covers_last else 1

    def _start_decoding(self, job: _Job, *, into_heap: bool = False) -> None:
        if job.decodes <= 0:
            self._give_back(job)  # Its last token comes with the running step.
            return
        job.decode_ns = self._later_ns(job)
        self._decode_ns += job.decode_ns
        last = self._step + job.decodes
        alone_ns = job.decodes * self._replica.alone_step_ns
        if job.live.covers_last and self._time_ns + alone_ns <= job.deadline_ns < NEVER_NS:
            self._due[last] = min(self._due.get(last, NEVER_NS), job.deadline_ns)
        entry = (last, job.live.seq, job)
        if into_heap:
            heappush(self._decoding, entry)
        else:
            self._decoding.append(entry)

    def _give_back(self, job: _Job) -> None:
        self._slots += 1
        self._blocks += job.blocks
