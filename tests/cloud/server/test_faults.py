"""What goes wrong at the front door: hostile bytes, dead peers, cancels, overload."""

import asyncio
import gc
import logging
import math
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import structlog
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from cloud.scheduler.scheduler import Scheduler
from cloud.server.assembly import scheduler_config
from cloud.server.keys import KeyFile
from edge.client import RobotClient
from edge.observation import Observation
from headway.config import Settings
from headway.outcome import Reason
from headway.rpc.channel import channel_options
from headway.rpc.credentials import Credentials
from headway.rpc.errors import CallError, DeadlineMissedError, RejectedError, UnavailableError
from headway.rpc.status import error_from_rpc
from headway.v1 import operations_pb2, robot_pb2
from headway.v1.robot_pb2_grpc import RobotServiceStub
from tests.cloud.server.test_session import answer, ask, greeted, hello
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
from tests.support.verifier import verify

_CODES_OF_A_WRONG_CALL = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED}


def simulated(step_s: float, **overrides: object) -> Settings:
    """An engine that takes as long for every step, whatever is in it."""
    free = {
        "engine__simulated__t0_s": step_s,
        "engine__simulated__prefill_token_s": 0.0,
        "engine__simulated__decode_s": 0.0,
        "actions__chunk_steps": 2,
    }
    return settings(**(free | overrides))


