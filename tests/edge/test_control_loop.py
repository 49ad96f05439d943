"""The loop on real threads: whoever fails or hangs, the robot comes to rest."""

import threading
import time
from collections.abc import Callable, Mapping

import pytest

from edge.action import Action, Timings
from edge.behaviour import VelocityRamp
from edge.control_loop import Command, ControlLoop
from edge.fallback import FallbackConfig, Level
from edge.observation import Observation
from headway.clock import MonotonicClock
from headway.outcome import Reason
from headway.rpc.errors import CallError, RejectedError

MS = 1_000_000
CONFIG = FallbackConfig(
    control_period_ns=5 * MS,
    max_answer_age_ns=60_000 * MS,
    safe_stop_after_ns=30 * MS,
    budget_ns=200 * MS,
)
REST = {"speed": 0.0}


def until(claim: Callable[[], bool]) -> None:
    """Waits for `claim`; a test that waits in vain fails by its time-out."""
    while not claim():
        time.sleep(0.001)


class Robot:
    """Notes every command; sees something new each time."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.threads: list[str] = []
        self.num_seen = 0

    def observe(self, now_ns: int) -> Observation:
        """The next observation."""
        del now_ns
        self.num_seen += 1
        return Observation(f"o{self.num_seen}", task="go")

    def actuate(self, command: Command) -> None:
        """Notes it."""
        self.commands.append(command)
        self.threads.append(threading.current_thread().name)

    def levels(self) -> list[Level]:
        """Without repetitions."""
        found: list[Level] = []
        for command in list(self.commands):
            if not found or found[-1] is not command.level:
                found.append(command.level)
        return found


class ScriptedCloud:
    """Answers with `num_steps` steps of 5 ms, until it is told otherwise."""

    def __init__(self, num_steps: int = 10) -> None:
        self.num_steps = num_steps
        self.error: Exception | None = None
        self.hangs = threading.Event()
        self.is_let_go = threading.Event()
        self.asked: list[str] = []

    def next_action(self, observation: Observation, budget_s: float) -> Action:
        """As it was told."""
        del budget_s
        self.asked.append(observation.observation_id)
        if self.hangs.is_set():
            self.is_let_go.wait(30)
        if self.error is not None:
            raise self.error
        steps = tuple((1.0,) for _ in range(self.num_steps))
        name = observation.observation_id
        return Action(name, ("speed",), steps, 5 * MS, Timings(0, 0, 0, 0), 0, "m")


@pytest.fixture(autouse=True)
def _leaves_no_thread() -> object:
    """Whatever happened, none of the loop's threads is left."""
    yield
    left = [one.name for one in threading.enumerate() if one.name.startswith("headway-")]
    assert left == []


def test_answers_are_played_and_the_last_command_is_rest() -> None:
    """From the control thread alone."""
    robot, cloud = Robot(), ScriptedCloud()
    with ControlLoop(cloud, robot.observe, robot.actuate, CONFIG, rest=REST) as loop:
        until(lambda: loop.report().answered >= 5)
        until(lambda: loop.level is Level.CLOUD)
    assert robot.levels()[:2] == [Level.SAFE_STOP, Level.CLOUD]
    assert {c.values["speed"] for c in robot.commands if c.level is Level.CLOUD} == {1.0}
    last = robot.commands[-1]
    assert (last.level, dict(last.values)) == (Level.SAFE_STOP, REST)
    assert set(robot.threads) == {"headway-control"}
    assert len(set(cloud.asked)) == len(cloud.asked)


@pytest.mark.parametrize(
    "error",
    [
        RejectedError("no", reason=Reason.LATE, retry_after_s=0.0),
        CallError("no"),
        RuntimeError("a bug"),
    ],
)
def test_a_no_or_a_bug_of_the_cloud_ends_in_a_stop_and_an_answer_ends_that(
    error: Exception,
) -> None:
    """HOLD, SAFE_STOP, and CLOUD again; the ramp runs while it holds."""
    robot, cloud = Robot(), ScriptedCloud()
    hold = VelocityRamp({"speed": 20.0})
    with ControlLoop(cloud, robot.observe, robot.actuate, CONFIG, rest=REST, hold=hold) as loop:
        until(lambda: loop.level is Level.CLOUD)
        cloud.error = error
        until(lambda: loop.level is Level.SAFE_STOP)
        cloud.error = None
        until(lambda: loop.level is Level.CLOUD)
    levels = robot.levels()
    drop = levels.index(Level.CLOUD)
    assert levels[drop : drop + 4] == [Level.CLOUD, Level.HOLD, Level.SAFE_STOP, Level.CLOUD]
    speeds = [command.values["speed"] for command in robot.commands if command.level is Level.HOLD]
    assert speeds[0] == 1.0
    assert speeds == sorted(speeds, reverse=True)


