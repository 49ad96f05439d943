"""Admission is a promise: the test that decides whether one can be given."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cloud.scheduler.config import SchedulerConfig
from cloud.scheduler.fluid import fluid_forecast
from cloud.scheduler.forecast import Forecast, forecast, lost_anyway
from cloud.scheduler.replica import Replica
from cloud.scheduler.request_state import NEVER_NS, LiveRequest

__all__ = ["Late", "Placement", "SchedulabilityTest"]

# With more waiting than this, by class, the fluid test stands in for the
# roll-forward. Interactive promises are hard, and those that can be kept are few.
_FORECAST_LIMITS = (256, 48)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a promise can be kept, and when it is predicted to be."""

    replica: Replica
    finish_ns: int


@dataclass(frozen=True, slots=True)
class Late:
    """No replica can keep the promise."""

    predicted_ns: int | None  # Span until it would have been kept, where that is known.
    retry_after_ns: int
    message: str


class SchedulabilityTest:
    """Whether a newcomer, and everything promised that it delays, is still in time."""

    __slots__ = ("_config",)

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config

    def place(
        self,
        newcomer: LiveRequest,
        replicas: Iterable[Replica],
        now_ns: int,
        without: LiveRequest | None = None,
    ) -> Placement | Late:
        """The replica of earliest predicted completion, or why there is none."""
        best: Placement | None = None
        refusal: Late | None = None
        for replica in replicas:
            verdict = self._test(newcomer, replica, now_ns, without)
            if isinstance(verdict, Placement):
                if best is None or verdict.finish_ns < best.finish_ns:
                    best = verdict
            elif refusal is None or verdict.retry_after_ns < refusal.retry_after_ns:
                refusal = verdict
        if best is not None:
            return best
        if refusal is None:
            raise ValueError("a placement needs at least one replica")
        return refusal

    def _test(
        self, newcomer: LiveRequest, replica: Replica, now_ns: int, without: LiveRequest | None
    ) -> Placement | Late:
        replica.margin.age(now_ns)
        stretch = self._stretch(newcomer, replica)
        newcomer.demand_ns = replica.cost.chunk_ns(0, newcomer.prefill_left)
        alone_ns = self._alone_ns(newcomer, replica, now_ns, stretch)
        if alone_ns > newcomer.deadline_ns:
            return self._is_late(Forecast(alone_ns), newcomer, replica, now_ns)
        if sum(map(len, replica.waiting[: newcomer.rank + 1])) > _FORECAST_LIMITS[newcomer.rank]:
            found = fluid_forecast(
                replica,
                self._config,
                newcomer,
                now_ns,
                stretch=stretch,
                target_ns=self._config.longest_step_ns(newcomer.rank),
            )
            if found.victim is not None:
                return self._breaks(found, found.victim, now_ns)
            if found.finish_ns > newcomer.deadline_ns:
                return self._is_late(found, newcomer, replica, now_ns)
            return Placement(replica, found.finish_ns)
        found = forecast(replica, self._config, newcomer, now_ns, stretch=stretch, without=without)
        if found.victim is not None:
            lost = lost_anyway(
                replica, self._config, newcomer.rank, now_ns, stretch=stretch, without=without
            )
            if found.victim in lost:
                found = forecast(
                    replica,
                    self._config,
                    newcomer,
                    now_ns,
                    stretch=stretch,
                    without=without,
                    ignored=lost,
                )
            if found.victim is not None:
                return self._breaks(found, found.victim, now_ns)
        if found.finish_ns > newcomer.deadline_ns:
            return self._is_late(found, newcomer, replica, now_ns)
        return Placement(replica, found.finish_ns)

    @staticmethod
    def _alone_ns(newcomer: LiveRequest, replica: Replica, now_ns: int, stretch: float) -> int:
        """When it would be done if the replica did nothing else after the running step."""
        cost, context = replica.cost, newcomer.computed
        if newcomer.request.prefix_hashes:
            hits = replica.pool.match(newcomer.request.prefix_hashes, newcomer.prompt_tokens)
            context = len(hits) * replica.pool.block_tokens
        own_ns = cost.t0_ns + cost.chunk_ns(context, newcomer.total_tokens - context)
        if newcomer.covers_last:
            own_ns += (newcomer.max_output - newcomer.num_output - 1) * (
                cost.t0_ns + cost.decode_ns + cost.kv_ns * newcomer.total_tokens
            )
        return replica.step_end_ns(now_ns) + int(own_ns * stretch)

    def _stretch(self, newcomer: LiveRequest, replica: Replica) -> float:
        """What predicted times are multiplied with: the margin, and the lane's share
        while somebody starves.
        """
        stretch = replica.margin.value
        if replica.lane.is_open:
            stretch /= 1 - self._config.lane_share
        return stretch

    def _breaks(self, found: Forecast, victim: LiveRequest, now_ns: int) -> Late:
        wait_ns = max(found.victim_finish_ns - victim.deadline_ns, 1)
        predicted = None if found.finish_ns == NEVER_NS else found.finish_ns - now_ns
        return Late(predicted, wait_ns, "it would make a promise to another request late")

    def _is_late(
        self, found: Forecast, newcomer: LiveRequest, replica: Replica, now_ns: int
    ) -> Late:
        if found.finish_ns == NEVER_NS:
            return Late(
                None, replica.step_end_ns(now_ns) - now_ns + 1, "no room comes free in time"
            )
        return Late(
            found.finish_ns - now_ns,
            found.finish_ns - newcomer.deadline_ns,
            f"the answer would come after {(found.finish_ns - now_ns) / 1e6:.1f} ms, "
            f"{(newcomer.deadline_ns - now_ns) / 1e6:.1f} ms are left",
        )
