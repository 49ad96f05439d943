"""What the server says and what the engine process hears are the same."""

from cloud.engine.api import EngineDescription, EngineRequest, Sampling
from cloud.engine.wire import (
    StepEncoder,
    decode_description,
    decode_step,
    encode_description,
    encode_result,
)
from cloud.scheduler.types import ScheduledItem, StepOutput, StepPlan, StepResult
from headway.cost_model import MeasuredStep, StepShape
from headway.internal.v1alpha import engine_pb2 as pb

_SAMPLING = Sampling(0.5, 0.25, 2**64 - 1, stop_tokens=(3, 4), allowed_tokens=(1, 3, 5))


def _over_the_wire(message: pb.StepsRequest) -> tuple[StepPlan, list[EngineRequest]]:
    return decode_step(pb.StepsRequest.FromString(message.SerializeToString()))


def test_a_plan_arrives_as_it_was_sent() -> None:
    """With every field set, requests named by their handles."""
    encoder = StepEncoder("x")
    opened = [
        EngineRequest("robot-7", (9, 8), _SAMPLING, "act"),
        EngineRequest("b", (1, 2), outputs=(3,)),
    ]
    items = (
        ScheduledItem("b", 0, 2, True, False, (5, 6), True),
        ScheduledItem("robot-7", 1, 1, False, True, (), False),
        ScheduledItem("b", 2, 1, True, True, (7,), False),
    )
    plan = StepPlan("r0", 41, items, (), ((1, 2), (3, 4)), ((5, 6),))

    received, requests = _over_the_wire(encoder.encode(plan, opened, 1))

    assert requests == [
        EngineRequest("1", (9, 8), _SAMPLING, "act"),
        EngineRequest("2", (1, 2), outputs=(3,)),
    ]
    assert received.items == tuple(
        item._replace(request_id={"robot-7": "1", "b": "2"}[item.request_id]) for item in items
    )
    assert (received.swap_out, received.swap_in) == (plan.swap_out, plan.swap_in)
    assert received.step_id == 1


def test_a_handle_is_never_used_twice() -> None:
    """A request that has the id of a closed one is another request."""
    encoder = StepEncoder("x")
    request = EngineRequest("a", (1,))
    encoder.encode(StepPlan("r0", 1, ()), [request], 1)
    received, requests = _over_the_wire(
        encoder.encode(StepPlan("r0", 2, (), closed=("a", "never opened")), [request], 2)
    )
    assert received.closed == ("1",)
    assert [r.request_id for r in requests] == ["2"]


def test_a_result_comes_back_under_the_requests_own_name() -> None:
    """And under the plan's own step id."""
    encoder = StepEncoder("x")
    plan = StepPlan("r0", 41, (ScheduledItem("a", 0, 1, True, True, (0,), True),))
    encoder.encode(plan, [EngineRequest("a", (1,))], 3)
    response = encode_result(StepResult(3, (StepOutput("1", 77, True),), 123))
    assert encoder.decode_result(response, plan) == StepResult(
        41, (StepOutput("a", 77, True),), 123
    )


def test_a_description_arrives_as_it_was_sent() -> None:
    """With its calibration."""
    steps = (MeasuredStep(StepShape(1, 2, 3, 4), 5), MeasuredStep(StepShape(6, 7, 8, 9), 10))
    description = EngineDescription("torch", "m", "x", 4096, 16, 99, 514, 2048, 7, 1.5, steps)
    assert decode_description(encode_description(description)) == description


def test_a_steady_decode_step_is_small() -> None:
    """32 decodes with long contexts take less than 500 bytes."""
    encoder = StepEncoder("x" * 32)
    names = [f"request-{i}" for i in range(32)]
    encoder.encode(StepPlan("r0", 1, ()), [EngineRequest(name, (1,)) for name in names], 1)
    items = tuple(ScheduledItem(name, 3000, 1, False, True) for name in names)
    message = encoder.encode(StepPlan("r0", 2, items), [], 2)
    assert message.ByteSize() < 500
