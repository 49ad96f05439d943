"""The margin on predictions: calibrated online."""

import random

import pytest

from cloud.scheduler.margin import DecayedQuantile, OnlineMargin
from tests.support.scheduling import MS, S


def _margin() -> OnlineMargin:
    return OnlineMargin(1.0, miss_share=0.001, half_life_ns=10 * S, span_ns=200 * MS)


def test_a_quantile_is_that_of_the_ratios() -> None:
    """The 0.9 quantile of 1..1.99 in steps of 0.01 is 1.9, to the resolution of 1 %."""
    quantile = DecayedQuantile(1.0, beyond=0.1, half_life_ns=10 * S)
    for number in range(100):
        quantile.add(1 + number / 100, 0)
    assert quantile.value == pytest.approx(1.9, rel=0.011)


def test_an_exact_predictor_needs_no_margin() -> None:
    """A ratio of 1 stays 1, and no step is kept for."""
    margin = _margin()
    for number in range(100):
        margin.observe(20 * MS, 20 * MS, number * 20 * MS)
    assert margin.value == 1.0
    assert margin.step_excess == 0.0


@pytest.mark.parametrize("factor", [3.0, 1 / 3])
def test_a_predictor_wrong_by_three_either_way_is_corrected(factor: float) -> None:
    """Predicted times are multiplied with what they are wrong by, without swinging."""
    margin = _margin()
    values = []
    for number in range(2000):
        now_ns = number * 20 * MS
        margin.observe(20 * MS, int(20 * MS * factor), now_ns)
        values.append(margin.value)
    settled = values[1000:]
    assert max(settled) <= factor * 1.011
    assert min(settled) >= factor * 0.99


def test_what_was_slow_long_ago_is_forgotten() -> None:
    """So that one bad minute does not refuse robots for ever."""
    margin = _margin()
    margin.observe(200 * MS, 600 * MS, S)
    assert margin.value == pytest.approx(3.0, rel=0.011)
    margin.age(300 * S)
    assert margin.value == 1.0


def test_errors_of_many_steps_cancel() -> None:
    """Independent errors of 20 % a step: a span of ten varies far less than a step."""
    generator = random.Random(1)
    margin = _margin()
    for number in range(3000):
        actual = int(20 * MS * generator.lognormvariate(0, 0.2))
        margin.observe(20 * MS, actual, number * 20 * MS)
    assert 1.05 < margin.value < 1.4
    # exp(3.09 · 0.2) = 1.85 is the 0.999 quantile of a single step.
    assert margin.value + margin.step_excess == pytest.approx(1.85, rel=0.15)
