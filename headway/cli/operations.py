"""What the operators' commands share: where the server is, and how it is called."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import click
import grpc

from headway.cli.credential_options import credential_options, credentials_given
from headway.rpc.credentials import open_channel
from headway.rpc.errors import CallError, UnavailableError
from headway.rpc.status import error_from_rpc
from headway.v1.operations_pb2_grpc import OperationsServiceStub

__all__ = ["CALL_TIMEOUT_S", "Operations", "operations_at", "server_options"]

CALL_TIMEOUT_S = 5.0

_F = TypeVar("_F", bound=Callable[..., object])


def server_options(command: _F) -> _F:
    """Adds `address` and the credential options to a command."""
    address = click.option(
        "--address", default="127.0.0.1:50051", show_default=True, help="Server, as host:port."
    )
    return address(credential_options(command))


class Operations:
    """OperationsService of one server, with the caller's credential.

    Args:
        channel: to the server.
        metadata: of each call.
        address: where it is, for messages.
    """

    def __init__(
        self, channel: grpc.Channel, metadata: tuple[tuple[str, str], ...], address: str
    ) -> None:
        self._stub: Any = OperationsServiceStub(channel)
        self._metadata = metadata
        self.address = address

    def call(self, method: str, request: object) -> Any:
        """The answer of a method.

        Raises:
            CallError: there is none.
        """
        with self._errors():
            work = getattr(self._stub, method)
            return work(request, timeout=CALL_TIMEOUT_S, metadata=self._metadata)

    def watch(self, request: object) -> Iterator[Any]:
        """The messages of WatchStatus.

        Raises:
            CallError: why there are no more.
        """
        with self._errors():
            yield from self._stub.WatchStatus(request, metadata=self._metadata)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            raise self._in_words(error_from_rpc(error, address=self.address)) from None

    def _in_words(self, error: CallError) -> CallError:
        if isinstance(error, UnavailableError) and error.reason is None:
            return UnavailableError(
                f"{error}; start one with 'headway serve --dev', or see --address"
            )
        return error


@contextmanager
def operations_at(address: str, **given: Any) -> Iterator[Operations]:
    """OperationsService at `address`, with what the credential options say.

    Raises:
        HeadwayError: a credential cannot be used.
    """
    credentials = credentials_given(**given)
    with open_channel(address, credentials) as channel:
        yield Operations(channel, credentials.metadata, address)
