"""The same observation once more: one piece of work, one answer."""

import asyncio
from typing import Any

import grpc
import pytest

from cloud.engine.api import EngineRequest
from cloud.scheduler.types import DeadlineCovers, Request
from cloud.server.call import Call
from cloud.server.replays import Replays
from headway.clock import VirtualClock
from headway.outcome import Reason, RequestClass
from headway.rpc.errors import CallError, ConflictError
from headway.rpc.status import error_from_rpc
from tests.cloud.server.test_session import answer, ask, greeted
from tests.support.fifo_policy import FifoPolicy
from tests.support.running_server import observation, running_server, settings, until
from tests.support.scripted_engine import ScriptedEngine


async def refused(call: Any) -> CallError:
    """What a call that must fail raises at the client."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return error_from_rpc(caught.value)


async def test_a_finished_answer_is_given_again_without_new_work() -> None:
    """Every field of it; a smaller budget, as a second attempt has, changes nothing."""
    engine = ScriptedEngine()
    async with running_server(
        settings(), make_engine=lambda: engine, policy=FifoPolicy()
    ) as running:
        first = await running.next_action(observation("obs-1", budget_s=30.0))
        executed = list(engine.executed)
        again = await running.next_action(observation("obs-1", budget_s=29.0))
        assert again == first
        assert engine.executed == executed
        other = await running.next_action(observation("obs-2"))
        assert other.observation_id == "obs-2"
    assert len(set(engine.executed)) == 2


async def test_a_running_answer_is_waited_for_together() -> None:
    """One request to the engine, and each attempt has its answer."""
    engine = ScriptedEngine()
    engine.is_open.clear()
    async with running_server(
        settings(), make_engine=lambda: engine, policy=FifoPolicy()
    ) as running:
        calls = [asyncio.ensure_future(running.next_action(observation("o"))) for _ in range(3)]
        await until(lambda: running.server.num_open_calls == 3)
        engine.is_open.set()
        chunks = await asyncio.gather(*calls)
    assert {chunk.observation_id for chunk in chunks} == {"o"}
    assert len(set(engine.executed)) == 1


async def test_whoever_leaves_does_not_take_the_answer_of_the_others_along() -> None:
    """The first attempt's connection broke; the second one's answer still comes."""
    engine = ScriptedEngine()
    engine.is_open.clear()
    async with running_server(
        settings(), make_engine=lambda: engine, policy=FifoPolicy()
    ) as running:
        first = asyncio.ensure_future(running.next_action(observation("o")))
        await until(lambda: running.server.dispatcher.num_live == 1)
        second = asyncio.ensure_future(running.next_action(observation("o")))
        await until(lambda: running.server.num_open_calls == 2)
        first.cancel()
        await until(lambda: running.server.num_open_calls == 1)
        assert running.server.dispatcher.num_live == 1
        engine.is_open.set()
        assert (await second).observation_id == "o"


async def test_the_last_one_to_leave_ends_the_work() -> None:
    """And asking once more starts anew."""
    engine = ScriptedEngine()
    engine.is_open.clear()
    async with running_server(
        settings(), make_engine=lambda: engine, policy=FifoPolicy()
    ) as running:
        calls = [asyncio.ensure_future(running.next_action(observation("o"))) for _ in range(2)]
        await until(lambda: running.server.num_open_calls == 2)
        for call in calls:
            call.cancel()
        await until(lambda: running.server.dispatcher.num_live == 0)
        engine.is_open.set()
        assert (await running.next_action(observation("o"))).observation_id == "o"


async def test_another_observation_of_the_same_id_is_a_conflict() -> None:
    """ALREADY_EXISTS, names the field; other robots' ids are their own."""
    async with running_server(
        settings(), make_engine=ScriptedEngine, policy=FifoPolicy()
    ) as running:
        await running.next_action(observation("o", task="go"))
        error = await refused(running.next_action(observation("o", task="stop")))
        assert (type(error), error.reason) == (ConflictError, Reason.CONFLICT)
        assert "observation.observation_id" in str(error)
        chunk = await running.next_action(observation("o", task="stop"), robot_id="r2")
        assert chunk.observation_id == "o"


async def test_a_session_tells_a_conflict_as_a_message_and_repeats_an_answer() -> None:
    """Also what NextAction answered before: a robot's observations are its own everywhere."""
    async with running_server(
        settings(), make_engine=ScriptedEngine, policy=FifoPolicy()
    ) as running:
        chunk = await running.next_action(observation("o", task="go"))
        async with greeted(running) as stream:
            await stream.write(ask("o", task="stop"))
            told = await answer(stream)
            assert told.rejection.observation_id == "o"
            assert told.rejection.reason == 13  # REJECT_REASON_CONFLICT of the contract.
            await stream.write(ask("o", task="go"))
            assert (await answer(stream)).action == chunk


def call_of(request_id: str, deadline_ns: int) -> Call:
    """A live call."""
    request = Request(
        request_id=request_id,
        tenant="t",
        request_class=RequestClass.INTERACTIVE,
        prompt_tokens=1,
        max_output_tokens=1,
        deadline_ns=deadline_ns,
        deadline_covers=DeadlineCovers.LAST_TOKEN,
    )
    return Call(request, EngineRequest(request_id, (1,)), 0, lambda _: None)


def test_nothing_is_given_past_its_deadline() -> None:
    """A robot that asks later is answered anew."""
    clock = VirtualClock()
    replays = Replays(clock.now_ns)
    call = call_of("a", 1_000)
    replays.keep(("t", "r", "o"), call)
    clock.advance(999)
    assert replays.find(("t", "r", "o")) is call
    clock.advance(1)
    assert replays.find(("t", "r", "o")) is None


def test_what_is_remembered_is_bounded_in_number_and_time() -> None:
    """A stranger who makes up ids fills no memory."""
    clock = VirtualClock()
    replays = Replays(clock.now_ns, num_kept=3)
    for number in range(10):
        replays.keep(("t", "r", str(number)), call_of(str(number), 10**18))
    assert len(replays) == 3
    assert [replays.find(("t", "r", str(n))) is not None for n in range(10)] == [False] * 7 + [
        True
    ] * 3
    clock.advance(60_000_000_000)
    replays.keep(("t", "r", "new"), call_of("new", 10**18))
    assert len(replays) == 1
