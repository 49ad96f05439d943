"""NextAction over a real socket: the answer, and every way to be told "no"."""

import asyncio
import math
import pickle
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from cloud.scheduler.types import Rejected, StepPlan
from headway.outcome import Reason
from headway.rpc.errors import (
    CallError,
    DeadlineMissedError,
    InvalidRequestError,
    RejectedError,
    UnavailableError,
)
from headway.rpc.status import error_from_rpc
from headway.v1 import robot_pb2
from tests.support.fifo_policy import FifoPolicy
from tests.support.running_server import RunningServer, observation, running_server, settings
from tests.support.scripted_engine import ScriptedEngine


async def refused(call: Any) -> CallError:
    """What a call that must fail raises at the client."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return error_from_rpc(caught.value)


async def test_answer_has_the_observation_s_id_and_the_configured_chunk() -> None:
    """Names, steps and period are those of the settings; values are bins' middles."""
    async with running_server(
        settings(actions__chunk_steps=3), make_engine=ScriptedEngine, policy=FifoPolicy()
    ) as running:
        chunk = await running.next_action(observation("obs-7"))
    assert chunk.observation_id == "obs-7"
    assert list(chunk.names) == ["linear_velocity", "angular_velocity"]
    assert (chunk.step_period.seconds, chunk.step_period.nanos) == (0, 100_000_000)
    assert chunk.model == "tiny"
    # The scripted engine gives <act_000>, <act_001>, …; of 256 bins over -1 … 1
    # bin i has its middle at -1 + 2·(i + ½)/256, and over -2 … 2 at twice that.
    middles = [-1 + 2 * (i + 0.5) / 256 for i in range(6)]
    expected = [[middles[i], 2 * middles[i + 1]] for i in (0, 2, 4)]
    assert [list(step.values) for step in chunk.steps] == expected
    timings = chunk.timings
    assert timings.total.seconds * 10**9 + timings.total.nanos > 0


async def test_scheduler_s_no_arrives_with_its_details() -> None:
    """LATE: reason, hint and prediction reach the client; nothing is executed."""
    policy, engine = FifoPolicy(), ScriptedEngine()
    policy.answers.append(Rejected("", Reason.LATE, "would take 0.9 s", 250_000_000, 900_000_000))
    async with running_server(settings(), make_engine=lambda: engine, policy=policy) as running:
        error = await refused(running.next_action(observation()))
    assert (type(error), error.reason) == (RejectedError, Reason.LATE)
    assert (error.retry_after_s, error.predicted_s) == (0.25, 0.9)
    assert "would take 0.9 s" in error.message
    assert engine.executed == []


def _nan() -> robot_pb2.Observation:
    message = observation()
    message.state[0].values[0].value = math.nan
    return message


def _budget(seconds: int, nanos: int) -> robot_pb2.Observation:
    message = observation(budget_s=None)
    message.budget.CopyFrom(Duration(seconds=seconds, nanos=nanos))
    return message


def _image(encoding: int, width: int, height: int, data: bytes) -> robot_pb2.Observation:
    message = observation()
    message.images.add(
        name="front",
        encoding=encoding,
        width=width,
        height=height,
        data=data,
    )
    return message


def _aged(seconds: int) -> robot_pb2.Observation:
    message = observation()
    message.state[0].age.seconds = seconds
    return message


def _crowded(*, sources: int = 0, values: int = 0, images: int = 0) -> robot_pb2.Observation:
    message = observation()
    for _ in range(sources):
        message.state.add(name="s").values.add(name="x")
    for _ in range(values):
        message.state[0].values.add(name="x")
    for _ in range(images):
        message.images.add()
    return message


def _changed(**fields: Any) -> robot_pb2.Observation:
    message = observation()
    for name, value in fields.items():
        setattr(message, name, value)
    return message


