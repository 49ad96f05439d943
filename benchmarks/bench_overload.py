"""The service live, on the real-time simulated engine, from half the load to ten times it.

First robots at half of what the engine can carry, alone and then beside batch work that
takes whatever is left: how many of them are still admitted, how much later they are
answered, and how much batch work gets done; then the same for several values of
`scheduler.max_step_s`. Then robots alone at 0.5 to 10 times that load: what is completed,
what is refused and how soon the refusal is there.

Every run's decision log is checked by the independent verifier. Times are taken at the
client, in another process than the server, from the instant at which a robot meant to ask.
Plots go to --out.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# gRPC's own words of streams that are cut at the end of a run.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter
from rich.console import Console
from rich.table import Table

from edge.network_margin import NetworkMargin
from headway.rpc.channel import channel_options
from headway.rpc.status import error_from_rpc
from headway.v1 import operations_pb2, robot_pb2
from headway.v1.operations_pb2_grpc import OperationsServiceStub
from headway.v1.robot_pb2_grpc import RobotServiceStub
from tests.support.verifier import read_log, verify

BUDGET_S = 0.5
MAX_STEP_S = 0.1
TPOT_S = 0.05  # Of robots, by default.
T0_S, PREFILL_TOKEN_S, DECODE_S = 0.025, 0.0001, 0.0025
WARM_UP_S = 2.0
NUM_BATCH_STREAMS = 48
BATCH_TOKENS = 48
# Of what the flooded engine answers: where next to nobody is refused.
NOMINAL = 0.5
LOADS = (0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)
MAX_STEPS_S = (0.05, 0.1, 0.2, 0.4)
# What a fit of a real engine finds; small beside what the machine itself adds.
NOISE = 0.02


# --- The server, in a process of its own. ---


async def serve(engine: str, max_step_s: float, log_path: Path) -> None:
    """Serves until standard input ends, then writes the decision log and step times."""
    from cloud.scheduler.scheduler import Scheduler
    from cloud.server.app import Server
    from cloud.server.assembly import scheduler_config
    from headway.config import load_settings
    from headway.telemetry import configure_logging

    settings = load_settings(
        None,
        {
            "server.port": 0,
            "server.development": True,
            "engine.kind": engine,
            "engine.kv_tokens": 65_536,
            "engine.simulated.t0_s": T0_S,
            "engine.simulated.prefill_token_s": PREFILL_TOKEN_S,
            "engine.simulated.decode_s": DECODE_S,
            "engine.simulated.noise": NOISE,
            "scheduler.max_step_s": max_step_s,
            "actions.chunk_steps": 4,
        },
    )
    configure_logging("json", "error")
    records: list[dict[str, Any]] = []
    server = Server(settings, policy=Scheduler(scheduler_config(settings), log=records.append))
    await server.start()
    print(server.port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(grace_s=5)
    times = server.dispatcher.replicas[0].times
    records.append({"kind": "times", "added": [*times.added_ns], "steps": [*times.engine_ns]})
    with log_path.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record) + "\n")


class Serving:
    """A server under one setting, and its decision log once it has ended."""

    def __init__(self, engine: str, max_step_s: float, folder: Path) -> None:
        self.log_path = folder / f"log-{time.monotonic_ns()}.jsonl"
        self._process = subprocess.Popen(
            [
                *(sys.executable, __file__, "--serve", str(self.log_path)),
                *("--max-step-s", str(max_step_s), "--engine", engine),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        stdout = self._process.stdout
        line = stdout.readline() if stdout is not None else ""
        if not line:
            raise SystemExit("the server did not start")
        self.address = f"127.0.0.1:{int(line)}"

    def close(self) -> None:
        """Ends it, and waits for its log."""
        self._process.communicate()


# --- Its clients. ---


@dataclass
class Run:
    """What robots were answered in one run."""

    load_per_s: float
    seconds: float
    in_time_s: list[float] = field(default_factory=list)
    refusals_s: list[float] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    num_late: int = 0  # Answered past the budget, by the robot's own clock.
    num_missed: int = 0  # Admitted, and then told that it would not be.
    batch_tokens_per_s: float = 0.0
    batch_share: float = 0.0  # Of the steps' time beside robots, what batch work filled.
    margin: NetworkMargin = field(default_factory=NetworkMargin)
    violations: int = 0
    added_ns: Sequence[int] = ()  # Of the latest steps, outside the engine.
    steps_ns: Sequence[int] = ()  # And in it.

    @property
    def num_asked(self) -> int:
        """All of them, each with one fate."""
        return self.num_admitted + len(self.refusals_s)

    @property
    def num_admitted(self) -> int:
        """Completed, late and missed."""
        return len(self.in_time_s) + self.num_late + self.num_missed

    @property
    def goodput_per_s(self) -> float:
        """Answers in time, a second."""
        return len(self.in_time_s) / self.seconds

    @property
    def bad_share(self) -> float:
        """Of the admitted, those whose answer was late or never came."""
        return (self.num_late + self.num_missed) / max(1, self.num_admitted)


def percentile(values: Sequence[float], share: float) -> float:
    """By nearest rank; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


