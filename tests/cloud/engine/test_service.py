"""The engine's end of the step protocol."""

import pytest

from cloud.engine.api import EngineRequest
from cloud.engine.errors import PlanError
from cloud.engine.service import StepProtocol
from cloud.engine.simulated import SimulatedExecutor
from cloud.engine.wire import StepEncoder
from cloud.scheduler.types import ScheduledItem, StepPlan
from headway.cost_model import CostModel
from headway.internal.v1alpha import engine_pb2 as pb


@pytest.fixture
def protocol() -> StepProtocol:
    """Of an engine with the incarnation "now"."""
    executor = SimulatedExecutor(CostModel(t0_ns=0), incarnation="now")
    return StepProtocol(executor, executor.describe())


def _first_step() -> pb.StepsRequest:
    item = ScheduledItem("a", 0, 1, True, True, (0,), True)
    return StepEncoder("now").encode(StepPlan("", 1, (item,)), [EngineRequest("a", (1,))], 1)


def test_a_repeated_step_is_not_executed_again(protocol: StepProtocol) -> None:
    """A second execution would be refused: the request is open already."""
    first = protocol.answer(_first_step())
    assert protocol.answer(_first_step()) == first
    assert list(first.tokens) == [97]


@pytest.mark.parametrize("incarnation", ["before", ""])
def test_a_step_for_another_incarnation_is_refused(
    protocol: StepProtocol, incarnation: str
) -> None:
    """Its requests are not known here."""
    with pytest.raises(PlanError, match=f"is for incarnation {incarnation or 'none'}, this is now"):
        protocol.answer(pb.StepsRequest(incarnation=incarnation, step_id=1))


@pytest.mark.parametrize("step_id", [3, 0])
def test_a_gap_is_refused(protocol: StepProtocol, step_id: int) -> None:
    """What a missing step brought would be missing for good."""
    protocol.answer(_first_step())
    with pytest.raises(PlanError, match=f"step {step_id} came after step 1"):
        protocol.answer(pb.StepsRequest(incarnation="now", step_id=step_id))
