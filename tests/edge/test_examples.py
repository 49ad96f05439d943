"""The examples, and the one in the README, run as they stand."""

import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import grpc
import pytest

from headway.outcome import Reason
from headway.v1 import robot_pb2
from tests.support.robot_server import Script, ScriptedRobotServer, refuse

ROOT = Path(__file__).parents[2]


def run(arguments: list[str]) -> str:
    """What the program prints; an error is a failure."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout


def late(request: robot_pb2.NextActionRequest, context: grpc.ServicerContext) -> NoReturn:
    """A "no" that comes at once."""
    refuse(context, Reason.LATE, retry_after_ns=40_000_000)


def test_the_stock_stub_prints_the_action() -> None:
    """Ten steps of the scripted server, then the time."""
    with ScriptedRobotServer() as server:
        output = run(["examples/stock_stub.py", server.address]).splitlines()
    assert output[:10] == ["linear_velocity +0.50  angular_velocity +0.00"] * 10
    assert output[10] == "in 5 ms by scripted"


def test_the_stock_stub_explains_a_no() -> None:
    """Status, reason and hint, read from the standard details."""
    with ScriptedRobotServer([late]) as server:
        output = run(["examples/stock_stub.py", server.address])
    assert output == "no: RESOURCE_EXHAUSTED: no: LATE\nreason: LATE\nask again in 40 ms\n"


def test_without_a_server_the_examples_say_so_in_plain_words() -> None:
    """Where they looked for one, and nothing of gRPC's own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    assert run(["examples/stock_stub.py", address]) == (
        f"no server at {address}; start one with 'headway serve --dev'\n"
    )
    assert run(["examples/robot.py", address]) == (
        f"no action: no server at {address}: nobody listens there\nbrake\n" * 5
    )


def test_the_robot_drives_and_brakes() -> None:
    """A refusal is a brake, and the next observation is asked about all the same."""
    with ScriptedRobotServer([late, ScriptedRobotServer().scripts[0]]) as server:
        output = run(["examples/robot.py", server.address])
        assert len(server.requests) == 5
    assert output.startswith("no action: no: LATE\nbrake\ndrive linear_velocity +0.50")
    assert output.count("drive") == 4


@pytest.mark.parametrize("refuses", [False, True])
def test_the_example_of_the_readme_runs(refuses: bool, tmp_path: Path) -> None:
    """Its only change is the address."""
    readme = (ROOT / "README.md").read_text()
    found = re.search(r"```python\n(.*?)```", readme, re.DOTALL)
    assert found is not None
    script: Script = late if refuses else ScriptedRobotServer().scripts[0]
    with ScriptedRobotServer([script]) as server:
        program = tmp_path / "example.py"
        program.write_text(found[1].replace("127.0.0.1:50051", server.address))
        output = run([str(program)])
    assert ("+0.5" in output or "0.5" in output) is not refuses


def test_the_loop_of_the_documents_drives_by_the_cloud(tmp_path: Path) -> None:
    """docs/robot.md as it stands, on a server that answers at once."""
    page = (ROOT / "docs" / "robot.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    with ScriptedRobotServer() as server:
        code = code.replace("127.0.0.1:50051", server.address).replace("wait(10)", "wait(2)")
        script = tmp_path / "loop.py"
        script.write_text(code)
        lines = run([str(script)]).splitlines()
    levels = [line.split()[0] for line in lines]
    assert levels[0] == "SAFE_STOP"
    assert "CLOUD" in levels
    assert set(levels) <= {"SAFE_STOP", "CLOUD", "HOLD", lines[-2].split()[0]}
    assert lines[-2].startswith("LoopReport(")
    # The last command of all.
    assert lines[-1].startswith("SAFE_STOP {'linear_velocity': 0.0, 'angular_velocity': 0.0}")
