"""What the service adds to bare gRPC: NextAction and Session on an engine that costs nothing.

Two server processes and this client. One server is `cloud.server` with the
production scheduler and an engine whose steps take no time; the other echoes
the same messages with grpc.aio and nothing else. Both are measured in turn in
one run, so that their ratios mean something on any machine.

The chunk is one step of two values: two tokens, hence two turns of the loop
plan -> execute -> commit. A larger chunk costs one more turn a token, which is
the scheduler's and the engine's affair; its figure is printed beside.
"""

import argparse
import asyncio
import gc
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import grpc
import psutil
from rich.console import Console
from rich.table import Table

from headway.rpc.channel import channel_options, server_options
from headway.v1 import robot_pb2
from headway.v1.robot_pb2_grpc import (
    RobotServiceStub,
    add_RobotServiceServicer_to_server,
)

CALLERS = (1, 64)
WARM_UP_S = 1.0
# Each measurement is repeated, bare and product in turn: what else the machine
# does then hits both.
ROUNDS = 3


@dataclass
class Measured:
    """One server under one kind of load, all rounds together."""

    calls: int = 0
    wall_s: float = 0.0
    server_cpu_s: float = 0.0
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
    def p50_ms(self) -> float:
        """Median time from call to answer."""
        return 1e3 * median(self.latencies_s)


def observation(number: int, budget_s: int) -> robot_pb2.Observation:
    """What a small mobile robot sends: pose, goal and battery."""
    message = robot_pb2.Observation(observation_id=f"obs-{number}", task="drive to the goal")
    for source, values in (
        ("odometry", {"x": 12.375, "y": -3.25, "heading": 1.571, "speed": 0.5}),
        ("goal", {"distance": 4.125, "bearing": -0.25}),
        ("power", {"battery": 0.875}),
    ):
        state = message.state.add(name=source)
        for name, value in values.items():
            state.values.add(name=name, value=value)
    message.budget.seconds = budget_s
    return message


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
    settings = load_settings(
        None,
        {
            "server.port": 0,
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

    def close(self) -> None:
        """Ends it."""
        self._process.communicate()


@asynccontextmanager
async def callers(port: int, num_callers: int, kind: str) -> AsyncIterator[list[Any]]:
    """`num_callers` functions, each of which makes one call: unary, session or refused."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=channel_options()) as channel:
        stub: Any = RobotServiceStub(channel)
        makers = {"unary": _unary, "refused": _refused, "session": _session}
        yield [await makers[kind](stub, number) for number in range(num_callers)]


async def _unary(stub: Any, robot: int) -> Callable[[int], Awaitable[None]]:
    async def call(number: int) -> None:
        request = robot_pb2.NextActionRequest(
            robot_id=f"robot-{robot}",
            embodiment="diff_drive",
            observation=observation(number, 10),
        )
        response = await stub.NextAction(request, timeout=10)
        assert response.action.steps

    return call


async def _refused(stub: Any, robot: int) -> Callable[[int], Awaitable[None]]:
    async def call(number: int) -> None:
        request = robot_pb2.NextActionRequest(
            robot_id=f"robot-{robot}",
            embodiment="diff_drive",
            observation=observation(number, 0),
        )
        request.observation.budget.nanos = 1  # No engine is that fast: LATE.
        answer = stub.NextAction(request, timeout=10)
        code = await answer.code()
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED, code

    return call


async def _session(stub: Any, robot: int) -> Callable[[int], Awaitable[None]]:
    stream = stub.Session()
    hello = robot_pb2.Hello(robot_id=f"robot-{robot}", embodiment="diff_drive", rate_hz=10)
    await stream.write(robot_pb2.SessionRequest(hello=hello))
    assert (await stream.read()).HasField("settings")

    async def call(number: int) -> None:
        await stream.write(robot_pb2.SessionRequest(observation=observation(number, 10)))
        while not (answer := await stream.read()).HasField("action"):
            assert not answer.HasField("rejection"), answer.rejection

    return call


async def measure(server: ServerProcess, kind: str, num_callers: int, seconds: float) -> Measured:
    """Calls as fast as `num_callers` can, each waiting for its answer."""
    measured = Measured()
    async with callers(server.port, num_callers, kind) as calls:

        async def one(call: Callable[[int], Awaitable[None]], until: float, keep: bool) -> None:
            number = 0
            while (start := time.perf_counter()) < until:
                number += 1
                await call(number)
                if keep:
                    measured.latencies_s.append(time.perf_counter() - start)

        async def all_until(until: float, keep: bool) -> None:
            await asyncio.gather(*(one(call, until, keep) for call in calls))

        await all_until(time.perf_counter() + WARM_UP_S, keep=False)
        cpu_s, start = server.cpu_s(), time.perf_counter()
        await all_until(start + seconds, keep=True)
        measured.wall_s = time.perf_counter() - start
        measured.server_cpu_s = server.cpu_s() - cpu_s
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
            total.latencies_s += one.latencies_s
    return sums


def mark(is_met: bool, goal: str) -> str:
    """Goal and verdict."""
    return f"[green]{goal} met[/]" if is_met else f"[red]{goal} MISSED[/]"


async def run(seconds: float, chunk_steps: int) -> None:
    """Measures and prints."""
    bare, product = ServerProcess("bare", 1), ServerProcess("product", 1)
    larger = ServerProcess("product", chunk_steps)
    table = Table(title="NextAction on an engine that costs nothing, against bare grpc.aio")
    for column in ("method", "callers", "bare /s", "headway /s", "ratio", "added CPU", "added p50"):
        table.add_column(column, justify="left" if column == "method" else "right")
    table.add_column("goals")
    try:
        for kind, least in (("unary", 0.5), ("session", 0.3)):
            for num_callers in CALLERS:
                base, ours = await compare(bare, product, kind, num_callers, seconds)
                ratio = ours.per_s / base.per_s
                cpu_us, p50_ms = ours.cpu_us - base.cpu_us, ours.p50_ms - base.p50_ms
                goals = [mark(ratio >= least, f"≥ {least}"), mark(cpu_us <= 150, "≤ 150 µs")]
                if num_callers == 1:
                    goals.append(mark(p50_ms <= 0.3, "≤ 0.3 ms"))
                table.add_row(
                    kind,
                    str(num_callers),
                    f"{base.per_s:,.0f}",
                    f"{ours.per_s:,.0f}",
                    f"{ratio:.2f}",
                    f"{cpu_us:.0f} µs",
                    f"{p50_ms:.2f} ms",
                    ", ".join(goals),
                )
        refused = await measure(product, "refused", 64, seconds)
        table.add_row(
            "refusals (LATE)", "64", "", f"{refused.per_s:,.0f}", "",
            f"{refused.cpu_us:.0f} µs in all", "", mark(refused.per_s >= 3000, "≥ 3,000 /s"),
        )  # fmt: skip
        more = await measure(larger, "unary", 64, seconds)
        table.add_row(
            f"unary, {2 * chunk_steps} tokens", "64", "", f"{more.per_s:,.0f}", "",
            f"{more.cpu_us:.0f} µs in all", "", "(no goal: its turns are the scheduler's)",
        )  # fmt: skip
    finally:
        for server in (bare, product, larger):
            server.close()
    Console().print(table)


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
