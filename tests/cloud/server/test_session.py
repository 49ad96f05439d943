"""Session over a real socket: one stream, many answers, and a "no" that does not end it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from cloud.scheduler.types import Rejected
from headway.outcome import Reason
from headway.rpc.errors import InvalidRequestError, UnavailableError
from headway.v1 import robot_pb2
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


def hello(robot_id: str = "r1", embodiment: str = "diff_drive", rate_hz: float = 10.0) -> Any:
    """A session's first message."""
    return robot_pb2.SessionRequest(
        hello=robot_pb2.Hello(robot_id=robot_id, embodiment=embodiment, rate_hz=rate_hz)
    )


def ask(observation_id: str, **options: Any) -> Any:
    """An observation on a session."""
    return robot_pb2.SessionRequest(observation=observation(observation_id, **options))


async def answer(stream: Any) -> Any:
    """The next message that is no heartbeat."""
    while True:
        message = await asyncio.wait_for(stream.read(), 30)
        if message is grpc.aio.EOF or not message.HasField("heartbeat"):
            return message


@asynccontextmanager
async def greeted(running: RunningServer, robot_id: str = "r1") -> AsyncIterator[Any]:
    """A stream whose settings have come."""
    stream = running.robots.Session()
    await stream.write(hello(robot_id))
    assert (await answer(stream)).HasField("settings")
    yield stream
    stream.cancel()


async def test_settings_come_first_and_say_what_is_configured() -> None:
    """A robot need not be configured twice."""
    config = settings(
        server__heartbeat_interval_s=1.5,
        server__idle_timeout_s=7.0,
        server__max_message_bytes=65536,
        actions__chunk_steps=4,
        actions__step_period_s=0.05,
    )
    async with running_server(config, make_engine=ScriptedEngine, policy=FifoPolicy()) as running:
        stream = running.robots.Session()
        await stream.write(hello())
        told = (await answer(stream)).settings
        stream.cancel()
    assert (told.heartbeat_interval.seconds, told.heartbeat_interval.nanos) == (1, 500_000_000)
    assert told.idle_timeout.seconds == 7
    assert told.max_message_bytes == 65536
    assert (told.chunk_steps, told.step_period.nanos) == (4, 50_000_000)


async def test_every_observation_gets_its_own_answer() -> None:
    """And the stream ends well when the robot closes it."""
    async with (
        running_server(settings(), make_engine=ScriptedEngine, policy=FifoPolicy()) as running,
        greeted(running) as stream,
    ):
        for number in range(5):
            await stream.write(ask(f"obs-{number}"))
            assert (await answer(stream)).action.observation_id == f"obs-{number}"
        await stream.done_writing()
        assert await answer(stream) is grpc.aio.EOF
        assert await stream.code() is grpc.StatusCode.OK


async def test_answers_that_are_under_way_still_come_after_the_robot_s_last_word() -> None:
    """Half-closing a stream asks for no more, and gives nothing up."""
    policy, engine = FifoPolicy(), ScriptedEngine()
    engine.is_open.clear()
    async with (
        running_server(settings(), make_engine=lambda: engine, policy=policy) as running,
        greeted(running) as stream,
    ):
        await stream.write(ask("last"))
        await stream.done_writing()
        await engine.is_executing.wait()
        engine.is_open.set()
        assert (await answer(stream)).action.observation_id == "last"
        assert await answer(stream) is grpc.aio.EOF


async def test_rejection_is_a_message_and_the_stream_goes_on() -> None:
    """LATE with hint and prediction; malformed; not even a message; then an answer."""
    policy = FifoPolicy()
    async with (
        running_server(settings(), make_engine=ScriptedEngine, policy=policy) as running,
        greeted(running) as stream,
    ):
        policy.answers.append(Rejected("", Reason.LATE, "too late", 250_000_000, 900_000_000))
        await stream.write(ask("obs-1"))
        no = (await answer(stream)).rejection
        assert (no.observation_id, no.reason) == ("obs-1", robot_pb2.REJECT_REASON_LATE)
        assert (no.retry_after.nanos, no.predicted.nanos) == (250_000_000, 900_000_000)
        assert no.message == "too late"

        await stream.write(ask("obs-2", budget_s=0.0))
        no = (await answer(stream)).rejection
        assert (no.observation_id, no.reason) == ("obs-2", robot_pb2.REJECT_REASON_INVALID)
        assert not no.HasField("retry_after")

        await stream.write(robot_pb2.SessionRequest())
        assert (await answer(stream)).rejection.reason == robot_pb2.REJECT_REASON_INVALID

        await stream.write(ask("obs-3"))
        assert (await answer(stream)).action.observation_id == "obs-3"


