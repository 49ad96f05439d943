"""How far predictions are to be trusted: calibrated while serving."""

__all__ = ["OnlineMargin"]

# Ratios are counted in steps of 2 %, from 1/8 to 32.
_STEP = 1.02
_LOWEST = 1 / 8
_COUNT = 281


def _ratios() -> list[float]:
    ratios, ratio = [], _LOWEST
    for _ in range(_COUNT):
        ratios.append(ratio)
        ratio *= _STEP
    return ratios


class OnlineMargin:
    """The decayed high quantile of actual over predicted time.

    What a promise rests on is the sum of a request's steps, not a single one, so
    actual and predicted are compared over spans of about a promise's length.
    Before there is a measurement, and again as they age, `base` counts as one.
    """

    __slots__ = (
        "_actual_ns",
        "_base",
        "_counts",
        "_half_life_ns",
        "_predicted_ns",
        "_quantile",
        "_span_ns",
        "_updated_ns",
        "value",
    )

    def __init__(self, base: float, *, miss_share: float, half_life_ns: int, span_ns: int) -> None:
        self._base = base
        self._quantile = 1 - miss_share
        self._half_life_ns = half_life_ns
        self._span_ns = span_ns
        self._counts: dict[int, float] = {}
        self._updated_ns = 0
        self._actual_ns = 0
        self._predicted_ns = 0
        self.value = base  # What predictions are multiplied with.

    def observe(self, predicted_ns: int, actual_ns: int, now_ns: int) -> None:
        """Takes in a step."""
        self._predicted_ns += predicted_ns
        self._actual_ns += actual_ns
        if max(self._predicted_ns, self._actual_ns) < self._span_ns or not self._predicted_ns:
            return
        ratio = self._actual_ns / self._predicted_ns
        self._actual_ns = self._predicted_ns = 0
        self._decay(now_ns)
        place = _place_of(ratio)
        self._counts[place] = self._counts.get(place, 0.0) + 1.0
        self._set_value()

    def age(self, now_ns: int) -> None:
        """Lets measurements fade where no new ones come, at most once a half-life."""
        if now_ns - self._updated_ns >= self._half_life_ns and self._counts:
            self._decay(now_ns)
            self._set_value()

    def _decay(self, now_ns: int) -> None:
        keep = 0.5 ** ((now_ns - self._updated_ns) / self._half_life_ns)
        self._updated_ns = now_ns
        # What counts for less than this cannot reach the quantile any more.
        self._counts = {
            place: count * keep for place, count in self._counts.items() if count * keep > 1e-4
        }

    def _set_value(self) -> None:
        total = sum(self._counts.values())
        if total < 1:
            # The base stands in for what has faded.
            place = _place_of(self._base)
            counts = {**self._counts, place: self._counts.get(place, 0.0) + 1 - total}
            total = 1.0
        else:
            counts = self._counts
        beyond = total * (1 - self._quantile)
        for place in sorted(counts, reverse=True):
            beyond -= counts[place]
            if beyond < 0:
                self.value = _RATIOS[place]
                return


_RATIOS = _ratios()


def _place_of(ratio: float) -> int:
    """The smallest counted ratio that is not below `ratio`."""
    low, high = 0, _COUNT - 1
    while low < high:
        middle = (low + high) // 2
        if _RATIOS[middle] >= ratio * (1 - 1e-9):
            high = middle
        else:
            low = middle + 1
    return low
