"""The standard health service: SERVING only while an engine is up and no shutdown has begun."""

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

__all__ = ["Health"]


class Health:
    """Tells load balancers whether to send work here.

    Args:
        services: names that are told; the empty name stands for the server.
    """

    def __init__(self, services: tuple[str, ...]) -> None:
        self._services = ("", *services)
        self._servicer = health_aio.HealthServicer()
        self._changes: set[asyncio.Task[None]] = set()

    async def start(self, server: grpc.aio.Server) -> None:
        """Adds the service to `server`, NOT_SERVING until told otherwise."""
        await self._set(is_serving=False)
        self.add_to(server)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Lets another server tell the same."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    def tell(self, *, is_serving: bool) -> None:
        """Says whether work can be done; without effect once `stop` was called."""
        task = asyncio.get_running_loop().create_task(self._set(is_serving=is_serving))
        # The loop holds tasks weakly.
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)

    async def stop(self) -> None:
        """Says NOT_SERVING from now on."""
        await self._servicer.enter_graceful_shutdown()

    async def _set(self, *, is_serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.ServingStatus
        for service in self._services:
            await self._servicer.set(service, status.SERVING if is_serving else status.NOT_SERVING)