RGB8 = robot_pb2.IMAGE_ENCODING_RGB8
JPEG = robot_pb2.IMAGE_ENCODING_JPEG
WRONG: dict[str, tuple[robot_pb2.Observation, str]] = {
    "budget 0": (_budget(0, 0), "observation.budget"),
    "budget negative": (_budget(-1, 0), "observation.budget"),
    "budget of two signs": (_budget(1, -5), "observation.budget"),
    "budget with too many nanos": (_budget(0, 10**9), "observation.budget"),
    "budget of more than 10,000 years": (_budget(315_576_000_001, 0), "observation.budget"),
    "neither budget nor deadline": (observation(budget_s=None), "observation.budget"),
    "value not finite": (_nan(), "observation.state.values.value"),
    "negative age": (_aged(-1), "observation.state.age"),
    "no data": (
        robot_pb2.Observation(observation_id="a", budget=Duration(seconds=1)),
        "observation.state",
    ),
    "no id": (_changed(observation_id=""), "observation.observation_id"),
    "long id": (_changed(observation_id="x" * 65), "observation.observation_id"),
    "id with a line feed": (_changed(observation_id="a\nb"), "observation.observation_id"),
    "id not ASCII": (_changed(observation_id="ö"), "observation.observation_id"),
    "RGB8 one byte short": (_image(RGB8, 4, 2, bytes(23)), "observation.images.data"),
    "RGB8 one byte long": (_image(RGB8, 4, 2, bytes(25)), "observation.images.data"),
    "image without pixels": (_image(RGB8, 0, 2, b""), "observation.images"),
    "image without encoding": (_image(0, 4, 2, bytes(24)), "observation.images.encoding"),
    "JPEG that is none": (_image(JPEG, 4, 2, b"GIF89a"), "observation.images.data"),
    # Refused before each is looked at: nobody else is answered meanwhile.
    "too many sources": (_crowded(sources=256), "observation.state"),
    "too many values": (_crowded(values=2047), "observation.state.values"),
    "too many images": (_crowded(images=17), "observation.images"),
    "long task": (_changed(task="x" * 16_385), "observation"),
    "image for a blind model": (_image(RGB8, 4, 2, bytes(24)), "observation.images"),
}


@pytest.fixture
async def running() -> Any:
    """A server that would answer anything that is well formed."""
    async with running_server(
        settings(), make_engine=ScriptedEngine, policy=FifoPolicy()
    ) as running:
        yield running


@pytest.mark.parametrize("name", WRONG)
async def test_wrong_observation_is_refused_with_its_field(
    running: RunningServer, name: str
) -> None:
    """INVALID_ARGUMENT, one line, and the field; the next observation is served."""
    wrong, field = WRONG[name]
    error = await refused(running.next_action(wrong))
    assert (type(error), error.reason) == (InvalidRequestError, Reason.INVALID)
    assert error.message.startswith(f"{field}: ")
    assert "\n" not in error.message
    assert (await running.next_action(observation("next"))).observation_id == "next"


async def test_unknown_embodiment_is_told_the_known_ones(running: RunningServer) -> None:
    """So that a typing error is found at once."""
    request = robot_pb2.NextActionRequest(
        robot_id="r1", embodiment="diffdrive", observation=observation()
    )
    error = await refused(running.robots.NextAction(request))
    assert type(error) is InvalidRequestError
    assert "diff_drive" in error.message


@pytest.mark.parametrize("robot_id", ["", "x" * 65, "a\tb"])
async def test_robot_id_must_be_one(running: RunningServer, robot_id: str) -> None:
    """It stands in logs and metrics."""
    error = await refused(running.next_action(observation(), robot_id=robot_id))
    assert error.message.startswith("robot_id: ")


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps({"action": "run"}),
        robot_pb2.NextActionRequest(robot_id="r1").SerializeToString()[:-1],
        b"\x0a\x02\xff\xfe",  # Field 1, a string that is not UTF-8.
        b"\xff" * 300,
    ],
    ids=["pickle", "truncated", "bad UTF-8", "random"],
)
async def test_bytes_that_are_no_message_are_invalid(running: RunningServer, data: bytes) -> None:
    """Not UNKNOWN, and no word of the parser's."""
    error = await refused(running.raw_unary("NextAction")(data))
    assert (type(error), error.reason) == (InvalidRequestError, Reason.INVALID)
    assert "NextActionRequest" in error.message


