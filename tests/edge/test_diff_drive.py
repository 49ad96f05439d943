"""The made-up robot moves as the unicycle model says, and only on fresh orders."""

import math

import pytest

from edge.action import Action, Timings
from edge.diff_drive import DiffDriveRobot
from edge.observation import Observation

MS = 1_000_000
S = 1_000 * MS


def seen(observation: Observation, source: str, name: str) -> float:
    """One value of an observation."""
    return next(s for s in observation.state if s.name == source).values[name]


def action(observation_id: str, *steps: tuple[float, float]) -> Action:
    """A chunk of 100 ms steps."""
    return Action(
        observation_id,
        ("linear_velocity", "angular_velocity"),
        steps,
        100 * MS,
        Timings(0, 0, 0, 0),
        0,
        "m",
    )


def robot_in_the_middle() -> DiffDriveRobot:
    """One that does not meet a wall within the tests."""
    for seed in range(100):
        robot = DiffDriveRobot("r", seed, 0)
        place = robot.observe(0)
        if all(5 < seen(place, "odometry", axis) < 15 for axis in "xy"):
            return DiffDriveRobot("r", seed, 0)
    raise AssertionError("no seed starts in the middle")


def test_straight_on_for_a_second_is_its_velocity_in_metres() -> None:
    """0.5 m/s for 1 s along the heading: 0.5 m."""
    robot = robot_in_the_middle()
    before = robot.observe(0)
    robot.play(action(before.observation_id, *[(0.5, 0.0)] * 10), 0)
    after = robot.observe(1 * S)
    heading = seen(before, "odometry", "heading")
    for axis, part in (("x", math.cos(heading)), ("y", math.sin(heading))):
        moved = seen(after, "odometry", axis) - seen(before, "odometry", axis)
        assert moved == pytest.approx(0.5 * part, abs=0.002)


def test_turning_changes_the_heading_by_rate_times_time() -> None:
    """1 rad/s for 0.5 s: 0.5 rad, on the spot."""
    robot = robot_in_the_middle()
    before = robot.observe(0)
    robot.play(action(before.observation_id, *[(0.0, 1.0)] * 10), 0)
    after = robot.observe(500 * MS)
    turned = seen(after, "odometry", "heading") - seen(before, "odometry", "heading")
    assert math.remainder(turned, math.tau) == pytest.approx(0.5, abs=0.002)
    assert seen(after, "odometry", "x") == seen(before, "odometry", "x")


def test_it_stops_by_itself_when_the_chunk_is_played() -> None:
    """No order left: it brakes at 1.5 m/s² to standstill."""
    robot = robot_in_the_middle()
    first = robot.observe(0)
    robot.play(action(first.observation_id, (0.6, 0.0)), 0)
    robot.observe(100 * MS)
    assert robot.is_moving
    robot.observe(100 * MS + 401 * MS)
    assert not robot.is_moving


def test_steps_that_passed_while_the_answer_came_are_not_played() -> None:
    """An answer 250 ms old starts with its third step."""
    robot = robot_in_the_middle()
    first = robot.observe(0)
    robot.play(action(first.observation_id, (0.1, 0.0), (0.2, 0.0), (0.3, 0.0)), 250 * MS)
    assert seen(robot.observe(260 * MS), "odometry", "linear_velocity") == 0.3


def test_an_answer_to_an_older_observation_is_ignored() -> None:
    """The answer to the second observation stays in force."""
    robot = robot_in_the_middle()
    first = robot.observe(0)
    second = robot.observe(10 * MS)
    robot.play(action(second.observation_id, *[(0.4, 0.0)] * 10), 20 * MS)
    robot.play(action(first.observation_id, *[(-0.4, 0.0)] * 10), 30 * MS)
    robot.play(action("somebody-else", *[(-0.4, 0.0)] * 10), 30 * MS)
    assert seen(robot.observe(50 * MS), "odometry", "linear_velocity") == 0.4


def test_one_seed_gives_one_life() -> None:
    """Same seed, same answers, same observations."""
    lives = []
    for _ in range(2):
        robot = DiffDriveRobot("r", 7, 0)
        first = robot.observe(0)
        robot.play(action(first.observation_id, *[(0.5, 0.3)] * 10), 0)
        lives.append((first, robot.observe(700 * MS)))
    assert lives[0] == lives[1]


def test_a_robot_far_from_its_wall_never_leaves_the_floor() -> None:
    """A minute of full speed ends inside 20 m × 20 m."""
    robot = DiffDriveRobot("r", 3, 0)
    for second in range(60):
        now = robot.observe(second * S)
        robot.play(action(now.observation_id, *[(1.5, 0.0)] * 10), second * S)
        assert all(0 <= seen(now, "odometry", axis) <= 20 for axis in "xy")


def test_a_robot_that_was_forgotten_for_years_is_where_it_stopped() -> None:
    """At once, and not tick by tick; its battery is flat."""
    robot = robot_in_the_middle()
    before = robot.observe(0)
    robot.play(action(before.observation_id, (0.5, 0.0)), 0)
    stopped = robot.observe(10 * S)
    assert not robot.is_moving
    later = robot.observe(30 * 365 * 86_400 * S)
    for name in ("x", "y", "heading"):
        assert seen(later, "odometry", name) == seen(stopped, "odometry", name)
    assert seen(stopped, "power", "battery") > 0
    assert seen(later, "power", "battery") == 0
