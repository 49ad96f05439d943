"""The engine without a model."""

import asyncio

import pytest

from cloud.engine.api import EngineLostError, EngineRequest, Sampling
from cloud.engine.errors import PlanError
from cloud.engine.simulated import SimulatedEngine, SimulatedExecutor
from cloud.scheduler.types import ScheduledItem, StepPlan
from headway.cost_model import CostModel
from tests.support.executor_driver import ExecutorDriver

# The design's worked cloud: 20 ms a step, 0.1 ms a prompt token, 0.2 ms a decode.
_MODEL = CostModel(t0_ns=20e6, prefill_ns=0.1e6, decode_ns=0.2e6)
_FREE = CostModel(t0_ns=0)


def test_a_step_takes_what_the_cost_model_says() -> None:
    """736 prompt tokens beside one decode: 20 + 73.6 + 0.2 ms."""
    driver = ExecutorDriver(SimulatedExecutor(_MODEL))
    driver.open(EngineRequest("a", (1,) * 10))
    assert driver.step(("a", 10)).elapsed_ns == 21_000_000
    driver.open(EngineRequest("b", (1,) * 736))
    assert driver.step(("a", 1), ("b", 736)).elapsed_ns == 93_800_000
    assert driver.step().elapsed_ns == 0


def test_tokens_cycle_through_the_allowed_ones() -> None:
    """So that an action has every value that the model could give."""
    executor = SimulatedExecutor(_FREE)
    request = EngineRequest("a", (1,), Sampling(allowed_tokens=(300, 301, 302)))
    assert ExecutorDriver(executor).generate(request, 5) == [300, 301, 302, 300, 301]
    text = ExecutorDriver(executor).generate(EngineRequest("b", (1,)), 28)
    assert bytes(text) == b"abcdefghijklmnopqrstuvwxyzab"


def test_a_request_from_another_engine_goes_on_where_it_was() -> None:
    """Its tokens count from its first one, wherever that was given."""
    driver = ExecutorDriver(SimulatedExecutor(_FREE))
    driver.open(EngineRequest("a", (1, 2), outputs=tuple(b"ab")))
    driver.step(("a", 4))
    driver.step(("a", 1))
    assert bytes(driver.outputs["a"]) == b"abcd"


def test_noise_is_seeded_and_bounded() -> None:
    """The same seed gives the same times, within the share asked for."""

    def times(seed: int) -> list[int]:
        driver = ExecutorDriver(SimulatedExecutor(_MODEL, noise=0.25, seed=seed))
        driver.open(EngineRequest("a", (1,)))
        return [driver.step(("a", 1)).elapsed_ns for _ in range(200)]

    first, *decodes = times(1)
    assert [first, *decodes] == times(1) != times(2)
    assert 0.75 * 20.2e6 <= min(decodes) < 0.8 * 20.2e6
    assert 1.2 * 20.2e6 < max(decodes) <= 1.25 * 20.2e6


def test_plans_are_held_to_the_rules_of_a_real_engine() -> None:
    """A scheduler's mistake shows in simulation too."""
    item = ScheduledItem("a", 0, 20, True, True, (0,), True)
    with pytest.raises(PlanError, match="KV rows for 16"):
        SimulatedExecutor(_FREE).execute(
            StepPlan("r0", 1, (item,)), [EngineRequest("a", (1,) * 20)]
        )


async def test_a_failure_reaches_the_pending_step() -> None:
    """It does not wait for the step's time, which is an hour here."""
    executor = SimulatedExecutor(CostModel(t0_ns=3600e9))
    engine = SimulatedEngine(executor)
    await engine.start()
    driver = ExecutorDriver(executor)
    driver.open(EngineRequest("a", (1,)))
    step = asyncio.create_task(engine.execute(driver.plan([("a", 1)]), driver.take_opened()))
    await asyncio.sleep(0)
    assert not step.done()

    engine.fail("it burned down")

    with pytest.raises(EngineLostError, match="it burned down"):
        await step
    with pytest.raises(EngineLostError, match="it burned down"):
        await engine.execute(StepPlan("r0", 2, ()), [])
    await engine.stop()
    await engine.stop()


async def test_a_step_in_real_time_is_not_over_early() -> None:
    """Elapsed time on the loop's clock is at least the step's own."""
    executor = SimulatedExecutor(CostModel(t0_ns=5e6))
    engine = SimulatedEngine(executor)
    driver = ExecutorDriver(executor)
    driver.open(EngineRequest("a", (1,)))
    started = asyncio.get_running_loop().time()
    result = await engine.execute(driver.plan([("a", 1)]), driver.take_opened())
    assert result.elapsed_ns == 5_000_000
    assert asyncio.get_running_loop().time() - started >= 0.005