async def test_grpc_deadline_alone_is_enough(running: RunningServer) -> None:
    """Stock clients set only that."""
    chunk = await running.next_action(observation(budget_s=None), timeout=30)
    assert chunk.steps


@pytest.mark.parametrize(("budget_s", "timeout_s"), [(0.05, 60.0), (60.0, 0.05)])
async def test_smaller_of_budget_and_grpc_deadline_rules(budget_s: float, timeout_s: float) -> None:
    """A request whose engine never answers is ended by whichever is first."""
    policy, engine = FifoPolicy(), ScriptedEngine()
    engine.is_open.clear()
    async with running_server(settings(), make_engine=lambda: engine, policy=policy) as running:
        error = await refused(
            running.next_action(observation(budget_s=budget_s), timeout=timeout_s)
        )
        assert type(error) is DeadlineMissedError
        await asyncio.wait_for(running.server.dispatcher.wait_idle(), 30)
        # With the budget it is the server that says so, with a reason.
        if budget_s < timeout_s:
            assert error.reason is Reason.DEADLINE_MISSED


async def test_client_that_leaves_takes_its_request_along() -> None:
    """Cancelled while it runs and while it waits: nothing of either is left."""
    policy, engine = FifoPolicy(), ScriptedEngine()
    engine.is_open.clear()
    async with running_server(settings(), make_engine=lambda: engine, policy=policy) as running:
        calls = [
            asyncio.ensure_future(running.next_action(observation(), robot_id=f"r{number}"))
            for number in range(3)
        ]
        for _ in calls:
            await policy.submitted.get()
        await engine.is_executing.wait()
        for call in calls:
            call.cancel()
        await asyncio.wait_for(running.server.dispatcher.wait_idle(), 30)
        engine.is_open.set()
        assert (await running.next_action(observation("after"))).observation_id == "after"
        # The two that waited never came to the engine.
        assert len(set(engine.executed)) == 2


async def test_newer_observation_takes_the_place_of_the_one_that_waits() -> None:
    """The old call is told so at once, without waiting for the engine."""
    policy, engine = FifoPolicy(), ScriptedEngine()
    engine.is_open.clear()
    async with running_server(settings(), make_engine=lambda: engine, policy=policy) as running:
        first = asyncio.ensure_future(running.next_action(observation("first")))
        await engine.is_executing.wait()
        second = asyncio.ensure_future(running.next_action(observation("second")))
        await policy.submitted.get()
        await policy.submitted.get()
        third = asyncio.ensure_future(running.next_action(observation("third")))
        error = await refused(second)
        assert (type(error), error.reason) == (RejectedError, Reason.SUPERSEDED)
        engine.is_open.set()
        assert (await first).observation_id == "first"
        assert (await third).observation_id == "third"


async def test_lost_engine_is_told_started_again_and_serves() -> None:
    """ENGINE_LOST for what ran, NO_ENGINE while there is none, and then an answer."""
    engines: list[ScriptedEngine] = []

    def make() -> ScriptedEngine:
        engines.append(ScriptedEngine())
        if len(engines) == 1:
            engines[0].is_open.clear()
        return engines[-1]

    config = settings(engine__restart_backoff_s=0.2, engine__restart_backoff_max_s=0.2)
    async with running_server(config, make_engine=make, policy=FifoPolicy()) as running:
        call = asyncio.ensure_future(running.next_action(observation("first")))
        await engines[0].is_executing.wait()
        engines[0].lose("killed by signal 9")
        error = await refused(call)
        assert (type(error), error.reason) == (UnavailableError, Reason.ENGINE_LOST)
        assert error.retry_after_s is not None
        assert engines[0].is_stopped
        error = await refused(running.next_action(observation("second")))
        assert (type(error), error.reason) == (UnavailableError, Reason.NO_ENGINE)
        assert error.retry_after_s is not None
        await running.until_serving()
        assert (await running.next_action(observation("third"))).observation_id == "third"
    assert len(engines) == 2


