"""A server's state as tables for a person."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from google.protobuf.duration_pb2 import Duration
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from headway.v1 import operations_pb2

__all__ = ["ServerView", "classes_table", "count", "milliseconds", "plain_table", "request_lines"]

_BAD = "bold red"


@dataclass(frozen=True, slots=True)
class ServerView:
    """What was asked of a server at one instant.

    Attributes:
        address: of the server.
        status: its state.
        tenants: those that the caller may see.
        replicas: in detail; none where the caller is no operator.
    """

    address: str
    status: operations_pb2.GetStatusResponse
    tenants: Sequence[operations_pb2.TenantStatus] = ()
    replicas: Sequence[operations_pb2.ReplicaDetail] = field(default=())

    def __rich__(self) -> RenderableType:
        parts: list[RenderableType] = [_heading(self.address, self.status)]
        if self.status.classes:
            parts += [Text(""), classes_table(self.status, "Work", shows_load=True)]
        if self.tenants:
            parts += [Text(""), _tenants(self.tenants)]
        replicas = _details(self.replicas) if self.replicas else _replicas(self.status)
        down = [
            Text(f"{one.replica_id} is down: {one.down_reason}", style=_BAD)
            for one in self.status.replicas
            if one.down_reason
        ]
        return Group(*parts, Text(""), replicas, *down)


def _heading(address: str, status: operations_pb2.GetStatusResponse) -> Text:
    state = ("drained: no new work is taken", "bold yellow")
    if not status.draining:
        is_serving = any(one.up and not one.draining for one in status.replicas)
        state = ("serving", "bold green") if is_serving else ("no engine takes work", _BAD)
    facts = f", {status.model}, up {_span(status.uptime)}, version {status.version}"
    return Text.assemble((f"{address}  ", "bold"), state, facts)


def classes_table(
    status: operations_pb2.GetStatusResponse, title: str, *, shows_load: bool = False
) -> Table:
    """A row a class and tenant: what was asked for, and what became of it.

    Args:
        status: the state.
        title: above the table.
        shows_load: with what waits and runs at this instant.
    """
    table = plain_table(title, ("class", "tenant"))
    numbers = ("wait", "run", "admitted") if shows_load else ("admitted",)
    _add_numbers(table, numbers)
    table.add_column("refused")
    _add_numbers(table, ("late", "tokens", "p50 ms", "p99 ms"))
    for row in status.classes:
        reasons = ", ".join(f"{r.reason} {r.count:,}" for r in row.rejected if r.count)
        load = (f"{row.queued:,}", f"{row.running:,}") if shows_load else ()
        table.add_row(
            row.request_class,
            row.tenant or "(unknown)",
            *load,
            f"{row.admitted:,}",
            Text(reasons or "0", style="yellow" if reasons else ""),
            count(row.missed, _BAD),
            f"{row.output_tokens:,}",
            milliseconds(_ns(row.latency_p50)),
            milliseconds(_ns(row.latency_p99)),
        )
    return table


def _tenants(tenants: Sequence[operations_pb2.TenantStatus]) -> Table:
    table = plain_table("Tenants", ("tenant",))
    _add_numbers(table, ("weight", "tokens/s", "left", "tokens in", "tokens out"))
    table.add_column("may use")
    for one in tenants:
        is_limited = one.HasField("bucket_tokens")
        left = Text(f"{one.bucket_tokens:,.0f}", style="yellow" if one.bucket_tokens <= 0 else "")
        table.add_row(
            one.name,
            f"{one.weight:g}",
            f"{one.tokens_per_s:,.0f}" if is_limited else "no limit",
            left if is_limited else "-",
            f"{sum(row.prompt_tokens for row in one.classes):,}",
            f"{sum(row.output_tokens for row in one.classes):,}",
            ", ".join(one.allowed_classes) + (", operator" if one.is_operator else ""),
        )
    return table


def _details(replicas: Sequence[operations_pb2.ReplicaDetail]) -> Table:
    table = plain_table("Replicas", ("replica", "state"))
    _add_numbers(
        table,
        (
            *("run", "wait", "KV", "steps", "p50 ms", "p99 ms"),
            *("margin", "delay ms"),
        ),
    )
    for one in replicas:
        status = one.status
        total = status.kv_blocks_total
        table.add_row(
            status.replica_id,
            _state(status),
            f"{status.running:,}",
            f"{one.queued:,}",
            f"{one.kv_blocks_held / total:.0%}" if total else "-",
            f"{status.steps:,}",
            milliseconds(_ns(status.step_p50), decimals=1),
            milliseconds(_ns(status.step_p99), decimals=1),
            f"{one.margin:.2f}" if status.up else "-",
            milliseconds(one.predicted_wait.ToNanoseconds()) if status.up else "-",
        )
    return table


def _replicas(status: operations_pb2.GetStatusResponse) -> Table:
    """What everybody may know of them."""
    table = plain_table("Replicas", ("replica", "state"))
    for one in status.replicas:
        table.add_row(one.replica_id, _state(one))
    return table


def _state(status: operations_pb2.ReplicaStatus) -> Text:
    if not status.up:
        return Text("down", style=_BAD)
    return Text("drained", style="yellow") if status.draining else Text("up", style="green")


def request_lines(report: operations_pb2.ExplainRequestResponse) -> RenderableType:
    """One request: a line that says why, and its facts."""
    name = report.request_id or report.label
    known_as = f" ({report.label})" if report.request_id and report.label else ""
    grid = Table.grid(padding=(0, 2))
    facts = [
        ("class", f"{report.request_class}, tenant {report.tenant}"),
        ("replica", report.replica_id),
        ("reason", report.reason),
        ("tokens", f"{report.prompt_tokens:,} read, {report.output_tokens:,} given"),
        ("age", _span(report.age)),
        ("predicted", _span(report.predicted) if report.HasField("predicted") else ""),
        ("left", _span(report.slack) if report.HasField("slack") else ""),
        ("ask again", f"after {_span(report.retry_after)}" if _ns(report.retry_after) else ""),
    ]
    if report.state == operations_pb2.REQUEST_STATE_ENDED:
        spans = (("queue", report.queue), ("prefill", report.prefill), ("decode", report.decode))
        facts.append(("times", ", ".join(f"{name} {_span(span)}" for name, span in spans)))
    for name_of, value in facts:
        if value:
            grid.add_row(f"  {name_of}", value)
    return Group(Text(f"{name}{known_as} {report.explanation}", style="bold"), grid)


def plain_table(title: str, names: tuple[str, ...]) -> Table:
    """An empty table with its title and its first columns."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for name in names:
        table.add_column(name, no_wrap=True)
    return table


def _add_numbers(table: Table, names: Sequence[str]) -> None:
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)


def count(number: int, style: str) -> Text:
    """A number that has its style only where it is not 0."""
    return Text(f"{number:,}", style=style if number else "")


def milliseconds(span_ns: int | None, *, decimals: int = 0) -> str:
    """A span in ms, or a dash where there is none."""
    return "-" if span_ns is None else f"{span_ns / 1e6:,.{decimals}f}"


def _ns(span: Duration) -> int | None:
    return span.ToNanoseconds() or None


def _span(span: Duration) -> str:
    """As people say it, in at most two units."""
    total_s = span.ToNanoseconds() / 1e9
    sign, total_s = ("-" if total_s < 0 else ""), abs(total_s)
    if total_s < 1:
        return f"{sign}{total_s * 1e3:.0f} ms"
    if total_s < 60:
        return f"{sign}{total_s:.1f} s"
    minutes = int(total_s // 60)
    if minutes < 60:
        return f"{sign}{minutes} min {int(total_s % 60)} s"
    hours = minutes // 60
    if hours < 48:
        return f"{sign}{hours} h {minutes % 60} min"
    return f"{sign}{hours // 24} days {hours % 24} h"
