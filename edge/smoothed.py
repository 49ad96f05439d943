"""A span that varies: its smoothed mean, and what it will hardly exceed."""

__all__ = ["SmoothedSpan"]

# The least that four deviations count for: G in RFC 6298.
_GRANULARITY_NS = 1_000_000
_MAX_BACKOFF = 16


class SmoothedSpan:
    """Estimates a span as TCP estimates its round trip.

    Smoothed mean plus four smoothed deviations, gains 1/8 and 1/4 (RFC 6298,
    section 2). Silence doubles it until the next measurement (section 5.5).
    """

    def __init__(self) -> None:
        self._mean_ns = 0
        self._deviation_ns = 0
        self._has_sample = False
        self._backoff = 0

    def observe(self, span_ns: int) -> None:
        """Takes in one measurement."""
        span_ns = max(0, span_ns)
        self._backoff = 0
        if not self._has_sample:
            self._mean_ns, self._deviation_ns = span_ns, span_ns // 2
            self._has_sample = True
            return
        error_ns = span_ns - self._mean_ns
        self._deviation_ns += (abs(error_ns) - self._deviation_ns) // 4
        self._mean_ns += error_ns // 8

    def observe_silence(self) -> None:
        """Takes in that nothing came in the time that was given."""
        self._backoff = min(self._backoff + 1, _MAX_BACKOFF)

    @property
    def upper_ns(self) -> int:
        """What the next one will hardly exceed."""
        estimate_ns = self._mean_ns + max(_GRANULARITY_NS, 4 * self._deviation_ns)
        return estimate_ns << self._backoff
