"""The command line: finds the subcommand, and turns every way to fail into one
line and an exit status.

Nothing but click is imported until a subcommand is known, so that `--help` is
instant and works without any extra.
"""

import difflib
import importlib
from collections.abc import Sequence
from dataclasses import dataclass

import click

from headway import __version__
from headway.cli.interrupt import dying_of_interrupt
from headway.errors import HeadwayError

__all__ = ["COMMANDS", "Subcommand", "command_line", "run"]

# As shells do: 128 + SIGINT.
_EXIT_INTERRUPTED = 130
_EXIT_WRONG_INPUT = 2
_OWN_PACKAGES = frozenset({"headway", "cloud", "edge", "fleet_sim"})


@dataclass(frozen=True, slots=True)
class Subcommand:
    """Where a subcommand lives, and what is known of it without importing it."""

    target: str  # "module:attribute", a click command.
    help: str
    extra: str = ""  # Of the package; empty where the base install is enough.


COMMANDS: dict[str, Subcommand] = {
    "serve": Subcommand("cloud.server.command:serve", "Serve a model to robots.", "cloud"),
    "status": Subcommand("headway.cli.status_command:status", "Show what a server does."),
    "drain": Subcommand("headway.cli.drain_command:drain", "Take a server out of service."),
    "robot": Subcommand("edge.command:robot", "Act as a robot against a server.", "edge"),
    "edge": Subcommand(
        "edge.runtime_command:edge", "Run the on-robot runtime on this machine.", "edge,runtime"
    ),
    "demo": Subcommand(
        "fleet_sim.demo.command:demo",
        "Show a server, eight robots and batch work beside them.",
        "cloud,edge,sim",
    ),
    "model": Subcommand("cloud.engine.command:model", "Get, make or check models.", "cloud"),
    "tenant": Subcommand("cloud.server.tenant_command:tenant", "Make or end API keys.", "cloud"),
    "config": Subcommand("headway.cli.config_command:config", "Explain or check settings."),
    "cost": Subcommand("headway.cli.cost_command:cost", "Fit the step cost model to a log."),
}


class _LazyGroup(click.Group):
    """Knows its commands from a table and imports only the one that is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        subcommand = COMMANDS.get(cmd_name)
        if subcommand is None:
            return None
        ctx.meta[__name__] = subcommand
        module, _, attribute = subcommand.target.partition(":")
        with dying_of_interrupt():
            command = getattr(importlib.import_module(module), attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{subcommand.target} is no click command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Finds the subcommand; an unknown one names the nearest."""
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            near = difflib.get_close_matches(name, COMMANDS, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(COMMANDS)}"
            raise click.UsageError(f"no command '{name}'; {hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.help) for name, command in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> object:
        """Runs the subcommand; a missing package becomes advice."""
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            raise HeadwayError(_advice(error, ctx.meta.get(__name__))) from error


def _advice(error: ModuleNotFoundError, subcommand: Subcommand | None) -> str:
    """What to install, given what was missing."""
    missing = error.name or str(error)
    if missing.partition(".")[0] in _OWN_PACKAGES:
        return f"this installation is incomplete: it has no {missing}. Install headway anew"
    extra = f"[{subcommand.extra}]" if subcommand is not None and subcommand.extra else ""
    return f"the package '{missing}' is not installed. Run: pip install 'headway{extra}'"


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="headway")
def command_line() -> None:
    """Headway serves models to fleets of robots: an answer in time, or a "no" at once."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; the process's exit status, see `main`."""
    try:
        result = command_line.main(
            args=None if arguments is None else list(arguments),
            prog_name="headway",
            standalone_mode=False,
        )
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx is not None else "headway"
        message = error.format_message().rstrip(".")
        end = "" if message.endswith("?") else "."
        click.echo(f"{path}: {message}{end} Try '{path} --help'.", err=True)
        return error.exit_code
    except click.ClickException as error:
        click.echo(f"headway: {error.format_message()}", err=True)
        return _EXIT_WRONG_INPUT
    except HeadwayError as error:
        click.echo(f"headway: {error}", err=True)
        return _EXIT_WRONG_INPUT
    except (click.Abort, KeyboardInterrupt):
        return _EXIT_INTERRUPTED
    # Without standalone mode click returns the status given to ctx.exit().
    return result if isinstance(result, int) else 0
