"""How much of a budget the network takes."""

from edge.smoothed import SmoothedSpan

__all__ = ["NetworkMargin"]


class NetworkMargin:
    """Estimates up- and downlink time: what a round trip takes beside the server's own time.

    Silence doubles the estimate until the next answer: a network that became
    slow is otherwise never measured, since every answer that would tell comes
    too late.
    """

    def __init__(self) -> None:
        self._span = SmoothedSpan()

    def observe(self, round_trip_ns: int, server_ns: int) -> None:
        """Takes in one answer: its round trip, and the server's share of it."""
        self._span.observe(round_trip_ns - server_ns)

    def observe_silence(self) -> None:
        """Takes in that a budget passed without a word."""
        self._span.observe_silence()

    def margin_ns(self, budget_ns: int) -> int:
        """What to take off `budget_ns` before sending it.

        Never more than half: an estimate that forbade every request would never
        be corrected by a new measurement.
        """
        return min(self._span.upper_ns, budget_ns // 2)
