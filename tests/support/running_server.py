"""A whole server on a real loopback socket, inside a test's own loop."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from cloud.engine.api import Engine
from cloud.server.app import ObservedPolicy, Server
from headway.config import Settings, load_settings
from headway.rpc.channel import channel_options
from headway.rpc.errors import CallError
from headway.rpc.status import duration_from_ns, error_from_rpc
from headway.v1 import robot_pb2
from headway.v1.operations_pb2_grpc import OperationsServiceStub
from headway.v1.robot_pb2_grpc import RobotServiceStub

__all__ = ["RunningServer", "observation", "read_error", "running_server", "settings", "until"]


async def until(claim: Callable[[], bool]) -> None:
    """Waits for `claim`, which nothing announces."""
    async with asyncio.timeout(30):
        while not claim():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def read_error(stream: Any) -> CallError:
    """What reading a stream to its end raises."""
    try:
        while await stream.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return error_from_rpc(error)
    raise AssertionError("the stream ended well")


def settings(**overrides: object) -> Settings:
    """Defaults, on a free port, with `section__key` overrides."""
    dotted = {name.replace("__", "."): value for name, value in overrides.items()}
    defaults = {"server.port": 0, "server.development": True, "engine.kind": "simulated"}
    return load_settings(None, defaults | dotted)


def observation(
    observation_id: str = "obs-1", *, budget_s: float | None = 5.0, task: str = "go"
) -> robot_pb2.Observation:
    """A small one of a diff_drive robot."""
    message = robot_pb2.Observation(observation_id=observation_id, task=task)
    source = message.state.add(name="odometry")
    source.values.add(name="x", value=1.25)
    source.values.add(name="y", value=-0.5)
    if budget_s is not None:
        message.budget.CopyFrom(duration_from_ns(round(budget_s * 1e9)))
    return message


class RunningServer:
    """A server and stubs on one channel to it."""

    def __init__(self, server: Server, channel: grpc.aio.Channel) -> None:
        self.server = server
        self.channel = channel
        self.robots: Any = RobotServiceStub(channel)
        self.operations: Any = OperationsServiceStub(channel)

    def raw_unary(self, method: str) -> Any:
        """A unary method of RobotService that sends and gives bytes as they are."""
        return self.channel.unary_unary(f"/headway.v1.RobotService/{method}")

    async def until_serving(self) -> None:
        """Waits until the health service says so."""
        stub: Any = HealthStub(self.channel)
        async for answer in stub.Watch(health_pb2.HealthCheckRequest()):
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                return

    async def next_action(
        self, observation: robot_pb2.Observation, robot_id: str = "r1", **call: Any
    ) -> robot_pb2.ActionChunk:
        """One unary call."""
        request = robot_pb2.NextActionRequest(
            robot_id=robot_id, embodiment="diff_drive", observation=observation
        )
        response: robot_pb2.NextActionResponse = await self.robots.NextAction(request, **call)
        return response.action


@asynccontextmanager
async def running_server(
    config: Settings,
    *,
    make_engine: Callable[[], Engine] | None = None,
    policy: ObservedPolicy | None = None,
) -> AsyncIterator[RunningServer]:
    """Starts a server, and stops it at the end."""
    server = Server(config, make_engine=make_engine, policy=policy)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(server.address, options=channel_options()) as channel:
            yield RunningServer(server, channel)
    finally:
        await server.stop(grace_s=0)
