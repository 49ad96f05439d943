"""Drives a robot by its levels, on threads of its own.

Three threads, so that none that may wait can keep the robot moving:

    control   once a period: asks `Fallback` what holds and commands it; never waits
              for anybody
    asking    asks the cloud, one question at a time, and brings its answers
    watchdog  looks whether the control thread still lives, and stops the robot where
              it does not
"""

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from edge.action import Action
from edge.behaviour import Behaviour, Stop
from edge.fallback import Fallback, FallbackConfig, Level, Order
from edge.observation import Observation
from headway.clock import Clock, MonotonicClock, s_from_ns
from headway.rpc.errors import CallError

__all__ = ["Cloud", "Command", "ControlLoop", "EdgePolicy", "LoopReport"]

_log = logging.getLogger(__name__)
# Periods without a sign of the control thread until the watchdog takes over.
_WATCHDOG_PERIODS = 5
# And never sooner: a garbage collection or a page fault is no death.
_LEAST_WATCHDOG_NS = 100_000_000
# A tick that begins later than this share of a period is counted as late.
_LATE_SHARE = 0.5
_JOIN_S = 5.0


class Cloud(Protocol):
    """Whom the loop asks; `edge.client.RobotClient` is one."""

    def next_action(self, observation: Observation, budget_s: float) -> Action:
        """What to do next, or a `CallError` before `budget_s` is spent."""


class EdgePolicy(Protocol):
    """The robot's own way to choose, such as a small model on board."""

    def is_ready(self, now_ns: int) -> bool:
        """Whether it could choose now."""

    def values(self, now_ns: int) -> Mapping[str, float]:
        """What to command now, by name, in SI units. Must not wait."""


@dataclass(frozen=True, slots=True)
class Command:
    """What the robot is to do until the next one.

    Attributes:
        level: who decided.
        values: by name, in SI units.
        reason: why it is not the cloud; empty where it is.
        at_ns: of the loop's clock.
    """

    level: Level
    values: Mapping[str, float]
    reason: str
    at_ns: int


@dataclass(frozen=True, slots=True)
class LoopReport:
    """How the loop has done so far."""

    ticks: int
    late_ticks: int  # Began more than half a period after their time.
    worst_lateness_ns: int
    drops: int  # Times that the cloud's answers ran out.
    watchdog_stops: int
    asked: int
    answered: int
    refused: int


