"""Fitting: against scipy's solver, on known models, and what it says of itself."""

import dataclasses
import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls

from headway.cost_model import CostModel, MeasuredStep, StepShape, errors_on, fit
from headway.cost_model.fit import nonnegative_least_squares

TRUE = CostModel(t0_ns=20e6, prefill_ns=1e5, pair_ns=50, decode_ns=2e5, kv_ns=1.9e3)


def steps_of(model: CostModel, count: int, noise: float = 0.0, seed: int = 1) -> list[MeasuredStep]:
    """`count` mixed steps that take what the model says, off by at most `noise`."""
    chance = random.Random(seed)
    steps = []
    for _ in range(count):
        chunks = [
            (chance.randrange(4000), chance.randrange(1, 1000)) for _ in range(chance.randrange(3))
        ]
        decodes = [chance.randrange(1, 3000) for _ in range(chance.randrange(40))]
        shape = StepShape.of(chunks, decodes)
        factor = chance.uniform(1 - noise, 1 + noise)
        steps.append(MeasuredStep(shape, round(model.predict_ns(shape) * factor)))
    return steps


def squared_error(
    rows: Sequence[Sequence[float]], targets: Sequence[float], solution: Sequence[float]
) -> float:
    """|rows·solution − targets|²."""
    return math.fsum(
        (math.fsum(a * x for a, x in zip(row, solution, strict=True)) - target) ** 2
        for row, target in zip(rows, targets, strict=True)
    )


# Steps as they come: few distinct sizes, so that columns are often absent,
# equal, or multiples of each other.
sizes = st.sampled_from([0, 1, 2, 3, 7, 64, 512, 4096])
rows_of_steps = st.lists(
    st.tuples(
        st.just(1.0),
        sizes.map(float),
        sizes.map(lambda n: n * 33.5),
        sizes.map(float),
        sizes.map(lambda n: n * 1000.0),
        st.floats(1e-3, 1e3),  # The measured time.
    ),
    min_size=1,
    max_size=30,
)


@given(rows_of_steps)
@settings(max_examples=300)
def test_the_solver_is_as_good_as_scipys(data: list[tuple[float, ...]]) -> None:
    """No solution has a smaller squared error, and none of ours is negative."""
    rows = [[value / row[-1] for value in row[:-1]] for row in data]
    targets = [1.0] * len(rows)
    ours = nonnegative_least_squares(rows, targets)
    # The oracle gets columns of length 1, as badly scaled ones make it stop early.
    matrix = np.array(rows)
    lengths = np.linalg.norm(matrix, axis=0)
    lengths[lengths == 0] = 1
    theirs = nnls(matrix / lengths, np.array(targets))[0] / lengths
    assert min(ours) >= 0
    best = squared_error(rows, targets, theirs)
    assert squared_error(rows, targets, ours) <= best * (1 + 1e-7) + 1e-9 * len(rows)


def test_it_finds_the_model_that_made_the_steps() -> None:
    """Without noise every coefficient comes back, save for rounding to nanoseconds."""
    found = fit(steps_of(TRUE, 60))
    for name in ("t0_ns", "prefill_ns", "pair_ns", "decode_ns", "kv_ns"):
        assert getattr(found.model, name) == pytest.approx(getattr(TRUE, name), rel=1e-4)
    assert found.mape < 1e-6
    assert found.margin == pytest.approx(1)


def test_three_percent_of_noise_costs_three_percent_of_trust() -> None:
    """Uniform noise of ±3 %: mean error 1.5 %, and a margin of about 1.03."""
    found = fit(steps_of(TRUE, 2000, noise=0.03))
    assert found.mape == pytest.approx(0.015, abs=0.002)
    assert found.worst_under_prediction == pytest.approx(0.03, abs=0.005)
    assert found.margin == pytest.approx(1.03, abs=0.006)
    assert found.model.margin == found.margin


