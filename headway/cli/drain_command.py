"""`headway drain`: takes a server, or one replica, out of service; and back."""

from typing import Any

import click

from headway.cli.operations import Operations, operations_at, server_options
from headway.errors import HeadwayError
from headway.v1 import operations_pb2

__all__ = ["drain"]


@click.command()
@server_options
@click.option("--replica", default="", metavar="ID", help="One replica.  [default: the server]")
@click.option("--undo", is_flag=True, help="Take new work again.")
@click.option("--wait", is_flag=True, help="Return once nothing is left to finish.")
def drain(address: str, *, replica: str, undo: bool, wait: bool, **given: Any) -> None:
    """Take no new work on a server, or on one replica of it; what was admitted is finished.

    The server goes on running: stop it (Ctrl-C, SIGTERM) when nothing is left, or
    take it into service again with --undo. Only for operators.
    """
    if undo and wait:
        raise click.UsageError("give one of --undo, --wait")
    what = replica or f"the server at {address}"
    with operations_at(address, **given) as operations:
        if undo:
            operations.call("Undrain", operations_pb2.UndrainRequest(replica_id=replica))
            click.echo(f"{what} takes new work again")
            return
        left = operations.call("Drain", operations_pb2.DrainRequest(replica_id=replica))
        click.echo(f"{what} takes no new work; left to finish: {_in_words(left)}")
        if wait and (left.running or left.queued):
            _wait(operations, replica, what)
            click.echo(f"{what} has nothing left to finish")


def _wait(operations: Operations, replica: str, what: str) -> None:
    """Returns once nothing is left.

    Raises:
        HeadwayError: somebody took it into service again.
    """
    for answer in operations.watch(operations_pb2.WatchStatusRequest()):
        is_drained, left = _left(operations, replica, answer.status)
        if not is_drained:
            raise HeadwayError(f"{what} was taken into service again; nothing is waited for")
        if not left:
            return


def _left(
    operations: Operations, replica: str, status: operations_pb2.GetStatusResponse
) -> tuple[bool, int]:
    """Whether it is drained, and how many requests are left to finish."""
    if not replica:
        return status.draining, sum(one.running + one.queued for one in status.classes)
    details = operations.call("ListReplicas", operations_pb2.ListReplicasRequest())
    (mine,) = [one for one in details.replicas if one.status.replica_id == replica]
    return mine.status.draining, mine.status.running + mine.queued


def _in_words(left: operations_pb2.DrainResponse) -> str:
    if not (left.running or left.queued):
        return "nothing"
    return f"{left.running:,} running, {left.queued:,} waiting"
