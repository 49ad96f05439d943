"""Counters and histograms for what happens a thousand times a second.

prometheus_client's own take a lock for each and look at one bucket after the
other, which is most of what counting a request costs. These are written by one
thread, the server's loop, and read by the one that answers Prometheus, which
formats them as it does its own.

Needs the cloud extra (prometheus_client).
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Generic, TypeVar

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

__all__ = ["CounterFamily", "Distribution", "HistogramFamily", "Tally"]

_Child = TypeVar("_Child")
_NS_PER_S = 1_000_000_000


class Tally:
    """One series of a counter; count with `tally.value += 1`."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0


class Distribution:
    """One series of a histogram.

    Args:
        bounds: upper bounds of its buckets, ascending; what is larger than all
            of them is in one more.
    """

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Takes in one value; on a bound it belongs to the bucket below."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += value


class _Family(Collector, Generic[_Child]):
    """Series of one name, told apart by the values of their labels."""

    def __init__(self, name: str, meaning: str, labels: Sequence[str]) -> None:
        self._terms = (name, meaning, tuple(labels))
        self._children: dict[tuple[str, ...], _Child] = {}

    def labels(self, *values: str) -> _Child:
        """The series of these labels' values, made when it is first asked for."""
        child = self._children.get(values)
        if child is None:
            child = self._children[values] = self._new()
        return child

    def _new(self) -> _Child:
        raise NotImplementedError

    def _items(self) -> list[tuple[tuple[str, ...], _Child]]:
        # In one go: the loop may add a series meanwhile.
        return list(self._children.items())


class CounterFamily(_Family[Tally]):
    """A counter.

    Args:
        name: without "_total".
        meaning: one sentence.
        labels: their names.
    """

    def describe(self) -> Iterator[CounterMetricFamily]:
        """The family without its series, for the registry."""
        name, meaning, labels = self._terms
        yield CounterMetricFamily(name, meaning, labels=labels)

    def collect(self) -> Iterator[CounterMetricFamily]:
        """The family as it is now."""
        for family in self.describe():
            for values, tally in self._items():
                family.add_metric(values, tally.value)
            yield family

    def _new(self) -> Tally:
        return Tally()


class HistogramFamily(_Family[Distribution]):
    """A histogram.

    Args:
        name: ends in its unit.
        meaning: one sentence.
        labels: their names.
        bounds: upper bounds of the buckets in the unit of the name, ascending.
        per_unit: how many of what is observed make one unit; nanoseconds and
            seconds where it is left out.
    """

    def __init__(
        self,
        name: str,
        meaning: str,
        labels: Sequence[str],
        bounds: Sequence[float],
        per_unit: int = _NS_PER_S,
    ) -> None:
        super().__init__(name, meaning, labels)
        self._per_unit = per_unit
        # Whole nanoseconds: what is on a bound is found on it.
        self._bounds = bounds if per_unit == 1 else [round(one * per_unit) for one in bounds]
        self._bound_names = [*map(floatToGoString, bounds), "+Inf"]

    def describe(self) -> Iterator[HistogramMetricFamily]:
        """The family without its series, for the registry."""
        name, meaning, labels = self._terms
        yield HistogramMetricFamily(name, meaning, labels=labels)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """The family as it is now."""
        for family in self.describe():
            for values, one in self._items():
                # Prometheus counts in a bucket what is in all lower ones too.
                totals = accumulate(one.counts.copy())
                family.add_metric(
                    values,
                    list(zip(self._bound_names, totals, strict=True)),
                    one.sum / self._per_unit,
                )
            yield family

    def _new(self) -> Distribution:
        return Distribution(self._bounds)
