"""How well the step cost model fits steps that were measured on real machines.

For each table of measurements: the coefficients of a fit to all of it, and the
errors on points that the fit did not see (each point is left out once and
predicted by a fit to the others).

The data is public and lies beside the checkout; where it does not, there is
nothing to measure.
"""

import csv
import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from headway.cost_model import CostModel, MeasuredStep, StepShape, errors_on, fit

__all__ = ["LeftOut", "leave_one_out", "sarathi_chunked", "sarathi_steps", "vtc_steps"]

DATA = Path(__file__).parents[2] / "shared" / "data"
_NS_PER_S = 1e9
_NS_PER_MS = 1e6


def vtc_steps(
    profile: Path, *, least_output: int = 1
) -> tuple[list[MeasuredStep], list[MeasuredStep]]:
    """(prefill steps, decode steps) of Llama-2-7B on an A10G.

    From Ying1123/VTC-artifact, fair_bench/cost_profile.json: {prompt tokens:
    {output tokens: [requests, s, s]}}. The requests fill 10,000 tokens of KV
    (1111 = 10000 // (8 + 1)) and run as one batch; the times are those of the
    batch's prefill, and of all its decode steps, divided by the requests (the
    first grows with the prompt alone, 0.215 ms a token; the second times the
    requests, by the output tokens, is a step of 36 to 274 ms).

    Args:
        profile: the file.
        least_output: leave out decodes of fewer output tokens. With 1 a time is
            that of a single step, with 64 the mean of 64.
    """
    prefills: list[MeasuredStep] = []
    decodes: list[MeasuredStep] = []
    for prompt_text, by_output in json.loads(profile.read_text()).items():
        prompt = int(prompt_text)
        for output_text, (requests, prefill_s, decode_s) in by_output.items():
            output = int(output_text)
            shape = StepShape.of([(0, prompt)] * requests, [])
            prefills.append(MeasuredStep(shape, round(prefill_s * requests * _NS_PER_S)))
            if output < least_output:
                continue
            # The mean step: half of the output is there already.
            kv_tokens = round(requests * (prompt + output / 2))
            shape = StepShape(decodes=requests, kv_tokens=kv_tokens)
            elapsed_ns = round(decode_s * requests / output * _NS_PER_S)
            decodes.append(MeasuredStep(shape, elapsed_ns))
    return prefills, decodes


def sarathi_steps(folder: Path) -> list[MeasuredStep]:
    """Steps of Yi-34B on two A100, from microsoft/sarathi-serve, osdi-experiments.

    Figure 2 (prefill alone, decodes alone; seconds) and table 2 (decodes, a
    prefill, and both in one step; milliseconds). The tables do not say how much
    KV the decodes read, so c_kv cannot be told from c_d.
    """
    steps: list[MeasuredStep] = []
    for name, ns in (
        ("sarathi_osdi_figure-2_prefill.csv", _NS_PER_S),
        ("sarathi_osdi_figure-2_decode.csv", _NS_PER_S),
        ("sarathi_osdi_table-2_results.csv", _NS_PER_MS),
    ):
        for row in _rows(folder / name):
            prefill = int(row["batch_num_prefill_tokens"])
            shape = StepShape.of([(0, prefill)] if prefill else [], [])
            decodes = int(row["batch_num_decode_tokens"])
            shape = StepShape(shape.prefill_tokens, shape.prefill_pairs, decodes)
            steps.append(MeasuredStep(shape, round(float(row["batch_execution_time"]) * ns)))
    return steps