async def test_bytes_that_are_no_message_do_not_end_the_stream() -> None:
    """What could not be read has no id to be sent back."""
    async with running_server(
        settings(), make_engine=ScriptedEngine, policy=FifoPolicy()
    ) as running:
        raw: Any = running.channel.stream_stream("/headway.v1.RobotService/Session")()
        await raw.write(hello().SerializeToString())
        await raw.read()
        await raw.write(b"\x80\x04junk")
        no = robot_pb2.SessionResponse.FromString(await raw.read()).rejection
        assert (no.observation_id, no.reason) == ("", robot_pb2.REJECT_REASON_INVALID)
        await raw.write(ask("obs-1").SerializeToString())
        action = robot_pb2.SessionResponse.FromString(await raw.read()).action
        assert action.observation_id == "obs-1"
        raw.cancel()


async def test_newer_observation_supersedes_the_one_that_waits() -> None:
    """The running one is still answered; each answer bears its own id."""
    policy, engine = FifoPolicy(), ScriptedEngine()
    engine.is_open.clear()
    async with (
        running_server(settings(), make_engine=lambda: engine, policy=policy) as running,
        greeted(running) as stream,
    ):
        await stream.write(ask("obs-1"))
        await engine.is_executing.wait()
        await stream.write(ask("obs-2"))
        await stream.write(ask("obs-3"))
        no = (await answer(stream)).rejection
        assert (no.observation_id, no.reason) == ("obs-2", robot_pb2.REJECT_REASON_SUPERSEDED)
        engine.is_open.set()
        assert (await answer(stream)).action.observation_id == "obs-1"
        assert (await answer(stream)).action.observation_id == "obs-3"


@pytest.mark.parametrize(
    ("first", "field"),
    [
        (ask("obs-1"), "hello"),
        (hello(robot_id=""), "hello.robot_id"),
        (hello(embodiment="boat"), "hello.embodiment"),
        (hello(rate_hz=0), "hello.rate_hz"),
        (hello(rate_hz=float("nan")), "hello.rate_hz"),
        (hello(rate_hz=float("inf")), "hello.rate_hz"),
    ],
)
async def test_wrong_first_message_ends_the_stream(first: Any, field: str) -> None:
    """There is nobody yet to whom a rejection could be sent."""
    async with running_server(
        settings(), make_engine=ScriptedEngine, policy=FifoPolicy()
    ) as running:
        stream = running.robots.Session()
        await stream.write(first)
        error = await read_error(stream)
        assert (type(error), error.reason) == (InvalidRequestError, Reason.INVALID)
        assert error.message.startswith(f"{field}: ")


async def test_second_robot_does_not_disturb_the_first() -> None:
    """One leaves with work under way; the other's answers come."""
    policy, engine = FifoPolicy(), ScriptedEngine()
    engine.is_open.clear()
    async with (
        running_server(settings(), make_engine=lambda: engine, policy=policy) as running,
        greeted(running, "r1") as first,
    ):
        async with greeted(running, "r2") as second:
            await second.write(ask("two"))
            await policy.submitted.get()
            await first.write(ask("one"))
            await policy.submitted.get()
        engine.is_open.set()
        assert (await answer(first)).action.observation_id == "one"
        await asyncio.wait_for(running.server.dispatcher.wait_idle(), 30)


async def test_silent_stream_is_ended() -> None:
    """A robot that sends not even heartbeats holds nothing for ever."""
    config = settings(server__heartbeat_interval_s=0.02, server__idle_timeout_s=0.05)
    async with (
        running_server(config, make_engine=ScriptedEngine, policy=FifoPolicy()) as running,
        greeted(running) as stream,
    ):
        error = await read_error(stream)
        assert "silent for 0.05 s" in error.message


async def test_heartbeats_go_both_ways_and_keep_a_stream_open() -> None:
    """The server's count up by one; ten time-outs long nothing ends."""
    config = settings(server__heartbeat_interval_s=0.02, server__idle_timeout_s=0.2)
    async with (
        running_server(config, make_engine=ScriptedEngine, policy=FifoPolicy()) as running,
        greeted(running) as stream,
    ):
        for number in range(1, 101):
            message = await stream.read()
            assert message.heartbeat.sequence == number
            beat = robot_pb2.Heartbeat(sequence=number)
            await stream.write(robot_pb2.SessionRequest(heartbeat=beat))