async def outcome(call: Any) -> str:
    """The reason of the "no", or its code; "ok" where there is none."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        no = error_from_rpc(error)
        return no.reason.value if no.reason is not None else error.code().name
    return "ok"


# --- bytes and numbers ---


@examples(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.binary(max_size=400), st.integers(0, 120))
def test_no_bytes_bring_the_server_down(data: bytes, cut: int) -> None:
    """Random, and truncated messages, to every method: INVALID or an answer, never INTERNAL."""

    async def check() -> None:
        config = settings(actions__chunk_steps=1)
        async with running_server(
            config, make_engine=ScriptedEngine, policy=FifoPolicy()
        ) as running:
            whole = robot_pb2.NextActionRequest(
                robot_id="r1", embodiment="diff_drive", observation=observation()
            ).SerializeToString()
            for payload in (data, whole[:cut], whole[:cut] + data):
                for method in ("NextAction", "Generate"):
                    await _send(running, f"/headway.v1.RobotService/{method}", payload)
                for method in ("GetStatus", "ListTenants"):
                    await _send(running, f"/headway.v1.OperationsService/{method}", payload)
            async with greeted(running, "r2") as stream:
                raw = stream
                await raw.write(ask("after"))
                assert (await answer(stream)).action.observation_id == "after"

    asyncio.run(check())


async def _send(running: RunningServer, path: str, payload: bytes) -> None:
    call: Any = (
        running.channel.unary_stream(path)
        if path.endswith("Generate")
        else running.channel.unary_unary(path)
    )
    try:
        if path.endswith("Generate"):
            stream = call(payload, timeout=30)
            while await stream.read() is not grpc.aio.EOF:
                pass
        else:
            await call(payload, timeout=30)
    except grpc.aio.AioRpcError as error:
        told = (error.code(), error_from_rpc(error).reason is not None)
    else:
        return
    assert told[0] in _CODES_OF_A_WRONG_CALL, (path, payload)
    assert told[1]


async def test_bytes_on_a_session_are_answered_one_by_one() -> None:
    """Whatever they are; the stream, and the one beside it, go on."""
    rng = random.Random(7)
    async with (
        running_server(
            settings(actions__chunk_steps=1), make_engine=ScriptedEngine, policy=FifoPolicy()
        ) as running,
        greeted(running, "other") as other,
    ):
        raw: Any = running.channel.stream_stream("/headway.v1.RobotService/Session")()
        await raw.write(hello("r1").SerializeToString())
        await raw.read()
        for number in range(50):
            # Field 7 is none of the contract's, and its length is a lie.
            await raw.write(b"\x3a\xff" + rng.randbytes(rng.randrange(40)))
            await raw.write(ask(f"o{number}").SerializeToString())
        kinds: Counter[str] = Counter()
        while kinds["action"] < 50:
            message = robot_pb2.SessionResponse.FromString(await raw.read())
            kinds[message.WhichOneof("message") or ""] += 1
            if message.HasField("rejection"):
                assert message.rejection.reason == robot_pb2.REJECT_REASON_INVALID
        assert kinds["rejection"] == 50
        await other.write(ask("mine"))
        assert (await answer(other)).action.observation_id == "mine"
        raw.cancel()


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, math.nan, math.inf, 1e300])
async def test_an_impossible_grpc_deadline_harms_nobody(timeout_s: float) -> None:
    """The client says so itself or is told; the next call is served."""
    async with running_server(
        settings(), make_engine=ScriptedEngine, policy=FifoPolicy()
    ) as running:
        try:
            told = (await running.next_action(observation("odd"), timeout=timeout_s)).observation_id
        except (ValueError, OverflowError):
            told = "refused by gRPC itself"
        except grpc.aio.AioRpcError as error:
            told = error.code().name
        assert told in {"odd", "refused by gRPC itself", "DEADLINE_EXCEEDED"}
        assert (await running.next_action(observation("next"))).observation_id == "next"


async def test_the_wall_clock_is_of_no_account(monkeypatch: pytest.MonkeyPatch) -> None:
    """It jumps by hours between and during requests; budgets and answers do not notice."""
    engine = ScriptedEngine()
    async with running_server(
        settings(), make_engine=lambda: engine, policy=FifoPolicy()
    ) as running:
        real = time.time
        for jump_s in (-5.0, 5.0, 36_000.0, -36_000.0):
            engine.is_open.clear()
            call = asyncio.ensure_future(
                running.next_action(observation(f"jump{jump_s:g}", budget_s=30.0))
            )
            await until(lambda: running.server.dispatcher.num_live == 1)
            monkeypatch.setattr(time, "time", lambda jump_s=jump_s: real() + jump_s)
            engine.is_open.set()
            assert (await call).observation_id == f"jump{jump_s:g}"


# --- dead and slow peers ---


async def test_a_link_that_goes_dead_frees_what_it_held_and_a_new_one_is_served() -> None:
    """Nothing is closed, nothing comes any more: keepalive notices, on both sides."""
    engine = ScriptedEngine()
    async with running_server(
        settings(), make_engine=lambda: engine, policy=FifoPolicy()
    ) as running:
        with BlackHole(running.server.port) as hole:
            async with grpc.aio.insecure_channel(
                hole.address, options=channel_options()
            ) as channel:
                stub: Any = RobotServiceStub(channel)
                stream = stub.Session()
                await stream.write(hello("r1"))
                assert (await answer(stream)).HasField("settings")
                engine.is_open.clear()
                await stream.write(ask("lost"))
                await until(lambda: running.server.dispatcher.num_live == 1)
                hole.holds_back = True
                # The server's side: the robot's request and stream are gone.
                await until(lambda: running.server.num_open_sessions == 0)
                assert running.server.dispatcher.num_live == 0
                # The robot's side: an end, and not silence for ever.
                assert isinstance(await read_error(stream), UnavailableError)
                hole.holds_back = False
                engine.is_open.set()
                again = stub.Session()
                await again.write(hello("r1"))
                await again.write(ask("next"))
                assert (await answer(again)).HasField("settings")
                assert (await answer(again)).action.observation_id == "next"
                again.cancel()


async def test_a_robot_comes_back_while_its_old_stream_is_still_there() -> None:
    """What it asks anew is answered on the new stream; the old one's end takes nothing along."""
    engine = ScriptedEngine()
    engine.is_open.clear()
    async with (
        running_server(settings(), make_engine=lambda: engine, policy=FifoPolicy()) as running,
        greeted(running, "r1") as old,
    ):
        await old.write(ask("before"))
        await until(lambda: running.server.dispatcher.num_live == 1)
        async with greeted(running, "r1") as new:
            await new.write(ask("before"))
            await new.write(ask("after"))
            await until(lambda: running.server.dispatcher.num_live == 2)
            old.cancel()
            await until(lambda: running.server.num_open_sessions == 1)
            assert running.server.dispatcher.num_live == 2
            engine.is_open.set()
            told = [(await answer(new)).action.observation_id for _ in range(2)]
            assert told == ["before", "after"]


async def test_closing_a_client_whose_server_is_dead_ends_its_call() -> None:
    """Not after the budget: at once, with a word that it was closed."""
    async with running_server(
        settings(), make_engine=ScriptedEngine, policy=FifoPolicy()
    ) as running:
        with BlackHole(running.server.port) as hole:
            client = RobotClient.connect(hole.address, robot_id="r1")
            seen = Observation("o", task="go")
            await asyncio.to_thread(client.next_action, seen, 30.0)
            hole.holds_back = True
            waiting = asyncio.ensure_future(
                asyncio.to_thread(client.next_action, Observation("p", task="go"), 3_600.0)
            )
            await asyncio.sleep(0)
            await asyncio.to_thread(client.close)
            with pytest.raises(CallError) as caught:
                await waiting
            assert isinstance(caught.value, UnavailableError)


