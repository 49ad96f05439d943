"""`headway demo`: the product at work, in half a minute."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import click
import grpc
from rich.console import Console

from fleet_sim.demo.load import FleetLoad
from fleet_sim.demo.measures import FleetMeasures
from fleet_sim.demo.pilot import Pilot, run_pilot
from fleet_sim.demo.server_process import ServerProcess, ServerProcessError
from fleet_sim.demo.stop_request import StopRequest
from fleet_sim.demo.summary import summary_lines
from fleet_sim.demo.view import Screen, View, screen_for
from headway.rpc.channel import channel_options
from headway.v1 import operations_pb2
from headway.v1.operations_pb2_grpc import OperationsServiceStub

__all__ = ["demo"]

_EXIT_INTERRUPTED = 130
_START_TIMEOUT_S = 180.0
_RATE_HZ = 1.0  # Once a second: said on the screen.
_NUM_BATCH = 6
_FRAME_S = 0.25
_STATUS_TIMEOUT_S = 1.0
# The burst, as shares of the whole.
_BURST_FROM, _BURST_TO = 0.4, 0.6


@click.command()
@click.option(
    "--seconds", type=click.FloatRange(2, 3600), default=30.0, show_default=True, help="How long."
)
@click.option(
    "--robots", type=click.IntRange(1, 64), default=8, show_default=True, help="How many robots."
)
@click.option(
    "--model", default="tiny", show_default=True, metavar="FOLDER|tiny", help="Model to serve."
)
@click.option(
    "--engine",
    type=click.Choice(["torch", "simulated"]),
    default="torch",
    show_default=True,
    help="What runs it; simulated only takes the time of a model.",
)
@click.pass_context
def demo(context: click.Context, seconds: float, robots: int, model: str, engine: str) -> None:
    """Show a server, robots that need answers in time, and batch work beside them.

    Starts a server of its own on a free port and ends it again. For a fifth of
    the time more robots come than the machine can serve.
    """
    if math.isnan(seconds):  # Which no range refuses.
        raise click.BadParameter("nan is not a number of seconds.", param_hint="'--seconds'")
    console = Console(highlight=False)
    options = ["--model", model, "--engine", engine]
    with StopRequest() as stop, ServerProcess(options) as server:
        finished = _run(console, stop, server, seconds, robots)
    if not finished:
        if console.is_terminal:
            console.print()  # The terminal has written ^C.
        console.print("Interrupted. The server has ended, and nothing is left behind.")
        context.exit(_EXIT_INTERRUPTED)


@dataclass(frozen=True, slots=True)
class _Plan:
    """The numbers of one demo."""

    seconds: float
    num_robots: int
    pilot: Pilot

    def phase(self, elapsed_s: float) -> str:
        """What happens then, in words."""
        if self.is_burst(elapsed_s):
            return (
                f"Burst: {self.pilot.num_visitors} more robots, all at the same instants: "
                "too many to serve"
            )
        when = "Before the burst" if elapsed_s < _BURST_FROM * self.seconds else "After the burst"
        return f"{when}: {self.num_robots} robots, and as much batch work as fits beside them"

    def is_burst(self, elapsed_s: float) -> bool:
        """Whether visitors are there then."""
        return _BURST_FROM <= elapsed_s / self.seconds < _BURST_TO


def _run(
    console: Console, stop: StopRequest, server: ServerProcess, seconds: float, num_robots: int
) -> bool:
    """The demo with a server that is starting; whether it came to its end."""
    if not _wait_ready(console, stop, server):
        return False
    _introduce(console, server)
    measures = FleetMeasures()
    plan = _Plan(seconds, num_robots, run_pilot(server.address, measures))
    if stop.is_made:
        return False
    console.print(
        f"An action takes {plan.pilot.action_ns / 1e6:.0f} ms here when nobody else asks.\n"
        f"Every robot asks once a second and can wait {plan.pilot.budget_s * 1e3:.0f} ms. "
        "Ctrl-C ends the demo.\n",
    )
    load = FleetLoad(
        server.address,
        measures,
        num_robots=num_robots,
        rate_hz=_RATE_HZ,
        budget_s=plan.pilot.budget_s,
        num_batch=_NUM_BATCH,
    )
    start_s = time.monotonic()
    with _operations(server.address) as status_of, screen_for(console) as screen:
        with load:
            _watch(plan, stop, server, load, measures, status_of, screen)
        elapsed_s = time.monotonic() - start_s
        status = status_of.get()
        # Once more: by now every question has its answer.
        screen.show(View(elapsed_s, seconds, "The end", status, measures))
    console.print()
    lines = summary_lines(
        measures,
        status,
        num_robots=num_robots,
        num_visitors=plan.pilot.num_visitors,
        budget_s=plan.pilot.budget_s,
        elapsed_s=elapsed_s,
    )
    for line in lines:
        console.print(line, markup=False, style="bold" if line[:1].strip() else "")
    return not stop.is_made


def _wait_ready(console: Console, stop: StopRequest, server: ServerProcess) -> bool:
    """Waits for the server; False where the end was asked for meanwhile.

    Raises:
        ServerProcessError: it ended, or takes too long.
    """
    console.print("Starting a server. It loads its model and measures this machine first.")
    start_s = time.monotonic()
    # Nothing of it is left in a file or on the screen.
    with console.status("") as waiting:
        while not server.is_ready:
            waited_s = time.monotonic() - start_s
            waiting.update(f"{waited_s:.0f} s; on a busy machine it may take half a minute")
            if waited_s > _START_TIMEOUT_S:
                raise ServerProcessError(
                    f"the server was not ready within {_START_TIMEOUT_S:.0f} s; "
                    "try 'headway serve --dev' to see what it says"
                )
            if stop.sleep(_FRAME_S):
                return False
    return True


def _introduce(console: Console, server: ServerProcess) -> None:
    console.print(f"Serving {server.model} on {server.address}.")
    if server.is_untrained:
        console.print(
            "The model is tiny and untrained: its actions mean nothing. Their timing is real.",
            style="yellow",
        )


def _watch(
    plan: _Plan,
    stop: StopRequest,
    server: ServerProcess,
    load: FleetLoad,
    measures: FleetMeasures,
    status_of: "_Operations",
    screen: Screen,
) -> None:
    """Shows what happens until the time is over or the end is asked for."""
    start_s = time.monotonic()
    has_burst = False
    while (elapsed_s := time.monotonic() - start_s) < plan.seconds:
        if plan.is_burst(elapsed_s) and not has_burst:
            has_burst = True
            load.start_burst(plan.pilot.num_visitors)
        if has_burst and not plan.is_burst(elapsed_s):
            load.end_burst()
        load.check()
        if not server.is_ready or stop.is_made:
            return
        screen.show(View(elapsed_s, plan.seconds, plan.phase(elapsed_s), status_of.get(), measures))
        stop.sleep(min(_FRAME_S, max(0.0, start_s + plan.seconds - time.monotonic())))


class _Operations:
    """Asks the server for its state; an answer that does not come leaves the last one."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._stub = OperationsServiceStub(channel)
        self._last = operations_pb2.GetStatusResponse()

    def get(self) -> operations_pb2.GetStatusResponse:
        """The newest state."""
        try:
            request = operations_pb2.GetStatusRequest()
            self._last = self._stub.GetStatus(request, timeout=_STATUS_TIMEOUT_S)
        except grpc.RpcError:
            pass  # Busy; the screen shows what was.
        return self._last


@contextmanager
def _operations(address: str) -> Iterator[_Operations]:
    with grpc.insecure_channel(address, options=channel_options()) as channel:
        yield _Operations(channel)
