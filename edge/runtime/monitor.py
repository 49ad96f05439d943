"""How soon control reacted: the bound, the histogram, and what broke it."""

from bisect import bisect_left
from dataclasses import dataclass

__all__ = ["ReactionMonitor", "ReactionReport"]

# Upper bounds in ns: 0.1 ms to 1 s, ten a decade.
_BOUNDS_NS = tuple(round(100_000 * 10 ** (step / 10)) for step in range(41))


@dataclass(frozen=True, slots=True)
class ReactionReport:
    """What a monitor has seen.

    Attributes:
        bound_ns: that was stated; None: none was.
        count: control steps.
        violations: reactions that took longer than the bound.
        worst_ns: the longest reaction.
        skipped: ticks that were given up, since the next one was due.
        bounds_ns: upper bounds of the histogram's buckets.
        counts: one more than there are bounds: the last is what is longer than all.
    """

    bound_ns: int | None
    count: int
    violations: int
    worst_ns: int
    skipped: int
    bounds_ns: tuple[int, ...]
    counts: tuple[int, ...]

    def quantile_ns(self, share: float) -> int:
        """Upper bound of the bucket that holds the quantile; 0 of nothing."""
        left = share * self.count
        for bound_ns, count in zip(self.bounds_ns, self.counts, strict=False):
            left -= count
            if left <= 0 and self.count:
                return min(bound_ns, self.worst_ns)
        return self.worst_ns


class ReactionMonitor:
    """Keeps the time from each release to its result."""

    def __init__(self, bound_ns: int | None) -> None:
        self.bound_ns = bound_ns
        self._counts = [0] * (len(_BOUNDS_NS) + 1)
        self._count = self._violations = self._worst_ns = self._skipped = 0

    def add(self, reaction_ns: int) -> bool:
        """Takes in one reaction; whether it kept the bound."""
        self._counts[bisect_left(_BOUNDS_NS, reaction_ns)] += 1
        self._count += 1
        self._worst_ns = max(self._worst_ns, reaction_ns)
        kept = self.bound_ns is None or reaction_ns <= self.bound_ns
        self._violations += not kept
        return kept

    def skip(self, count: int) -> None:
        """Takes in ticks that were given up."""
        self._skipped += count

    def report(self) -> ReactionReport:
        """So far."""
        return ReactionReport(
            self.bound_ns,
            self._count,
            self._violations,
            self._worst_ns,
            self._skipped,
            _BOUNDS_NS,
            tuple(self._counts),
        )