async def one_robot(stub: Any, number: int, seed: int, meant_s: float, run: Run) -> None:
    """One question, and its fate."""
    rng = random.Random(seed * 1_000_003 + number)
    seen = robot_pb2.Observation(observation_id=f"{seed}-{number}", task="drive to the goal")
    odometry = seen.state.add(name="odometry")
    for name in ("x", "y", "heading"):
        odometry.values.add(name=name, value=round(rng.uniform(-9, 9), 3))
    # As the product's client does: what the network takes is not the server's to spend.
    budget_ns = round(BUDGET_S * 1e9)
    seen.budget.FromNanoseconds(budget_ns - run.margin.margin_ns(budget_ns))
    request = robot_pb2.NextActionRequest(
        robot_id=f"robot-{number}", embodiment="diff_drive", observation=seen
    )
    sent_s = time.perf_counter()
    try:
        chunk = (await stub.NextAction(request, timeout=BUDGET_S + 1.0)).action
    except grpc.aio.AioRpcError as error:
        took_s = time.perf_counter() - sent_s
        no = error_from_rpc(error)
        reason = no.reason.value if no.reason is not None else error.code().name
        run.reasons[reason] += 1
        if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
            run.refusals_s.append(took_s)
        else:
            run.num_missed += 1
        return
    round_trip_ns = round((time.perf_counter() - sent_s) * 1e9)
    run.margin.observe(round_trip_ns, chunk.timings.total.ToNanoseconds())
    took_s = time.perf_counter() - meant_s
    # The budget counts from when it was sent: how late this process was is not the server's.
    if round_trip_ns <= budget_ns:
        run.in_time_s.append(took_s)
    else:
        run.num_late += 1


async def robots(address: str, per_s: float, seconds: float, seed: int) -> Run:
    """Open loop: robots ask at Poisson instants, whatever became of the others."""
    run = Run(per_s, seconds)
    rng = random.Random(seed)
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        stub = RobotServiceStub(channel)
        begin_s = time.perf_counter() + 0.1
        at_s = begin_s
        asking: list[asyncio.Task[None]] = []
        while (at_s := at_s + rng.expovariate(per_s)) < begin_s + seconds:
            await asyncio.sleep(max(0.0, at_s - time.perf_counter()))
            asking.append(asyncio.create_task(one_robot(stub, len(asking), seed, at_s, run)))
        await asyncio.gather(*asking)
    return run


@asynccontextmanager
async def batch_work(address: str) -> AsyncIterator[None]:
    """Streams of batch text, a new one for each that ends."""
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        stub: Any = RobotServiceStub(channel)

        async def stream(number: int) -> None:
            text = f"Report {number}: " + "the robot drove on. " * 4
            while True:
                request = robot_pb2.GenerateRequest(
                    prompt=text, max_tokens=BATCH_TOKENS, priority=robot_pb2.PRIORITY_BATCH
                )
                async for _ in stub.Generate(request):
                    pass

        streams = [asyncio.create_task(stream(number)) for number in range(NUM_BATCH_STREAMS)]
        try:
            yield
        finally:
            for one in streams:
                one.cancel()
            await asyncio.gather(*streams, return_exceptions=True)


