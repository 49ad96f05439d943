"""`headway serve` as a process: its ready line, its ends, and what it says of wrong input."""

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from cloud.engine.tiny import write_tiny_checkpoint
from headway.outcome import Reason
from headway.rpc.status import error_from_rpc
from headway.v1 import robot_pb2
from headway.v1.robot_pb2_grpc import RobotServiceStub
from tests.support.running_server import observation

Serve = Any


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Starts `headway serve` with settings in TOML; whatever is left is killed at the end."""
    started: list[subprocess.Popen[str]] = []

    def start(toml: str = "", *arguments: str) -> subprocess.Popen[str]:
        config = tmp_path / "headway.toml"
        config.write_text(toml)
        process = subprocess.Popen(
            [
                *(sys.executable, "-c", "from headway.cli import main; main()"),
                *("serve", "--dev", "--port", "0", "--config", str(config), *arguments),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def address_of(process: subprocess.Popen[str]) -> str:
    """Waits for the ready line; the address in it."""
    stdout = process.stdout
    assert stdout is not None
    line = stdout.readline()
    assert line.startswith("headway: serving "), process.communicate()
    return line.partition(" on ")[2].partition(",")[0]


SLOW = "[engine]\nkind = 'simulated'\n[engine.simulated]\nt0_s = {t0_s}\nprefill_token_s = 0.0\n"


def ask(stub: Any, observation_id: str, robot_id: str = "r1") -> Any:
    """A call under way."""
    return stub.NextAction.future(
        robot_pb2.NextActionRequest(
            robot_id=robot_id,
            embodiment="diff_drive",
            observation=observation(observation_id, budget_s=60.0),
        )
    )


def test_ready_line_names_model_address_and_engine(serve: Serve) -> None:
    """And says that the model is untrained. SIGTERM ends it with status 0 and a last line."""
    process = serve(SLOW.format(t0_s=0.0))
    stdout = process.stdout
    assert stdout is not None
    line = stdout.readline()
    assert "tiny (untrained" in line
    assert "simulated engine" in line
    process.send_signal(signal.SIGTERM)
    last, _ = process.communicate(timeout=30)
    assert (process.returncode, last) == (0, "headway: stopped\n")


def test_model_that_was_not_trained_to_act_says_so_and_serves_both(
    serve: Serve, tmp_path: Path
) -> None:
    """Any language model will do to try the way to the robot with."""
    folder = tmp_path / "talker"
    write_tiny_checkpoint(folder)
    config, tokens = folder / "config.json", folder / "tokenizer.json"
    config.write_text(config.read_text().replace('"headway_untrained": true', '"tried": true'))
    whole = json.loads(tokens.read_text())
    whole["added_tokens"] = [one for one in whole["added_tokens"] if "act" not in one["content"]]
    tokens.write_text(json.dumps(whole))
    process = serve("[engine]\nkv_tokens = 2048\n", "--model", str(folder))
    stdout = process.stdout
    assert stdout is not None
    line = stdout.readline()
    assert "talker (not trained to act: its actions mean nothing) on 127" in line
    address = line.partition(" on ")[2].partition(",")[0]
    with grpc.insecure_channel(address) as channel:
        stub = RobotServiceStub(channel)
        assert len(ask(stub, "obs-1").result(60).action.steps) == 10
        request = robot_pb2.GenerateRequest(prompt="hi", max_tokens=3)
        *_, last = stub.Generate(request)
        assert last.summary.output_tokens <= 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_first_signal_keeps_promises_and_refuses_new_work(
    serve: Serve, number: signal.Signals
) -> None:
    """NOT_SERVING, DRAINING for the new, the promised answer, and then the end."""
    # 20 tokens at 50 ms: the answer takes a second.
    process = serve(SLOW.format(t0_s=0.05))
    with grpc.insecure_channel(address_of(process)) as channel:
        stub, health = RobotServiceStub(channel), HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        # With an answer the server is known to have taken the first one in.
        promised = ask(stub, "promised")
        assert running_requests(channel) == 1
        process.send_signal(number)
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        refused = ask(stub, "refused", "r2")
        assert error_from_rpc(refused.exception(30)).reason is Reason.DRAINING
        assert promised.result(30).action.observation_id == "promised"
        process.wait(30)
    assert process.returncode == 0


def running_requests(channel: grpc.Channel) -> int:
    """Waits until the server works on something; on how much."""
    from headway.v1 import operations_pb2
    from headway.v1.operations_pb2_grpc import OperationsServiceStub

    stub = OperationsServiceStub(channel)
    while True:
        (replica,) = stub.GetStatus(operations_pb2.GetStatusRequest()).replicas
        if replica.running:
            return int(replica.running)


def test_grace_is_an_end_to_waiting(serve: Serve) -> None:
    """What takes longer is told DRAINING."""
    process = serve("[server]\ngrace_s = 0.1\n" + SLOW.format(t0_s=1.0))
    with grpc.insecure_channel(address_of(process)) as channel:
        call = ask(RobotServiceStub(channel), "slow")
        running_requests(channel)
        process.send_signal(signal.SIGTERM)
        assert error_from_rpc(call.exception(30)).reason is Reason.DRAINING
        process.wait(30)
    assert process.returncode == 0


def test_second_signal_ends_at_once_and_leaves_no_process(serve: Serve) -> None:
    """With a torch engine at work and an hour of grace."""
    toml = "[server]\ngrace_s = 3600.0\n[engine]\nkv_tokens = 4096\n"
    process = serve(toml)
    with grpc.insecure_channel(address_of(process)) as channel:
        stub = RobotServiceStub(channel)
        request = robot_pb2.GenerateRequest(
            prompt="hi", max_tokens=4000, priority=robot_pb2.PRIORITY_STANDARD
        )
        stream = stub.Generate(request)
        next(stream)
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        process.send_signal(signal.SIGTERM)
        watch = HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        while next(watch).status != health_pb2.HealthCheckResponse.NOT_SERVING:
            pass
        process.send_signal(signal.SIGTERM)
        last, _ = process.communicate(timeout=30)
    assert (process.returncode, last) == (130, "headway: stopped at once\n")
    gone, alive = psutil.wait_procs(children, timeout=10)
    assert not alive, gone


def test_signal_while_starting_leaves_nothing(serve: Serve) -> None:
    """No ready line, no process."""
    process = serve("[engine]\nkv_tokens = 2048\n")
    own = psutil.Process(process.pid)
    while not (children := own.children()):
        assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGTERM)
    stdout, _ = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (0, "")
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive


@pytest.mark.parametrize(
    ("toml", "arguments", "words"),
    [
        ("[server]\nprot = 1\n", (), "server.port"),
        ("[server]\nhost = '0.0.0.0'\n", (), "expected a loopback address"),
        ("", ("--model", "/nowhere/at/all"), "/nowhere/at/all"),
        ("", ("--engine", "warp"), "'torch', 'simulated'"),
        ("", ("--port", "70000"), "70000"),
        ("[actions]\nchunk_steps = 0\n", (), "actions.chunk_steps"),
        ("[engine]\nkv_tokens = 100000000000\n", (), "memory"),
    ],
)
def test_wrong_input_is_one_line_and_status_2(
    serve: Serve, toml: str, arguments: tuple[str, ...], words: str
) -> None:
    """What was wrong, no traceback, nothing on standard output, no process left."""
    process = serve(toml, *arguments)
    children = psutil.Process(process.pid).children(recursive=True)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (2, "")
    assert words in stderr
    assert len(stderr.splitlines()) == 1, stderr
    assert not psutil.wait_procs(children, timeout=10)[1]


def test_port_in_use_is_one_line_and_no_engine_was_started(serve: Serve) -> None:
    """Two servers never share a port."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = serve("", "--port", str(port))
        stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (2, "")
    assert stderr.splitlines() == [
        f"headway: cannot listen on 127.0.0.1:{port}: is another server running there? "
        "Choose another port (--port), or 0 for a free one"
    ]


