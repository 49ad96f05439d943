"""What the service adds to bare gRPC: NextAction and Session on an engine that costs nothing.

Two server processes, and this process as the client of both. One server is
`cloud.server` with the production scheduler, its metrics and log lines, and an
engine whose steps take no time; the other echoes messages of the same size with
grpc.aio and nothing else. Both are measured in turn in one run, so that their
ratios mean something on any machine.

The client sends bytes that were made before, so that the servers are what limits
it; no two observations in a row are alike. An added time is the product's less
the bare server's.

The chunk is one step of two values: two tokens, hence two turns of the loop
plan -> execute -> commit for a call that is alone. A larger chunk costs one more
turn a token, which is the scheduler's and the engine's affair; its figure is
printed below.

Calls that are there at the same time share their turns, and with them what a
turn costs. On an engine that costs nothing streams do and unary calls do not;
why is not proven, perhaps because grpc.aio takes those in one by one. The turns
a call are printed below, too.
"""

import argparse
import asyncio
import gc
import itertools
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any, TypeAlias

import grpc
import psutil
from rich.console import Console
from rich.table import Table

from headway.rpc.channel import channel_options, server_options
from headway.v1 import operations_pb2, robot_pb2
from headway.v1.operations_pb2_grpc import OperationsServiceStub
from headway.v1.robot_pb2_grpc import add_RobotServiceServicer_to_server

CALLERS = (1, 64)
# Of the bare server's throughput.
LEAST_RATIO = {"unary": 0.5, "session": 0.3}
WARM_UP_S = 1.0
# Each measurement is repeated, bare and product in turn: what else the machine
# does then hits both.
ROUNDS = 3
# Made beforehand for each robot, and sent in turn; each time under an id of its own,
# since the same observation once more would be no new work.
NUM_REQUESTS = 50
PLACE_OF_ID = b"obs-0000000000"
IDS = itertools.count(1)
_SERVICE = "/headway.v1.RobotService/"


@dataclass
class Measured:
    """One server under one kind of load, all rounds together."""

    calls: int = 0
    wall_s: float = 0.0
    server_cpu_s: float = 0.0
    turns: int = 0
    latencies_s: list[float] = field(default_factory=list)

    @property
    def per_s(self) -> float:
        """Answers a second."""
        return self.calls / self.wall_s

    @property
    def cpu_us(self) -> float:
        """CPU time of the server process, per call."""
        return 1e6 * self.server_cpu_s / self.calls

    @property
    def turns_a_call(self) -> float:
        """Turns of plan -> execute -> commit, per call."""
        return self.turns / self.calls

    @property
    def p50_ms(self) -> float:
        """Median time from call to answer."""
        return 1e3 * median(self.latencies_s)


def observation(number: int, budget_s: int) -> robot_pb2.Observation:
    """What a small mobile robot sends: pose, goal and battery."""
    message = robot_pb2.Observation(observation_id=PLACE_OF_ID.decode(), task="drive to the goal")
    moved = 0.013 * number
    for source, values in (
        ("odometry", {"x": 12.375 + moved, "y": -3.25 + moved, "heading": 1.571, "speed": 0.5}),
        ("goal", {"distance": 4.125 + moved, "bearing": -0.25 + moved}),
        ("power", {"battery": 0.875}),
    ):
        state = message.state.add(name=source)
        for name, value in values.items():
            state.values.add(name=name, value=value)
    message.budget.seconds = budget_s
    return message


def requests_of(robot: int, kind: str) -> list[bytes]:
    """What one robot asks, in turn: for a stream, for a call, or for a call to refuse."""
    messages: list[bytes] = []
    for number in range(NUM_REQUESTS):
        seen = observation(number, 10)
        if kind == "session":
            messages.append(robot_pb2.SessionRequest(observation=seen).SerializeToString())
            continue
        if kind == "refused":
            seen.budget.Clear()
            seen.budget.nanos = 1  # No engine is that fast: LATE.
        request = robot_pb2.NextActionRequest(
            robot_id=f"robot-{robot}", embodiment="diff_drive", observation=seen
        )
        messages.append(request.SerializeToString())
    return messages


