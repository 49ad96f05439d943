"""Clients that keep to no rule: HTTP/2 by hand, in ways that no library would send it."""

import asyncio
import gzip
import socket
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from cloud.scheduler.scheduler import Scheduler
from cloud.server.assembly import scheduler_config
from headway.clock import MonotonicClock
from headway.outcome import Reason
from headway.rpc.status import error_from_rpc
from headway.v1 import operations_pb2, robot_pb2
from tests.cloud.server.test_session import answer, ask, greeted, hello
from tests.support.fifo_policy import FifoPolicy
from tests.support.raw_http2 import RawClient, call_frames, metadata_bytes
from tests.support.running_server import (
    RunningServer,
    observation,
    running_server,
    settings,
    until,
)
from tests.support.scripted_engine import ScriptedEngine

_T = TypeVar("_T")

_NEXT_ACTION = "/headway.v1.RobotService/NextAction"
_GENERATE = "/headway.v1.RobotService/Generate"
_STATUS = "/headway.v1.OperationsService/GetStatus"
_WATCH = "/grpc.health.v1.Health/Watch"


def request(observation_id: str = "raw", *, budget_s: float | None = 20.0) -> bytes:
    """A whole call for an action."""
    return robot_pb2.NextActionRequest(
        robot_id="raw",
        embodiment="diff_drive",
        observation=observation(observation_id, budget_s=budget_s),
    ).SerializeToString()


async def aside(work: Callable[[], _T]) -> _T:
    """What blocks, in a thread: the server lives on this loop."""
    return await asyncio.wait_for(asyncio.to_thread(work), 30)


async def serves(running: RunningServer, observation_id: str) -> None:
    """Another client is answered, and nothing is left open behind it."""
    chunk = await running.next_action(observation(observation_id, budget_s=20.0), robot_id="other")
    assert chunk.observation_id == observation_id
    await until(lambda: running.server.num_open_calls == 0)
    assert running.server.dispatcher.num_live == 0


