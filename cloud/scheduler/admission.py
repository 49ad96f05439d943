"""Admission is a promise: the test that decides whether one can be given."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

from cloud.scheduler.config import SchedulerConfig
from cloud.scheduler.fluid import fluid_forecast
from cloud.scheduler.forecast import Forecast, forecast, lost_anyway
from cloud.scheduler.load import load_of, quick_finish_ns
from cloud.scheduler.replica import Replica
from cloud.scheduler.request_state import NEVER_NS, LiveRequest

__all__ = ["Late", "Placement", "SchedulabilityTest"]

# With more waiting than this, by class, the fluid test stands in for the
# roll-forward. Interactive promises are hard, and those that can be kept are few.
_FORECAST_LIMITS = (256, 48)
# From the first share of requests refused as late on slack is kept, from the second on all
# of it: this part of the spare time that budgets have, and never more than half as much
# again as predicted. Short budgets cannot afford more; docs/decisions/0003 has the sweep.
_CROWDED, _FULL = 0.2, 0.3
_OF_SPARE, _MOST = 0.12, 0.5
_USUAL_SPARE = 1.0  # Of a budget twice as long as needed alone: until others are seen.
_NEWEST = 1 / 16  # Weight of the newest request's.
_ENOUGH = 16.0  # Requests of late to tell a share from.
_CROWD = "most are refused at present, and it would leave too little slack to the others"
# Share of the time that is taken to be left for standard work at the least.
_LEAST_SPEED = 1 / 32


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
    # Whether it would be late even if the replica did nothing else.
    is_hopeless: bool = False


class Pressure:
    """How much slack is kept because more is asked than can be done.

    A batch that is packed until nobody has any slack runs in many small steps, each with
    its t0, and completes less. While much is refused as late there is enough to choose
    from: then those who are let in leave slack to each other.
    """

    __slots__ = ("_asked", "_half_life_ns", "_refused", "_spare", "_updated_ns")

    def __init__(self, half_life_ns: int) -> None:
        self._half_life_ns = max(1, half_life_ns)
        self._asked = self._refused = 0.0  # Counts of late; older ones count less.
        self._updated_ns = 0
        self._spare = _USUAL_SPARE  # Budget over the time needed alone, less one.

    def note(self, is_refused: bool, now_ns: int) -> None:
        """Counts an answer."""
        keep = 0.5 ** ((now_ns - self._updated_ns) / self._half_life_ns)
        self._updated_ns = now_ns
        self._asked = self._asked * keep + 1.0
        self._refused = self._refused * keep + is_refused

    def note_spare(self, spare: float) -> None:
        """Takes in how much longer a budget was than what it was for."""
        self._spare += _NEWEST * (max(0.0, spare) - self._spare)

    @property
    def stretch(self) -> float:
        """Factor on predicted times: 1 where most can be done."""
        if self._asked < _ENOUGH:
            return 1.0
        pressure = (self._refused / self._asked - _CROWDED) / (_FULL - _CROWDED)
        if pressure <= 0:
            return 1.0
        return 1 + min(pressure, 1.0) * min(_MOST, _OF_SPARE * self._spare)


class SchedulabilityTest:
    """Whether a newcomer, and everything promised that it delays, is still in time."""

    __slots__ = ("_config", "_pressure")

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._pressure = Pressure(config.demand_window_ns)  # Of interactive requests.

    def place(
        self,
        newcomer: LiveRequest,
        replicas: Iterable[Replica],
        now_ns: int,
        without: LiveRequest | None = None,
    ) -> Placement | Late:
        """The replica of earliest predicted completion, or why there is none."""
        replicas = list(replicas)
        verdict = self._best(newcomer, replicas, now_ns, without)
        if newcomer.rank == 0:
            if isinstance(verdict, Placement):
                self._pressure.note(False, now_ns)
            elif not verdict.is_hopeless:  # Who is late even alone is no sign of a crowd.
                self._pressure.note(True, now_ns)
                self._pressure.note_spare(self._spare(newcomer, replicas, now_ns))
        return verdict

    def _best(
        self,
        newcomer: LiveRequest,
        replicas: list[Replica],
        now_ns: int,
        without: LiveRequest | None,
    ) -> Placement | Late:
        best = self._quick(newcomer, replicas, now_ns)
        if best is not None:
            return best
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

    def _quick(
        self, newcomer: LiveRequest, replicas: list[Replica], now_ns: int
    ) -> Placement | None:
        """A replica that has time for everything before any deadline; the emptiest one."""
        best: Placement | None = None
        for replica in replicas:
            replica.margin.age(now_ns)
            stretch = self._stretch(newcomer, replica) * self._slack(newcomer)
            finish_ns = quick_finish_ns(replica, self._config, newcomer, now_ns, stretch)
            if finish_ns is not None and (best is None or finish_ns < best.finish_ns):
                best = Placement(replica, finish_ns)
        return best

    def _test(
        self, newcomer: LiveRequest, replica: Replica, now_ns: int, without: LiveRequest | None
    ) -> Placement | Late:
        """Whether the replica can keep the promise: as it is, and with the slack that is
        kept under pressure.
        """
        stretch = self._stretch(newcomer, replica)
        verdict = self._carry_out(newcomer, replica, now_ns, without, stretch)
        slack = self._slack(newcomer)
        is_alone = not load_of(replica, newcomer.rank).num + len(replica.waiting[0])
        if slack == 1 or is_alone or isinstance(verdict, Late):
            return verdict
        packed = self._carry_out(newcomer, replica, now_ns, without, stretch * slack)
        if isinstance(packed, Placement):
            return verdict
        return replace(packed, is_hopeless=False, message=_CROWD)

    def _carry_out(
        self,
        newcomer: LiveRequest,
        replica: Replica,
        now_ns: int,
        without: LiveRequest | None,
        stretch: float,
    ) -> Placement | Late:
        alone_ns = self._alone_ns(newcomer, replica, now_ns, stretch)
        if alone_ns > newcomer.deadline_ns:
            late = self._is_late(Forecast(alone_ns), newcomer, replica, now_ns)
            return replace(late, is_hopeless=True)
        config, rank = self._config, newcomer.rank
        if sum(map(len, replica.waiting[: rank + 1])) > _FORECAST_LIMITS[rank]:
            target_ns = config.longest_step_ns(rank)
            found = fluid_forecast(
                replica, config, newcomer, now_ns, stretch=stretch, target_ns=target_ns
            )
        else:
            roll = partial(forecast, replica, config, newcomer, now_ns, without=without)
            found = roll(stretch=stretch)
            if found.victim is not None:
                lost = lost_anyway(replica, config, rank, now_ns, stretch=stretch, without=without)
                if found.victim in lost:
                    found = roll(stretch=stretch, lost=lost)
        if found.victim is not None:
            return self._breaks(found, found.victim, now_ns)
        if found.finish_ns > newcomer.deadline_ns:
            return self._is_late(found, newcomer, replica, now_ns)
        return Placement(replica, found.finish_ns)

    def _alone_ns(
        self, newcomer: LiveRequest, replica: Replica, now_ns: int, stretch: float
    ) -> int:
        """When it would be done if the replica did nothing else after the running step."""
        cost, context = replica.cost, replica.known_tokens(newcomer, self._config)
        own_ns = cost.t0_ns + cost.chunk_ns(context, newcomer.total_tokens - context)
        if newcomer.covers_last:
            own_ns += (newcomer.max_output - newcomer.num_output - 1) * (
                cost.t0_ns + cost.decode_ns + cost.kv_ns * newcomer.total_tokens
            )
        return replica.step_end_ns(now_ns) + int(own_ns * stretch)

    def _spare(self, newcomer: LiveRequest, replicas: list[Replica], now_ns: int) -> float:
        """How much longer its budget is than what it needs alone, as a share of that."""
        needed_ns = min(
            self._alone_ns(newcomer, one, now_ns, 1.0) - one.step_end_ns(now_ns) for one in replicas
        )
        return (newcomer.deadline_ns - now_ns) / max(1, needed_ns) - 1

    def _slack(self, newcomer: LiveRequest) -> float:
        """What is kept under pressure. Standard work yields, and has nobody to keep it for."""
        return 1.0 if newcomer.rank else self._pressure.stretch

    def _stretch(self, newcomer: LiveRequest, replica: Replica) -> float:
        """What predicted times are multiplied with: the margin, the lane's share while
        somebody starves, and for a standard promise what interactive work takes of late.
        """
        stretch = replica.margin.value
        if replica.lane.is_open:
            stretch /= 1 - self._config.lane_share
        if newcomer.rank:
            stretch /= max(_LEAST_SPEED, 1 - replica.interactive_load)
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