class ControlLoop:
    """One robot's loop; use it with `with`, or `start` and `close` it.

    Args:
        cloud: whom to ask.
        observe: what the robot sees at an instant of the loop's clock; called from the
            asking thread. None: it sees nothing that is worth asking about.
        actuate: takes each command; called from the control thread, must not wait. From
            the watchdog's thread only after the control thread fell silent.
        config: periods, ages and budgets.
        rest: commanded by name before anything was: which values there are, at rest.
        hold: how the robot comes to rest in HOLD.
        stop: what it does in SAFE_STOP.
        edge_policy: None: the robot has none.
        clock: steady; never the wall clock.
    """

    def __init__(
        self,
        cloud: Cloud,
        observe: Callable[[int], Observation | None],
        actuate: Callable[[Command], None],
        config: FallbackConfig,
        *,
        rest: Mapping[str, float],
        hold: Behaviour | None = None,
        stop: Behaviour | None = None,
        edge_policy: EdgePolicy | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._cloud = cloud
        self._observe = observe
        self._actuate = actuate
        self._config = config
        self._behaviours = {Level.HOLD: hold or Stop(), Level.SAFE_STOP: stop or Stop()}
        self._edge_policy = edge_policy
        self._clock = clock if clock is not None else MonotonicClock()
        now_ns = self._clock.now_ns()
        self._fallback = Fallback(config, now_ns)
        self._last: Mapping[str, float] = dict(rest)
        self._before: Mapping[str, float] = self._last  # When the present level began.
        self._level_since_ns = now_ns
        self._lock = threading.Lock()  # Of the fallback and the counts below.
        self._actuating = threading.Lock()
        self._is_over = threading.Event()
        self._may_ask = threading.Event()
        self._threads: list[threading.Thread] = []
        self._ticked_ns = now_ns
        self._ticks = self._late_ticks = self._worst_lateness_ns = 0
        self._watchdog_stops = self._asked = self._answered = self._refused = 0
        self._is_taken_over = False
        self._failure: Exception | None = None

    def start(self) -> None:
        """Begins to command. May be called once."""
        now_ns = self._clock.now_ns()
        self._ticked_ns = now_ns
        for name, work in (
            ("control", self._control),
            ("asking", self._ask),
            ("watchdog", self._watch),
        ):
            thread = threading.Thread(target=work, name=f"headway-{name}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        """Stops the robot and every thread. May be called twice.

        Returns within the budget of the question that is under way.

        Raises:
            Exception: what ended the control thread, if anything did.
        """
        self._is_over.set()
        self._may_ask.set()
        me = threading.current_thread()
        for thread in self._threads:
            if thread is not me:
                thread.join(_JOIN_S + s_from_ns(self._config.budget_ns))
        self._threads.clear()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def data(self, source: str, measured_ns: int | None = None) -> None:
        """A source measured something; from any thread. See `Fallback.data`."""
        at_ns = self._clock.now_ns() if measured_ns is None else measured_ns
        with self._lock:
            self._fallback.data(source, at_ns)
        self._may_ask.set()

    def stop_now(self, reason: str) -> None:
        """SAFE_STOP from the next period on; from any thread."""
        with self._lock:
            self._fallback.stop(reason, self._clock.now_ns())

    @property
    def level(self) -> Level:
        """Who decides now."""
        return self._fallback.level

    def report(self) -> LoopReport:
        """How it has done so far."""
        with self._lock:
            return LoopReport(
                ticks=self._ticks,
                late_ticks=self._late_ticks,
                worst_lateness_ns=self._worst_lateness_ns,
                drops=self._fallback.num_drops,
                watchdog_stops=self._watchdog_stops,
                asked=self._asked,
                answered=self._answered,
                refused=self._refused,
            )

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # --- the control thread ---

    def _control(self) -> None:
        for work in (self._tick_on, self._rest):
            try:
                work()
            except Exception as error:
                # Kept for whoever closes the loop; a thread has nobody to raise to.
                self._failure = self._failure or error
                _log.exception("the control loop failed")

    def _tick_on(self) -> None:
        due_ns = self._clock.now_ns()
        while not self._is_over.is_set():
            now_ns = self._clock.now_ns()
            self._note_tick(now_ns, now_ns - due_ns)
            self._command(now_ns)
            self._may_ask.set()
            # From the plan, not from now: periods do not add up their lateness. A
            # loop that was held up goes on from where time is.
            due_ns = max(due_ns + self._config.control_period_ns, now_ns)
            self._is_over.wait(max(0.0, s_from_ns(due_ns - self._clock.now_ns())))

    def _note_tick(self, now_ns: int, lateness_ns: int) -> None:
        with self._lock:
            self._ticked_ns = now_ns
            self._ticks += 1
            self._worst_lateness_ns = max(self._worst_lateness_ns, lateness_ns)
            is_late = lateness_ns > _LATE_SHARE * self._config.control_period_ns
            self._late_ticks += is_late
        if is_late:
            _log.warning("the control thread was %.1f ms late", lateness_ns / 1e6)

    def _command(self, now_ns: int) -> None:
        policy = self._edge_policy
        is_ready = policy is not None and policy.is_ready(now_ns)
        with self._lock:
            previous = self._fallback.level
            order = self._fallback.order(now_ns, edge_is_ready=is_ready)
        if order.level is not previous:
            self._before, self._level_since_ns = self._last, now_ns
            _log.info("level %s: %s", order.level.name, order.reason or "an answer came")
        values = self._values(order, now_ns)
        with self._actuating:
            if self._is_taken_over:
                # Late back from wherever it was: the watchdog has stopped the robot, and
                # what was just decided is of a time before that.
                self._is_taken_over = False
                return
            self._last = values
            self._actuate(Command(order.level, values, order.reason, now_ns))

    def _values(self, order: Order, now_ns: int) -> Mapping[str, float]:
        if order.values is not None:
            return order.values
        if order.level is Level.EDGE and self._edge_policy is not None:
            return self._edge_policy.values(now_ns)
        elapsed_ns = now_ns - self._level_since_ns
        return self._behaviours[order.level].values(self._before, elapsed_ns)

    def _rest(self) -> None:
        """The last command of all."""
        reason = "the control loop has ended"
        now_ns = self._clock.now_ns()
        with self._actuating:
            values = self._behaviours[Level.SAFE_STOP].values(self._last, 0)
            self._actuate(Command(Level.SAFE_STOP, values, reason, now_ns))

    # --- the asking thread ---

    def _ask(self) -> None:
        while not self._is_over.is_set():
            self._may_ask.wait()
            self._may_ask.clear()
            with self._lock:
                is_time = self._fallback.should_ask(self._clock.now_ns())
            if is_time and not self._is_over.is_set():
                try:
                    self._ask_once()
                except Exception:
                    # The robot goes on by itself, and this thread tries again.
                    _log.exception("asking the cloud failed")

    def _ask_once(self) -> None:
        observed_ns = self._clock.now_ns()
        observation = self._observe(observed_ns)
        if observation is None:
            return
        with self._lock:
            self._asked += 1
            self._fallback.asked(observation.observation_id, observed_ns, self._clock.now_ns())
        try:
            action = self._cloud.next_action(observation, s_from_ns(self._config.budget_ns))
        except CallError as no:
            reason = no.reason.value if no.reason is not None else str(no)
            hint_s = no.retry_after_s
            with self._lock:
                self._refused += 1
                self._fallback.refused(
                    observation.observation_id,
                    reason,
                    self._clock.now_ns(),
                    None if hint_s is None else round(hint_s * 1e9),
                )
            return
        with self._lock:
            self._answered += 1
            self._fallback.answered(action, self._clock.now_ns())

    # --- the watchdog ---

    def _watch(self) -> None:
        limit_ns = max(_LEAST_WATCHDOG_NS, _WATCHDOG_PERIODS * self._config.control_period_ns)
        while not self._is_over.wait(s_from_ns(limit_ns) / 4):
            silent_ns = self._clock.now_ns() - self._ticked_ns
            if silent_ns > limit_ns and not self._is_taken_over:
                try:
                    self._take_over(silent_ns)
                except Exception:
                    # Once more in a while: what cannot be reached now may be later.
                    _log.exception("the watchdog could not stop the robot")

    def _take_over(self, silent_ns: int) -> None:
        reason = f"the control thread has been silent for {silent_ns / 1e6:.0f} ms"
        _log.error("%s", reason)
        with self._lock:
            self._watchdog_stops += 1
            self._fallback.stop(reason, self._clock.now_ns())
        # A control thread that hangs inside `actuate` holds this lock; whoever cannot be
        # reached through it cannot be stopped through it either.
        if not self._actuating.acquire(timeout=s_from_ns(_LEAST_WATCHDOG_NS)):
            return
        try:
            values = self._behaviours[Level.SAFE_STOP].values(self._last, 0)
            self._actuate(Command(Level.SAFE_STOP, values, reason, self._clock.now_ns()))
            self._last, self._is_taken_over = values, True
        finally:
            self._actuating.release()
