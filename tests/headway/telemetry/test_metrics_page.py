"""docs/operations.md lists every metric as Prometheus is told of it."""

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from headway.outcome import Outcome, Reason, RequestClass
from headway.telemetry.metrics import Metrics
from headway.telemetry.step_metrics import Step

PAGE = Path(__file__).parents[3] / "docs" / "operations.md"
_ROW = re.compile(r"^\| `(headway_\w+)` \| (\w+) \| ([^|]+) \| ([^|]*) \| ([^|]+) \|$", re.M)
# What the end of a name says of the unit.
_UNITS = {"seconds": "s", "ratio": "1", "perc": "0 to 1", "tokens": "tokens", "blocks": "blocks"}


def _all_told() -> dict[str, tuple[str, tuple[str, ...], str]]:
    """(kind, labels, meaning) of every metric, once each of them has a series."""
    metrics = Metrics(["acme"])
    interactive = RequestClass.INTERACTIVE
    metrics.admitted(interactive, "acme")
    metrics.rejected(interactive, "acme", Reason.LATE)
    metrics.finished(interactive, "acme", Outcome.COMPLETED, output_tokens=2, prediction_ratio=1.0)
    metrics.step("r0", Step(1, 1, 1, 1, 1, 1))
    metrics.set_replica("r0", is_up=True)
    metrics.set_fairness(interactive, "acme", 1.0)
    found = {}
    for family in text_string_to_metric_families(metrics.exposition().decode()):
        if family.name.startswith("headway_") and not family.name.endswith("_created"):
            labels = {label for sample in family.samples for label in sample.labels} - {"le"}
            name = family.name + ("_total" if family.type == "counter" else "")
            found[name] = (family.type, tuple(sorted(labels)), family.documentation)
    return found


def test_the_page_lists_every_metric_with_kind_labels_and_meaning() -> None:
    """And no other one."""
    listed = {
        name: (kind, tuple(sorted(labels.replace("`", "").replace(",", " ").split())), meaning)
        for name, kind, _, labels, meaning in _ROW.findall(PAGE.read_text())
    }
    assert listed == _all_told()


def test_the_units_of_the_page_are_those_of_the_names() -> None:
    """Where a name ends in one."""
    for name, _, unit, _, _ in _ROW.findall(PAGE.read_text()):
        words = name.removesuffix("_total").rpartition("_")
        expected = _UNITS.get(words[2])
        assert expected in (None, unit), name
