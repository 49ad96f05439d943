"""Measured steps tell the cost model apart."""

import pytest

from cloud.engine.api import EngineRequest
from cloud.engine.calibration import measure_steps
from cloud.engine.simulated import SimulatedExecutor
from headway.cost_model import CostModel, fit
from tests.support.executor_driver import ExecutorDriver


@pytest.mark.parametrize("num_blocks", [1024, 64, 8])
def test_the_grid_determines_every_coefficient(num_blocks: int) -> None:
    """Steps of a known cost model fit back to it, also where little KV limits the grid."""
    truth = CostModel(t0_ns=2e6, prefill_ns=40_000, pair_ns=50, decode_ns=90_000, kv_ns=250)
    executor = SimulatedExecutor(truth, num_blocks=num_blocks)

    found = fit(measure_steps(executor, budget_s=0)).model

    for name in ("t0_ns", "prefill_ns", "pair_ns", "decode_ns", "kv_ns"):
        # Predictions are rounded to whole nanoseconds.
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=0.01), name


def test_no_request_is_left_behind() -> None:
    """A request of the probes' name can be opened afterwards."""
    executor = SimulatedExecutor(CostModel(t0_ns=1))
    measure_steps(executor, budget_s=0)
    driver = ExecutorDriver(executor)
    assert driver.generate(EngineRequest("probe-0", (1,)), 1) == [97]