def test_a_cloud_that_hangs_holds_up_nobody() -> None:
    """Beyond every budget: the control thread goes on, and stops the robot."""
    robot, cloud = Robot(), ScriptedCloud()
    with ControlLoop(cloud, robot.observe, robot.actuate, CONFIG, rest=REST) as loop:
        until(lambda: loop.level is Level.CLOUD)
        cloud.hangs.set()
        until(lambda: loop.level is Level.SAFE_STOP)
        num_commands = len(robot.commands)
        until(lambda: len(robot.commands) > num_commands + 5)
        cloud.is_let_go.set()


def test_a_robot_that_cannot_see_stands() -> None:
    """Whether its eyes raise or say nothing."""

    def blind(now_ns: int) -> Observation | None:
        if now_ns % 2:
            raise OSError("no camera")
        return None

    robot, cloud = Robot(), ScriptedCloud()
    with ControlLoop(cloud, blind, robot.actuate, CONFIG, rest=REST) as loop:
        until(lambda: loop.report().ticks > 20)
    assert robot.levels() == [Level.SAFE_STOP]
    assert cloud.asked == []


class HangingPolicy:
    """Is ready, and then never comes back from choosing."""

    def __init__(self) -> None:
        self.is_asked = threading.Event()
        self.is_let_go = threading.Event()

    def is_ready(self, now_ns: int) -> bool:
        """Always."""
        del now_ns
        return True

    def values(self, now_ns: int) -> Mapping[str, float]:
        """After a long time."""
        del now_ns
        self.is_asked.set()
        self.is_let_go.wait(30)
        return {"speed": 9.0}


def test_the_watchdog_stops_a_robot_whose_control_thread_hangs() -> None:
    """From a thread of its own; what the other one decided before that is never commanded."""
    robot, cloud, policy = Robot(), ScriptedCloud(num_steps=4), HangingPolicy()
    with ControlLoop(
        cloud, robot.observe, robot.actuate, CONFIG, rest=REST, edge_policy=policy
    ) as loop:
        until(lambda: loop.level is Level.CLOUD)
        cloud.error = CallError("no")
        policy.is_asked.wait(30)
        until(lambda: "headway-watchdog" in robot.threads)
        assert loop.report().watchdog_stops == 1
        by_watchdog = robot.commands[robot.threads.index("headway-watchdog")]
        assert (by_watchdog.level, dict(by_watchdog.values)) == (Level.SAFE_STOP, REST)
        assert "control thread has been silent" in by_watchdog.reason
        num_commands = len(robot.commands)
        policy.is_let_go.set()
        until(lambda: len(robot.commands) > num_commands)
    assert all(command.values["speed"] != 9.0 for command in robot.commands)
    assert robot.commands[num_commands].level is Level.SAFE_STOP


def test_a_failing_actuator_ends_the_loop_and_is_told() -> None:
    """Not swallowed by a thread: whoever closes the loop hears of it."""

    def broken(command: Command) -> None:
        raise OSError("no bus")

    loop = ControlLoop(ScriptedCloud(), Robot().observe, broken, CONFIG, rest=REST)
    loop.start()
    until(lambda: not any(t.name == "headway-control" for t in threading.enumerate()))
    with pytest.raises(OSError, match="no bus"):
        loop.close()


class JumpingClock:
    """Steady, save for a jump that a starved thread would see."""

    def __init__(self) -> None:
        self._clock = MonotonicClock()
        self.jump_ns = 0

    def now_ns(self) -> int:
        """With the jump."""
        return self._clock.now_ns() + self.jump_ns


def test_a_starved_control_thread_is_noticed() -> None:
    """Counted, with how late it was; and what became too old meanwhile is not played."""
    robot, cloud, clock = Robot(), ScriptedCloud(), JumpingClock()
    with ControlLoop(cloud, robot.observe, robot.actuate, CONFIG, rest=REST, clock=clock) as loop:
        until(lambda: loop.level is Level.CLOUD)
        before = loop.report()
        clock.jump_ns = 700 * MS
        until(lambda: loop.report().worst_lateness_ns >= 600 * MS)
        assert loop.report().late_ticks > before.late_ticks


def test_a_person_s_stop_comes_through_at_any_time() -> None:
    """At the next period, with the reason."""
    robot, cloud = Robot(), ScriptedCloud()
    with ControlLoop(cloud, robot.observe, robot.actuate, CONFIG, rest=REST) as loop:
        until(lambda: loop.level is Level.CLOUD)
        cloud.error = CallError("no")
        loop.stop_now("emergency button")
        until(lambda: robot.commands[-1].reason == "emergency button")