async def test_step_that_never_ends_means_a_lost_engine() -> None:
    """A stall is survived like a crash."""
    engines: list[ScriptedEngine] = []

    def make() -> ScriptedEngine:
        engines.append(ScriptedEngine())
        if len(engines) == 1:
            engines[0].is_open.clear()
        return engines[-1]

    config = settings(engine__step_timeout_s=0.1, engine__restart_backoff_s=0.05)
    async with running_server(config, make_engine=make, policy=FifoPolicy()) as running:
        error = await refused(running.next_action(observation()))
        assert error.reason is Reason.ENGINE_LOST
        assert engines[0].is_stopped


async def test_more_calls_than_allowed_are_refused_and_counted_right() -> None:
    """The counter comes back to where it was, however calls end."""
    policy, engine = FifoPolicy(), ScriptedEngine()
    engine.is_open.clear()
    async with running_server(
        settings(server__max_calls=2), make_engine=lambda: engine, policy=policy
    ) as running:
        calls = [
            asyncio.ensure_future(running.next_action(observation(), robot_id=f"r{number}"))
            for number in range(2)
        ]
        await policy.submitted.get()
        await policy.submitted.get()
        error = await refused(running.next_action(observation(), robot_id="r3"))
        assert (type(error), error.reason) == (RejectedError, Reason.QUEUE_FULL)
        calls[0].cancel()
        engine.is_open.set()
        assert (await calls[1]).steps
        for _ in range(5):
            assert (await running.next_action(observation())).steps


class BuggyPolicy(FifoPolicy):
    """Falls over when it is to plan."""

    def plan(self, replica_id: str, now_ns: int) -> StepPlan:
        """Raises."""
        raise RuntimeError("a bug")


async def test_bug_of_the_scheduler_ends_the_server_and_its_calls() -> None:
    """Nobody is left waiting, and no word of it goes out."""
    async with running_server(
        settings(), make_engine=ScriptedEngine, policy=BuggyPolicy()
    ) as running:
        call = asyncio.ensure_future(running.next_action(observation()))
        with pytest.raises(RuntimeError, match="a bug"):
            await asyncio.wait_for(running.server.run(), 30)
        await running.server.stop(grace_s=0.01)
        error = await refused(call)
        assert type(error) is UnavailableError
        assert "bug" not in error.message


async def test_message_limit_is_exact() -> None:
    """A message of the largest size is read; one byte more is refused by gRPC itself."""
    limit = 4096
    config = settings(server__max_message_bytes=limit)
    async with running_server(config, make_engine=ScriptedEngine, policy=FifoPolicy()) as running:
        request = robot_pb2.NextActionRequest(
            robot_id="r1", embodiment="diff_drive", observation=observation()
        )
        spare = limit - request.ByteSize()
        data = request.SerializeToString()
        # An unknown field (15, bytes) is skipped by every parser of protobuf.
        padding = b"\x7a" + _varint(spare - 3) + bytes(spare - 3)
        assert len(data + padding) == limit
        send = running.raw_unary("NextAction")
        assert await send(data + padding)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await send(data + b"\x7a" + _varint(spare - 2) + bytes(spare - 2))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await send(data)


def _varint(value: int) -> bytes:
    """A number of 128 to 16,383 as protobuf writes it."""
    return bytes([value & 0x7F | 0x80, value >> 7])


async def test_metadata_beyond_the_limit_is_refused(running: RunningServer) -> None:
    """20 KB of it: RESOURCE_EXHAUSTED, and the next call is served."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await running.next_action(observation(), metadata=(("x-junk", "j" * 20_000),))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await running.next_action(observation(), metadata=(("x-small", "s"),))).steps
