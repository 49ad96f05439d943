"""Our counters and histograms, against the library's own."""

from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from headway.telemetry.series import CounterFamily, HistogramFamily

BOUNDS_S = (0.001, 0.01, 0.25, 10.0)
# Below, on and above the bounds, and beyond them all.
SPANS_NS = (0, 999_999, 1_000_000, 1_000_001, 250_000_000, 300_000_000, 10_000_000_001)


def samples_of(registry: CollectorRegistry) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Everything that Prometheus would read, save when a series was made."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_they_tell_prometheus_what_the_library_would() -> None:
    """Names, labels, buckets, sums and counts, for the same events."""
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    counters = CounterFamily("things", "Things.", ("kind",))
    spans = HistogramFamily("span_seconds", "Spans.", ("kind",), BOUNDS_S)
    ours.register(counters)
    ours.register(spans)
    counter = Counter("things", "Things.", ("kind",), registry=theirs)
    histogram = Histogram("span_seconds", "Spans.", ("kind",), registry=theirs, buckets=BOUNDS_S)
    for kind, spans_ns in (("a", SPANS_NS), ("b", SPANS_NS[3:]), ("none", ())):
        ours_of_kind, theirs_of_kind = spans.labels(kind), histogram.labels(kind)
        counters.labels(kind)
        counter.labels(kind)
        for span_ns in spans_ns:
            counters.labels(kind).value += 2
            counter.labels(kind).inc(2)
            ours_of_kind.observe(span_ns)
            theirs_of_kind.observe(span_ns / 1e9)
    # Theirs rounds each span to seconds before it is added.
    assert samples_of(ours) == pytest.approx(samples_of(theirs), rel=1e-12)


def test_the_registry_knows_their_names() -> None:
    """So that two families of one name are noticed, and one can be asked for alone."""
    registry = CollectorRegistry()
    registry.register(CounterFamily("things", "Things.", ()))
    spans = HistogramFamily("span_seconds", "Spans.", (), BOUNDS_S)
    registry.register(spans)
    spans.labels().observe(1)
    alone: Any = registry.restricted_registry(["span_seconds_count"])
    assert samples_of(alone) == {("span_seconds_count", frozenset()): 1}
