"""The standard health service: SERVING only while an engine is up and no shutdown has begun.

The service of grpcio-health-checking writes to its watchers under the lock that a
change of state needs: one watcher that reads nothing, and neither the others nor
a shutdown go on. Here nobody waits for a watcher.
"""

import asyncio

import grpc
from grpc_health.v1 import health, health_pb2

from cloud.server.calls import Context
from cloud.server.refused import CallRefused, abort
from cloud.server.validation import parse
from headway.outcome import Reason

__all__ = ["Health"]

_SERVING: int = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING: int = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN: int = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class Health:
    """Tells load balancers whether to send work here.

    NOT_SERVING until told otherwise.

    Args:
        services: names that are told; the empty name stands for the server.
    """

    def __init__(self, services: tuple[str, ...]) -> None:
        self._services = frozenset(("", *services))
        self._is_serving = self._is_stopping = False
        # One for each watcher.
        self._changes: set[asyncio.Event] = set()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Lets `server` tell it."""
        handler = grpc.method_handlers_generic_handler(
            health.SERVICE_NAME,
            {
                "Check": grpc.unary_unary_rpc_method_handler(self._check),
                "Watch": grpc.unary_stream_rpc_method_handler(self._watch),
            },
        )
        server.add_generic_rpc_handlers((handler,))

    def tell(self, *, is_serving: bool) -> None:
        """Says whether work can be done; without effect once `stop` was called."""
        self._is_serving = is_serving and not self._is_stopping
        for change in self._changes:
            change.set()

    def stop(self) -> None:
        """Says NOT_SERVING from now on."""
        self._is_stopping = True
        self.tell(is_serving=False)

    def _status(self, service: str) -> int:
        if service not in self._services:
            return _UNKNOWN
        return _SERVING if self._is_serving else _NOT_SERVING

    async def _check(self, data: bytes, context: Context) -> bytes:
        service = await _service(data, context)
        status = self._status(service)
        if status == _UNKNOWN:
            known = ", ".join(sorted(self._services - {""}))
            await abort(
                context,
                CallRefused(
                    Reason.NOT_FOUND,
                    f"service: {service[:64]!r} is not here; expected one of {known}, or none",
                    field="service",
                ),
            )
        return _message(status)

    async def _watch(self, data: bytes, context: Context) -> None:
        service = await _service(data, context)
        change = asyncio.Event()
        self._changes.add(change)
        try:
            told = -1
            while True:
                change.clear()
                status = self._status(service)
                if status != told:
                    told = status
                    await context.write(_message(status))
                await change.wait()
        finally:
            self._changes.discard(change)


async def _service(data: bytes, context: Context) -> str:
    """The name that is asked for; ends the call where `data` is no message."""
    try:
        message = parse(health_pb2.HealthCheckRequest, data)
    except CallRefused as refused:
        await abort(context, refused)
    name: str = message.service
    return name


def _message(status: int) -> bytes:
    data: bytes = health_pb2.HealthCheckResponse(status=status).SerializeToString()
    return data