_READER = """
import sys
import grpc
from headway.v1 import robot_pb2, robot_pb2_grpc

with grpc.insecure_channel(sys.argv[1]) as channel:
    stub = robot_pb2_grpc.RobotServiceStub(channel)
    for piece in stub.Generate(robot_pb2.GenerateRequest(prompt="once", max_tokens=4000)):
        print("piece", flush=True)
"""


async def test_a_client_that_is_killed_gives_its_memory_back() -> None:
    """Kill -9 in the middle of a text: its slot and its KV are free by the end of the step."""
    engine = ScriptedEngine()
    engine.pace = asyncio.Semaphore(5)
    policy = Scheduler(scheduler_config(settings()))
    async with running_server(settings(), make_engine=lambda: engine, policy=policy) as running:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _READER, running.server.address),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        assert process.stdout is not None
        assert await process.stdout.readline() == b"piece\n"
        process.kill()
        await process.wait()
        engine.pace.release()
        await until(lambda: running.server.dispatcher.num_live == 0)
        (replica,) = policy.snapshot(time.monotonic_ns()).replicas
        assert (replica.num_running, replica.blocks_held) == (0, 0)


# --- cancels ---


async def test_a_hundred_cancels_at_any_stage_leave_nothing() -> None:
    """Waiting, reading, decoding, at the last token, after the end: all is as before."""
    rng = random.Random(3)
    config = simulated(0.002, actions__chunk_steps=5)
    records: list[dict[str, Any]] = []
    policy = Scheduler(scheduler_config(config), log=records.append)
    async with running_server(config, policy=policy) as running:

        async def one(number: int) -> str:
            seen = observation(f"o{number}", budget_s=20.0)
            call = asyncio.ensure_future(running.next_action(seen, robot_id=f"r{number}"))
            done, _ = await asyncio.wait({call}, timeout=rng.uniform(0.0, 0.06))
            if not done:
                call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            return "cancelled" if call.cancelled() else "ok"

        fates = Counter(await asyncio.gather(*(one(number) for number in range(100))))
        assert fates["cancelled"] > 20
        await until(lambda: running.server.num_open_calls == 0)
        assert running.server.dispatcher.num_live == 0
        (replica,) = policy.snapshot(time.monotonic_ns()).replicas
        assert (replica.num_running, replica.blocks_held) == (0, 0)
        assert not running.server._robots._requests._live
    assert verify(records) == []


# --- load ---


async def test_what_is_over_before_its_turn_is_never_executed() -> None:
    """An engine that hangs with another one's step: refused at its deadline, unexecuted."""
    engine = ScriptedEngine()
    async with running_server(settings(), make_engine=lambda: engine) as running:
        engine.is_open.clear()
        first = asyncio.ensure_future(running.next_action(observation("first", budget_s=60.0)))
        await engine.is_executing.wait()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.next_action(observation("late", budget_s=0.3), robot_id="r2")
        assert isinstance(error_from_rpc(caught.value), DeadlineMissedError | RejectedError)
        executed = set(engine.executed)
        engine.is_open.set()
        assert (await first).observation_id == "first"
        assert set(engine.executed) == executed
        assert len(executed) == 1


async def test_health_answers_while_a_step_takes_for_ever() -> None:
    """The loop never waits for an engine."""
    engine = ScriptedEngine()
    engine.is_open.clear()
    async with running_server(
        settings(), make_engine=lambda: engine, policy=FifoPolicy()
    ) as running:
        call = asyncio.ensure_future(running.next_action(observation("slow", budget_s=60.0)))
        await engine.is_executing.wait()
        stub: Any = HealthStub(running.channel)
        for _ in range(5):
            told = await stub.Check(health_pb2.HealthCheckRequest(), timeout=30)
            assert told.status == health_pb2.HealthCheckResponse.SERVING
        assert not call.done()
        engine.is_open.set()
        await call


async def test_eight_robots_at_a_slow_engine() -> None:
    """One at a time, 4 steps of 40 ms each, 0.5 s: three fit, the others are told at once."""
    config = simulated(0.04, scheduler__max_running=1)
    async with running_server(config) as running:
        fates = Counter(
            await asyncio.gather(
                *(
                    outcome(
                        running.next_action(observation(f"o{n}", budget_s=0.5), robot_id=f"r{n}")
                    )
                    for n in range(8)
                )
            )
        )
    # 0.5 / 0.16 is 3.1, less what margins keep; a machine that is held up may miss one.
    assert 1 <= fates["ok"] + fates["DEADLINE_MISSED"] <= 3
    assert fates["LATE"] == 8 - fates["ok"] - fates["DEADLINE_MISSED"]


