"""The starvation lane: a small share of step time for work that waited too long."""

__all__ = ["StarvationLane"]


class StarvationLane:
    """A deficit counter in predicted step time.

    While somebody starves it earns `share` of the time that passes, and holds at
    most what `window_ns` earns. What the lane's work costs is taken off, below
    zero if need be. A share of 0 closes the lane.
    """

    __slots__ = ("_most_ns", "_share", "_updated_ns", "credit_ns")

    def __init__(self, share: float, window_ns: int) -> None:
        self._share = share
        self._most_ns = share * window_ns
        self._updated_ns = -1
        self.credit_ns = 0.0

    @property
    def is_open(self) -> bool:
        """Whether somebody starves, as of the last step."""
        return self._updated_ns >= 0 and self._share > 0

    def accrue(self, now_ns: int, *, is_starving: bool) -> float:
        """Earns for the time since the last call; returns what can be spent."""
        if is_starving and self._updated_ns >= 0:
            earned = self._share * (now_ns - self._updated_ns)
            self.credit_ns = min(self._most_ns, self.credit_ns + earned)
        self._updated_ns = now_ns if is_starving else -1
        return max(0.0, self.credit_ns)

    def spend(self, span_ns: float) -> None:
        """Takes off what work of the lane costs."""
        self.credit_ns -= span_ns
