"""Levels, trimming and staleness: pure, in virtual time."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.action import Action, Timings
from edge.fallback import Fallback, FallbackConfig, Level
from headway.errors import ConfigError

MS = 1_000_000
PERIOD = 100 * MS
CONFIG = FallbackConfig(
    control_period_ns=PERIOD,
    max_answer_age_ns=1_000 * MS,
    safe_stop_after_ns=500 * MS,
    budget_ns=300 * MS,
)


def chunk(observation_id: str, num_steps: int = 10, period_ns: int = PERIOD) -> Action:
    """Step i says i."""
    return Action(
        observation_id,
        ("speed",),
        tuple((float(i),) for i in range(num_steps)),
        period_ns,
        Timings(0, 0, 0, 0),
        0,
        "m",
    )


def engaged(config: FallbackConfig = CONFIG, num_steps: int = 10) -> Fallback:
    """Following what was seen at 0."""
    robot = Fallback(config, 0)
    robot.asked("o0", 0, 0)
    assert robot.answered(chunk("o0", num_steps), 0)
    assert robot.order(0).level is Level.CLOUD
    return robot


def test_a_robot_that_was_just_switched_on_stands() -> None:
    """Until the cloud has answered what it saw."""
    robot = Fallback(CONFIG, 0)
    order = robot.order(0)
    assert (order.level, order.values) == (Level.SAFE_STOP, None)
    assert robot.should_ask(0)


def test_steps_that_the_delay_used_up_are_dropped() -> None:
    """An answer after 250 ms begins with its third step; each belongs to its own period."""
    robot = Fallback(CONFIG, 0)
    robot.asked("o0", 0, 0)
    assert robot.answered(chunk("o0"), 250 * MS)
    played = [robot.order(at * MS).values for at in (250, 299, 300, 950, 999)]
    assert played == [
        {"speed": 2.0},
        {"speed": 2.0},
        {"speed": 3.0},
        {"speed": 9.0},
        {"speed": 9.0},
    ]


@pytest.mark.parametrize(
    ("what", "tell"),
    [
        ("refused", lambda robot: robot.refused("o1", "LATE", 210 * MS, 5_000 * MS)),
        ("missed", lambda robot: robot.refused("o1", "DEADLINE_MISSED", 500 * MS)),
        ("silent", lambda robot: None),
    ],
)
def test_every_way_to_get_no_answer_ends_the_same(
    what: str, tell: Callable[[Fallback], None]
) -> None:
    """HOLD within a period of the last step that is not too old, then SAFE_STOP in time."""
    robot = engaged()
    robot.asked("o1", 200 * MS, 200 * MS)
    levels = {}
    for at_ms in range(200, 2000, 10):
        if at_ms == 510:
            tell(robot)
        levels[at_ms] = robot.order(at_ms * MS).level
    # Ten steps of 100 ms from 0 on; then 500 ms.
    assert {at: level for at, level in levels.items() if at < 1000} == dict.fromkeys(
        range(200, 1000, 10), Level.CLOUD
    )
    assert {levels[at] for at in range(1000, 1500, 10)} == {Level.HOLD}, what
    assert {levels[at] for at in range(1500, 2000, 10)} == {Level.SAFE_STOP}
    assert robot.num_drops == 1


def test_an_answer_is_not_followed_past_its_largest_age() -> None:
    """However many steps it has."""
    robot = engaged(num_steps=100)
    assert robot.order(999 * MS).level is Level.CLOUD
    assert robot.order(1_000 * MS).level is Level.HOLD


def test_the_reason_is_told_to_people() -> None:
    """Of the last "no", or that there was none."""
    robot = engaged()
    robot.asked("o1", 200 * MS, 200 * MS)
    robot.refused("o1", "LATE", 300 * MS)
    assert robot.order(500 * MS).reason == ""
    assert robot.order(1_000 * MS).reason == "LATE"
    silent = engaged()
    assert silent.order(1_000 * MS).reason == "no answer came"


def test_a_late_answer_to_what_was_seen_before_the_stop_does_not_start_the_robot() -> None:
    """What it saw while it drove says nothing of what is there now; a new answer does."""
    robot = engaged(num_steps=2)
    robot.asked("before", 900 * MS, 900 * MS)
    assert robot.order(200 * MS).level is Level.HOLD
    assert robot.order(950 * MS).level is Level.SAFE_STOP
    assert not robot.answered(chunk("before"), 960 * MS)
    assert robot.order(960 * MS).level is Level.SAFE_STOP
    robot.asked("after", 970 * MS, 970 * MS)
    assert robot.answered(chunk("after"), 990 * MS)
    assert robot.order(990 * MS).level is Level.CLOUD


def test_only_newer_answers_to_its_own_questions_are_followed() -> None:
    """Not another robot's, not twice, not an older one that overtook."""
    robot = engaged()
    robot.asked("o1", 100 * MS, 100 * MS)
    robot.asked("o2", 200 * MS, 200 * MS)
    assert not robot.answered(chunk("never asked"), 210 * MS)
    assert robot.answered(chunk("o2"), 220 * MS)
    assert not robot.answered(chunk("o2"), 230 * MS)
    assert not robot.answered(chunk("o1"), 240 * MS)
    assert robot.order(300 * MS).values == {"speed": 1.0}


