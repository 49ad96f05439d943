"""Clocks. Instants and spans are integer nanoseconds; a clock value means
nothing outside the process that read it.
"""

import time
from typing import Protocol

__all__ = ["Clock", "MonotonicClock", "VirtualClock", "ns_from_s", "s_from_ns"]

_NS_PER_S = 1_000_000_000


def ns_from_s(seconds: float) -> int:
    """`seconds` in whole nanoseconds, rounded to the nearest.

    Raises:
        ValueError: not a finite number.
    """
    if not -float("inf") < seconds < float("inf"):
        raise ValueError(f"a time must be a finite number of seconds, got {seconds}")
    return round(seconds * _NS_PER_S)


def s_from_ns(span_ns: int) -> float:
    """`span_ns` in seconds, for configuration and display."""
    return span_ns / _NS_PER_S


class Clock(Protocol):
    """Tells the time. Never goes back."""

    def now_ns(self) -> int:
        """Nanoseconds since an arbitrary origin."""


class MonotonicClock:
    """The machine's steady clock; a change of the wall clock does not move it."""

    def now_ns(self) -> int:
        """Nanoseconds since an arbitrary origin."""
        return time.monotonic_ns()


class VirtualClock:
    """A clock that moves when it is told to, for tests and simulation."""

    def __init__(self, start_ns: int = 0) -> None:
        self._now_ns = start_ns

    def now_ns(self) -> int:
        """Nanoseconds since an arbitrary origin."""
        return self._now_ns

    def advance(self, span_ns: int) -> None:
        """Moves the clock on by `span_ns`.

        Raises:
            ValueError: `span_ns` is negative.
        """
        if span_ns < 0:
            raise ValueError(f"a clock never goes back; asked to move by {span_ns} ns")
        self._now_ns += span_ns

    def advance_to(self, instant_ns: int) -> None:
        """Moves the clock to `instant_ns`.

        Raises:
            ValueError: `instant_ns` lies in the past.
        """
        self.advance(instant_ns - self._now_ns)