async def test_a_watcher_of_health_that_reads_nothing_holds_up_nobody() -> None:
    """Its window is 0: the other watchers are told, and the server is drained all the same."""
    async with running_server(
        settings(), make_engine=ScriptedEngine, policy=FifoPolicy()
    ) as running:
        with RawClient(running.server.port, window=0) as deaf:
            deaf.call(_WATCH, b"")
            await aside(deaf.until_begun)
            stub: Any = HealthStub(running.channel)
            watch = stub.Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            await asyncio.wait_for(running.server.drain(30.0), 30)
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_health_answers_for_what_it_knows_alone() -> None:
    """An unknown service is NOT_FOUND, bytes that are no message are INVALID_ARGUMENT."""
    async with running_server(
        settings(), make_engine=ScriptedEngine, policy=FifoPolicy()
    ) as running:
        stub: Any = HealthStub(running.channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(health_pb2.HealthCheckRequest(service="nobody's"))
        assert error_from_rpc(caught.value).reason is Reason.NOT_FOUND
        unknown = await stub.Watch(health_pb2.HealthCheckRequest(service="nobody's")).read()
        assert unknown.status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        send: Any = running.channel.unary_unary("/grpc.health.v1.Health/Check")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await send(b"\xff\xff")
        assert error_from_rpc(caught.value).reason is Reason.INVALID


async def test_calls_whose_message_never_comes_are_bounded() -> None:
    """A server for four calls holds 1,004 of a connection, resets the next hundred, and serves."""
    config = settings(server__max_calls=4)
    async with running_server(config, make_engine=ScriptedEngine, policy=FifoPolicy()) as running:
        with RawClient(running.server.port) as client:
            for _ in range(1_104):
                client.call(_NEXT_ACTION)
            ends = [await aside(client.status) for _ in range(100)]
            # Reset by gRPC, and not even answered.
            assert ends == [None] * 100
            await serves(running, "beside")
        await serves(running, "after")


async def test_calls_that_are_reset_at_once_leave_nothing() -> None:
    """Five hundred, opened and reset in one breath (CVE-2023-44487)."""
    async with running_server(
        settings(), make_engine=ScriptedEngine, policy=FifoPolicy()
    ) as running:
        await serves(running, "before")
        before = len(asyncio.all_tasks())
        with RawClient(running.server.port) as client:
            for _ in range(500):
                client.cancel(client.call(_NEXT_ACTION, request()))
            await serves(running, "beside")
        await serves(running, "after")
        await until(lambda: len(asyncio.all_tasks()) <= before)


async def test_a_call_that_is_cut_off_at_any_byte_leaves_nothing() -> None:
    """A connection that ends by a reset after 1 byte, after 2, and so on to the last but one."""
    async with running_server(
        settings(actions__chunk_steps=1), make_engine=ScriptedEngine, policy=FifoPolicy()
    ) as running:
        await serves(running, "before")
        before = len(asyncio.all_tasks())
        for length in range(1, 1000):
            client = RawClient(running.server.port)
            whole = client.greeting + call_frames(1, _NEXT_ACTION, request(f"o{length}"))
            client.socket.sendall(whole[:length])
            client.reset_connection()
            if length >= len(whole) - 1:
                break
            await asyncio.sleep(0)
        assert length == len(whole) - 1
        await serves(running, "after")
        await until(lambda: len(asyncio.all_tasks()) <= before)
        assert not running.server._robots._requests._live


@pytest.mark.parametrize(
    "junk",
    [b"GET / HTTP/1.1\r\nHost: robot\r\n\r\n", b"\x16\x03\x01" + bytes(100), bytes(range(256)) * 9],
    ids=["HTTP/1.1", "TLS", "anything"],
)
async def test_another_protocol_is_hung_up_on(junk: bytes) -> None:
    """And the next client is served."""
    async with running_server(
        settings(), make_engine=ScriptedEngine, policy=FifoPolicy()
    ) as running:
        client = RawClient(running.server.port)
        client.socket.sendall(junk)
        assert await aside(client.status) is None
        client.socket.close()
        await serves(running, "after")


@pytest.mark.soak
async def test_a_connection_that_says_nothing_is_closed() -> None:
    """After ten seconds, so that descriptors come back."""
    async with running_server(
        settings(), make_engine=ScriptedEngine, policy=FifoPolicy()
    ) as running:
        with socket.create_connection(("127.0.0.1", running.server.port), timeout=60) as silent:
            ended = asyncio.to_thread(_read_to_end, silent)
            await asyncio.wait_for(ended, 60)


def _read_to_end(connection: socket.socket) -> None:
    while connection.recv(4096):
        pass


async def test_answers_that_nobody_reads_give_everything_back() -> None:
    """A text is dropped after the time-out for writing, and its KV is free; so is an action's."""
    engine = ScriptedEngine()
    policy = Scheduler(scheduler_config(settings()))
    config = settings(server__write_timeout_s=0.05)
    async with running_server(config, make_engine=lambda: engine, policy=policy) as running:
        text = robot_pb2.GenerateRequest(prompt="once", max_tokens=4000).SerializeToString()
        with RawClient(running.server.port, window=0) as deaf:
            deaf.call(_GENERATE, text)
            deaf.call(_NEXT_ACTION, request())
            deaf.call(_STATUS, b"")
            await until(lambda: len(set(engine.executed)) == 2)
            await until(lambda: running.server.num_open_calls == 0)
            await until(lambda: running.server.dispatcher.num_live == 0)
            (replica,) = policy.snapshot(MonotonicClock().now_ns()).replicas
            assert (replica.num_running, replica.blocks_held) == (0, 0)
            await serves(running, "beside")


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (b"5S", 0),
        (b"99999999H", 0),  # The longest that there is.
        (b"0n", 4),
        # None of these is one by gRPC over HTTP/2, which answers INTERNAL itself.
        (b"-1S", 13),
        (b"nan", 13),
        (b"inf", 13),
        (b"", 13),
        (b"1", 13),
        (b"1e9S", 13),
        (b"5X", 13),
        (b"\xff\xfe", 13),
        # More digits than it has, which gRPC takes for no deadline: then it has none.
        (b"999999999999S", 3),
    ],
)
async def test_a_raw_time_out_rules_or_is_refused(header: bytes, expected: int) -> None:
    """The observation has no budget: an odd header never stands for endless time."""
    async with running_server(
        settings(), make_engine=ScriptedEngine, policy=FifoPolicy()
    ) as running:
        with RawClient(running.server.port) as client:
            client.call(_NEXT_ACTION, request(budget_s=None), extra=(("grpc-timeout", header),))
            assert await aside(client.status) == expected
        await serves(running, "after")