def test_an_answer_that_is_nearly_over_does_not_bring_the_robot_back() -> None:
    """Two periods at least, or it would start and stop by turns; while it drives, less will do."""
    robot = engaged(num_steps=2)
    assert robot.order(200 * MS).level is Level.HOLD
    robot.asked("o1", 200 * MS, 200 * MS)
    assert not robot.answered(chunk("o1", num_steps=3), 301 * MS)
    robot.asked("o2", 310 * MS, 310 * MS)
    assert robot.answered(chunk("o2", num_steps=3), 410 * MS)
    assert robot.order(410 * MS).level is Level.CLOUD
    robot.asked("o3", 420 * MS, 420 * MS)
    assert robot.answered(chunk("o3", num_steps=3), 715 * MS)


def test_the_robots_own_policy_goes_before_holding() -> None:
    """While it is ready; HOLD and the stop count from when it is not."""
    robot = engaged(num_steps=2)
    assert robot.order(200 * MS, edge_is_ready=True).level is Level.EDGE
    assert robot.order(5_000 * MS, edge_is_ready=True).level is Level.EDGE
    assert robot.order(5_100 * MS).level is Level.HOLD
    assert robot.order(5_200 * MS, edge_is_ready=True).level is Level.EDGE
    assert robot.order(5_300 * MS).level is Level.HOLD
    assert robot.order(5_799 * MS).level is Level.HOLD
    assert robot.order(5_800 * MS).level is Level.SAFE_STOP
    assert robot.order(5_900 * MS, edge_is_ready=True).level is Level.SAFE_STOP


def test_a_frozen_camera_is_stale() -> None:
    """The same picture again is no news: nothing is asked of it, nor decided by it."""
    robot = Fallback(
        FallbackConfig(max_source_age_ns={"front": 200 * MS, "odometry": 50 * MS}), now_ns=0
    )
    assert robot.stale_sources(0) == ["front", "odometry"]
    assert not robot.should_ask(0)
    robot.data("front", 10 * MS)
    for at_ms in range(10, 400, 10):
        robot.data("odometry", at_ms * MS)
        robot.data("front", 10 * MS)
    assert robot.stale_sources(400 * MS) == ["front"]
    assert not robot.should_ask(400 * MS)
    robot.data("front", 400 * MS)
    assert robot.should_ask(400 * MS)


def test_a_stale_source_takes_the_robots_own_policy_away() -> None:
    """It would be as blind as the cloud."""
    config = FallbackConfig(max_source_age_ns={"front": 200 * MS})
    robot = Fallback(config, 0)
    robot.data("front", 0)
    robot.asked("o0", 0, 0)
    assert robot.answered(chunk("o0", num_steps=3), 10 * MS)
    assert robot.order(10 * MS).level is Level.CLOUD
    order = robot.order(300 * MS, edge_is_ready=True)
    assert (order.level, order.reason) == (Level.HOLD, "front is stale")


def test_the_next_question_is_asked_ahead_by_the_measured_delay() -> None:
    """Answers took 200 ms each time: with a period's room that is 300 ms before the end."""
    config = FallbackConfig(
        control_period_ns=PERIOD, max_answer_age_ns=2_000 * MS, budget_ns=1_000 * MS
    )
    robot = Fallback(config, 0)
    at_ms = 0
    for number in range(60):
        robot.asked(f"o{number}", at_ms * MS, at_ms * MS)
        assert robot.answered(chunk(f"o{number}"), (at_ms + 200) * MS)
        seen_ms = at_ms
        at_ms += 200
        robot.order(at_ms * MS)
        while not robot.should_ask(at_ms * MS):
            robot.order(at_ms * MS)
            at_ms += 1
    # The tenth step ends 1,000 ms after the observation; deviations have died away.
    assert at_ms - seen_ms == pytest.approx(1_000 - 200 - 100, abs=2)