async def test_ten_times_too_much_is_accounted_for_everywhere() -> None:
    """What clients were told, what the server counts and the decision log are one story."""
    config = simulated(0.02, scheduler__max_running=4)
    records: list[dict[str, Any]] = []
    policy = Scheduler(scheduler_config(config), log=records.append)
    async with running_server(config, policy=policy) as running:
        fates = Counter(
            await asyncio.gather(
                *(
                    outcome(
                        running.next_action(observation(f"o{n}", budget_s=0.2), robot_id=f"r{n}")
                    )
                    for n in range(300)
                )
            )
        )
        status = await running.operations.GetStatus(operations_pb2.GetStatusRequest())
    (counted,) = status.classes
    refused = {one.reason: one.count for one in counted.rejected if one.count}
    assert fates["ok"] == counted.completed
    assert fates["LATE"] == refused.pop("LATE")
    assert refused == {}
    missed = fates["DEADLINE_MISSED"] + fates["DEADLINE_EXCEEDED"]
    assert counted.missed == missed
    assert sum(fates.values()) == 300 == counted.completed + counted.missed + fates["LATE"]
    assert fates["LATE"] > 100
    logged = Counter(record["decision"] for record in records if record["kind"] == "submit")
    assert logged == {"ADMITTED": counted.admitted, "LATE": fates["LATE"]}
    assert verify(records) == []


async def test_calls_beyond_the_most_never_break_the_counter() -> None:
    """Three hundred at once at a server for eight: never above, never below, and back to none."""
    engine = ScriptedEngine()
    engine.is_open.clear()
    config = settings(server__max_calls=8)
    async with running_server(config, make_engine=lambda: engine, policy=FifoPolicy()) as running:
        seen: list[int] = []
        calls = [
            asyncio.ensure_future(
                outcome(running.next_action(observation(f"o{n}", budget_s=60.0), robot_id=f"r{n}"))
            )
            for n in range(300)
        ]
        while sum(call.done() for call in calls) < 292:
            seen.append(running.server.num_open_calls)
            await asyncio.sleep(0)
        engine.is_open.set()
        fates = Counter(await asyncio.gather(*calls))
        await until(lambda: running.server.num_open_calls == 0)
    assert fates == {"ok": 8, "QUEUE_FULL": 292}
    assert min(seen) >= 0


async def test_ignoring_the_hints_gains_nothing() -> None:
    """A quota of 400 tokens: fifty requests at once get what fits into it, and no more."""
    tenants = [{"name": "default", "tokens_per_s": 0.001, "burst_tokens": 400}]
    config = simulated(0.001, tenants=tenants, scheduler__prefix_cache=False)
    async with running_server(config) as running:
        fates = Counter(
            await asyncio.gather(
                *(
                    outcome(
                        running.next_action(observation(f"o{n}", budget_s=30.0), robot_id=f"r{n}")
                    )
                    for n in range(50)
                )
            )
        )
        status = await running.operations.GetStatus(operations_pb2.GetStatusRequest())
    assert set(fates) == {"ok", "QUOTA"}
    (counted,) = status.classes
    # Each is its prompt, and twice its four tokens of output: the default weights.
    weight = counted.prompt_tokens / fates["ok"] + 2 * 4
    assert fates["ok"] == 400 // weight


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_connections", [50, 1000])
async def test_a_tenant_with_many_connections_takes_nobodys_share(
    num_connections: int, tmp_path: Path
) -> None:
    """Each of them asks again as soon as it is told; the one robot of another tenant asks thirty
    times, one after the other, and is answered each time.
    """
    keys = KeyFile(tmp_path / "keys.json")
    config = simulated(
        0.005,
        scheduler__max_running=8,
        server__development=False,
        server__keys_file=str(keys.path),
        tenants=[{"name": "many"}, {"name": "one"}],
    )
    many, one = (Credentials(api_key=keys.issue(name)).metadata for name in ("many", "one"))
    fates: Counter[str] = Counter()
    is_over = asyncio.Event()
    async with running_server(config) as running:

        async def flood(number: int) -> None:
            count = 0
            async with grpc.aio.insecure_channel(
                running.server.address,
                # A connection of its own, and not one that is shared.
                options=[*channel_options(), ("grpc.use_local_subchannel_pool", 1)],
            ) as channel:
                stub: Any = RobotServiceStub(channel)
                while not is_over.is_set():
                    count += 1
                    request = robot_pb2.NextActionRequest(
                        robot_id=f"r{number}",
                        embodiment="diff_drive",
                        observation=observation(f"o{count}", budget_s=2.0),
                    )
                    fates[await outcome(stub.NextAction(request, metadata=many))] += 1

        flooding = [asyncio.create_task(flood(number)) for number in range(num_connections)]
        await until(lambda: fates["ok"] > 0)
        told = [
            await outcome(running.next_action(observation(f"q{n}", budget_s=20.0), metadata=one))
            for n in range(30)
        ]
        is_over.set()
        await asyncio.gather(*flooding)
    assert told == ["ok"] * 30
    assert fates["ok"] > 0


