"""The admin port: off unless set, on the loopback address alone, and what it tells."""

import socket
from typing import Any

import grpc
import pytest
from grpc_channelz.v1 import channelz_pb2
from grpc_channelz.v1.channelz_pb2_grpc import ChannelzStub
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub

from cloud.server.app import Server
from headway.errors import HeadwayError
from tests.support.running_server import observation, running_server, settings


def free_port() -> int:
    """A port that nobody has."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


async def test_channelz_counts_the_calls_of_the_service() -> None:
    """Of all servers of the process, the one that the robots' calls came to."""
    port = free_port()
    async with running_server(settings(server__admin_port=port)) as running:
        for number in range(3):
            await running.next_action(observation(f"obs-{number}"))
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub: Any = ChannelzStub(channel)
            answer = await stub.GetServers(channelz_pb2.GetServersRequest())
            health: Any = HealthStub(channel)
            checked = await health.Check(health_pb2.HealthCheckRequest())
            reflection: Any = ServerReflectionStub(channel)
            asked = iter([ServerReflectionRequest(list_services="")])
            listed = [part async for part in reflection.ServerReflectionInfo(asked)]
    assert max(one.data.calls_succeeded for one in answer.server) >= 3
    assert checked.status == health_pb2.HealthCheckResponse.SERVING
    names = {one.name for one in listed[0].list_services_response.service}
    assert {"grpc.channelz.v1.Channelz", "grpc.health.v1.Health"} <= names


async def test_the_robots_port_tells_nothing_of_connections() -> None:
    """Channelz is for the admin port alone."""
    async with running_server(settings(server__admin_port=free_port())) as running:
        stub: Any = ChannelzStub(running.channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetServers(channelz_pb2.GetServersRequest())
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_it_listens_on_the_one_loopback_address_and_stops_with_the_server() -> None:
    """Not even on the others of this machine."""
    port = free_port()
    async with running_server(settings(server__admin_port=port)):
        with socket.create_connection(("127.0.0.1", port), 10):
            pass
        with (
            pytest.raises(OSError, match="refused"),
            socket.create_connection(("127.0.0.2", port), 10),
        ):
            pass
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), 10):
        pass


async def test_a_port_that_is_taken_is_one_line() -> None:
    """With the key to change; nothing of the server is left."""
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        server = Server(settings(server__admin_port=port))
        with pytest.raises(HeadwayError, match=r"another server\.admin_port"):
            await server.start()
