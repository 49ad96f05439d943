"""How much of a budget the network takes."""

__all__ = ["NetworkMargin"]

# The least that four deviations count for: G in RFC 6298.
_GRANULARITY_NS = 1_000_000
_MAX_BACKOFF = 16


class NetworkMargin:
    """Estimates up- and downlink time, as TCP estimates its round trip.

    Smoothed mean plus four smoothed deviations, gains 1/8 and 1/4 (RFC 6298,
    section 2), of what is left of a measured round trip once the server's own
    time is taken off. Silence doubles it until the next answer (section 5.5): a
    network that became slow is otherwise never measured, since every answer
    that would tell comes too late.
    """

    def __init__(self) -> None:
        self._mean_ns = 0
        self._deviation_ns = 0
        self._has_sample = False
        self._backoff = 0

    def observe(self, round_trip_ns: int, server_ns: int) -> None:
        """Takes in one answer: its round trip, and the server's share of it."""
        sample_ns = max(0, round_trip_ns - server_ns)
        self._backoff = 0
        if not self._has_sample:
            self._mean_ns, self._deviation_ns = sample_ns, sample_ns // 2
            self._has_sample = True
            return
        error_ns = sample_ns - self._mean_ns
        self._deviation_ns += (abs(error_ns) - self._deviation_ns) // 4
        self._mean_ns += error_ns // 8

    def observe_silence(self) -> None:
        """Takes in that a budget passed without a word."""
        self._backoff = min(self._backoff + 1, _MAX_BACKOFF)

    def margin_ns(self, budget_ns: int) -> int:
        """What to take off `budget_ns` before sending it.

        Never more than half: an estimate that forbade every request would never
        be corrected by a new measurement.
        """
        estimate_ns = self._mean_ns + max(_GRANULARITY_NS, 4 * self._deviation_ns)
        return min(estimate_ns << self._backoff, budget_ns // 2)
