"""Generate over a real socket: pieces that add up, usage, stops, and clients that leave."""

import asyncio
import threading
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from headway.config import parse_settings
from headway.outcome import Reason
from headway.rpc.errors import CallError, DeadlineMissedError, InvalidRequestError
from headway.rpc.status import error_from_rpc
from headway.v1 import robot_pb2
from tests.support.fifo_policy import FifoPolicy
from tests.support.running_server import (
    RunningServer,
    observation,
    read_error,
    running_server,
    settings,
)
from tests.support.scripted_engine import ScriptedEngine


async def pieces(running: RunningServer, **fields: Any) -> list[robot_pb2.GenerateResponse]:
    """All messages of one call."""
    values: dict[str, Any] = {"prompt": "hi", "max_tokens": 8} | fields
    request = robot_pb2.GenerateRequest(**values)
    return [message async for message in running.robots.Generate(request)]


async def refused(running: RunningServer, **fields: Any) -> CallError:
    """What a call that must fail raises at the client."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await pieces(running, **fields)
    return error_from_rpc(caught.value)


async def test_text_comes_with_usage_at_the_end() -> None:
    """The scripted engine speaks the alphabet; a byte is a token."""
    async with running_server(
        settings(), make_engine=ScriptedEngine, policy=FifoPolicy()
    ) as running:
        messages = await pieces(running, prompt="hello", max_tokens=30)
    assert "".join(message.text for message in messages) == "abcdefghijklmnopqrstuvwxyzabcd"
    assert [message.HasField("summary") for message in messages].count(True) == 1
    summary = messages[-1].summary
    assert summary.finish_reason == robot_pb2.FINISH_REASON_LENGTH
    assert (summary.prompt_tokens, summary.output_tokens) == (5, 30)
    assert summary.model == "tiny"


async def test_character_is_never_split() -> None:
    """Characters of 1 to 4 bytes, a byte at a time; the last one stays half."""
    engine = ScriptedEngine()
    engine.spoken = "aß€🤖".encode() + "€".encode()[:2]
    async with running_server(
        settings(), make_engine=lambda: engine, policy=FifoPolicy()
    ) as running:
        engine.pace = asyncio.Semaphore(0)
        call = running.robots.Generate(
            robot_pb2.GenerateRequest(prompt="hi", max_tokens=len(engine.spoken))
        )
        for character in "aß€🤖":
            for _ in character.encode():
                engine.pace.release()
            assert (await call.read()).text == character
        engine.pace.release()
        engine.pace.release()
        assert (await call.read()).text == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (["def"], "abc"),
        (["xyz", "cd"], "ab"),
        (["a"], ""),
        (["ghX"], "abcdefgh"),  # Held back, and told once it is known to be none.
        (["hX"], "abcdefgh"),
    ],
)
async def test_text_ends_before_a_stop_string(stop: list[str], expected: str) -> None:
    """Also where it is cut into tokens; the engine's work ends too."""
    async with running_server(
        settings(), make_engine=ScriptedEngine, policy=FifoPolicy()
    ) as running:
        messages = await pieces(running, stop=stop)
        assert "".join(message.text for message in messages) == expected
        is_cut = len(expected) < 8
        assert messages[-1].summary.finish_reason == (
            robot_pb2.FINISH_REASON_STOP if is_cut else robot_pb2.FINISH_REASON_LENGTH
        )
        await asyncio.wait_for(running.server.dispatcher.wait_idle(), 30)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt": ""}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x" * 257]}, "stop"),
        ({"priority": 9}, "priority"),
        ({"budget": Duration()}, "budget"),
        ({"budget": Duration(seconds=-1)}, "budget"),
        ({"priority": robot_pb2.PRIORITY_INTERACTIVE}, "budget"),
    ],
)
async def test_wrong_field_is_named(fields: dict[str, Any], field: str) -> None:
    """INVALID_ARGUMENT with the field."""
    async with running_server(
        settings(), make_engine=ScriptedEngine, policy=FifoPolicy()
    ) as running:
        error = await refused(running, **fields)
    assert (type(error), error.reason) == (InvalidRequestError, Reason.INVALID)
    assert error.message.startswith(f"{field}: ")