def numbered(request: bytes) -> bytes:
    """The request with an id that no other one has."""
    return request.replace(PLACE_OF_ID, b"obs-%010d" % next(IDS))


# --- The two servers, each in a process of its own. ---


class Echo:
    """Answers every observation with the same chunk."""

    def __init__(self, chunk_steps: int) -> None:
        self._response = robot_pb2.NextActionResponse()
        chunk = self._response.action
        chunk.observation_id = "obs-1234"
        chunk.names.extend(["linear_velocity", "angular_velocity"])
        for _ in range(chunk_steps):
            chunk.steps.add(values=[0.5, 0.25])
        chunk.step_period.nanos = 100_000_000
        for name in ("queue", "prefill", "decode", "total"):
            getattr(chunk.timings, name).nanos = 123_456
        chunk.model = "tiny"

    async def NextAction(  # noqa: N802
        self, request: robot_pb2.NextActionRequest, context: Any
    ) -> robot_pb2.NextActionResponse:
        """The chunk."""
        return self._response

    async def Generate(  # noqa: N802
        self, request: robot_pb2.GenerateRequest, context: Any
    ) -> None:
        """Not measured."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "not measured")

    async def Session(  # noqa: N802
        self, request_iterator: AsyncIterator[robot_pb2.SessionRequest], context: Any
    ) -> AsyncIterator[robot_pb2.SessionResponse]:
        """Settings for the hello, and the chunk for everything else."""
        response = robot_pb2.SessionResponse(action=self._response.action)
        async for request in request_iterator:
            if request.HasField("hello"):
                yield robot_pb2.SessionResponse(settings=robot_pb2.SessionSettings())
            else:
                yield response


async def serve_bare(chunk_steps: int) -> None:
    """Runs the echo until standard input ends."""
    server = grpc.aio.server(options=server_options())
    handlers: Any = Echo(chunk_steps)
    add_RobotServiceServicer_to_server(handlers, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)


async def serve_product(chunk_steps: int) -> None:
    """Runs the whole server, logging to standard error, until standard input ends."""
    from cloud.server.app import Server
    from headway.config import load_settings
    from headway.telemetry import configure_logging

    free = ("t0_s", "prefill_token_s", "pair_s", "decode_s", "kv_token_s")
    with socket.create_server(("127.0.0.1", 0)) as holder:
        metrics_port = holder.getsockname()[1]
    settings = load_settings(
        None,
        {
            "server.port": 0,
            "server.development": True,
            "server.metrics_port": metrics_port,
            "engine.kind": "simulated",
            "actions.chunk_steps": chunk_steps,
            **{f"engine.simulated.{name}": 0.0 for name in free},
        },
    )
    configure_logging("json", "info")
    server = Server(settings)
    await server.start()
    gc.collect()
    gc.freeze()  # As `headway serve` does.
    print(server.port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(grace_s=0)


# --- The client. ---

Call: TypeAlias = Callable[[int], Awaitable[None]]
# An answer has more: names, steps, period, timings and model.
ANSWER_BYTES = 60


class ServerProcess:
    """One of the two, running."""

    def __init__(self, kind: str, chunk_steps: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", kind, "--chunk-steps", str(chunk_steps)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        stdout = self._process.stdout
        assert stdout is not None
        line = stdout.readline()
        if not line:
            raise SystemExit(f"the {kind} server did not start")
        self.port = int(line)
        self._usage = psutil.Process(self._process.pid)

    def cpu_s(self) -> float:
        """CPU time that the process has used so far."""
        times = self._usage.cpu_times()
        return float(times.user + times.system)

    async def num_turns(self) -> int:
        """Steps of its engine so far; 0 where it has none."""
        address, options = f"127.0.0.1:{self.port}", channel_options()
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            stub: Any = OperationsServiceStub(channel)
            try:
                status = await stub.GetStatus(operations_pb2.GetStatusRequest())
            except grpc.aio.AioRpcError:
                return 0
        return sum(replica.steps for replica in status.replicas)

    def close(self) -> None:
        """Ends it."""
        self._process.communicate()


@asynccontextmanager
async def callers(port: int, num_callers: int, kind: str) -> AsyncIterator[list[Call]]:
    """`num_callers` functions, each of which makes one call: unary, session or refused."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=channel_options()) as channel:
        makers = {"unary": _unary, "refused": _refused, "session": _session}
        yield [await makers[kind](channel, number) for number in range(num_callers)]