async def batch_tokens(address: str) -> int:
    """Tokens that batch work has read and written so far."""
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        stub: Any = OperationsServiceStub(channel)
        status = await stub.GetStatus(operations_pb2.GetStatusRequest())
    return sum(
        one.prompt_tokens + one.output_tokens
        for one in status.classes
        if one.request_class == "batch"
    )


async def measure(
    per_s: float,
    seconds: float,
    *,
    seed: int = 1,
    with_batch: bool = False,
    max_step_s: float = MAX_STEP_S,
    engine: str = "simulated",
    folder: Path,
) -> Run:
    """One run against a fresh server."""
    serving = Serving(engine, max_step_s, folder)
    try:
        # Connections, code paths and the scheduler's margin are warm before it counts.
        await robots(serving.address, max(per_s, 5.0), WARM_UP_S, seed + 1000)
        if with_batch:
            async with batch_work(serving.address):
                await asyncio.sleep(2.0)
                tokens, began_s = await batch_tokens(serving.address), time.perf_counter()
                run = await _robots_or_rest(serving.address, per_s, seconds, seed)
                took_s = time.perf_counter() - began_s
                run.batch_tokens_per_s = (await batch_tokens(serving.address) - tokens) / took_s
        else:
            run = await _robots_or_rest(serving.address, per_s, seconds, seed)
    finally:
        await asyncio.to_thread(serving.close)
    *records, times = read_log(serving.log_path)
    run.violations = len(verify(records))
    run.batch_share = batch_share(records, max_step_s)
    run.added_ns, run.steps_ns = times["added"], times["steps"]
    serving.log_path.unlink()
    return run


async def _robots_or_rest(address: str, per_s: float, seconds: float, seed: int) -> Run:
    if per_s:
        return await robots(address, per_s, seconds, seed)
    await asyncio.sleep(seconds)
    return Run(0.0, seconds)


def batch_share(records: Sequence[dict[str, Any]], max_step_s: float) -> float:
    """Of the steps' time beside robots, the share that batch work filled.

    A step may take `max_step_s`, or with a robot in it that class's time between two
    tokens. What is left of that, after the step's own cost and the robots' tokens, is
    batch work's to fill.
    """
    is_robots: dict[str, bool] = {}
    filled_ns, left_ns = 0.0, 1.0
    cost: dict[str, float] = {}
    for record in records:
        if record["kind"] == "replica_up":
            cost = record["cost"]
        elif record["kind"] == "submit":
            is_robots[record["id"]] = record["class"] == 0
        elif record["kind"] == "plan" and record["items"]:
            own_ns = {True: 0.0, False: 0.0}
            has_robot = False
            for name, _, num_tokens, is_prefill, *_ in record["items"]:
                took_ns = num_tokens * cost["prefill_ns"] if is_prefill else cost["decode_ns"]
                own_ns[is_robots[name]] += took_ns
                has_robot |= is_robots[name]
            limit_s = min(TPOT_S, max_step_s) if has_robot else max_step_s
            filled_ns += own_ns[False]
            left_ns += max(own_ns[False], limit_s * 1e9 - cost["t0_ns"] - own_ns[True])
    return filled_ns / left_ns


# --- What it shows. ---


def goal(table: Table, what: str, wanted: str, measured: str, *, met: bool) -> bool:
    """A row, and whether it is met."""
    verdict = "[green]met[/]" if met else "[red]MISSED[/]"
    table.add_row(what, wanted, measured, verdict)
    return met


def interval(hits: int, count: int) -> str:
    """A share with its 95 % interval (Wilson 1927)."""
    if not count:
        return "of none"
    z, share = 1.96, hits / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * ((share * (1 - share) + z * z / (4 * count)) / count) ** 0.5
    return f"{hits}/{count:,} ({max(0, middle - half):.2%} to {middle + half:.2%})"


