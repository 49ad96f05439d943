"""The margin while serving: a decayed high quantile of actual over predicted."""

import math

__all__ = ["MarginTracker"]

# Buckets are 1 % wide, up to 64 times the prediction. Bucket 0 has everything
# up to 1: how early a step was does not matter.
_GROWTH = math.log(1.01)
_NUM_BUCKETS = math.ceil(math.log(64) / _GROWTH) + 1
# Weights grow instead of all the others shrinking; long before they overflow
# everything is scaled down at once.
_RESCALE_ABOVE = 1e100


class MarginTracker:
    """Watches actual over predicted times and says what margin would have held.

    Each ratio counts half as much once `half_life` further ones were seen.
    Constant memory; `observe` is O(1), `margin` O(buckets). Same ratios in,
    same margin out.

    It starts as if it had seen 1/(1 − quantile) ratios whose quantile is
    `initial`: so that the first interruption does not set the margin, and a
    calibrated start is believed until there is evidence.

    Args:
        initial: margin to start from, at least 1; that of the fit.
        quantile: share of the ratios that the margin is to cover.
        half_life: in ratios. About 1.44 of it count at any time, and for a
            quantile of 0.999 they must be many thousands.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self, initial: float = 1.0, *, quantile: float = 0.999, half_life: int = 10_000
    ) -> None:
        if not (math.isfinite(initial) and initial >= 1):
            raise ValueError(f"initial must be a finite number of at least 1, got {initial}")
        if not 0 < quantile < 1:
            raise ValueError(f"quantile must be between 0 and 1, got {quantile}")
        if half_life < 1:
            raise ValueError(f"half_life must be at least 1, got {half_life}")
        self._tail_share = 1 - quantile
        self._growth: float = 2.0 ** (1 / half_life)
        self._weight = 1.0  # Of the next ratio.
        self._buckets = [0.0] * _NUM_BUCKETS
        self._total = 1 / self._tail_share
        # Twice the tail: the quantile of the imagined ratios is `initial` itself.
        above = min(2.0, self._total)
        self._buckets[_bucket(initial)] += above
        self._buckets[_bucket(1.0)] += self._total - above

    @property
    def margin(self) -> float:
        """The quantile, rounded up to 1 %, at least 1."""
        allowed = self._tail_share * self._total
        tail = 0.0
        for number in range(_NUM_BUCKETS - 1, -1, -1):
            tail += self._buckets[number]
            if tail > allowed:
                return _upper_edge(number)
        return 1.0

    def observe(self, actual_ns: int, predicted_ns: int) -> None:
        """Takes in one step.

        Args:
            actual_ns: time that it took, at least 0.
            predicted_ns: time predicted without any margin, more than 0.

        Raises:
            ValueError: a time is out of range.
        """
        if actual_ns < 0 or predicted_ns <= 0:
            raise ValueError(
                f"actual_ns must be at least 0 and predicted_ns more than 0, "
                f"got {actual_ns} and {predicted_ns}"
            )
        self._buckets[_bucket(actual_ns / predicted_ns)] += self._weight
        self._total += self._weight
        self._weight *= self._growth
        if self._weight > _RESCALE_ABOVE:
            scale = 1 / self._weight
            self._buckets = [weight * scale for weight in self._buckets]
            self._total *= scale
            self._weight = 1.0


def _bucket(ratio: float) -> int:
    """Number of the bucket whose upper edge is the first that is not below `ratio`."""
    if ratio <= 1:
        return 0
    return min(math.ceil(math.log(ratio) / _GROWTH), _NUM_BUCKETS - 1)


def _upper_edge(number: int) -> float:
    return math.exp(number * _GROWTH)
