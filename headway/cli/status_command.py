"""`headway status`: what a server does."""

import json
from collections.abc import Iterator
from typing import Any

import click
from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.live import Live

from headway.cli.operations import Operations, operations_at, server_options
from headway.cli.status_view import ServerView, request_lines
from headway.rpc.errors import PermissionDeniedError
from headway.rpc.status import duration_from_ns
from headway.v1 import operations_pb2

__all__ = ["status"]


@click.command()
@server_options
@click.option("--watch", is_flag=True, help="Go on until Ctrl-C.")
@click.option(
    "--interval",
    type=click.FloatRange(0.1, 60.0),
    default=1.0,
    show_default=True,
    metavar="S",
    help="Seconds between two looks, with --watch.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a look.")
@click.option(
    "--request", "request_id", default="", metavar="ID", help="Explain one request instead."
)
def status(
    address: str, *, watch: bool, interval: float, as_json: bool, request_id: str, **given: Any
) -> None:
    """Show what a server does: its work, tenants and replicas.

    Operators see everything, a tenant sees its own. --request takes an id of the
    server's log, or "robot id/observation id", and says where that request stands
    and why.
    """
    if watch and request_id:
        raise click.UsageError("give one of --watch, --request")
    with operations_at(address, **given) as operations:
        if request_id:
            _explain(operations, request_id, as_json=as_json)
        elif watch:
            _watch(operations, interval, as_json=as_json)
        else:
            now = operations.call("GetStatus", operations_pb2.GetStatusRequest())
            _show(_look(operations, now), as_json=as_json)


def _look(operations: Operations, now: operations_pb2.GetStatusResponse) -> ServerView:
    """The state with everything that the caller may see beside it."""
    tenants = operations.call("ListTenants", operations_pb2.ListTenantsRequest())
    try:
        detail = operations.call("ListReplicas", operations_pb2.ListReplicasRequest())
    except PermissionDeniedError:
        return ServerView(operations.address, now, tenants.tenants)
    return ServerView(operations.address, now, tenants.tenants, detail.replicas)


def _looks(operations: Operations, interval_s: float) -> Iterator[ServerView]:
    request = operations_pb2.WatchStatusRequest(interval=duration_from_ns(round(interval_s * 1e9)))
    for answer in operations.watch(request):
        yield _look(operations, answer.status)


def _watch(operations: Operations, interval_s: float, *, as_json: bool) -> None:
    console = Console()
    looks = _looks(operations, interval_s)
    try:
        if as_json or not console.is_terminal:
            for view in looks:
                _show(view, as_json=as_json)
            return
        with Live(console=console, auto_refresh=False) as live:
            for view in looks:
                live.update(view, refresh=True)
    except KeyboardInterrupt:
        return


def _show(view: ServerView, *, as_json: bool) -> None:
    if as_json:
        click.echo(
            json.dumps(
                {
                    "status": _plain(view.status),
                    "tenants": [_plain(one) for one in view.tenants],
                    "replicas": [_plain(one) for one in view.replicas],
                }
            )
        )
    else:
        Console().print(view)


def _explain(operations: Operations, request_id: str, *, as_json: bool) -> None:
    request = operations_pb2.ExplainRequestRequest(request_id=request_id)
    report = operations.call("ExplainRequest", request)
    if as_json:
        click.echo(json.dumps(_plain(report)))
    else:
        Console().print(request_lines(report))


def _plain(message: Any) -> dict[str, Any]:
    """Protobuf's own JSON form, with the names of the contract and every field."""
    return MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
