"""How far predictions are to be trusted: calibrated while serving.

Two things go wrong with a prediction, and each is followed at its own pace. The whole
engine becomes slower or quicker (another load on the machine, a throttled chip): `level`
follows within a second, and one stall does not move it. And single spans and steps vary
about that level: their high quantile needs thousands of measurements, is counted in
measurements rather than in seconds, and one stall in a thousand does not move it either.
"""

import math
from collections import deque
from statistics import NormalDist, median
from typing import NamedTuple

__all__ = ["OnlineMargin", "Tail"]

# Ratios are counted in steps of 1 %: place k stands for 1.01^k, from an eighth to
# 32 times the level.
_STEP = 1.01
_LOWEST, _HIGHEST = -209, 348
# The level is the median of this many spans: more than half of them must be slow.
_WINDOW = 9
# From this many measurements on the quantile is theirs alone.
_ENOUGH = 50
# So many measurements in a short history may be larger than the quantile.
_OUTLIERS = 2.0
# The quantile's memory, in multiples of the measurements of which one may be larger.
_MEMORY = 4.0
# A level that rose by more than this is a change of speed, less is variation.
_CHANGE = 1.1
# Share of a normal distribution that is more than one sigma above its mean.
_ABOVE_ONE_SIGMA = 0.1587


class Tail:
    """A high quantile of ratios, of which the last few thousand count.

    Until there are enough of them it is at least `base`.
    """

    __slots__ = ("_base", "_beyond", "_counts", "_keep", "_num_sigmas", "_weight", "total", "value")

    def __init__(self, base: float, *, beyond: float) -> None:
        self._base = base
        self._beyond = beyond  # Share of the ratios that may be larger.
        self._num_sigmas = NormalDist().inv_cdf(1 - beyond)
        self._keep = 1 - beyond / _MEMORY
        self._counts: dict[int, float] = {}
        # What a ratio added now counts, in units in which older ones stay as they are.
        self._weight = 1.0
        self.total = 0.0  # Ratios in memory, the older ones counting less.
        self.value = base

    def add(self, ratio: float) -> None:
        """Counts a ratio; `value` follows with `settle`."""
        place = _place_of(ratio)
        self._weight /= self._keep
        self._counts[place] = self._counts.get(place, 0.0) + self._weight
        self.total = self.total * self._keep + 1.0

    def fade(self, keep: float) -> None:
        """Lets all ratios count less, as old ones do."""
        self._weight /= keep
        self.total *= keep
        self.settle()

    def settle(self) -> None:
        """Brings `value` up to date: O(number of different ratios).

        The outliers left out of a short history would be missed promises where they
        are the rule: as long as none was larger, the quantile is at least that of a
        normal distribution (of logarithms) with the same upper quantile at one sigma.
        """
        if self._weight > 1e9:
            self._rescale()
        outliers = max(self.total * self._beyond, min(_OUTLIERS, self.total / _ENOUGH))
        places = sorted(self._counts, reverse=True)
        trimmed = self._exceeded_by(outliers, places)
        middle = self._exceeded_by(self.total / 2, places)
        sigma = self._exceeded_by(self.total * _ABOVE_ONE_SIGMA, places) - middle
        largest = places[0] if places else _LOWEST
        place = max(trimmed, min(middle + sigma * self._num_sigmas, largest))
        self.value = _STEP**place
        if self.total < _ENOUGH:
            self.value = max(self.value, self._base)

    def _exceeded_by(self, count: float, places: list[int]) -> int:
        """The place above which there are `count` ratios."""
        left = count * self._weight
        for place in places:
            left -= self._counts[place]
            if left < 0:
                return place
        return _LOWEST

    def _rescale(self) -> None:
        # What counts for less than this cannot reach the quantile any more.
        least = 1e-4 * self._weight
        self._counts = {
            place: count / self._weight for place, count in self._counts.items() if count > least
        }
        self._weight = 1.0


class _Span(NamedTuple):
    """Steps in a row, compared with what was predicted."""

    ratio: float  # Of their sums.
    steps: tuple[float, ...]  # Of each.
    level: float  # What was known when they ended.


_NO_SPAN = _Span(1.0, (), 1.0)