def show_beside_batch(console: Console, alone: Run, beside: Run, batch_alone: float) -> bool:
    """The goals of robots beside batch work.

    What robots leave to batch work is the time of their steps, up to the class's longest
    time between two tokens, beside the step's own cost and their tokens.
    """
    rise_s = percentile(beside.in_time_s, 0.99) - percentile(alone.in_time_s, 0.99)
    # The longest step that an arriving robot finds running, and one of its own.
    allowed_s = MAX_STEP_S + 0.05
    kept = beside.num_admitted / max(1, alone.num_admitted)
    bad = beside.num_late + beside.num_missed
    table = Table(title=f"Robots at {NOMINAL:g}x ({alone.load_per_s:.1f}/s) beside batch work")
    for column in ("goal", "wanted", "measured", ""):
        table.add_column(column)
    met = [
        goal(
            table,
            "robots admitted, of those without batch",
            ">= 0.98",
            f"{kept:.3f} ({beside.num_admitted} of {alone.num_admitted})",
            met=kept >= 0.98,
        ),
        goal(
            table,
            "admitted that were late or missed",
            "<= 0.1 %",
            interval(bad, beside.num_admitted),
            met=beside.bad_share <= 0.001,
        ),
        goal(
            table,
            "rise of the answers' p99",
            f"<= {allowed_s * 1e3:.0f} ms",
            f"{rise_s * 1e3:.0f} ms",
            met=rise_s <= allowed_s,
        ),
        goal(
            table,
            "batch work, of the time that robots leave",
            ">= 0.8",
            f"{beside.batch_share:.2f} ({beside.batch_tokens_per_s:.0f} tokens/s; "
            f"{batch_alone:.0f} alone)",
            met=beside.batch_share >= 0.8,
        ),
    ]
    console.print(table)
    return all(met)


def show_loads(console: Console, runs: Sequence[tuple[float, Run]]) -> bool:
    """A row a load, and the goals over all of them."""
    table = Table(title="Robots alone, by load")
    for column in ("load", "asked/s", "in time/s", "refused", "late, missed", "answer p50",
                   "answer p99", "refusal p50", "refusal p99", "added a step", "log"):  # fmt: skip
        table.add_column(column, justify="right")
    for load, run in runs:
        table.add_row(
            f"{load:g}x",
            f"{run.load_per_s:.0f}",
            f"{run.goodput_per_s:.1f}",
            f"{len(run.refusals_s) / max(1, run.num_asked):.0%}",
            f"{run.num_late}, {run.num_missed}",
            *(f"{percentile(run.in_time_s, share) * 1e3:.0f} ms" for share in (0.5, 0.99)),
            *(f"{percentile(run.refusals_s, share) * 1e3:.1f} ms" for share in (0.5, 0.99)),
            "{:.2f}, {:.1f} ms".format(
                *(percentile(run.added_ns, one) / 1e6 for one in (0.5, 0.99))
            ),
            "good" if not run.violations else f"{run.violations} broken",
        )
    console.print(table)
    after = [run.goodput_per_s for load, run in runs if load > 1]
    bad = sum(run.num_late + run.num_missed for _, run in runs)
    admitted = sum(run.num_admitted for _, run in runs)
    slowest_s = max(percentile(run.refusals_s, 0.99) for _, run in runs)
    goals = Table()
    for column in ("goal", "wanted", "measured", ""):
        goals.add_column(column)
    met = [
        goal(
            goals,
            "goodput past 1x, the least of the best",
            ">= 0.9",
            f"{min(after) / max(after):.2f}",
            met=min(after) >= 0.9 * max(after),
        ),
        goal(
            goals,
            "admitted that were late or missed",
            "<= 0.1 %",
            interval(bad, admitted),
            met=bad <= 0.001 * admitted,
        ),
        goal(
            goals,
            "refusals' p99 at the client, worst load",
            "< 20 ms",
            f"{slowest_s * 1e3:.1f} ms",
            met=slowest_s < 0.020,
        ),
        *(
            goal(
                goals,
                f"added to a step outside the engine, p50, at {load:g}x",
                "<= 1 ms and 5 %",
                f"{percentile(run.added_ns, 0.5) / 1e6:.2f} ms, {added_share(run):.1%} of a step "
                f"(p99 {percentile(run.added_ns, 0.99) / 1e6:.1f} ms)",
                met=percentile(run.added_ns, 0.5) <= 1e6 and added_share(run) <= 0.05,
            )
            for load, run in runs
            if load in (1.0, 10.0)
        ),
        goal(
            goals,
            "broken rules in all decision logs",
            "0",
            str(sum(run.violations for _, run in runs)),
            met=not any(run.violations for _, run in runs),
        ),
    ]
    console.print(goals)
    return all(met)


