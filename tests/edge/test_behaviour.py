"""How a robot comes to rest: closed forms."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.behaviour import Stop, VelocityRamp
from headway.errors import ConfigError


def test_stop_is_zero_at_once() -> None:
    """For every value that was commanded."""
    assert Stop().values({"linear": 1.5, "angular": -2.0}, 0) == {"linear": 0.0, "angular": 0.0}


@pytest.mark.parametrize(
    ("elapsed_s", "linear"), [(0.0, 1.5), (0.5, 1.0), (1.0, 0.5), (1.5, 0.0), (9.0, 0.0)]
)
def test_a_ramp_is_v_minus_a_t(elapsed_s: float, linear: float) -> None:
    """1.5 m/s at 1 m/s²; backwards alike; what has no deceleration stands at once."""
    ramp = VelocityRamp({"linear": 1.0})
    values = ramp.values({"linear": 1.5, "angular": 2.0}, round(elapsed_s * 1e9))
    assert values == {"linear": pytest.approx(linear), "angular": 0.0}
    back = ramp.values({"linear": -1.5}, round(elapsed_s * 1e9))
    assert back == {"linear": pytest.approx(-linear)}


@given(st.floats(-100, 100), st.floats(1e-3, 100), st.lists(st.integers(0, 10**10), min_size=2))
def test_a_ramp_never_speeds_up_nor_turns_round(
    start: float, deceleration: float, instants: list[int]
) -> None:
    """At later instants it is slower, and of the same sign."""
    ramp = VelocityRamp({"v": deceleration})
    speeds = [ramp.values({"v": start}, at)["v"] for at in sorted(instants)]
    assert all(speed * start >= 0 for speed in speeds)
    assert [abs(speed) for speed in speeds] == sorted(map(abs, speeds), reverse=True)
    assert abs(speeds[0]) <= abs(start)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_an_impossible_deceleration_is_refused(rate: float) -> None:
    """By the name of its value."""
    with pytest.raises(ConfigError, match="linear"):
        VelocityRamp({"linear": rate})
