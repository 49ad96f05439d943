"""Measured steps tell the cost model apart."""

from pathlib import Path

import pytest

from cloud.engine.api import EngineRequest
from cloud.engine.calibration import measure_steps, measure_swap_ns
from cloud.engine.simulated import SimulatedExecutor
from cloud.engine.torch_executor import TorchExecutor
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


def test_an_engine_without_host_memory_swaps_nothing() -> None:
    """0 says that there is nothing to copy to."""
    assert measure_swap_ns(SimulatedExecutor(CostModel(t0_ns=1))) == 0


def test_the_time_of_a_copy_is_that_of_a_block() -> None:
    """A step that takes 3.2 ms whatever is in it, with 16 blocks out and in: 0.1 ms each."""
    executor = SimulatedExecutor(CostModel(t0_ns=3.2e6), num_blocks=64, num_swap_blocks=40)
    assert measure_swap_ns(executor) == 0.1e6


def test_a_copied_block_costs_a_real_engine_less_than_its_tokens(tiny_folder: Path) -> None:
    """Sixteen tokens of the smallest model there is take a step; a copy is a few kilobytes."""
    executor = TorchExecutor.load(tiny_folder, num_blocks=64, block_tokens=16, num_swap_blocks=32)
    assert 0 < measure_swap_ns(executor) < 10e6