async def _unary(channel: grpc.aio.Channel, robot: int) -> Call:
    ask: Any = channel.unary_unary(_SERVICE + "NextAction")
    requests = requests_of(robot, "unary")

    async def call(number: int) -> None:
        # The bare server's answer is of the same size.
        assert len(await ask(numbered(requests[number % NUM_REQUESTS]), timeout=10)) > ANSWER_BYTES

    return call


async def _refused(channel: grpc.aio.Channel, robot: int) -> Call:
    ask: Any = channel.unary_unary(_SERVICE + "NextAction")
    requests = requests_of(robot, "refused")

    async def call(number: int) -> None:
        code = await ask(numbered(requests[number % NUM_REQUESTS]), timeout=10).code()
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED, code

    return call


async def _session(channel: grpc.aio.Channel, robot: int) -> Call:
    open_session: Any = channel.stream_stream(_SERVICE + "Session")
    requests = requests_of(robot, "session")
    stream = open_session()
    hello = robot_pb2.Hello(robot_id=f"robot-{robot}", embodiment="diff_drive", rate_hz=10)
    await stream.write(robot_pb2.SessionRequest(hello=hello).SerializeToString())
    answer = robot_pb2.SessionResponse.FromString(await stream.read())
    assert answer.HasField("settings"), answer

    async def call(number: int) -> None:
        await stream.write(numbered(requests[number % NUM_REQUESTS]))
        # What is shorter is a heartbeat: every two seconds, where nobody is refused.
        while len(answer := await stream.read()) <= ANSWER_BYTES:
            heartbeat = robot_pb2.SessionResponse.FromString(answer)
            assert heartbeat.HasField("heartbeat"), heartbeat

    return call


async def measure(server: ServerProcess, kind: str, num_callers: int, seconds: float) -> Measured:
    """Calls as fast as `num_callers` can, each waiting for its answer."""
    measured = Measured()
    async with callers(server.port, num_callers, kind) as calls:

        async def one(call: Call, until: float, keep: bool) -> None:
            number = 0
            while (start := time.perf_counter()) < until:
                number += 1
                await call(number)
                if keep:
                    measured.latencies_s.append(time.perf_counter() - start)

        async def all_until(until: float, keep: bool) -> None:
            await asyncio.gather(*(one(call, until, keep) for call in calls))

        await all_until(time.perf_counter() + WARM_UP_S, keep=False)
        turns = await server.num_turns()
        cpu_s, start = server.cpu_s(), time.perf_counter()
        await all_until(start + seconds, keep=True)
        measured.wall_s = time.perf_counter() - start
        measured.server_cpu_s = server.cpu_s() - cpu_s
        measured.turns = await server.num_turns() - turns
    measured.calls = len(measured.latencies_s)
    return measured


async def compare(
    bare: ServerProcess, product: ServerProcess, kind: str, num_callers: int, seconds: float
) -> tuple[Measured, Measured]:
    """(bare, product), in turn, several rounds of each."""
    sums = (Measured(), Measured())
    for _ in range(ROUNDS):
        for server, total in zip((bare, product), sums, strict=True):
            one = await measure(server, kind, num_callers, seconds / ROUNDS)
            total.calls += one.calls
            total.wall_s += one.wall_s
            total.server_cpu_s += one.server_cpu_s
            total.turns += one.turns
            total.latencies_s += one.latencies_s
    return sums


