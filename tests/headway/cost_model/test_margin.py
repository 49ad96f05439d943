"""The online margin: a decayed quantile, against a quantile computed plainly."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.cost_model import MarginTracker

BUCKET = 1.01  # The margin is rounded up by at most this.


def observe(tracker: MarginTracker, ratios: list[float]) -> None:
    """Steps that were predicted to take 1 ms and took that times a ratio."""
    for ratio in ratios:
        tracker.observe(round(ratio * 1_000_000), 1_000_000)


def test_it_starts_at_the_margin_of_the_fit() -> None:
    """Before any step: what calibration said, rounded up to 1 %."""
    assert MarginTracker().margin == 1
    assert 1.3 <= MarginTracker(1.3).margin <= 1.3 * BUCKET


def test_one_interruption_does_not_set_the_margin() -> None:
    """The first step takes 40 times as long; one in a thousand may."""
    tracker = MarginTracker(1.2)
    observe(tracker, [40.0])
    assert tracker.margin <= 1.2 * BUCKET


def test_two_early_ones_do() -> None:
    """More than one in a thousand were slow: the margin covers all but one of them."""
    tracker = MarginTracker(1.2)
    observe(tracker, [3.0, 40.0])
    assert 3.0 <= tracker.margin <= 3.0 * BUCKET


def test_a_start_that_was_too_careful_is_forgotten() -> None:
    """2,000 steps on time: nothing is left of an initial margin of 5."""
    tracker = MarginTracker(5.0)
    observe(tracker, [0.97] * 2000)
    assert tracker.margin == 1


def test_a_machine_that_got_slower_is_noticed_and_one_that_recovered_too() -> None:
    """After a spell at 1.5 times the prediction the margin is back after some half-lives."""
    tracker = MarginTracker(half_life=2000)
    observe(tracker, [1.0] * 5000 + [1.5] * 20)
    assert 1.5 <= tracker.margin <= 1.5 * BUCKET
    # 20 of about 2,885 that count: five half-lives bring it under one in a thousand.
    observe(tracker, [1.0] * 10_000)
    assert tracker.margin == 1


@given(st.lists(st.floats(1.0, 60.0), min_size=1, max_size=60), st.sampled_from([0.5, 0.9, 0.99]))
def test_it_is_the_weighted_quantile(ratios: list[float], quantile: float) -> None:
    """Against the definition: the least edge above which at most 1 − q of the weight lies."""
    half_life = 10
    tracker = MarginTracker(quantile=quantile, half_life=half_life)
    observe(tracker, ratios)
    exact = [
        (round(ratio * 1_000_000) / 1_000_000, 2 ** (n / half_life))
        for n, ratio in enumerate(ratios)
    ]
    # The start: 1/(1 − q) ratios of 1.
    weighted = [(1.0, 1 / (1 - quantile)), *exact]
    total = math.fsum(weight for _, weight in weighted)
    expected = min(
        ratio
        for ratio, _ in weighted
        if math.fsum(weight for other, weight in weighted if other > ratio)
        <= (1 - quantile) * total * (1 + 1e-9)
    )
    assert expected / BUCKET <= tracker.margin <= expected * BUCKET * (1 + 1e-9)


def test_the_same_ratios_give_the_same_margin_for_ever() -> None:
    """Past the point where weights are scaled down: 400 half-lives, two trackers in step."""
    chance = random.Random(3)
    ratios = [chance.uniform(0.8, 1.4) for _ in range(8000)]
    one, other = MarginTracker(half_life=20), MarginTracker(half_life=20)
    observe(one, ratios)
    observe(other, ratios)
    assert one.margin == other.margin
    # Only the last few count at this half-life: a tracker of those agrees.
    fresh = MarginTracker(half_life=20)
    observe(fresh, ratios[-2000:])
    assert one.margin == fresh.margin


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"initial": 0.9}, "initial"),
        ({"initial": math.nan}, "initial"),
        ({"quantile": 1.0}, "quantile"),
        ({"half_life": 0}, "half_life"),
    ],
)
def test_impossible_arguments_are_refused(arguments: dict[str, float], message: str) -> None:
    """The message names the argument."""
    with pytest.raises(ValueError, match=message):
        MarginTracker(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(("actual", "predicted"), [(-1, 10), (10, 0)])
def test_impossible_times_are_refused(actual: int, predicted: int) -> None:
    """A ratio needs a time and a prediction."""
    with pytest.raises(ValueError, match="actual_ns"):
        MarginTracker().observe(actual, predicted)
