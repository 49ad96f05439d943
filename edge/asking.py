"""Asks for actions at a steady rate, whatever the answers do."""

import itertools
import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from edge.answer import Answer
from edge.client import RobotClient
from edge.diff_drive import DiffDriveRobot
from headway.clock import Clock, MonotonicClock, ns_from_s, s_from_ns
from headway.rpc.errors import CallError, DeadlineMissedError, InvalidRequestError

__all__ = ["AskingLoop"]

_MAX_CALLS_IN_FLIGHT = 64
# So that a failure ends the loop soon, however slow the rate.
_LONGEST_WAIT_S = 0.2


class AskingLoop:
    """One robot that asks open loop: at start + i/rate, never from the last answer.

    The budget counts from the intended instant. Where it is longer than a
    period, calls overlap. Answers are handed over one at a time, in the order
    in which they come; where calls overlap, from threads of the loop.

    Args:
        client: whom to ask.
        robot: who moves by the answers.
        rate_hz: how often, more than 0.
        budget_s: seconds until an answer is late.
        on_answer: called with each answer; what it raises ends `run`.
        clock: tells the instants.

    Raises:
        InvalidRequestError: rate or budget are impossible, or need more than 64
            calls at a time.
    """

    def __init__(
        self,
        client: RobotClient,
        robot: DiffDriveRobot,
        *,
        rate_hz: float,
        budget_s: float,
        on_answer: Callable[[Answer], None],
        clock: Clock | None = None,
    ) -> None:
        if not (math.isfinite(rate_hz) and rate_hz > 0):
            raise InvalidRequestError(f"a rate must be a finite number above 0 Hz, got {rate_hz}")
        if not (math.isfinite(budget_s) and budget_s > 0):
            raise InvalidRequestError(
                f"a budget must be a finite number of seconds above 0, got {budget_s}"
            )
        self._num_overlapping = math.ceil(rate_hz * budget_s)
        if self._num_overlapping > _MAX_CALLS_IN_FLIGHT:
            raise InvalidRequestError(
                f"{rate_hz} Hz with a budget of {budget_s} s needs {self._num_overlapping} calls "
                f"at a time, and {_MAX_CALLS_IN_FLIGHT} are possible; lower one of the two"
            )
        self._client = client
        self._robot = robot
        self._rate_hz = rate_hz
        self._budget_ns = ns_from_s(budget_s)
        self._on_answer = on_answer
        self._clock = clock if clock is not None else MonotonicClock()
        self._lock = threading.Lock()
        self._failure: BaseException | None = None

    def run(self, stop: threading.Event, count: int | None = None) -> None:
        """Asks until `stop` is set, or `count` times; returns when all have been answered.

        Raises:
            Exception: what `on_answer` raised.
        """
        if self._num_overlapping <= 1:
            for asked_ns in self._instants(stop, count):
                self._ask(asked_ns)
            return
        with ThreadPoolExecutor(self._num_overlapping, self._robot.robot_id) as calls:
            for asked_ns in self._instants(stop, count):
                calls.submit(self._ask, asked_ns).add_done_callback(self._note_failure)
        if self._failure is not None:
            raise self._failure

    def _instants(self, stop: threading.Event, count: int | None) -> Iterator[int]:
        """Each instant of asking, when it has come."""
        start_ns = self._clock.now_ns()
        for i in itertools.count() if count is None else range(count):
            asked_ns = start_ns + ns_from_s(i / self._rate_hz)
            if self._waits_until(asked_ns, stop):
                return
            yield asked_ns

    def _waits_until(self, instant_ns: int, stop: threading.Event) -> bool:
        """Waits; True where the loop is to end instead."""
        while (left_ns := instant_ns - self._clock.now_ns()) > 0:
            if stop.wait(min(s_from_ns(left_ns), _LONGEST_WAIT_S)) or self._failure is not None:
                return True
        return stop.is_set() or self._failure is not None

    def _ask(self, asked_ns: int) -> None:
        with self._lock:
            observation = self._robot.observe(self._clock.now_ns())
        action, error = None, None
        left_ns = asked_ns + self._budget_ns - self._clock.now_ns()
        try:
            if left_ns <= 0:
                raise DeadlineMissedError("the budget had passed before the robot could ask")
            action = self._client.next_action(observation, s_from_ns(left_ns))
        except CallError as caught:
            error = caught
        answered_ns = self._clock.now_ns()
        with self._lock:
            if action is not None:
                self._robot.play(action, answered_ns)
            self._on_answer(
                Answer(observation.observation_id, asked_ns, answered_ns, action, error)
            )

    def _note_failure(self, call: "Future[None]") -> None:
        if self._failure is None:
            self._failure = call.exception()