async def test_without_any_engine_everybody_is_told_so() -> None:
    """NO_ENGINE with a hint, for every kind of call: never silence."""
    engine = ScriptedEngine()
    config = settings(engine__restart_backoff_s=3600.0, engine__restart_backoff_max_s=3600.0)
    async with (
        running_server(config, make_engine=lambda: engine) as running,
        greeted(running, "r9") as stream,
    ):
        engine.lose("gone")
        working = asyncio.ensure_future(outcome(running.next_action(observation("running"))))
        assert await working == "ENGINE_LOST"
        await until(lambda: not running.server.dispatcher.replicas[0].is_up)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.next_action(observation("o"))
        no = error_from_rpc(caught.value)
        assert (type(no), no.reason) == (UnavailableError, Reason.NO_ENGINE)
        assert no.retry_after_s is not None
        await stream.write(ask("s"))
        told = (await answer(stream)).rejection
        assert told.reason == robot_pb2.REJECT_REASON_NO_ENGINE
        texts = running.robots.Generate(robot_pb2.GenerateRequest(prompt="x", max_tokens=2))
        assert (await read_error(texts)).reason is Reason.NO_ENGINE


@pytest.fixture
def _quiet() -> Iterator[None]:
    """No log below errors: what is captured of it would be the memory that is measured."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    yield
    structlog.reset_defaults()


@pytest.mark.soak
@pytest.mark.usefixtures("_quiet")
@pytest.mark.timeout(1800)
async def test_streams_that_come_and_go_leave_no_memory_behind() -> None:
    """100,000 finished and cancelled streams: objects, tasks and files stay level, and memory
    grows no faster than that of gRPC alone, which keeps some 200 bytes of each.
    """
    process = psutil.Process(os.getpid())

    async def grown(one: Callable[[int], Awaitable[None]], is_idle: Callable[[], bool]) -> float:
        """Bytes a stream that 80,000 add, once 20,000 have warmed everything up."""
        levels: list[tuple[int, int, int, int]] = []
        for part in range(5):
            for first in range(part * 20_000, (part + 1) * 20_000, 20):
                await asyncio.gather(*(one(first + n) for n in range(20)))
            await until(is_idle)
            gc.collect()
            objects, tasks = len(gc.get_objects()), len(asyncio.all_tasks())
            levels.append((process.memory_info().rss, process.num_fds(), tasks, objects))
        first_level, last = levels[0], levels[-1]
        assert last[1:3] <= first_level[1:3], levels
        # One more for every ten streams would be eight thousand.
        assert last[3] - first_level[3] < 8_000, levels
        return (last[0] - first_level[0]) / 80_000

    # Nothing but the product: what stands in for it in other tests notes down all it does.
    async with running_server(simulated(0.0, actions__chunk_steps=1)) as running:

        async def session(number: int) -> None:
            async with greeted(running, f"r{number % 500}") as stream:
                await stream.write(ask(f"o{number}"))
                if number % 2:
                    assert (await answer(stream)).HasField("action")

        ours = await grown(session, lambda: running.server.num_open_calls == 0)
    bare = await grown_bare(grown)
    assert ours <= 1.5 * bare + 50, (ours, bare)


async def grown_bare(
    grown: Callable[[Callable[[int], Awaitable[None]], Callable[[], bool]], Awaitable[float]],
) -> float:
    """The same of a server that sends back what it reads."""

    async def echo(_: object, context: Any) -> None:
        while (data := await context.read()) is not grpc.aio.EOF:
            await context.write(data)

    server = grpc.aio.server()
    method: Any = grpc.stream_stream_rpc_method_handler(echo)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("bare", {"Echo": method}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call: Any = channel.stream_stream("/bare/Echo")

        async def stream(number: int) -> None:
            opened = call()
            await opened.write(b"x" * 60)
            await opened.read()
            await opened.write(b"y" * 200)
            if number % 2:
                await opened.read()
            opened.cancel()

        found = await grown(stream, lambda: True)
    await server.stop(0)
    return found
