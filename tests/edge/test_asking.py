"""Open loop: the instants of asking are fixed beforehand."""

import math
import threading

import pytest

from edge.answer import Answer, AnswerKind
from edge.asking import AskingLoop
from edge.client import RobotClient
from edge.diff_drive import DiffDriveRobot
from headway.clock import VirtualClock, ns_from_s
from headway.rpc.errors import InvalidRequestError
from tests.support.robot_server import ScriptedRobotServer

MS = 1_000_000


class VirtualStop(threading.Event):
    """A stop whose waiting passes virtual time."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock

    def wait(self, timeout: float | None = None) -> bool:
        """Passes `timeout` at once."""
        assert timeout is not None
        self._clock.advance(ns_from_s(timeout))
        return self.is_set()


def loop(
    server: ScriptedRobotServer,
    client: RobotClient,
    clock: VirtualClock | None = None,
    *,
    answers: list[Answer],
    rate_hz: float = 50.0,
    budget_s: float = 1.0,
) -> AskingLoop:
    """A loop whose answers are collected."""
    robot = DiffDriveRobot("r", 1, clock.now_ns() if clock is not None else 0)
    return AskingLoop(
        client, robot, rate_hz=rate_hz, budget_s=budget_s, on_answer=answers.append, clock=clock
    )


def test_asks_at_start_plus_i_over_rate_without_drift() -> None:
    """The instants are those of the closed form, whatever the answers took."""
    clock = VirtualClock(1_000)
    answers: list[Answer] = []
    with ScriptedRobotServer() as server, RobotClient.connect(server.address) as client:
        asking = loop(server, client, clock, answers=answers, rate_hz=3.0, budget_s=20.0)
        asking.run(VirtualStop(clock), count=30)
    assert sorted(answer.asked_ns for answer in answers) == [
        1_000 + round(i * 1e9 / 3) for i in range(30)
    ]
    assert len({answer.observation_id for answer in answers}) == 30


def test_an_instant_that_has_passed_is_late_and_not_sent() -> None:
    """A robot that overslept does not ask with a budget that is gone."""
    clock = VirtualClock()
    answers: list[Answer] = []

    class Overslept(VirtualStop):
        def wait(self, timeout: float | None = None) -> bool:
            clock.advance(10_000 * MS)
            return False

    with ScriptedRobotServer() as server, RobotClient.connect(server.address) as client:
        # Asked at 0, 1 s, 2 s; the first wait takes 10 s.
        loop(server, client, clock, answers=answers, rate_hz=1.0, budget_s=0.5).run(
            Overslept(clock), count=3
        )
        assert len(server.requests) <= 1
    late = [answer for answer in answers if answer.asked_ns > 0]
    assert [answer.kind for answer in late] == [AnswerKind.LATE] * 2


@pytest.mark.parametrize("budget_s", [0.04, 1.0])
def test_a_failure_while_showing_an_answer_ends_the_loop(budget_s: float) -> None:
    """It is raised, not swallowed by a thread, whether calls overlap or not."""

    def fail(answer: Answer) -> None:
        raise ZeroDivisionError("shown")

    with ScriptedRobotServer() as server, RobotClient.connect(server.address) as client:
        robot = DiffDriveRobot("r", 1, 0)
        asking = AskingLoop(client, robot, rate_hz=20, budget_s=budget_s, on_answer=fail)
        with pytest.raises(ZeroDivisionError, match="shown"):
            asking.run(threading.Event())


def test_stop_ends_it_and_every_question_was_answered() -> None:
    """What was asked before the stop has its answer when run returns."""
    stop = threading.Event()
    answers: list[Answer] = []

    def show(answer: Answer) -> None:
        answers.append(answer)
        if len(answers) >= 5:  # Two may be shown at once.
            stop.set()

    with ScriptedRobotServer() as server, RobotClient.connect(server.address) as client:
        robot = DiffDriveRobot("r", 1, 0)
        AskingLoop(client, robot, rate_hz=12, budget_s=5, on_answer=show).run(stop)
        assert len(server.requests) == len(answers)
    assert all(answer.kind is AnswerKind.IN_TIME for answer in answers)


@pytest.mark.parametrize(
    ("rate_hz", "budget_s", "says"),
    [
        (0.0, 0.1, "rate"),
        (-1.0, 0.1, "rate"),
        (math.nan, 0.1, "rate"),
        (math.inf, 0.1, "rate"),
        (1.0, 0.0, "budget"),
        (1.0, -1.0, "budget"),
        (1.0, math.nan, "budget"),
        (1.0, math.inf, "budget"),
        (1000.0, 1.0, "1000 calls at a time"),
    ],
)
def test_impossible_rates_and_budgets_are_refused(
    rate_hz: float, budget_s: float, says: str
) -> None:
    """Before a thread is started."""
    with (
        RobotClient.connect("127.0.0.1:9") as client,
        pytest.raises(InvalidRequestError, match=says),
    ):
        AskingLoop(
            client,
            DiffDriveRobot("r", 1, 0),
            rate_hz=rate_hz,
            budget_s=budget_s,
            on_answer=lambda answer: None,
        )