@dataclass
class Goal:
    """One line of the answer."""

    what: str
    wanted: str
    measured: str
    is_met: bool
    beside: str


def goals_of(kind: str, num_callers: int, bare: Measured, ours: Measured) -> list[Goal]:
    """How one kind of call stands against what is wanted of it."""
    load = f"{kind}, {num_callers} caller{'s' * (num_callers > 1)}"
    least = LEAST_RATIO[kind]
    ratio = ours.per_s / bare.per_s
    cpu_us, p50_ms = ours.cpu_us - bare.cpu_us, ours.p50_ms - bare.p50_ms
    goals = [
        Goal(
            f"{load}: calls/s against bare",
            f">= {least}",
            f"{ratio:.2f}",
            ratio >= least,
            f"{ours.per_s:,.0f} of {bare.per_s:,.0f}",
        ),
        Goal(
            f"{load}: added CPU a call",
            "<= 150 µs",
            f"{cpu_us:.0f} µs",
            cpu_us <= 150,
            f"{ours.cpu_us:.0f} - {bare.cpu_us:.0f}",
        ),
    ]
    if num_callers == 1:
        beside = f"{ours.p50_ms:.2f} - {bare.p50_ms:.2f}"
        what = f"{load}: added p50"
        goals.append(Goal(what, "<= 0.3 ms", f"{p50_ms:.2f} ms", p50_ms <= 0.3, beside))
    return goals


def table_of(goals: Sequence[Goal]) -> Table:
    """A row a goal."""
    table = Table(title="The service on an engine that costs nothing, against bare grpc.aio")
    for column in ("goal", "wanted", "measured", "", "of which"):
        table.add_column(column, justify="right" if column == "measured" else "left", no_wrap=True)
    for goal in goals:
        verdict = "[green]met[/]" if goal.is_met else "[red]MISSED[/]"
        table.add_row(goal.what, goal.wanted, goal.measured, verdict, goal.beside)
    return table


async def run(seconds: float, chunk_steps: int) -> None:
    """Measures and prints."""
    load_before = os.getloadavg()[0]
    bare, product = ServerProcess("bare", 1), ServerProcess("product", 1)
    larger = ServerProcess("product", chunk_steps)
    goals: list[Goal] = []
    turns: list[str] = []
    try:
        for kind in LEAST_RATIO:
            for num_callers in CALLERS:
                measured = await compare(bare, product, kind, num_callers, seconds)
                goals += goals_of(kind, num_callers, *measured)
                turns.append(f"{kind}, {num_callers}: {measured[1].turns_a_call:.2f}")
        refused = await measure(product, "refused", 64, seconds)
        more = await measure(larger, "unary", 64, seconds)
    finally:
        for server in (bare, product, larger):
            server.close()
    per_s = refused.per_s
    goals.append(
        Goal(
            "refusals (LATE), 64 callers",
            ">= 3,000 /s",
            f"{per_s:,.0f} /s",
            per_s >= 3000,
            f"{refused.cpu_us:.0f} µs CPU each",
        )
    )
    Console(width=max(100, Console().width)).print(table_of(goals))
    print(
        f"Turns of the engine a call: {'; '.join(turns)}.\n"
        f"A chunk of {2 * chunk_steps} tokens, 64 callers: {more.per_s:,.0f} /s, "
        f"{more.cpu_us:.0f} µs CPU each.\n"
        f"{os.cpu_count()} cores; load average {load_before:.1f} before and "
        f"{os.getloadavg()[0]:.1f} after. A load of others takes from the figures in CPU too."
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each measurement")
    parser.add_argument("--chunk-steps", type=int, default=10, help="of the larger chunk")
    parser.add_argument("--serve", choices=("bare", "product"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve == "bare":
        asyncio.run(serve_bare(options.chunk_steps))
    elif options.serve == "product":
        asyncio.run(serve_product(options.chunk_steps))
    else:
        asyncio.run(run(options.seconds, options.chunk_steps))


if __name__ == "__main__":
    main()