def test_damaged_checkpoint_is_one_line(serve: Serve, tmp_path: Path) -> None:
    """Found by the engine process; said by the server."""
    folder = tmp_path / "damaged"
    write_tiny_checkpoint(folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    process = serve("", "--model", str(folder))
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (2, "")
    assert "model.safetensors" in stderr
    assert len(stderr.splitlines()) == 1, stderr


def test_metrics_are_served_where_asked_for(serve: Serve) -> None:
    """Prometheus's text format, with what was counted."""
    import urllib.request

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = serve(SLOW.format(t0_s=0.0), "--metrics-port", str(port))
    with grpc.insecure_channel(address_of(process)) as channel:
        ask(RobotServiceStub(channel), "obs-1").result(30)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    lines = text.splitlines()
    assert 'headway_requests_admitted_total{class="interactive",tenant="default"} 1.0' in lines
    assert 'headway_replica_up{replica="replica-0"} 1.0' in lines


def test_a_status_is_told_however_close_it_follows_an_answer(serve: Serve) -> None:
    """While a message is on its way gRPC takes no status: the robot would never hear.

    From another process, where a second Hello is there before the settings are out.
    """
    process = serve(SLOW.format(t0_s=0.0))
    hello = robot_pb2.SessionRequest(
        hello=robot_pb2.Hello(robot_id="r1", embodiment="diff_drive", rate_hz=10.0)
    )
    with grpc.insecure_channel(address_of(process)) as channel:
        stub = RobotServiceStub(channel)
        for _ in range(50):
            with pytest.raises(grpc.RpcError) as caught:
                list(stub.Session(iter([hello, hello]), timeout=10))
            assert error_from_rpc(caught.value).reason is Reason.CONFLICT


def test_debug_log_of_a_server_is_what_its_cost_model_is_fitted_to(
    serve: Serve, tmp_path: Path
) -> None:
    """`headway cost fit` finds the 20 ms that each step takes; its other lines are passed over."""
    process = serve(SLOW.format(t0_s=0.02) + "[telemetry]\nlog_level = 'debug'\n")
    with grpc.insecure_channel(address_of(process)) as channel:
        for number in range(2):
            ask(RobotServiceStub(channel), f"obs-{number}").result(30)
    process.send_signal(signal.SIGTERM)
    log = tmp_path / "steps.jsonl"
    log.write_text(process.communicate(timeout=30)[1])
    fitted = subprocess.run(
        [sys.executable, "-m", "headway", "cost", "fit", "--json", str(log)],
        capture_output=True,
        check=True,
        timeout=60,
    )
    found = json.loads(fitted.stdout)
    # 20 values for each of the two.
    assert found["num_train"] + found["num_held_out"] == 40
    # A busy machine only ever makes a step longer.
    assert found["t0_ns"] + found["decode_ns"] >= 19e6
