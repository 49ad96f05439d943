"""The margin on predictions: calibrated online."""

import random
from collections.abc import Iterable

import pytest

from cloud.scheduler.margin import OnlineMargin, Tail
from tests.support.scheduling import MS, S


def _margin(base: float = 1.0) -> OnlineMargin:
    return OnlineMargin(base, miss_share=0.001, half_life_ns=10 * S, span_ns=200 * MS)


def _run(
    margin: OnlineMargin, ratios: Iterable[float], *, start_ns: int = 0, predicted_ns: int = 5 * MS
) -> list[tuple[int, float, float]]:
    """Steps one after the other; (when, margin, excess) after each."""
    seen, now_ns = [], start_ns
    for ratio in ratios:
        now_ns += round(predicted_ns * ratio)
        margin.observe(predicted_ns, round(predicted_ns * ratio), now_ns)
        seen.append((now_ns, margin.value, margin.step_excess))
    return seen


@pytest.mark.parametrize("count", [200, 2_000, 20_000])
def test_a_tail_is_the_quantile_of_the_ratios(count: int) -> None:
    """Of a lognormal distribution of 20 % the 0.999 quantile is exp(3.09 · 0.2), from
    two hundred ratios on as from twenty thousand.
    """
    generator = random.Random(1)
    tail = Tail(1.0, beyond=0.001)
    for _ in range(count):
        tail.add(generator.lognormvariate(0, 0.2))
    tail.settle()
    assert tail.value == pytest.approx(1.855, rel=0.15)


def test_an_exact_predictor_needs_no_margin() -> None:
    """A ratio of 1 stays 1, and nothing is kept for a step."""
    margin = _margin()
    _run(margin, [1.0] * 1000)
    assert margin.value == 1.0
    assert margin.step_excess == 0.0


def test_what_single_measurements_vary_by_counts_until_there_are_some() -> None:
    """A fit's own margin at the start; what was measured, from fifty spans on."""
    margin = _margin(1.5)
    assert margin.value == 1.5
    _run(margin, [1.0] * 40 * 70)
    assert margin.value == 1.0


@pytest.mark.parametrize("factor", [3.0, 1 / 3])
def test_a_predictor_wrong_by_three_either_way_is_corrected(factor: float) -> None:
    """Predicted times are multiplied with what they are wrong by, without swinging."""
    margin = _margin()
    settled = [value for _, value, _ in _run(margin, [factor] * 4000)][2000:]
    assert max(settled) <= factor * 1.011
    assert min(settled) >= factor * 0.99


def test_one_stall_in_a_thousand_steps_is_within_the_target() -> None:
    """Forty times a step, once: a promise in a thousand may break, the others need no margin."""
    margin = _margin()
    _run(margin, [1.0] * 4000)
    after = _run(margin, [40.0] + [1.0] * 999)
    assert max(value for _, value, _ in after) < 1.5
    assert max(excess for _, _, excess in after) < 0.5


def test_stalls_that_come_more_often_than_the_target_are_kept_for() -> None:
    """Each hundredth step takes 40 times as long: more than 0.1 % of promises end with one."""
    margin = _margin()
    _run(margin, ([1.0] * 99 + [40.0]) * 40)
    assert margin.value + margin.step_excess >= 20


def test_a_change_of_speed_is_followed_within_a_second_or_so_both_ways() -> None:
    """An engine three times slower for 5 s: more than half of nine spans of 200 ms."""
    margin = _margin()
    _run(margin, [1.0] * 4000)
    slow = _run(margin, [3.0] * 333, start_ns=20 * S)
    assert all(value >= 2.97 for at_ns, value, _ in slow if at_ns >= 21.2 * S)
    assert max(value for _, value, _ in slow) <= 3.1
    back = _run(margin, [1.0] * 1000, start_ns=25 * S)
    late = [(value, excess) for at_ns, value, excess in back if at_ns >= 26.2 * S]
    assert max(value for value, _ in late) <= 1.2
    assert max(excess for _, excess in late) <= 0.2


def test_what_was_slow_long_ago_is_forgotten() -> None:
    """Where nobody is let in for the engine's slowness nothing is measured: it is tried again."""
    margin = _margin()
    _run(margin, [3.0] * 1000)
    margin.age(16 * S)
    assert margin.value == pytest.approx(3.0, rel=0.011)
    margin.age(60 * S)
    assert margin.value == 1.0


def test_errors_of_many_steps_cancel() -> None:
    """Independent errors of 20 % a step: a span of ten varies far less than a step."""
    generator = random.Random(1)
    margin = _margin()
    _run(margin, [generator.lognormvariate(0, 0.2) for _ in range(6000)], predicted_ns=20 * MS)
    assert 1.05 < margin.value < 1.4
    # exp(3.09 · 0.2) = 1.85 is the 0.999 quantile of a single step.
    assert margin.value + margin.step_excess == pytest.approx(1.85, rel=0.15)
