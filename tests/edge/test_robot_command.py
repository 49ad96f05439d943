"""`headway robot` as a person meets it: a real process, a real socket, real signals."""

import os
import re
import signal
import socket
import subprocess
import sys
from typing import IO, NoReturn

import grpc
import pytest

from headway.outcome import Reason
from headway.v1 import robot_pb2
from tests.support.robot_server import ScriptedRobotServer, action_chunk, refuse

MS = 1_000_000
ROBOT = [sys.executable, "-m", "headway", "robot"]


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """The finished command."""
    return subprocess.run(
        [*ROBOT, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def read_until(text: str, lines: IO[str]) -> None:
    """Reads up to the line with `text`; the end before it is a failure."""
    assert any(text in line for line in iter(lines.readline, "")), f"ended without {text!r}"


def free_address() -> str:
    """Where nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def test_prints_a_line_an_answer_and_a_tally() -> None:
    """Action or reason, and the times, as the scripted server gave them."""

    def late(request: robot_pb2.NextActionRequest, context: grpc.ServicerContext) -> NoReturn:
        refuse(context, Reason.LATE, retry_after_ns=40 * MS)

    def answer(
        request: robot_pb2.NextActionRequest, context: grpc.ServicerContext
    ) -> robot_pb2.ActionChunk:
        return action_chunk(request.observation.observation_id)

    with ScriptedRobotServer([answer, late, answer]) as server:
        done = run("--address", server.address, "--count", "3", "--rate", "10", "--budget", "2")
    assert done.returncode == 0
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    answers = [line for line in lines if "robot-1-0" in line]
    assert len(answers) == 3
    # queue 1, prefill 2, decode 2, total 5 ms: the scripted timings.
    assert re.search(r"robot-1-00001\s+linear \+0\.50 angular \+0\.00\s+1\s+2\s+2\s+5\s+\d+$",
                     answers[0])  # fmt: skip
    assert re.search(r"robot-1-00002\s+no: LATE, again in 40 ms\s+-\s+-\s+-\s+-\s+\d+$", answers[1])
    assert re.match(r"3 asked: 2 in time \(p50 \d+ ms, p99 \d+ ms\), 1 refused", lines[-1])


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_it_with_a_tally(end: signal.Signals) -> None:
    """Exit status 0 and no traceback: this is how it is meant to be ended."""
    with (
        ScriptedRobotServer() as server,
        subprocess.Popen(
            [*ROBOT, "--address", server.address, "--rate", "20", "--budget", "2"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        ) as process,
    ):
        assert process.stdout is not None
        read_until("robot-1-00003", process.stdout)
        process.send_signal(end)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert errors == ""
    assert re.search(r"\d+ asked: \d+ in time", output.splitlines()[-1])


def test_a_server_that_is_never_there_is_one_line_and_status_2() -> None:
    """With --count it gives up, and says what to do."""
    address = free_address()
    done = run("--address", address, "--count", "2", "--rate", "10", "--budget", "0.2")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"headway: no server was reached at {address}; start one with 'headway serve --dev', "
        "or see --address"
    ]
    assert done.stdout.count("no server at") == 1


def test_goes_on_asking_until_the_server_is_there() -> None:
    """Started before its server: says so once, then once that it is there."""
    address = free_address()
    with subprocess.Popen(
        [*ROBOT, "--address", address, "--rate", "10", "--budget", "0.5"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stdout is not None
        read_until("no server", process.stdout)
        with ScriptedRobotServer(port=int(address.rpartition(":")[2])):
            assert f"the server at {address} is there" in process.stdout.readline()
            assert "linear +0.50" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)


def test_stops_at_a_call_that_no_repetition_mends() -> None:
    """INVALID_ARGUMENT from the server: its line, status 2."""

    def invalid(request: robot_pb2.NextActionRequest, context: grpc.ServicerContext) -> NoReturn:
        refuse(context, Reason.INVALID)

    with ScriptedRobotServer([invalid]) as server:
        done = run("--address", server.address)
    assert done.returncode == 2
    assert done.stderr == "headway: no: INVALID\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--budget", "0"], "headway: a budget must be"),
        (["--budget", "nan"], "headway: a budget must be"),
        (["--budget", "inf"], "headway: a budget must be"),
        (["--budget", "-1"], "headway: a budget must be"),
        (["--rate", "0"], "headway: a rate must be"),
        (["--count", "0"], "headway robot: Invalid value for '--count'"),
        (["--robot-id", "tab\t"], "headway: robot_id must be 1 to 64"),
        (["--address", "http://127.0.0.1:50051"], "headway: an address must be host:port"),
    ],
)
def test_wrong_arguments_are_one_line_and_status_2(arguments: list[str], says: str) -> None:
    """No traceback, and what was expected."""
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(says)
    assert done.stderr.count("\n") == 1
