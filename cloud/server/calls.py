"""What every method does before and after its own work: count, identify, map errors."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeAlias

import grpc
import structlog

from cloud.server.identity import Authenticator, Identity
from cloud.server.ledger import Ledger
from cloud.server.refused import CallRefused, abort
from headway.outcome import Reason, RequestClass
from headway.telemetry.trace_context import trace_parent_of

__all__ = ["CallGate", "Context", "write_in_time"]

_log = structlog.get_logger()

Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"


class CallGate:
    """The way into a service.

    Args:
        authenticator: finds out who calls.
        ledger: counts the requests that end here.
        max_calls: most calls and sessions at once.
        write_timeout_s: how long the end of a stream waits for its reader.
    """

    def __init__(
        self, authenticator: Authenticator, ledger: Ledger, max_calls: int, write_timeout_s: float
    ) -> None:
        self._ledger = ledger
        self._write_timeout_s = write_timeout_s
        self._authenticator = authenticator
        self._max_calls = max_calls
        self.num_open = 0

    def unary(
        self,
        work: Callable[[bytes, Identity, Context], Awaitable[bytes]],
        request_class: RequestClass | None = None,
    ) -> Callable[[bytes, Context], Awaitable[bytes]]:
        """A handler for a method with one answer, around `work`.

        Args:
            work: the method.
            request_class: of the requests that it takes in. None: it takes none.
        """

        async def handler(data: bytes, context: Context) -> bytes:
            identity: Identity | None = None
            self.num_open += 1
            try:
                identity = self._authenticator.identify(context)
                self._require_room()
                return await work(data, identity, context)
            except CallRefused as refused:
                self._count(request_class, identity, refused, context)
                await abort(context, refused, identity.tenant if identity else "")
            except (asyncio.CancelledError, grpc.aio.AbortError):
                raise
            except Exception:
                await _abort_for_bug(context)
            finally:
                self.num_open -= 1

        return handler

    def streaming(
        self,
        work: Callable[[Any, Identity, Context], Awaitable[None]],
        request_class: RequestClass | None = None,
    ) -> Callable[[Any, Context], Awaitable[None]]:
        """A handler for a method that writes as it goes, around `work`.

        Args:
            work: the method.
            request_class: of what it takes in, where nothing says otherwise. None: it
                takes nothing in.
        """

        async def handler(incoming: Any, context: Context) -> None:
            identity: Identity | None = None
            self.num_open += 1
            try:
                identity = self._authenticator.identify(context)
                self._require_room()
                await work(incoming, identity, context)
            except CallRefused as refused:
                self._count(request_class, identity, refused, context)
                await self._abort_stream(context, refused, identity)
            except (asyncio.CancelledError, grpc.aio.AbortError):
                raise
            except Exception:
                await _abort_for_bug(context)
            finally:
                self.num_open -= 1

        return handler

    async def _abort_stream(
        self, context: Context, refused: CallRefused, identity: Identity | None
    ) -> None:
        """Ends a stream with a status; resets it where its reader takes nothing."""
        # A status waits behind the last message, and that for the reader. Once
        # the handler is over, gRPC lets go of the call, which resets the stream.
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._write_timeout_s):
                    await abort(context, refused, identity.tenant if identity else "")
        except grpc.aio.InternalError:
            # The last message is still on its way: gRPC takes no status behind it.
            raise asyncio.CancelledError from None

    def _count(
        self,
        request_class: RequestClass | None,
        identity: Identity | None,
        refused: CallRefused,
        context: Context,
    ) -> None:
        if request_class is not None:
            refused.trace = trace_parent_of(context.invocation_metadata())
            self._ledger.refuse(request_class, identity.tenant if identity else "", refused)

    def _require_room(self) -> None:
        if self.num_open > self._max_calls:
            raise CallRefused(
                Reason.QUEUE_FULL,
                f"{self._max_calls} calls are open already; wait, or ask another server",
                retry_after_ns=1_000_000_000,
            )


async def write_in_time(context: Context, message: bytes, timeout_s: float) -> None:
    """Writes to a stream whose reader has so long to make room for it.

    Raises:
        CallRefused: CANCELLED, it did not.
    """
    try:
        async with asyncio.timeout(timeout_s):
            await context.write(message)
    except TimeoutError:
        raise CallRefused.stream_ended(
            Reason.CANCELLED, f"nothing was read for {timeout_s:g} s; the stream is dropped"
        ) from None


async def _abort_for_bug(context: Context) -> NoReturn:
    # What went wrong is for the log alone: it may hold another tenant's data.
    _log.exception("call_failed")
    await abort(context, CallRefused(Reason.INTERNAL, "internal error; the server's log says more"))