def sarathi_chunked(folder: Path) -> list[tuple[list[StepShape], int]]:
    """(steps, measured time of all of them) of prompts that were cut into chunks.

    Same source and machine, figure 9: total milliseconds.
    """
    prompts: list[tuple[list[StepShape], int]] = []
    for row in _rows(folder / "sarathi_osdi_figure-9_chunking-overhead.csv"):
        length, chunk = int(row["prefill_length"]), int(row["chunk_size"])
        shapes = [
            StepShape.of([(done, min(chunk, length - done))], [])
            for done in range(0, length, chunk)
        ]
        prompts.append((shapes, round(float(row["prefill_execution_time"]) * _NS_PER_MS)))
    return prompts


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Errors on points that were each predicted by a fit to the others."""

    mape: float
    worst_under_prediction: float
    margin: float


def leave_one_out(steps: Sequence[MeasuredStep]) -> LeftOut:
    """Predicts each step by a fit to all the others."""
    single = [
        errors_on(fit([*steps[:number], *steps[number + 1 :]], held_out_share=0).model, [step])
        for number, step in enumerate(steps)
    ]
    mapes, worsts, margins = zip(*single, strict=True)
    return LeftOut(statistics.fmean(mapes), max(worsts), max(margins))


def _rows(path: Path) -> Iterable[dict[str, str]]:
    with path.open(newline="") as file:
        yield from csv.DictReader(file)


def _coefficients(model: CostModel, unseen: Sequence[str]) -> list[str]:
    """As cells: t0 in ms, the others in µs or ns; nothing for what was not there."""
    scales = {"t0_ns": 1e6, "prefill_ns": 1e3, "pair_ns": 1, "decode_ns": 1e3, "kv_ns": 1}
    return [
        "" if name in unseen else f"{getattr(model, name) / scale:.4g}"
        for name, scale in scales.items()
    ]


def _report(tables: dict[str, list[MeasuredStep]]) -> Table:
    report = Table(title="Step cost model against measured steps")
    for heading in ("measured", "steps", "t0 ms", "c_p µs", "c_a ns", "c_d µs", "c_kv ns"):
        report.add_column(heading, justify="left" if heading == "measured" else "right")
    for heading in ("MAPE", "worst under", "margin"):
        report.add_column(heading, justify="right", style="bold")
    for name, steps in tables.items():
        whole, left_out = fit(steps, held_out_share=0), leave_one_out(steps)
        report.add_row(
            name,
            str(len(steps)),
            *_coefficients(whole.model, whole.unseen),
            f"{left_out.mape:.1%}",
            f"{left_out.worst_under_prediction:.1%}",
            f"{left_out.margin:.2f}",
        )
    return report


def _chunked_errors(model: CostModel) -> list[float]:
    return [
        sum(model.predict_ns(shape) for shape in shapes) / elapsed_ns - 1
        for shapes, elapsed_ns in sarathi_chunked(DATA)
    ]


def main() -> int:
    """Prints the tables."""
    if not DATA.is_dir():
        print(f"nothing to measure: the public measurements are not in {DATA}", file=sys.stderr)
        return 0
    profile = DATA / "vtc_a10g_cost_profile.json"
    prefills, decodes = vtc_steps(profile)
    _, mean_decodes = vtc_steps(profile, least_output=64)
    sarathi = sarathi_steps(DATA)
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(
        _report(
            {
                "Llama-2-7B, A10G: decodes": decodes,
                "Llama-2-7B, A10G: decodes, means of >= 64": mean_decodes,
                "Llama-2-7B, A10G: prefills": prefills,
                "Llama-2-7B, A10G: all": prefills + decodes,
                "Yi-34B, 2 A100: prefills": [s for s in sarathi if s.shape.decodes == 0],
                "Yi-34B, 2 A100: decodes": [s for s in sarathi if s.shape.prefill_tokens == 0],
                "Yi-34B, 2 A100: all": sarathi,
            }
        )
    )
    errors = _chunked_errors(fit(sarathi, held_out_share=0).model)
    console.print(
        f"The last fit on 16 prompts in chunks of 512 to 16,384 that it never saw: "
        f"mean error {statistics.fmean(map(abs, errors)):.1%}, "
        f"from {min(errors):+.1%} to {max(errors):+.1%}."
    )
    console.print(
        "MAPE, worst under-prediction and margin are of steps that were left out of the fit."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