@pytest.mark.parametrize(
    ("size", "expected"), [(8 * 1024 - 1, 0), (8 * 1024, 0), (16 * 1024 + 1, 8), (20_000, 8)]
)
async def test_metadata_is_limited_as_documented(size: int, expected: int) -> None:
    """Up to 8 KiB it is always taken, beyond 16 KiB never."""
    async with running_server(
        settings(), make_engine=ScriptedEngine, policy=FifoPolicy()
    ) as running:
        with RawClient(running.server.port) as client:
            bare = metadata_bytes(_NEXT_ACTION, (("x-junk", b""),))
            junk = ("x-junk", b"j" * (size - bare))
            await aside(client.settle)
            assert metadata_bytes(_NEXT_ACTION, (junk,)) == size
            client.call(_NEXT_ACTION, request(), extra=(junk,))
            assert await aside(client.status) == expected
        await serves(running, "after")


async def test_a_small_message_that_unpacks_to_a_huge_one_is_refused() -> None:
    """Forty megabytes of zeros in forty kilobytes: RESOURCE_EXHAUSTED, by gRPC."""
    bomb = gzip.compress(bytes(40 << 20))
    async with running_server(
        settings(), make_engine=ScriptedEngine, policy=FifoPolicy()
    ) as running:
        with RawClient(running.server.port) as client:
            extra = (("grpc-encoding", b"gzip"),)
            client.call(_NEXT_ACTION, bomb, extra=extra, is_compressed=True)
            assert await aside(client.status) == 8
        await serves(running, "after")


_names = st.text(max_size=8)
_requests: st.SearchStrategy[bytes] = st.one_of(
    st.binary(max_size=60),
    st.builds(
        lambda robot_id, embodiment, rate_hz: hello(
            robot_id, embodiment, rate_hz
        ).SerializeToString(),
        st.one_of(st.just("r1"), _names),
        st.one_of(st.just("diff_drive"), _names),
        st.floats(),
    ),
    st.builds(
        lambda observation_id, budget_s, task, cut: ask(
            observation_id, budget_s=budget_s, task=task
        ).SerializeToString()[:cut],
        _names,
        st.one_of(st.none(), st.floats(-9e9, 9e9)),
        _names,
        st.integers(0, 90),
    ),
    st.just(robot_pb2.SessionRequest(heartbeat=robot_pb2.Heartbeat()).SerializeToString()),
)


@examples(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.lists(_requests, max_size=6), min_size=4, max_size=4))
def test_no_sequence_of_messages_breaks_a_session(streams: list[list[bytes]]) -> None:
    """Each ends as the contract says or is answered; INTERNAL never; the stream beside goes on."""

    async def check() -> None:
        config = settings(actions__chunk_steps=1)
        async with (
            running_server(config, make_engine=ScriptedEngine, policy=FifoPolicy()) as running,
            greeted(running, "other") as other,
        ):
            first = hello().SerializeToString()
            for messages in (*streams, *([first, *messages] for messages in streams)):
                assert await _end_of(running, messages) in _ENDS_OF_A_SESSION
            await other.write(ask("mine"))
            assert (await answer(other)).action.observation_id == "mine"
            other.cancel()
            await until(lambda: running.server.num_open_calls == 0)
            status = await running.operations.GetStatus(operations_pb2.GetStatusRequest())
            reasons = Counter(one.reason for kind in status.classes for one in kind.rejected)
            assert "INTERNAL" not in reasons

    asyncio.run(check())


# The contract's section on sessions.
_ENDS_OF_A_SESSION = {Reason.INVALID, Reason.CONFLICT, None}


async def _end_of(running: RunningServer, messages: list[bytes]) -> Reason | None:
    """Why a session of these messages was ended; None: as its robot wished."""
    stream: Any = running.channel.stream_stream("/headway.v1.RobotService/Session")()
    try:
        for message in messages:
            await stream.write(message)
        await stream.done_writing()
        while await stream.read() is not grpc.aio.EOF:
            pass
    except asyncio.InvalidStateError:
        pass  # It was ended before all was written.
    except grpc.aio.AioRpcError:
        pass
    code = await stream.code()
    if code is grpc.StatusCode.OK:
        return None
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stream.read()
    return error_from_rpc(caught.value).reason