async def test_lost_engine_is_a_message() -> None:
    """ENGINE_LOST and then NO_ENGINE on the same stream, with hints."""
    engine = ScriptedEngine()
    engine.is_open.clear()
    config = settings(engine__restart_backoff_s=30.0, engine__restart_backoff_max_s=30.0)
    async with (
        running_server(config, make_engine=lambda: engine, policy=FifoPolicy()) as running,
        greeted(running) as stream,
    ):
        await stream.write(ask("obs-1"))
        await engine.is_executing.wait()
        engine.lose("killed")
        no = (await answer(stream)).rejection
        assert (no.observation_id, no.reason) == ("obs-1", robot_pb2.REJECT_REASON_ENGINE_LOST)
        await stream.write(ask("obs-2"))
        no = (await answer(stream)).rejection
        assert (no.observation_id, no.reason) == ("obs-2", robot_pb2.REJECT_REASON_NO_ENGINE)
        assert no.HasField("retry_after")


async def test_shutdown_is_told_before_the_stream_ends() -> None:
    """DRAINING as a message, the promised answer, and then UNAVAILABLE."""
    policy, engine = FifoPolicy(), ScriptedEngine()
    engine.is_open.clear()
    async with (
        running_server(settings(), make_engine=lambda: engine, policy=policy) as running,
        greeted(running) as stream,
    ):
        await stream.write(ask("promised"))
        await engine.is_executing.wait()
        stopping = asyncio.ensure_future(running.server.stop(grace_s=30))
        await until(lambda: policy.is_draining)
        await stream.write(ask("refused"))
        no = (await answer(stream)).rejection
        assert (no.observation_id, no.reason) == ("refused", robot_pb2.REJECT_REASON_DRAINING)
        engine.is_open.set()
        assert (await answer(stream)).action.observation_id == "promised"
        error = await read_error(stream)
        assert (type(error), error.reason) == (UnavailableError, Reason.DRAINING)
        await stopping


async def test_shutdown_brings_every_promised_answer_to_its_robot() -> None:
    """Thirty robots are answered by the last step of all; then each is told UNAVAILABLE."""
    async with running_server(settings(engine__simulated__t0_s=0.02)) as running:

        async def answered(robot_id: str) -> tuple[bool, Reason | None]:
            async with greeted(running, robot_id) as stream:
                await stream.write(ask("promised"))
                is_answered = (await answer(stream)).HasField("action")
                return is_answered, (await asyncio.wait_for(read_error(stream), 30)).reason

        robots = [asyncio.ensure_future(answered(f"r{number}")) for number in range(30)]
        await until(lambda: running.server.dispatcher.num_live == 30)
        await running.server.stop(grace_s=30)
        assert await asyncio.gather(*robots) == [(True, Reason.DRAINING)] * 30


async def test_dropped_streams_leave_nothing_behind() -> None:
    """A hundred connect, ask and vanish; tasks, calls and counters are as before."""
    async with running_server(
        settings(), make_engine=ScriptedEngine, policy=FifoPolicy()
    ) as running:
        async with greeted(running, "first"):
            pass
        before = len(asyncio.all_tasks())

        async def vanish(number: int) -> None:
            async with greeted(running, f"r{number}") as stream:
                await stream.write(ask("obs"))

        for start in range(0, 100, 10):
            await asyncio.gather(*(vanish(start + number) for number in range(10)))
        await until(lambda: running.server.num_open_calls == 0)
        await asyncio.wait_for(running.server.dispatcher.wait_idle(), 30)
        assert running.server.num_open_sessions == 0
        assert not running.server._robots._requests._live
        await until(lambda: len(asyncio.all_tasks()) <= before)


async def test_robot_that_reads_nothing_is_dropped_and_others_are_served() -> None:
    """What waits for it is bounded; the bound ends its stream and nobody else's."""
    config = settings(
        server__send_queue_messages=8,
        server__write_timeout_s=0.05,
        server__heartbeat_interval_s=0.05,
    )
    async with (
        running_server(config, make_engine=ScriptedEngine, policy=FifoPolicy()) as running,
        greeted(running, "deaf") as deaf,
        greeted(running, "r2") as other,
    ):

        async def write() -> None:
            # Each is refused in 150 bytes; soon every buffer of the network is full.
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                while True:
                    await deaf.write(ask("x" * 64, budget_s=0.0))

        writing = asyncio.ensure_future(write())
        await until(lambda: running.server.num_open_sessions == 1)
        await until(lambda: running.server.num_open_calls == 1)
        await other.write(ask("obs-1"))
        assert (await answer(other)).action.observation_id == "obs-1"
        writing.cancel()
