"""The services on the production scheduler: simulated engine, and the torch one end to end."""

import asyncio
import signal
from typing import Any

import grpc
import psutil
import pytest

from headway.config import Settings
from headway.outcome import Reason
from headway.rpc.errors import RejectedError, UnavailableError
from headway.rpc.status import error_from_rpc
from headway.v1 import operations_pb2, robot_pb2
from tests.support.running_server import observation, read_error, running_server, settings


def simulated(**overrides: object) -> Settings:
    """An engine that takes 10 ms a step whatever is in it."""
    free = {
        "engine__simulated__t0_s": 0.010,
        "engine__simulated__prefill_token_s": 0.0,
        "engine__simulated__decode_s": 0.0,
    }
    return settings(**(free | overrides))


async def status(running: Any) -> operations_pb2.GetStatusResponse:
    """What GetStatus says."""
    answer: operations_pb2.GetStatusResponse = await running.operations.GetStatus(
        operations_pb2.GetStatusRequest()
    )
    return answer


async def test_late_request_is_refused_by_prediction() -> None:
    """20 tokens at 10 ms a step are 0.2 s: a budget of 0.1 s is refused with that figure."""
    async with running_server(simulated()) as running:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.next_action(observation(budget_s=0.1))
        error = error_from_rpc(caught.value)
        assert (type(error), error.reason) == (RejectedError, Reason.LATE)
        assert error.predicted_s is not None
        assert error.predicted_s >= 0.2
        chunk = await running.next_action(observation("in-time", budget_s=5.0))
        assert chunk.observation_id == "in-time"
        assert chunk.timings.decode.nanos >= 19 * 10_000_000
        told = await status(running)
    (interactive,) = told.classes
    assert (interactive.request_class, interactive.tenant) == ("interactive", "default")
    assert (interactive.admitted, interactive.completed, interactive.missed) == (1, 1, 0)
    assert [(one.reason, one.count) for one in interactive.rejected] == [("LATE", 1)]
    assert interactive.output_tokens == 20
    assert interactive.latency_p50.nanos >= 200_000_000
    (replica,) = told.replicas
    assert (replica.replica_id, replica.up, replica.steps) == ("replica-0", True, 20)
    assert replica.kv_blocks_total == replica.kv_blocks_free == 1024
    assert replica.step_p50.nanos >= 10_000_000
    assert told.model == "tiny"
    assert not told.draining


async def test_every_class_is_served_and_counted_apart() -> None:
    """A robot, a person and the night, on one engine at once."""
    async with running_server(simulated(engine__simulated__t0_s=0.001)) as running:

        async def text(priority: Any) -> str:
            request = robot_pb2.GenerateRequest(prompt="hi", max_tokens=40, priority=priority)
            return "".join([part.text async for part in running.robots.Generate(request)])

        texts = await asyncio.gather(
            text(robot_pb2.PRIORITY_STANDARD),
            text(robot_pb2.PRIORITY_BATCH),
            *(running.next_action(observation(), robot_id=f"r{number}") for number in range(8)),
        )
        told = await status(running)
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    assert texts[0] == texts[1] == (alphabet * 2)[:40]
    counts = {one.request_class: (one.admitted, one.completed) for one in told.classes}
    assert counts == {"interactive": (8, 8), "standard": (1, 1), "batch": (1, 1)}


async def test_request_larger_than_the_model_is_wrong_and_not_late() -> None:
    """Asking again would not help."""
    async with running_server(simulated(engine__max_context_tokens=64)) as running:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.next_action(observation(task="x" * 200))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error_from_rpc(caught.value).reason is Reason.TOO_LARGE


async def test_robot_that_asks_too_fast_gets_its_first_answer_and_its_newest() -> None:
    """One runs, one waits; every newer one takes the place of the one that waits."""
    async with running_server(simulated()) as running:
        first = asyncio.ensure_future(running.next_action(observation("obs-0")))
        while not (await status(running)).replicas[0].running:
            pass
        later = [
            asyncio.ensure_future(running.next_action(observation(f"obs-{number}")))
            for number in range(1, 5)
        ]
        answers = await asyncio.gather(first, *later, return_exceptions=True)
        told = await status(running)
    ids = [one.observation_id for one in answers if isinstance(one, robot_pb2.ActionChunk)]
    errors = [error_from_rpc(one) for one in answers if isinstance(one, grpc.aio.AioRpcError)]
    assert len(ids) == 2
    assert ids[0] == "obs-0"
    assert [error.reason for error in errors] == [Reason.SUPERSEDED] * 3
    assert (told.classes[0].cancelled, told.classes[0].missed) == (3, 0)


async def test_torch_engine_answers_is_killed_and_answers_again() -> None:
    """The whole path with a real model in a process of its own; kill -9 is survived."""
    config = settings(
        engine__kind="torch",
        engine__kv_tokens=2048,
        engine__restart_backoff_s=0.2,
        actions__chunk_steps=2,
    )
    async with running_server(config) as running:
        chunk = await running.next_action(observation("obs-1", budget_s=60.0))
        assert (chunk.observation_id, len(chunk.steps)) == ("obs-1", 2)
        for step in chunk.steps:
            assert -1 < step.values[0] < 1
            assert -2 < step.values[1] < 2
        again = await running.next_action(observation("obs-2", budget_s=60.0))
        # Greedy decoding: the same prompt gives the same actions.
        assert again.steps == chunk.steps

        request = robot_pb2.GenerateRequest(
            prompt="hi", max_tokens=1900, priority=robot_pb2.PRIORITY_BATCH
        )
        stream = running.robots.Generate(request)
        await stream.read()
        (engine,) = psutil.Process().children()
        engine.send_signal(signal.SIGKILL)
        error = await read_error(stream)
        assert (type(error), error.reason) == (UnavailableError, Reason.ENGINE_LOST)
        assert error.retry_after_s is not None
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.next_action(observation("obs-3", budget_s=60.0))
        assert error_from_rpc(caught.value).reason is Reason.NO_ENGINE
        down = (await status(running)).replicas[0]
        assert not down.up
        assert "SIGKILL" in down.down_reason
        await running.until_serving()
        chunk = await running.next_action(observation("obs-4", budget_s=60.0))
        assert chunk.observation_id == "obs-4"