def added_share(run: Run) -> float:
    """The median step's time outside the engine, as a share of that in it."""
    return percentile(run.added_ns, 0.5) / max(1.0, percentile(run.steps_ns, 0.5))


def show_frontier(console: Console, frontier: Sequence[tuple[float, Run]]) -> None:
    """What a longer step of batch work brings, and costs the robots."""
    table = Table(
        title=f"The frontier: scheduler.max_step_s, robots at {NOMINAL:g}x beside batch work"
    )
    for column in (
        "max_step",
        "batch tokens/s",
        "of steps filled",
        "admitted",
        "answer p50",
        "answer p99",
        "log",
    ):
        table.add_column(column, justify="right")
    for max_step_s, run in frontier:
        table.add_row(
            f"{max_step_s * 1e3:.0f} ms",
            f"{run.batch_tokens_per_s:.0f}",
            f"{run.batch_share:.2f}",
            f"{run.num_admitted / max(1, run.num_asked):.0%}",
            *(f"{percentile(run.in_time_s, share) * 1e3:.0f} ms" for share in (0.5, 0.99)),
            "good" if not run.violations else f"{run.violations} broken",
        )
    console.print(table)


def plot(
    runs: Sequence[tuple[float, Run]], frontier: Sequence[tuple[float, Run]], path: Path
) -> None:
    """Three panels: goodput, times, frontier."""
    figure = Figure(figsize=(15, 4.6), layout="constrained")
    goodput, times, trade = figure.subplots(1, 3)
    loads = [load for load, _ in runs]
    goodput.plot(loads, [run.load_per_s for _, run in runs], ":", color="gray", label="asked")
    goodput.plot(
        loads, [run.goodput_per_s for _, run in runs], "o-", color="tab:green", label="in time"
    )
    best = max(run.goodput_per_s for _, run in runs)
    goodput.set(title="What is answered in time", ylabel="actions a second", ylim=(0, 2.2 * best))
    times.plot(
        loads,
        [1e3 * percentile(run.in_time_s, 0.99) for _, run in runs],
        "o-",
        color="tab:green",
        label="answer, p99",
    )
    refusing = [(load, run) for load, run in runs if run.refusals_s]
    times.plot(
        [load for load, _ in refusing],
        [1e3 * percentile(run.refusals_s, 0.99) for _, run in refusing],
        "s-",
        color="tab:red",
        label="refusal, p99",
    )
    times.axhline(1e3 * BUDGET_S, ls="--", color="gray", label="budget")
    times.set(title="How soon a robot knows", ylabel="ms", yscale="log")
    for panel in (goodput, times):
        panel.set(xlabel="load (1x: what the engine can just carry)", xscale="log")
        panel.xaxis.set_major_locator(FixedLocator(loads))
        panel.xaxis.set_minor_locator(NullLocator())
        panel.xaxis.set_major_formatter(StrMethodFormatter("{x:g}x"))
        panel.legend(frameon=False)
    steps_ms = [1e3 * max_step_s for max_step_s, _ in frontier]
    trade.plot(
        steps_ms,
        [run.batch_tokens_per_s for _, run in frontier],
        "o-",
        color="tab:blue",
        label="batch tokens/s",
    )
    trade.set(
        title=f"What longer batch steps bring and cost, robots at {NOMINAL:g}x",
        xlabel="scheduler.max_step_s, in ms",
        ylabel="batch tokens a second",
        xscale="log",
    )
    trade.set_ylim(bottom=0)
    trade.xaxis.set_major_locator(FixedLocator(steps_ms))
    trade.xaxis.set_minor_locator(NullLocator())
    trade.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    answers = trade.twinx()
    for share, style in ((0.5, "s--"), (0.99, "s-")):
        answers.plot(
            steps_ms,
            [1e3 * percentile(run.in_time_s, share) for _, run in frontier],
            style,
            color="tab:green",
            label=f"answer, p{share * 100:.0f}",
        )
    answers.set(ylabel="ms", ylim=(0, 1.1e3 * BUDGET_S))
    answers.spines["top"].set_visible(False)
    lines = [*trade.get_lines(), *answers.get_lines()]
    trade.legend(lines, [str(line.get_label()) for line in lines], frameon=False, loc="lower right")
    for panel in (goodput, times, trade):
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


