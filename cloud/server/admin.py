"""The admin port: what gRPC itself knows of every connection, for people on this machine."""

from typing import Any

import grpc
from grpc_channelz.v1 import channelz, channelz_pb2
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from cloud.server.health import Health
from headway.errors import HeadwayError
from headway.rpc.channel import server_options

__all__ = ["AdminServer"]

# Never another one, whatever server.host is: callers show no credential here.
_HOST = "127.0.0.1"
_CHANNELZ: str = channelz_pb2.DESCRIPTOR.services_by_name["Channelz"].full_name


class AdminServer:
    """Answers channelz, health and reflection on the loopback address.

    Args:
        port: TCP port.
        health: of the service.
    """

    def __init__(self, port: int, health: Health) -> None:
        self._port = port
        self._health = health
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Starts to answer.

        Raises:
            HeadwayError: the port cannot be had.
        """
        server: Any = grpc.aio.server(options=server_options())
        self._health.add_to(server)
        channelz.add_channelz_servicer(server)
        names = (_CHANNELZ, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        try:
            bound = server.add_insecure_port(f"{_HOST}:{self._port}")
        except RuntimeError:
            bound = 0
        if not bound:
            raise HeadwayError(
                f"cannot listen on {_HOST}:{self._port}: is another server running there? "
                "Choose another server.admin_port, or 0 for none"
            )
        self._server = server
        await server.start()

    async def stop(self) -> None:
        """Stops at once. May be called twice."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(None)
