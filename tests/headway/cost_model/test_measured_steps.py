"""The cost model on steps that were measured on real machines."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.bench_cost_model import (
    DATA,
    leave_one_out,
    sarathi_chunked,
    sarathi_steps,
    vtc_steps,
)
from headway.cost_model import MeasuredStep, StepShape, fit

ROOT = Path(__file__).parents[3]

needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"the public data is not in {DATA}")

PROFILE = DATA / "vtc_a10g_cost_profile.json"


@needs_data
def test_decodes_on_an_a10g_cost_what_others_found() -> None:
    """Published for this profile: 18.16 ms + 0.216 ms a request + 1.89 µs a token of KV."""
    _, decodes = vtc_steps(PROFILE, least_output=64)
    model = fit(decodes, held_out_share=0).model
    assert model.t0_ns == pytest.approx(18.16e6, rel=0.001)
    assert model.decode_ns == pytest.approx(0.216e6, rel=0.001)
    assert model.kv_ns == pytest.approx(1.89e3, rel=0.001)


@needs_data
def test_prefills_on_an_a10g_cost_what_others_found() -> None:
    """Published for the same machine: 53 ms + 0.209 ms a token."""
    prefills, _ = vtc_steps(PROFILE)
    model = fit(prefills, held_out_share=0).model
    assert model.t0_ns == pytest.approx(53e6, rel=0.01)
    assert model.prefill_ns == pytest.approx(0.209e6, rel=0.01)


@needs_data
def test_a_decode_that_the_fit_never_saw_is_predicted_to_a_few_percent() -> None:
    """Means of 64 steps and more, each left out once."""
    _, decodes = vtc_steps(PROFILE, least_output=64)
    assert leave_one_out(decodes).mape < 0.05


@needs_data
def test_prompts_cut_into_chunks_are_predicted_from_whole_ones() -> None:
    """Yi-34B, 16 cut prompts: off by no more than a whole prompt that is left out."""
    steps = sarathi_steps(DATA)
    model = fit(steps, held_out_share=0).model
    errors = [
        abs(sum(model.predict_ns(shape) for shape in shapes) / elapsed_ns - 1)
        for shapes, elapsed_ns in sarathi_chunked(DATA)
    ]
    assert len(errors) == 16
    whole = leave_one_out([step for step in steps if step.shape.decodes == 0])
    assert sum(errors) / len(errors) <= whole.mape


def test_leaving_out_predicts_each_step_by_the_others() -> None:
    """Two steps of 100 µs and one of 200 µs, by hand."""
    steps = [MeasuredStep(StepShape(), ns) for ns in (100_000, 100_000, 200_000)]
    # From (100, 200): Σ(p/y − 1)² is least at p = (1/100 + 1/200)/(1/100² + 1/200²) = 120.
    left_out = leave_one_out(steps)
    assert left_out.worst_under_prediction == pytest.approx(0.5, rel=1e-4)
    assert left_out.mape == pytest.approx((0.2 + 0.2 + 0.5) / 3, rel=1e-4)
    assert left_out.margin == pytest.approx(2, rel=1e-4)


def test_the_benchmark_without_data_says_so_and_succeeds(tmp_path: Path) -> None:
    """A checkout on its own: one line, status 0."""
    copy = tmp_path / "checkout" / "benchmarks" / "bench_cost_model.py"
    copy.parent.mkdir(parents=True)
    copy.write_text((ROOT / "benchmarks" / "bench_cost_model.py").read_text())
    ran = subprocess.run(
        [sys.executable, copy], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert ran.returncode == 0
    assert ran.stdout == ""
    assert ran.stderr.startswith("nothing to measure: ")
    assert ran.stderr.count("\n") == 1
