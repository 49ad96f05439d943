"""How far predictions are to be trusted: calibrated while serving."""

import math

__all__ = ["DecayedQuantile", "OnlineMargin"]

# Ratios are counted in steps of 1 %: place k stands for 1.01^k, from an eighth to
# 32 times what was predicted.
_STEP = 1.01
_LOWEST, _HIGHEST = -209, 348


class DecayedQuantile:
    """A high quantile of ratios that count less as they age.

    Before there is a measurement, and again as they fade, `base` counts as one.
    """

    __slots__ = ("_base", "_beyond", "_counts", "_half_life_ns", "_updated_ns", "value")

    def __init__(self, base: float, *, beyond: float, half_life_ns: int) -> None:
        self._base = _place_of(base)
        self._beyond = beyond  # Share of the ratios that may be larger.
        self._half_life_ns = half_life_ns
        self._counts: dict[int, float] = {}
        self._updated_ns = 0
        self.value = base

    def add(self, ratio: float, now_ns: int) -> None:
        """Counts a ratio. Ages the others once a sixteenth of the half-life."""
        if now_ns - self._updated_ns > self._half_life_ns >> 4:
            self._decay(now_ns)
        place = _place_of(ratio)
        self._counts[place] = self._counts.get(place, 0.0) + 1.0
        self._set_value()

    def age(self, now_ns: int) -> None:
        """Lets ratios fade where no new ones come."""
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
        counts = self._counts
        total = sum(counts.values())
        if total < 1:
            counts = {**counts, self._base: counts.get(self._base, 0.0) + 1 - total}
            total = 1.0
        left = total * self._beyond
        for place in sorted(counts, reverse=True):
            left -= counts[place]
            if left < 0:
                self.value = _STEP**place
                return


class OnlineMargin:
    """What predicted times are multiplied with, and what is kept for a single step.

    A promise rests on the sum of its steps, whose errors partly cancel: `value`
    is the quantile of actual over predicted over spans of about a promise's
    length. Near its end it rests on a few steps, which vary more than that:
    `step_excess` times the longest step is kept besides.
    """

    __slots__ = ("_actual_ns", "_predicted_ns", "_span_ns", "_spans", "_steps")

    def __init__(self, base: float, *, miss_share: float, half_life_ns: int, span_ns: int) -> None:
        self._span_ns = span_ns
        self._actual_ns = 0
        self._predicted_ns = 0
        self._spans = DecayedQuantile(base, beyond=miss_share, half_life_ns=half_life_ns)
        self._steps = DecayedQuantile(base, beyond=miss_share, half_life_ns=half_life_ns)

    @property
    def value(self) -> float:
        """Factor on predicted time."""
        return self._spans.value

    @property
    def step_excess(self) -> float:
        """By what share of itself a single step may be longer still."""
        return max(0.0, self._steps.value - self._spans.value)

    def observe(self, predicted_ns: int, actual_ns: int, now_ns: int) -> None:
        """Takes in a step."""
        if predicted_ns <= 0:
            return
        self._steps.add(actual_ns / predicted_ns, now_ns)
        self._predicted_ns += predicted_ns
        self._actual_ns += actual_ns
        if max(self._predicted_ns, self._actual_ns) >= self._span_ns:
            self._spans.add(self._actual_ns / self._predicted_ns, now_ns)
            self._actual_ns = self._predicted_ns = 0

    def age(self, now_ns: int) -> None:
        """Lets measurements fade where no new ones come."""
        self._spans.age(now_ns)
        self._steps.age(now_ns)


def _place_of(ratio: float) -> int:
    """The smallest counted ratio that is not below `ratio`."""
    if ratio <= 0:
        return _LOWEST
    place = math.ceil(math.log(ratio) / math.log(_STEP) - 1e-6)
    return min(max(place, _LOWEST), _HIGHEST)
