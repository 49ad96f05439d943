"""What there is to see at one instant, and how it is shown: live, or line by line."""

from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from edge.answer import AnswerKind, Tally
from fleet_sim.demo.measures import FleetMeasures, LastAnswer
from headway.cli.status_view import classes_table, count, milliseconds, plain_table
from headway.v1 import operations_pb2

__all__ = ["LiveScreen", "PlainScreen", "Screen", "View", "screen_for"]

_ROBOTS_SHOWN, _ROBOTS_A_LINE = 8, 4
_PLAIN_EVERY_S = 3.0
_STYLES = {
    AnswerKind.IN_TIME: "green",
    AnswerKind.REFUSED: "yellow",
    AnswerKind.LATE: "bold red",
    AnswerKind.UNREACHABLE: "red",
    AnswerKind.FAILED: "red",
}
_WORDS = {
    AnswerKind.IN_TIME: "ok",
    AnswerKind.REFUSED: "no",
    AnswerKind.LATE: "late",
    AnswerKind.UNREACHABLE: "away",
    AnswerKind.FAILED: "failed",
}


@dataclass(frozen=True, slots=True)
class View:
    """The demo at one instant."""

    elapsed_s: float
    seconds: float
    phase: str
    status: operations_pb2.GetStatusResponse
    measures: FleetMeasures


class Screen(Protocol):
    """Where a person looks."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

    def show(self, view: View) -> None:
        """Shows the newest state."""


def screen_for(console: Console) -> Screen:
    """A live table on a terminal; elsewhere a line every few seconds."""
    return LiveScreen(console) if console.is_terminal else PlainScreen(console)


class LiveScreen:
    """A table that changes in place."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._live.stop()

    def show(self, view: View) -> None:
        """Draws the table anew."""
        self._live.update(_screenful(view), refresh=True)


class PlainScreen:
    """One line every three seconds, and one where a new phase begins."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._next_s = 0.0
        self._phase = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        return

    def show(self, view: View) -> None:
        """Writes a line where one is due."""
        if view.phase != self._phase:
            self._phase = view.phase
            self._console.print(f"{view.elapsed_s:4.0f} s  {view.phase}", soft_wrap=True)
        if view.elapsed_s < self._next_s:
            return
        self._next_s = view.elapsed_s + _PLAIN_EVERY_S
        self._console.print(f"{view.elapsed_s:4.0f} s  {_plain_line(view)}", soft_wrap=True)


def _plain_line(view: View) -> str:
    measures = view.measures
    both = [measures.residents, measures.visitors]
    refused = sum(tally.kinds[AnswerKind.REFUSED] for tally in both)
    late = sum(tally.kinds[AnswerKind.LATE] for tally in both)
    in_time = sum(tally.kinds[AnswerKind.IN_TIME] for tally in both)
    return (
        f"{in_time} in time, {refused} refused, {late} late, "
        f"p99 {milliseconds(measures.residents.answer_percentile_ns(0.99))} ms; "
        f"batch {_batch_tokens(view.status):,} tokens written"
    )


def _screenful(view: View) -> RenderableType:
    return Group(
        _heading(view),
        Text(""),
        classes_table(view.status, "What the server did"),
        Text(""),
        _fleet(view.measures),
        Text(""),
        _robots(view.measures.last_answers()),
    )


def _heading(view: View) -> RenderableType:
    line = Table.grid(padding=(0, 2))
    line.add_column(width=24)
    line.add_column()
    line.add_row(
        ProgressBar(total=view.seconds, completed=min(view.elapsed_s, view.seconds), width=24),
        f"{min(view.elapsed_s, view.seconds):.0f} of {view.seconds:.0f} s",
    )
    return Group(line, Text(view.phase, style="bold"))


def _fleet(measures: FleetMeasures) -> Table:
    """The robots' side: a row a group of robots."""
    table = plain_table("What the robots saw", ("robots",))
    for name in ("asked", "in time", "refused", "told in ms", "late", "p50 ms", "p99 ms"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, tally in _groups(measures):
        table.add_row(
            name,
            str(tally.num_asked),
            count(tally.kinds[AnswerKind.IN_TIME], "green"),
            count(tally.kinds[AnswerKind.REFUSED], "yellow"),
            milliseconds(tally.refusal_percentile_ns(0.99)),
            count(tally.kinds[AnswerKind.LATE], "bold red"),
            milliseconds(tally.answer_percentile_ns(0.5)),
            milliseconds(tally.answer_percentile_ns(0.99)),
        )
    return table


def _groups(measures: FleetMeasures) -> Iterator[tuple[str, Tally]]:
    if measures.pilot.num_asked:
        yield "pilot", measures.pilot
    yield "residents", measures.residents
    if measures.visitors.num_asked:
        yield "visitors", measures.visitors


def _robots(last: list[LastAnswer]) -> Table:
    """The newest answers of the first robots."""
    grid = Table.grid(padding=(0, 3))
    cells = []
    for robot in last[:_ROBOTS_SHOWN]:
        answer = robot.answer
        words = f"{_WORDS[answer.kind]} {answer.elapsed_ns / 1e6:.0f} ms"
        cells.append(Text.assemble(f"{robot.robot_id} ", (words, _STYLES[answer.kind])))
    for start in range(0, len(cells), _ROBOTS_A_LINE):
        grid.add_row(*cells[start : start + _ROBOTS_A_LINE])
    return grid


def _batch_tokens(status: operations_pb2.GetStatusResponse) -> int:
    return sum(row.output_tokens for row in status.classes if row.request_class == "batch")