def test_a_fifth_of_the_steps_is_held_out() -> None:
    """Every step is either fitted to or held out, never both."""
    steps = steps_of(TRUE, 100, noise=0.1)
    found = fit(steps)
    assert found.num_train + found.num_held_out == 100
    assert found.num_held_out == pytest.approx(20, abs=2)


def test_a_slow_held_out_step_widens_the_margin_and_leaves_the_model_alone() -> None:
    """Twice as slow where the fit did not look: the margin is 2, the fit the same."""
    steps = sorted(steps_of(TRUE, 50), key=lambda step: dataclasses.astuple(step.shape))
    plain = fit(steps)
    widened = 0
    for number, step in enumerate(steps):
        slow = [*steps]
        slow[number] = dataclasses.replace(step, elapsed_ns=2 * step.elapsed_ns)
        found = fit(slow)
        if dataclasses.replace(found.model, margin=1) == dataclasses.replace(plain.model, margin=1):
            widened += 1
            assert found.margin == pytest.approx(2, rel=1e-6)
            assert found.worst_under_prediction == pytest.approx(0.5, rel=1e-6)
    assert widened == plain.num_held_out > 0


def test_the_order_of_the_steps_does_not_matter() -> None:
    """Shuffled steps give the very same fit."""
    steps = steps_of(TRUE, 80, noise=0.05)
    shuffled = steps.copy()
    random.Random(5).shuffle(shuffled)
    assert fit(shuffled) == fit(steps)


def test_work_that_no_step_had_is_named() -> None:
    """Decode-only steps say nothing about prompts, and the fit says so."""
    found = fit([MeasuredStep(StepShape(decodes=n), 1000 + 10 * n) for n in range(1, 20)])
    assert found.unseen == ("prefill_ns", "pair_ns", "kv_ns")
    assert found.model.decode_ns == pytest.approx(10)
    assert found.model.prefill_ns == 0


def test_columns_that_cannot_be_told_apart_give_one_coefficient() -> None:
    """Each decode reads 100 tokens: one of the two explains both, and predicts as well."""
    steps = [
        MeasuredStep(StepShape(decodes=n, kv_tokens=100 * n), 5000 + 300 * n) for n in range(1, 40)
    ]
    found = fit(steps)
    assert (found.model.decode_ns == 0) != (found.model.kv_ns == 0)
    assert found.model.predict_ns(StepShape(decodes=64, kv_tokens=6400)) == pytest.approx(
        5000 + 300 * 64, rel=1e-6
    )


def test_a_step_that_gets_quicker_with_work_does_not_give_a_negative_coefficient() -> None:
    """Least squares alone would; a negative cost would make an endless step free."""
    found = fit([MeasuredStep(StepShape(decodes=n), 1000 - 5 * n) for n in range(1, 30)])
    assert found.model.decode_ns == 0


def test_few_steps_are_all_fitted_and_none_held_out() -> None:
    """With as many steps as coefficients there is none to spare."""
    found = fit(steps_of(TRUE, 5))
    assert (found.num_train, found.num_held_out) == (5, 0)


def test_errors_of_a_model_on_other_steps_are_its_own() -> None:
    """By hand: predicted 100, measured 80 and 125."""
    model = CostModel(t0_ns=100)
    mape, worst, margin = errors_on(model, [MeasuredStep(StepShape(), ns) for ns in (80, 125)])
    assert mape == pytest.approx((20 / 80 + 25 / 125) / 2)
    assert worst == pytest.approx(25 / 125)
    assert margin == pytest.approx(1.25)


@pytest.mark.parametrize(
    ("steps", "share", "message"),
    [
        ([], 0.2, "got none"),
        ([MeasuredStep(StepShape(), 0)], 0.2, "more than 0 ns"),
        ([MeasuredStep(StepShape(), 1)], 0.6, "held_out_share"),
    ],
)
def test_what_cannot_be_fitted_is_refused(
    steps: list[MeasuredStep], share: float, message: str
) -> None:
    """One line that says what was expected."""
    with pytest.raises(ValueError, match=message):
        fit(steps, held_out_share=share)
