"""Token buckets: a tenant's lasting rate and burst, in weighted tokens."""

import math

__all__ = ["TokenBucket"]

_NS_PER_S = 1_000_000_000


class TokenBucket:
    """Holds up to `burst_tokens` and refills at `tokens_per_s`.

    Promised work reserves all that it may use when it is admitted, or nothing,
    and gives back at its end what it did not use. Unpromised work draws as it
    runs; a draw may leave the level below zero, and then the tenant waits.
    A rate of 0 is no limit.
    """

    __slots__ = ("_burst", "_level", "_rate_per_ns", "_updated_ns")

    def __init__(self, tokens_per_s: float, burst_tokens: int, now_ns: int) -> None:
        self._rate_per_ns = tokens_per_s / _NS_PER_S
        self._burst = float(burst_tokens)
        self._level = float(burst_tokens)
        self._updated_ns = now_ns

    @property
    def is_limited(self) -> bool:
        """Whether there is a limit at all."""
        return self._rate_per_ns > 0

    def level(self, now_ns: int) -> float:
        """Weighted tokens that can be had now; infinite without a limit."""
        if not self.is_limited:
            return math.inf
        if now_ns > self._updated_ns:
            gained = (now_ns - self._updated_ns) * self._rate_per_ns
            self._level = min(self._burst, self._level + gained)
            self._updated_ns = now_ns
        return self._level

    def wait_ns(self, tokens: float, now_ns: int) -> int | None:
        """Span until `tokens` can be had: 0 for now, None for never."""
        lacking = tokens - self.level(now_ns)
        if lacking <= 0:
            return 0
        return None if tokens > self._burst else math.ceil(lacking / self._rate_per_ns)

    def positive_from_ns(self) -> int | None:
        """Instant from which the level is above zero; None where it was when last looked at."""
        if self._level > 0 or not self.is_limited:
            return None
        return self._updated_ns + math.floor(-self._level / self._rate_per_ns) + 1

    def draw(self, tokens: float, now_ns: int) -> None:
        """Takes `tokens`, below zero if need be."""
        if self.is_limited:
            self.level(now_ns)
            self._level -= tokens

    def give_back(self, tokens: float) -> None:
        """Returns tokens that were taken and not used."""
        if self.is_limited:
            self._level = min(self._burst, self._level + tokens)
