"""From measured steps to a cost model, and how far it can be trusted.

Non-negative least squares on relative errors: minimise Σ((predicted −
measured)/measured)² over coefficients of at least 0. Relative, because a
decode step of 20 ms and a prefill step of 2 s matter alike; and because the
error of a step that an interruption made slow is then at most 1, so that it
cannot pull the fit far.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from headway.cost_model.model import CostModel, MeasuredStep, StepShape

__all__ = ["Fit", "errors_on", "fit", "nonnegative_least_squares"]

# Columns of the problem, in the order of `_row`.
_COEFFICIENTS = ("t0_ns", "prefill_ns", "pair_ns", "decode_ns", "kv_ns")
# Of a column's squared length: less is left of it than rounding leaves when it
# is a sum of the others.
_COLLINEAR = 1e-11
# Fits whose squared errors differ by less than this per step are equally good.
_EQUALLY_GOOD = 1e-14
# The margin covers this share of the held-out steps; of fewer than 1,000, all.
_MARGIN_QUANTILE = 0.999
# Fractional parts of its multiples are spread evenly and never fall into step
# with a calibration grid, as "every fifth" would.
_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True)
class Fit:
    """A cost model, and its errors on steps that it was not fitted to.

    Where there were too few steps to hold any out, `num_held_out` is 0 and the
    errors are those on the steps of the fit: too good to rely on.
    """

    model: CostModel  # Its margin is the one below.
    mape: float  # Mean of |predicted − measured| / measured.
    worst_under_prediction: float  # Largest (measured − predicted) / measured, at least 0.
    margin: float  # At least 1: measured ≤ margin·predicted held for 99.9 %.
    num_train: int
    num_held_out: int
    # Coefficients that the steps say nothing about, and that are 0 for want of
    # better: no step had any such work. Predictions for it mean nothing.
    unseen: tuple[str, ...] = ()


def fit(steps: Sequence[MeasuredStep], *, held_out_share: float = 0.2) -> Fit:
    """Fits the cost model to measured steps.

    The same steps give the same fit in whatever order they come. Coefficients
    that cannot be told apart (columns that are multiples or sums of each other)
    are settled for the fewest that are not 0.

    Args:
        steps: what was measured. Two steps for each coefficient of interest, at
            sizes as far apart as those to be predicted.
        held_out_share: share of the steps kept out of the fit to measure its
            errors, 0 to 0.5. At least as many steps as coefficients always
            remain.

    Raises:
        ValueError: no steps, a step that took no time, or a share out of range.
    """
    if not steps:
        raise ValueError("a fit needs measured steps, got none")
    if not 0 <= held_out_share <= 0.5:
        raise ValueError(f"held_out_share must be from 0 to 0.5, got {held_out_share}")
    for step in steps:
        if step.elapsed_ns <= 0:
            raise ValueError(f"a step takes more than 0 ns, got {step.elapsed_ns} for {step.shape}")
    train, held_out = _split(steps, held_out_share)
    rows = [_row(step.shape) for step in train]
    relative = [
        [value / step.elapsed_ns for value in row] for row, step in zip(rows, train, strict=True)
    ]
    solution = nonnegative_least_squares(relative, [1.0] * len(train))
    model = CostModel(*solution)
    mape, worst, margin = errors_on(model, held_out or train)
    unseen = tuple(
        name for column, name in enumerate(_COEFFICIENTS) if not any(row[column] for row in rows)
    )
    return Fit(
        model=replace(model, margin=margin),
        mape=mape,
        worst_under_prediction=worst,
        margin=margin,
        num_train=len(train),
        num_held_out=len(held_out),
        unseen=unseen,
    )


def errors_on(model: CostModel, steps: Sequence[MeasuredStep]) -> tuple[float, float, float]:
    """MAPE, worst under-prediction and margin of a model on steps; see `Fit`.

    The model's own margin is left out.

    Raises:
        ValueError: no steps.
    """
    if not steps:
        raise ValueError("errors need measured steps, got none")
    predictions = [max(1, model.predict_ns(step.shape)) for step in steps]
    errors = [
        (step.elapsed_ns - predicted) / step.elapsed_ns
        for step, predicted in zip(steps, predictions, strict=True)
    ]
    ratios = sorted(
        step.elapsed_ns / predicted for step, predicted in zip(steps, predictions, strict=True)
    )
    rank = min(len(ratios), math.ceil(_MARGIN_QUANTILE * len(ratios)))
    mape = math.fsum(abs(error) for error in errors) / len(errors)
    return mape, max(0.0, *errors), max(1.0, ratios[rank - 1])


def _row(shape: StepShape) -> tuple[float, ...]:
    """What each coefficient is multiplied with."""
    return (1, shape.prefill_tokens, shape.prefill_pairs, shape.decodes, shape.kv_tokens)


def _split(
    steps: Sequence[MeasuredStep], share: float
) -> tuple[list[MeasuredStep], list[MeasuredStep]]:
    """Steps to fit to, and steps to hold out: spread over all shapes, no chance in it."""
    ordered = sorted(steps, key=lambda step: (*_row(step.shape), step.elapsed_ns))
    spare = max(0, len(ordered) - len(_COEFFICIENTS))
    train: list[MeasuredStep] = []
    held_out: list[MeasuredStep] = []
    for number, step in enumerate(ordered, start=1):
        is_held_out = (number * _GOLDEN_RATIO) % 1 < share and len(held_out) < spare
        (held_out if is_held_out else train).append(step)
    return train, held_out


def nonnegative_least_squares(
    rows: Sequence[Sequence[float]], targets: Sequence[float]
) -> list[float]:
    """The x ≥ 0 that minimises |rows·x − targets|².

    Exact by trying each set of columns that may differ from 0: some such set
    has the optimum as its unconstrained solution (Lawson and Hanson, Solving
    Least Squares Problems, chapter 23, gives the conditions). 2^columns small
    systems are solved: 32 here. O(rows·columns²) for the rest.

    Args:
        rows: one a measurement, all of one length, finite.
        targets: one a row, finite.

    Returns:
        One value a column. Among solutions that are equally good, one with the
        fewest values other than 0.
    """
    num_columns = len(rows[0])
    scales = [math.hypot(*(row[column] for row in rows)) for column in range(num_columns)]
    used = [column for column in range(num_columns) if scales[column] > 0]
    columns = {column: [row[column] / scales[column] for row in rows] for column in used}
    gram = {(one, other): _dot(columns[one], columns[other]) for one in used for other in used}
    projected = {column: _dot(columns[column], targets) for column in used}
    tolerance = _EQUALLY_GOOD * math.fsum(target * target for target in targets)
    best: dict[int, float] = {}
    best_gain = 0.0
    for size in range(1, len(used) + 1):
        for active in combinations(used, size):
            values = _solve(
                [[gram[one, other] for other in active] for one in active],
                [projected[column] for column in active],
            )
            if values is None or min(values) < 0:
                continue
            # By how much the squared error is less than that of x = 0.
            gain = math.fsum(
                projected[column] * value for column, value in zip(active, values, strict=True)
            )
            if gain > best_gain + tolerance:
                best, best_gain = dict(zip(active, values, strict=True)), gain
    return [best.get(column, 0.0) / (scales[column] or 1.0) for column in range(num_columns)]


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return math.fsum(one * other for one, other in zip(left, right, strict=True))


def _solve(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Solves a symmetric positive definite system with ones on its diagonal by
    Cholesky's method; None where a column is (nearly) a sum of the others.
    """
    size = len(right)
    lower = [[0.0] * size for _ in range(size)]
    for row in range(size):
        for column in range(row):
            known = sum(lower[row][k] * lower[column][k] for k in range(column))
            lower[row][column] = (matrix[row][column] - known) / lower[column][column]
        left = matrix[row][row] - sum(value * value for value in lower[row][:row])
        if left < _COLLINEAR:
            return None
        lower[row][row] = math.sqrt(left)
    forward: list[float] = []
    for row in range(size):
        known = sum(lower[row][k] * forward[k] for k in range(row))
        forward.append((right[row] - known) / lower[row][row])
    solution = [0.0] * size
    for row in reversed(range(size)):
        known = sum(lower[k][row] * solution[k] for k in range(row + 1, size))
        solution[row] = (forward[row] - known) / lower[row][row]
    return solution
