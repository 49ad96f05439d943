"""`headway serve`: one server process, from its first line to its last."""

import asyncio
import gc
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import click
import structlog

from headway.cli.interrupt import dying_of_interrupt
from headway.config import Settings, load_settings
from headway.telemetry import configure_logging

if TYPE_CHECKING:
    from cloud.server.app import Server

__all__ = ["serve"]

_log = structlog.get_logger()
_EXIT_BUG = 1
_EXIT_AT_ONCE = 130


@click.command()
@click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Settings file; see 'headway config --example'.",
)
@click.option("--port", type=click.IntRange(0, 65535), help="TCP port; 0 takes a free one.")
@click.option("--model", metavar="NAME|FOLDER|tiny", help="Model to serve.")
@click.option("--engine", type=click.Choice(["torch", "simulated"]), help="What runs the model.")
@click.option(
    "--dev", is_flag=True, default=None, help="Serve anyone on this machine, without credentials."
)
@click.option("--metrics-port", type=click.IntRange(0, 65535), help="Prometheus port; 0 is off.")
@click.pass_context
def serve(
    context: click.Context,
    config: Path | None,
    port: int | None,
    model: str | None,
    engine: str | None,
    dev: bool | None,
    metrics_port: int | None,
) -> None:
    """Serves a model to robots until it is told to stop (Ctrl-C, SIGTERM).

    The first signal finishes what was promised; the second ends at once.
    """
    settings = load_settings(
        config,
        {
            "server.port": port,
            "server.metrics_port": metrics_port,
            "server.development": dev,
            "engine.model": model,
            "engine.kind": engine,
        },
    )
    # What its C core has to say of an address that is taken, say, is said here
    # in our own words; whoever looks for a bug in it can set the variable.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    configure_logging(settings.telemetry.log_format, settings.telemetry.log_level)
    context.exit(asyncio.run(_serve(settings)))


async def _serve(settings: Settings) -> int:
    """Runs the server; the process's exit status."""
    with dying_of_interrupt():
        from cloud.server.app import Server

    signals = _Signals()
    server = Server(settings)
    starting = asyncio.create_task(server.start())
    try:
        if not await signals.outlasted_by(starting, times=1):
            return 0
        _freeze()
        click.echo(
            f"headway: serving {server.model.name}{_caution(server)} on {server.address}, "
            f"{settings.engine.kind} engine. Ctrl-C stops"
        )
        if settings.server.development:
            _log.warning(
                "development_mode",
                message="anyone on this machine may call without a credential",
            )
        running = asyncio.create_task(server.run())
        if await signals.outlasted_by(running, times=1):
            return _EXIT_BUG
        stopping = asyncio.create_task(server.stop())
        in_order = await signals.outlasted_by(stopping, times=2)
    finally:
        await server.stop(grace_s=0)
    click.echo("headway: stopped" if in_order else "headway: stopped at once")
    return 0 if in_order else _EXIT_AT_ONCE


def _caution(server: "Server") -> str:
    """What a person is to know before a robot moves by the model's word."""
    if server.is_trained_to_act:
        return ""
    what = "untrained" if server.model.is_untrained else "not trained to act"
    return f" ({what}: its actions mean nothing)"


class _Signals:
    """Counts SIGINT and SIGTERM from now on."""

    def __init__(self) -> None:
        self._count = 0
        self._changed = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._arrived, number)

    async def outlasted_by(self, task: "asyncio.Task[None]", *, times: int) -> bool:
        """Waits for `task`, or for the signal number `times`, which cancels it.

        Returns:
            Whether the task came to its end; raises what it raised.
        """
        waiting = asyncio.create_task(self._reached(times))
        try:
            await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
                return True
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return False
        finally:
            waiting.cancel()

    async def _reached(self, times: int) -> None:
        while self._count < times:
            self._changed.clear()
            await self._changed.wait()

    def _arrived(self, number: int) -> None:
        self._count += 1
        self._changed.set()
        _log.info("signal_received", signal=signal.Signals(number).name, count=self._count)


def _freeze() -> None:
    """What was loaded stays; the collector need not look at it again and again."""
    gc.collect()
    gc.freeze()
