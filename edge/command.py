"""`headway robot`: one robot on the command line."""

import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

import click

from edge.answer import Answer, AnswerKind, Tally
from edge.asking import AskingLoop
from edge.client import RobotClient
from edge.diff_drive import DiffDriveRobot
from headway.cli.credential_options import credential_options, credentials_given
from headway.rpc.errors import (
    InvalidRequestError,
    NotFoundError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
)

__all__ = ["robot"]

# Asking again gives the same answer: the person has to change something.
_FIX_THE_CALL = (
    InvalidRequestError,
    NotFoundError,
    PermissionDeniedError,
    UnauthenticatedError,
)
# Together 80 columns.
_ID_WIDTH = 13
_ANSWER_WIDTH = 26
_TIMES_HEADER = "queue prefill decode total trip"


@click.command()
@click.option(
    "--address", default="127.0.0.1:50051", show_default=True, help="Server, as host:port."
)
@click.option("--rate", default=1.0, show_default=True, metavar="HZ", help="Questions a second.")
@click.option(
    "--budget", default=0.5, show_default=True, metavar="S", help="Seconds until it is late."
)
@click.option(
    "--count",
    type=click.IntRange(min=1),
    metavar="N",
    help="Stop after so many.  [default: at Ctrl-C]",
)
@click.option("--robot-id", default="robot-1", show_default=True, help="Name of the robot.")
@click.option("--seed", default=1, show_default=True, help="Where it starts and wants to go.")
@credential_options
def robot(
    address: str,
    rate: float,
    budget: float,
    count: int | None,
    robot_id: str,
    seed: int,
    **given: Any,
) -> None:
    """Act as a robot against a server: ask for actions at a steady rate.

    Prints a line an answer: seconds since the start, the observation, the
    action's first step or why there is none, and the times in ms: in the
    server's queue, prefill, decode, in all there, and the robot's own round
    trip.
    """
    credentials = credentials_given(**given)
    screen = _Screen(address)
    body = DiffDriveRobot(robot_id, seed, time.monotonic_ns())
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with RobotClient.connect(
            address,
            robot_id=robot_id,
            embodiment=DiffDriveRobot.embodiment,
            credentials=credentials,
        ) as client:
            asking = AskingLoop(client, body, rate_hz=rate, budget_s=budget, on_answer=screen.show)
            screen.header(robot_id, rate, budget)
            asking.run(threading.Event(), count)
    except KeyboardInterrupt:
        click.echo()
    except BrokenPipeError:
        # Whoever read along has gone (`headway robot | head`): nobody to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    screen.footer()
    if count is not None and not screen.was_reached:
        raise UnavailableError(
            f"no server was reached at {address}; start one with 'headway serve --dev', "
            "or see --address"
        )


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


class _Screen:
    """Writes answers as lines, and counts them."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._tally = Tally()
        self._start_ns = time.monotonic_ns()
        self._is_away = False
        self.was_reached = False

    def header(self, robot_id: str, rate_hz: float, budget_s: float) -> None:
        click.echo(
            f"{robot_id} -> {self._address}, {rate_hz:g} Hz, "
            f"budget {budget_s * 1e3:.0f} ms. Times in ms; Ctrl-C ends."
        )
        click.echo(
            f"{'time s':>7} {'observation':<{_ID_WIDTH}} {'answer':<{_ANSWER_WIDTH}} "
            f"{_TIMES_HEADER}"
        )

    def show(self, answer: Answer) -> None:
        """One line for one answer.

        Raises:
            CallError: the call itself is wrong, so that asking on is no use.
        """
        if isinstance(answer.error, _FIX_THE_CALL):
            raise answer.error
        self._tally.add(answer)
        if answer.kind is AnswerKind.UNREACHABLE:
            self._say_away(answer)
            return
        if self._is_away:
            click.echo(f"{self._seconds(answer)} the server at {self._address} is there")
        self._is_away, self.was_reached = False, True
        click.echo(
            f"{self._seconds(answer)} {answer.observation_id:<{_ID_WIDTH}} "
            f"{_in_words(answer):<{_ANSWER_WIDTH}} {_times(answer)}"
        )

    def footer(self) -> None:
        """One line for the whole run."""
        tally = self._tally
        parts = [
            f"{tally.kinds[kind]} {kind.value}{_of_kind(tally, kind)}"
            for kind in AnswerKind
            if tally.kinds[kind]
        ]
        click.echo(f"{tally.num_asked} asked: {', '.join(parts) or 'nothing answered yet'}")

    def _say_away(self, answer: Answer) -> None:
        if not self._is_away:
            click.echo(
                f"{self._seconds(answer)} no server at {self._address}; "
                "asking on until there is one"
            )
        self._is_away = True

    def _seconds(self, answer: Answer) -> str:
        return f"{(answer.answered_ns - self._start_ns) / 1e9:7.3f}"


def _in_words(answer: Answer) -> str:
    """The first step of the action, or why there is none."""
    if answer.action is not None:
        first = zip(answer.action.names, answer.action.steps[0], strict=True)
        return " ".join(f"{name.removesuffix('_velocity')} {value:+.2f}" for name, value in first)
    hint = answer.error.retry_after_s if answer.error is not None else None
    again = "" if hint is None else f", again in {hint * 1e3:.0f} ms"
    return f"no: {answer.reason}{again}"


def _times(answer: Answer) -> str:
    trip = f"{answer.elapsed_ns / 1e6:4.0f}"
    if answer.action is None:
        return f"{'-':>5} {'-':>7} {'-':>6} {'-':>5} {trip}"
    times = answer.action.timings
    return (
        f"{times.queue_ns / 1e6:5.0f} {times.prefill_ns / 1e6:7.0f} {times.decode_ns / 1e6:6.0f} "
        f"{times.total_ns / 1e6:5.0f} {trip}"
    )


def _of_kind(tally: Tally, kind: AnswerKind) -> str:
    if kind is AnswerKind.IN_TIME:
        p50, p99 = tally.answer_percentile_ns(0.5), tally.answer_percentile_ns(0.99)
        if p50 is not None and p99 is not None:
            return f" (p50 {p50 / 1e6:.0f} ms, p99 {p99 / 1e6:.0f} ms)"
    if kind is AnswerKind.REFUSED:
        p99 = tally.refusal_percentile_ns(0.99)
        if p99 is not None:
            return f" (told within {p99 / 1e6:.0f} ms)"
    return ""