class OnlineMargin:
    """What predicted times are multiplied with, and what is kept for a single step.

    A promise rests on the sum of its steps, whose errors partly cancel: `value`
    is the quantile of actual over predicted over spans of about a promise's
    length. Near its end it rests on a few steps, which vary more than that:
    `step_excess` times the longest step is kept besides.

    Args:
        base: what single measurements are taken to vary by before there are any.
        miss_share: share of the measurements that may be larger than the margin.
        half_life_ns: with nothing to measure, what is known fades in this time.
        span_ns: length of a span.
    """

    __slots__ = (
        "_actual_ns",
        "_fade_ns",
        "_heard_ns",
        "_predicted_ns",
        "_ratios",
        "_span_ns",
        "_spans",
        "_steps",
        "_window",
        "level",
        "step_excess",
        "value",
    )

    def __init__(self, base: float, *, miss_share: float, half_life_ns: int, span_ns: int) -> None:
        self._span_ns = span_ns
        self._fade_ns = half_life_ns
        self._heard_ns = 0  # Last time a span ended, or fading was done up to.
        self._actual_ns = self._predicted_ns = 0
        self._ratios: list[float] = []  # Of the steps of the span that has begun.
        # The newest last. A prediction is taken to be right before it was ever compared.
        self._window = deque([_NO_SPAN] * _WINDOW, maxlen=_WINDOW)
        self._spans = Tail(base, beyond=miss_share)
        self._steps = Tail(base, beyond=miss_share)
        self.level = 1.0  # Actual over predicted time of late.
        self.value = base  # Factor on predicted time.
        self.step_excess = 0.0  # By what share of itself a single step may be longer still.

    def observe(self, predicted_ns: int, actual_ns: int, now_ns: int) -> None:
        """Takes in a step."""
        if predicted_ns <= 0:
            return
        self._ratios.append(actual_ns / predicted_ns)
        self._predicted_ns += predicted_ns
        self._actual_ns += actual_ns
        if max(self._predicted_ns, self._actual_ns) >= self._span_ns:
            ratio = self._actual_ns / self._predicted_ns
            self._end_span(ratio, tuple(self._ratios), now_ns)
            self._ratios.clear()
            self._actual_ns = self._predicted_ns = 0

    def _end_span(self, ratio: float, steps: tuple[float, ...], now_ns: int) -> None:
        self._heard_ns = now_ns
        self._window.append(_Span(ratio, steps, self.level))
        self.level = median([span.ratio for span in self._window])
        span = self._window[_WINDOW // 2]
        if span.steps:
            # Compared with what was known of the level when it ran, as a promise is; or,
            # where that has changed since, with what came of it: the level follows that.
            has_changed = self.level > _CHANGE * span.level
            self._spans.add(span.ratio / (self.level if has_changed else span.level))
            # Half of a span's steps may be of before a change.
            before, after = self._window[_WINDOW // 2 - 1], self._window[_WINDOW // 2 + 1]
            usual = max(self.level, before.ratio, after.ratio)
            for step in span.steps:
                self._steps.add(step / usual)
            self._spans.settle()
            self._steps.settle()
        self._set()

    def _set(self) -> None:
        self.value = self.level * self._spans.value
        self.step_excess = max(0.0, self.level * self._steps.value - self.value)

    def age(self, now_ns: int) -> None:
        """Lets what is known fade where nothing new comes, so that an engine to which
        nobody is let in for its slowness is tried again.
        """
        if now_ns - self._heard_ns < self._fade_ns:
            return
        if self._spans.total > 0 or self.level != 1.0:
            keep = 0.5 ** min(50.0, (now_ns - self._heard_ns) / self._fade_ns)
            self._spans.fade(keep)
            self._steps.fade(keep)
            self._window.extend([_NO_SPAN] * _WINDOW)
            self.level = 1.0
            self._set()
        self._heard_ns = now_ns


def _place_of(ratio: float) -> int:
    """The smallest counted ratio that is not below `ratio`."""
    if ratio <= 0:
        return _LOWEST
    place = math.ceil(math.log(ratio) / math.log(_STEP) - 1e-6)
    return min(max(place, _LOWEST), _HIGHEST)
