"""A client that knows nothing of us but the .proto files, or not even those."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pool, message_factory
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from tests.support.fifo_policy import FifoPolicy
from tests.support.running_server import running_server, settings
from tests.support.scripted_engine import ScriptedEngine

ROOT = Path(__file__).parents[3]
# What a robot's developer would write with nothing but the generated stubs.
CLIENT = """
import os
import sys
# The checkout, which is installed in place.
ours = os.path.join("headway", "__init__.py")
sys.path[:] = [one for one in sys.path if not os.path.isfile(os.path.join(one, ours))]
import grpc
from headway.v1 import robot_pb2, robot_pb2_grpc

assert robot_pb2.__file__.startswith(sys.path[0]), robot_pb2.__file__
with grpc.insecure_channel(sys.argv[1]) as channel:
    stub = robot_pb2_grpc.RobotServiceStub(channel)
    seen = robot_pb2.Observation(observation_id="o1", task="go")
    seen.budget.FromMilliseconds(30_000)
    request = robot_pb2.NextActionRequest(
        robot_id="r1", embodiment="diff_drive", observation=seen
    )
    print(stub.NextAction(request, timeout=30).action.observation_id)
    texts = stub.Generate(robot_pb2.GenerateRequest(prompt="once", max_tokens=3))
    print("".join(piece.text for piece in texts))

    def messages():
        hello = robot_pb2.Hello(robot_id="r2", embodiment="diff_drive", rate_hz=1)
        yield robot_pb2.SessionRequest(hello=hello)
        yield robot_pb2.SessionRequest(observation=seen)

    for answer in stub.Session(messages(), timeout=30):
        if answer.WhichOneof("message") != "heartbeat":
            print(answer.WhichOneof("message"))
"""


async def test_a_client_generated_from_the_proto_files_alone_is_served(tmp_path: Path) -> None:
    """Every method, with no line of our Python on its path."""
    for name in ("robot.proto", "operations.proto"):
        await asyncio.to_thread(
            subprocess.run,
            [
                *(sys.executable, "-m", "grpc_tools.protoc", "-I", str(ROOT / "proto")),
                *(f"--python_out={tmp_path}", f"--grpc_python_out={tmp_path}"),
                str(ROOT / "proto" / "headway" / "v1" / name),
            ],
            check=True,
        )
    script = tmp_path / "client.py"
    script.write_text(CLIENT)
    async with running_server(
        settings(), make_engine=ScriptedEngine, policy=FifoPolicy()
    ) as running:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(script), running.server.address),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={},
        )
        out, err = await process.communicate()
    assert out.decode().split() == ["o1", "abc", "settings", "action"], err.decode()


async def test_a_client_that_asks_for_the_contract_is_served() -> None:
    """As grpcurl does: services, messages and fields come from the server itself."""
    config = settings(server__reflection=True)
    async with running_server(config, make_engine=ScriptedEngine, policy=FifoPolicy()) as running:
        told = await asyncio.to_thread(_reflect_and_call, running.server.address)
    services, chunk = told
    assert {
        "headway.v1.RobotService",
        "headway.v1.OperationsService",
        "grpc.reflection.v1alpha.ServerReflection",
        "grpc.health.v1.Health",
    } <= services
    assert chunk.observation_id == "o1"
    assert list(chunk.names) == ["linear_velocity", "angular_velocity"]


async def test_a_server_tells_its_contract_only_where_it_is_set() -> None:
    """UNIMPLEMENTED by default."""
    async with running_server(
        settings(), make_engine=ScriptedEngine, policy=FifoPolicy()
    ) as running:
        with pytest.raises(grpc.RpcError) as caught:
            await asyncio.to_thread(_reflect_and_call, running.server.address)
    error: Any = caught.value
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED


def _reflect_and_call(address: str) -> tuple[set[str], Any]:
    """The services that a server names, and what it answers to a call made of that."""
    with grpc.insecure_channel(address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        services = set(database.get_services())
        pool = descriptor_pool.DescriptorPool(database)
        service = pool.FindServiceByName("headway.v1.RobotService")
        found = service.methods_by_name["NextAction"]
        request: Any = message_factory.GetMessageClass(found.input_type)()
        answer = message_factory.GetMessageClass(found.output_type)
        request.robot_id, request.embodiment = "r1", "diff_drive"
        request.observation.observation_id = "o1"
        request.observation.task = "go"
        request.observation.budget.seconds = 30
        call: Any = channel.unary_unary(
            f"/{service.full_name}/NextAction",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=answer.FromString,
        )
        return services, call(request, timeout=30).action
