"""Clocks: whole nanoseconds, forward only."""

import time
from collections.abc import Callable

import pytest

from headway.clock import MonotonicClock, VirtualClock, ns_from_s, s_from_ns


def test_virtual_clock_moves_only_when_told() -> None:
    """Two reads without an advance give the same instant."""
    clock = VirtualClock(5)
    assert clock.now_ns() == clock.now_ns() == 5
    clock.advance(7)
    clock.advance_to(20)
    assert clock.now_ns() == 20


@pytest.mark.parametrize("move", [lambda c: c.advance(-1), lambda c: c.advance_to(9)])
def test_virtual_clock_never_goes_back(move: Callable[[VirtualClock], None]) -> None:
    """A step back is refused and leaves the clock where it was."""
    clock = VirtualClock(10)
    with pytest.raises(ValueError, match="never goes back"):
        move(clock)
    assert clock.now_ns() == 10


def test_monotonic_clock_ignores_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wall clock that jumps to 1970 does not move the steady one back."""
    clock = MonotonicClock()
    before = clock.now_ns()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    assert clock.now_ns() >= before


@pytest.mark.parametrize(
    ("seconds", "ns"), [(0.0, 0), (1e-9, 1), (0.1, 100_000_000), (-2.5, -2_500_000_000)]
)
def test_seconds_become_whole_nanoseconds(seconds: float, ns: int) -> None:
    """0.1 s is 100,000,000 ns although 0.1 is no binary fraction."""
    assert ns_from_s(seconds) == ns
    assert s_from_ns(ns) == seconds


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_time_that_is_no_number_is_refused(value: float) -> None:
    """NaN and infinity are refused with a message that names the value."""
    with pytest.raises(ValueError, match="finite number of seconds"):
        ns_from_s(value)
