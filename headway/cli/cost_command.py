"""`headway cost`: fits the step cost model to a log."""

import json
from pathlib import Path
from typing import Any

import click

from headway.cost_model import Fit, MeasuredStep, StepShape, fit
from headway.errors import HeadwayError

__all__ = ["cost", "read_steps"]

_SHAPE_KEYS = ("prefill_tokens", "prefill_pairs", "decodes", "kv_tokens")
_LABELS = {
    "t0_ns": ("t0, each step", "ms", 1e6),
    "prefill_ns": ("c_p, prompt token", "µs", 1e3),
    "pair_ns": ("c_a, query-key pair", "ns", 1.0),
    "decode_ns": ("c_d, decoding request", "µs", 1e3),
    "kv_ns": ("c_kv, token of KV read", "ns", 1.0),
}


@click.group()
def cost() -> None:
    """Fit the step cost model to a log."""


@cost.command("fit")
@click.argument("log", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def fit_command(log: Path, *, as_json: bool) -> None:
    """Fit the cost model to the steps of LOG.

    LOG has JSON lines. Those with "elapsed_ns" are steps; the others are passed
    over. A step also has any of "prefill_tokens", "prefill_pairs", "decodes" and
    "kv_tokens"; what is left out is 0.
    """
    result = fit(read_steps(log))
    if as_json:
        click.echo(json.dumps(_as_dict(result)))
    else:
        _show(result, log)


def read_steps(log: Path) -> list[MeasuredStep]:
    """The steps of a log of JSON lines.

    Raises:
        HeadwayError: the log cannot be read, has no steps, or a line that is
            no JSON object or no step.
    """
    try:
        lines = log.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise HeadwayError(f"{log}: cannot be read: {reason}") from error
    steps: list[MeasuredStep] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise HeadwayError(f"{log}:{number}: not JSON: {error}") from error
        if not isinstance(record, dict):
            raise HeadwayError(f"{log}:{number}: got {line.strip()[:40]}, expected a JSON object")
        if "elapsed_ns" in record:
            steps.append(_step(record, f"{log}:{number}"))
    if not steps:
        raise HeadwayError(f'{log}: has no steps; expected JSON lines with "elapsed_ns"')
    return steps


def _step(record: dict[str, Any], where: str) -> MeasuredStep:
    elapsed_ns = _count(record, "elapsed_ns", where)
    if elapsed_ns == 0:
        raise HeadwayError(f"{where}: elapsed_ns: got 0, expected a whole number above 0")
    shape = StepShape(*(_count(record, name, where) for name in _SHAPE_KEYS))
    return MeasuredStep(shape, elapsed_ns)


def _count(record: dict[str, Any], name: str, where: str) -> int:
    value = record.get(name, 0)
    if type(value) is not int or value < 0:
        raise HeadwayError(
            f"{where}: {name}: got {json.dumps(value)}, expected a whole number of at least 0"
        )
    return value


def _as_dict(result: Fit) -> dict[str, object]:
    coefficients = {name: getattr(result.model, name) for name in _LABELS}
    return coefficients | {
        "margin": result.margin,
        "mape": result.mape,
        "worst_under_prediction": result.worst_under_prediction,
        "num_train": result.num_train,
        "num_held_out": result.num_held_out,
        "unseen": list(result.unseen),
    }


def _show(result: Fit, log: Path) -> None:
    click.echo(f"{log}: {result.num_train + result.num_held_out} steps")
    for name, (label, unit, scale) in _LABELS.items():
        value = getattr(result.model, name) / scale
        note = "   (no step had any)" if name in result.unseen else ""
        click.echo(f"  {label:<24}{value:>12.4g} {unit}{note}")
    if result.num_held_out:
        basis = f"on {result.num_held_out} steps that were held out"
    else:
        basis = "on the fitted steps themselves: too few to hold any out"
    click.echo(f"  {'mean error (MAPE)':<24}{result.mape:>12.2%} {basis}")
    click.echo(f"  {'worst under-prediction':<24}{result.worst_under_prediction:>12.2%}")
    click.echo(f"  {'margin':<24}{result.margin:>12.3f} times the prediction")