async def test_prompt_that_no_context_holds_is_refused_unread() -> None:
    """Its longest token has 9 characters (<act_000>), its engine 4,096 tokens."""
    async with running_server(
        settings(), make_engine=ScriptedEngine, policy=FifoPolicy()
    ) as running:
        tokenizer = running.server._robots._generate._tokenizer
        read: list[int] = []
        encode = tokenizer.encode

        def spy(text: str) -> tuple[int, ...]:
            read.append(threading.get_ident())
            return encode(text)

        tokenizer.encode = spy  # type: ignore[method-assign]
        error = await refused(running, prompt="x" * (4096 * 9 + 1))
        assert (error.reason, read) == (Reason.TOO_LARGE, [])
        # A long one that may fit is read beside the loop, on which all others wait.
        await pieces(running, prompt="x" * 2048)
        assert read != [threading.get_ident()]
        await pieces(running, prompt="x" * 2047)
        assert read[1:] == [threading.get_ident()]


async def test_prompt_without_any_token_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some vocabularies have none for a control character: there is nothing to go on from."""
    async with running_server(
        settings(), make_engine=ScriptedEngine, policy=FifoPolicy()
    ) as running:
        tokenizer = running.server._robots._generate._tokenizer
        monkeypatch.setattr(tokenizer, "encode", lambda text: ())
        error = await refused(running, prompt="\x04")
    assert (type(error), error.reason) == (InvalidRequestError, Reason.INVALID)


async def test_class_that_the_tenant_may_not_use_is_denied() -> None:
    """PERMISSION_DENIED, and no word of other tenants."""
    config = parse_settings(
        '[[tenants]]\nname = "default"\nclasses = ["interactive", "standard"]\n',
        source="test",
        overrides={"server.port": 0, "server.development": True},
    )
    async with running_server(config, make_engine=ScriptedEngine, policy=FifoPolicy()) as running:
        error = await refused(running, priority=robot_pb2.PRIORITY_BATCH)
        assert error.reason is Reason.PERMISSION_DENIED
        assert await pieces(running, priority=robot_pb2.PRIORITY_STANDARD)


async def test_standard_without_budget_gets_the_class_s_target() -> None:
    """A text whose first token does not come within slo_s is ended."""
    engine = ScriptedEngine()
    engine.is_open.clear()
    config = settings(scheduler__standard__slo_s=0.05)
    async with running_server(config, make_engine=lambda: engine, policy=FifoPolicy()) as running:
        error = await refused(running)
    assert (type(error), error.reason) == (DeadlineMissedError, Reason.DEADLINE_MISSED)


async def test_client_that_leaves_takes_its_request_along() -> None:
    """Mid-stream: the engine is told, and others are served."""
    policy, engine = FifoPolicy(), ScriptedEngine()
    engine.pace = asyncio.Semaphore(3)
    async with running_server(settings(), make_engine=lambda: engine, policy=policy) as running:
        request = robot_pb2.GenerateRequest(
            prompt="hi", max_tokens=1000, priority=robot_pb2.PRIORITY_BATCH
        )
        call = running.robots.Generate(request)
        assert (await call.read()).text
        call.cancel()
        await asyncio.wait_for(running.server.dispatcher.wait_idle(), 30)
        for _ in range(50):
            engine.pace.release()
        assert (await running.next_action(observation())).steps
    assert engine.closed == ["text-1"]


async def test_shutdown_ends_batch_text_at_once() -> None:
    """Nothing was promised to it: UNAVAILABLE DRAINING, with what came so far."""
    policy, engine = FifoPolicy(), ScriptedEngine()
    engine.pace = asyncio.Semaphore(3)
    async with running_server(settings(), make_engine=lambda: engine, policy=policy) as running:
        request = robot_pb2.GenerateRequest(
            prompt="hi", max_tokens=1000, priority=robot_pb2.PRIORITY_BATCH
        )
        call = running.robots.Generate(request)
        assert (await call.read()).text
        await running.server.stop(grace_s=30)
        assert (await read_error(call)).reason is Reason.DRAINING