async def run_torch(console: Console, seconds: float, folder: Path) -> None:
    """The same beside batch work on the torch engine, which shares the cores; no goals."""
    flood = await measure(100.0, seconds, engine="torch", folder=folder)
    one = flood.goodput_per_s
    table = Table(title=f"The torch engine on the tiny model; flooded it answers {one:.1f}/s")
    for column in ("robots", "asked/s", "in time/s", "refused", "late, missed", "answer p50",
                   "answer p99", "refusal p99", "batch tok/s", "added a step", "log"):  # fmt: skip
        table.add_column(column, justify="right")
    for name, load, with_batch in (
        ("flooded", 100.0, False),
        ("at 0.7x", 0.7 * one, False),
        ("at 0.7x, with batch", 0.7 * one, True),
    ):
        run = flood
        if load != 100.0:
            run = await measure(load, seconds, with_batch=with_batch, engine="torch", folder=folder)
        table.add_row(
            name,
            f"{run.load_per_s:.0f}",
            f"{run.goodput_per_s:.1f}",
            f"{len(run.refusals_s) / max(1, run.num_asked):.0%}",
            f"{run.num_late}, {run.num_missed}",
            *(f"{percentile(run.in_time_s, share) * 1e3:.0f} ms" for share in (0.5, 0.99)),
            f"{percentile(run.refusals_s, 0.99) * 1e3:.1f} ms",
            f"{run.batch_tokens_per_s:.0f}",
            "{:.2f}, {:.1f} ms".format(
                *(percentile(run.added_ns, one) / 1e6 for one in (0.5, 0.99))
            ),
            "good" if not run.violations else f"{run.violations} broken",
        )
    console.print(table)


async def run_all(seconds: float, out: Path) -> bool:
    """Everything; whether all goals are met."""
    console = Console(width=132)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        flood = await measure(150.0, seconds / 2, folder=folder)
        one = flood.goodput_per_s
        console.print(
            f"Engine: {T0_S * 1e3:g} ms a step, {DECODE_S * 1e3:g} ms a decode, "
            f"{PREFILL_TOKEN_S * 1e3:g} ms a prompt token. Flooded, it answers {one:.1f} robots "
            f"a second within {BUDGET_S:g} s: that is 1x."
        )
        batch_only = await measure(0.0, seconds / 2, with_batch=True, folder=folder)
        alone = await measure(NOMINAL * one, 2 * seconds, folder=folder)
        frontier = []
        for max_step_s in MAX_STEPS_S:
            length_s = 2 * seconds if max_step_s == MAX_STEP_S else seconds
            run = await measure(
                NOMINAL * one, length_s, with_batch=True, max_step_s=max_step_s, folder=folder
            )
            frontier.append((max_step_s, run))
        beside = next(run for max_step_s, run in frontier if max_step_s == MAX_STEP_S)
        is_good = show_beside_batch(console, alone, beside, batch_only.batch_tokens_per_s)
        show_frontier(console, frontier)
        runs = [(load, await measure(load * one, seconds, folder=folder)) for load in LOADS]
        is_good &= show_loads(console, runs)
        is_good &= not any(run.violations for _, run in frontier)
        await run_torch(console, seconds, folder)
    path = out / "overload.png"
    plot(runs, frontier, path)
    with suppress(OSError):
        console.print(
            f"{path}; {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}. The client "
            "and the server share the machine."
        )
    return is_good


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=15.0, help="of a run at one load")
    parser.add_argument("--out", type=Path, default=Path(".cache/overload"), help="for the plots")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--engine", default="simulated", help=argparse.SUPPRESS)
    parser.add_argument("--max-step-s", type=float, default=MAX_STEP_S, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve is not None:
        asyncio.run(serve(options.engine, options.max_step_s, options.serve))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    if not asyncio.run(run_all(options.seconds, options.out)):
        print("a goal is missed")


if __name__ == "__main__":
    main()