def test_one_question_at_a_time_until_its_budget_is_over() -> None:
    """Then whoever was asked is silent, and the next one may be asked."""
    robot = Fallback(CONFIG, 0)
    robot.asked("o0", 0, 0)
    assert not robot.should_ask(299 * MS)
    assert robot.should_ask(300 * MS)
    robot.asked("o1", 300 * MS, 300 * MS)
    assert not robot.should_ask(310 * MS)
    # The answer to the first one, late, is still the newest that there is.
    assert robot.answered(chunk("o0"), 320 * MS)


def test_a_hint_is_waited_out() -> None:
    """Asking before would be in vain; without one, a period is waited."""
    robot = Fallback(CONFIG, 0)
    robot.asked("o0", 0, 0)
    robot.refused("o0", "LATE", 10 * MS, 400 * MS)
    assert not robot.should_ask(409 * MS)
    assert robot.should_ask(410 * MS)
    robot.asked("o1", 410 * MS, 410 * MS)
    robot.refused("o1", "UNAVAILABLE", 420 * MS)
    assert not robot.should_ask(519 * MS)
    assert robot.should_ask(520 * MS)


def test_a_person_can_stop_it_at_once() -> None:
    """In the middle of an answer; only a new one starts it again."""
    robot = engaged()
    robot.stop("emergency button", 100 * MS)
    order = robot.order(100 * MS)
    assert (order.level, order.reason) == (Level.SAFE_STOP, "emergency button")
    robot.asked("o1", 110 * MS, 110 * MS)
    assert robot.answered(chunk("o1"), 150 * MS)
    assert robot.order(150 * MS).level is Level.CLOUD


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"control_period_ns": 0}, "control_period_ns"),
        ({"budget_ns": -1}, "budget_ns"),
        ({"max_source_age_ns": {"front": 0}}, "front"),
        ({"periods_to_return": 0}, "periods_to_return"),
        ({"max_answer_age_ns": 150 * MS}, "max_answer_age_ns"),
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, object], word: str) -> None:
    """Before anything moves."""
    with pytest.raises(ConfigError, match=word):
        FallbackConfig(**changes)  # type: ignore[arg-type]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["ask", "answer", "refuse", "tick", "edge", "data"]),
            st.integers(0, 400),
            st.integers(0, 12),
        ),
        max_size=60,
    )
)
def test_whatever_happens_the_robot_never_moves_by_what_is_too_old(
    events: list[tuple[str, int, int]],
) -> None:
    """A step is always of an answer to what it asked, of the step's own period, and young
    enough; no level is left upwards but by such an answer.
    """
    robot = Fallback(CONFIG, 0)
    now_ns = 0
    asked: dict[str, int] = {}
    answered: dict[str, int] = {}
    previous = robot.order(0).level
    for number, (kind, wait_ms, which) in enumerate(events):
        now_ns += wait_ms * MS
        names = list(asked)
        name = names[which % len(names)] if names else "none"
        if kind == "ask":
            asked[f"o{number}"] = now_ns
            robot.asked(f"o{number}", now_ns, now_ns)
            continue
        if kind == "answer":
            if robot.answered(chunk(name, num_steps=which + 1), now_ns):
                answered[name] = which + 1
            continue
        if kind == "refuse":
            robot.refused(name, "LATE", now_ns)
            continue
        order = robot.order(now_ns, edge_is_ready=kind == "edge")
        if order.level is Level.CLOUD:
            assert order.values is not None
            index = int(order.values["speed"])
            assert any(
                index < num_steps
                and asked[one] + index * PERIOD <= now_ns < asked[one] + (index + 1) * PERIOD
                and now_ns - asked[one] < CONFIG.max_answer_age_ns
                for one, num_steps in answered.items()
            )
        else:
            assert order.values is None
        if previous is Level.SAFE_STOP and order.level is not Level.SAFE_STOP:
            assert order.level is Level.CLOUD
        previous = order.level
