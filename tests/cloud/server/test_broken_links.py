"""Networks that go wrong between a robot and a server, each in its own way."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from edge.client import RobotClient
from edge.observation import Observation
from headway.rpc.channel import channel_options
from headway.rpc.errors import DeadlineMissedError, UnavailableError
from headway.rpc.status import error_from_rpc
from headway.v1 import robot_pb2
from headway.v1.robot_pb2_grpc import RobotServiceStub
from tests.cloud.server.test_session import answer, ask, hello
from tests.support.black_hole import BlackHole
from tests.support.fifo_policy import FifoPolicy
from tests.support.running_server import (
    RunningServer,
    observation,
    read_error,
    running_server,
    settings,
    until,
)
from tests.support.scripted_engine import ScriptedEngine


@asynccontextmanager
async def robot_behind(link: BlackHole) -> AsyncIterator[Any]:
    """The stub of a robot, on a connection of its own."""
    options = [*channel_options(), ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(link.address, options=options) as channel:
        yield RobotServiceStub(channel)


@asynccontextmanager
async def linked(
    engine: ScriptedEngine, **overrides: object
) -> AsyncIterator[tuple[RunningServer, BlackHole, Any]]:
    """A server, a link to it that can break, and the stub of a robot behind it."""
    config = settings(**overrides)
    async with running_server(config, make_engine=lambda: engine, policy=FifoPolicy()) as running:
        with BlackHole(running.server.port) as link:
            async with robot_behind(link) as stub:
                yield running, link, stub


def question(observation_id: str) -> Any:
    """A call for an action, of the robot behind the link."""
    return robot_pb2.NextActionRequest(
        robot_id="r1",
        embodiment="diff_drive",
        observation=observation(observation_id, budget_s=60.0),
    )


async def test_a_connection_that_is_reset_takes_its_work_along() -> None:
    """A call and a session end as UNAVAILABLE at the robot, and as nothing at the server."""
    engine = ScriptedEngine()
    async with linked(engine) as (running, link, stub):
        stream = stub.Session()
        await stream.write(hello("r2"))
        assert (await answer(stream)).HasField("settings")
        engine.is_open.clear()
        call = stub.NextAction(question("lost"))
        await stream.write(ask("lost too"))
        await until(lambda: running.server.dispatcher.num_live == 2)
        link.reset()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert isinstance(error_from_rpc(caught.value), UnavailableError)
        assert isinstance(await read_error(stream), UnavailableError)
        await until(lambda: running.server.num_open_calls == 0)
        assert running.server.dispatcher.num_live == 0
        engine.is_open.set()
        found = await stub.NextAction(question("next"))
        assert found.action.observation_id == "next"


@pytest.mark.parametrize("way", ["up", "down"])
async def test_a_link_that_loses_one_way_only_is_noticed_by_both(way: str) -> None:
    """Keepalive asks for an answer, and an answer needs both ways."""
    engine = ScriptedEngine()
    async with linked(engine) as (running, link, stub):
        stream = stub.Session()
        await stream.write(hello("r1"))
        assert (await answer(stream)).HasField("settings")
        engine.is_open.clear()
        await stream.write(ask("lost"))
        await until(lambda: running.server.dispatcher.num_live == 1)
        link.loses = way
        await until(lambda: running.server.num_open_sessions == 0)
        assert running.server.dispatcher.num_live == 0
        assert isinstance(await read_error(stream), UnavailableError)
        link.loses = ""
        engine.is_open.set()
        async with robot_behind(link) as again:
            found = await again.NextAction(question("next"))
            assert found.action.observation_id == "next"


async def test_an_answer_that_is_cut_off_at_any_byte_is_none() -> None:
    """After 0 bytes, 20, 40 and so on: UNAVAILABLE or the whole answer, never half of one."""
    engine = ScriptedEngine()
    cut = whole = 0
    async with linked(engine, actions__chunk_steps=4) as (running, link, stub):
        first = await stub.NextAction(question("first"))
        for num_bytes in range(0, 600, 20):
            async with robot_behind(link) as robot:
                engine.is_open.clear()
                call = robot.NextAction(question(f"o{num_bytes}"))
                await until(lambda: running.server.dispatcher.num_live == 1)
                link.cut_after_bytes = num_bytes
                engine.is_open.set()
                told: Any = await asyncio.gather(call, return_exceptions=True)
                found = told[0]
                if isinstance(found, grpc.aio.AioRpcError):
                    assert isinstance(error_from_rpc(found), UnavailableError)
                    cut += 1
                else:
                    assert found.action.observation_id == f"o{num_bytes}"
                    assert found.action.steps == first.action.steps
                    whole += 1
                link.reset()
            await until(lambda: running.server.num_open_calls == 0)
    assert cut >= 5
    assert whole >= 1


async def test_a_link_that_crawls_holds_up_nobody_else() -> None:
    """Its reader of a long text is dropped or served, by its own pace; others are answered."""
    engine = ScriptedEngine()
    async with linked(engine, server__write_timeout_s=0.2) as (running, link, stub):
        link.most_bytes = 100
        text = stub.Generate(robot_pb2.GenerateRequest(prompt="once", max_tokens=4000))
        assert (await text.read()).text
        for number in range(20):
            chunk = await running.next_action(observation(f"o{number}", budget_s=20.0), "r2")
            assert chunk.observation_id == f"o{number}"
        text.cancel()
        link.most_bytes = 0
        await until(lambda: running.server.num_open_calls == 0)
        assert running.server.dispatcher.num_live == 0


async def test_a_client_goes_on_by_itself_after_every_kind_of_break() -> None:
    """Reset, reset in the middle of an answer, silence: the same client is served again."""
    engine = ScriptedEngine()
    async with linked(engine) as (_, link, _stub):
        client = RobotClient.connect(link.address, robot_id="r1")

        async def asked(observation_id: str, budget_s: float) -> str:
            seen = Observation(observation_id, task="go")
            action = await asyncio.to_thread(client.next_action, seen, budget_s)
            return action.observation_id

        try:
            assert await asked("o1", 30.0) == "o1"
            link.reset()
            assert await asked("o2", 30.0) == "o2"
            link.cut_after_bytes = 30
            # What was cut off is asked for once more, by the client itself.
            assert await asked("o3", 30.0) == "o3"
            link.loses = "down"
            with pytest.raises((DeadlineMissedError, UnavailableError)):
                await asked("o4", 0.2)
            link.loses = ""
            assert await asked("o5", 30.0) == "o5"
        finally:
            await asyncio.to_thread(client.close)
