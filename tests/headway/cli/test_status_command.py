"""`headway status` and `headway drain`, against a server that says what it is told."""

# ruff: noqa: N802 - the methods have gRPC's names.

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from headway.cli.main import main
from headway.outcome import Reason
from headway.rpc.status import refusal
from headway.v1 import operations_pb2
from headway.v1.operations_pb2_grpc import (
    OperationsServiceServicer,
    add_OperationsServiceServicer_to_server,
)


class _Told(OperationsServiceServicer):
    """Two classes, two tenants, three replicas: one is drained, one is down.

    Attributes:
        is_operator: whether callers may look into replicas, and drain.
        is_draining: of the server.
        is_endless: whether states are followed by none, until `gone` is set.
        running: work of the day tenant in the next states; the last one stays.
        calls: (method, replica id).
    """

    def __init__(self) -> None:
        self.is_operator = True
        self.is_draining = False
        self.is_endless = False
        self.gone = threading.Event()
        self.running = [2]
        self.calls: list[tuple[str, str]] = []

    def _status(self) -> operations_pb2.GetStatusResponse:
        running = self.running.pop(0) if len(self.running) > 1 else self.running[0]
        day = operations_pb2.ClassStatus(
            request_class="interactive",
            tenant="day",
            running=running,
            admitted=1234,
            missed=1,
            rejected=[operations_pb2.ReasonCount(reason="LATE", count=56)],
            output_tokens=24_680,
            latency_p50=Duration(nanos=215_000_000),
        )
        night = operations_pb2.ClassStatus(request_class="batch", tenant="night", queued=7)
        return operations_pb2.GetStatusResponse(
            version="1.2.3",
            uptime=Duration(seconds=7500),
            model="SmolLM2",
            draining=self.is_draining,
            classes=[day, night] if running else [],
            replicas=[one.status for one in self._replicas()],
        )

    @staticmethod
    def _replicas() -> list[operations_pb2.ReplicaDetail]:
        up = operations_pb2.ReplicaStatus(replica_id="replica-0", up=True, kv_blocks_total=200)
        drained = operations_pb2.ReplicaStatus(replica_id="replica-1", up=True, draining=True)
        down = operations_pb2.ReplicaStatus(replica_id="replica-2", down_reason="killed by SIGKILL")
        return [
            operations_pb2.ReplicaDetail(status=up, kv_blocks_held=50, margin=1.25),
            operations_pb2.ReplicaDetail(status=drained),
            operations_pb2.ReplicaDetail(status=down),
        ]

    def GetStatus(self, request: Any, context: Any) -> operations_pb2.GetStatusResponse:
        return self._status()

    def WatchStatus(self, request: Any, context: Any) -> Iterator[Any]:
        for _ in range(3):
            yield operations_pb2.WatchStatusResponse(status=self._status())
        if self.is_endless:
            self.gone.wait(60)
        _refuse(context, Reason.DRAINING, "the server is being shut down")

    def ListTenants(self, request: Any, context: Any) -> operations_pb2.ListTenantsResponse:
        limited = operations_pb2.TenantStatus(
            name="night", weight=0.5, tokens_per_s=100, bucket_tokens=-20, allowed_classes=["batch"]
        )
        free = operations_pb2.TenantStatus(name="day", weight=2, is_operator=True)
        return operations_pb2.ListTenantsResponse(tenants=[free, limited])

    def ListReplicas(self, request: Any, context: Any) -> operations_pb2.ListReplicasResponse:
        if not self.is_operator:
            _refuse(context, Reason.PERMISSION_DENIED, "tenant 'day' may not do that")
        return operations_pb2.ListReplicasResponse(replicas=self._replicas())

    def Drain(self, request: Any, context: Any) -> operations_pb2.DrainResponse:
        if not self.is_operator:
            _refuse(context, Reason.PERMISSION_DENIED, "tenant 'day' may not do that")
        self.calls.append(("Drain", request.replica_id))
        self.is_draining = True
        return operations_pb2.DrainResponse(running=2, queued=1)

    def Undrain(self, request: Any, context: Any) -> operations_pb2.UndrainResponse:
        self.calls.append(("Undrain", request.replica_id))
        return operations_pb2.UndrainResponse()

    def ExplainRequest(self, request: Any, context: Any) -> operations_pb2.ExplainRequestResponse:
        if request.request_id != "r1/obs-1":
            _refuse(context, Reason.NOT_FOUND, "no live or recent request")
        return operations_pb2.ExplainRequestResponse(
            request_id="action-9",
            label="r1/obs-1",
            request_class="interactive",
            tenant="day",
            state=operations_pb2.REQUEST_STATE_WAITING,
            explanation="waits: 3 requests of its queue come first",
            slack=Duration(nanos=120_000_000),
        )


def _refuse(context: Any, reason: Reason, message: str) -> None:
    told = refusal(reason, message)
    context.set_trailing_metadata(told.trailing_metadata)
    context.abort(told.code, told.message)


@pytest.fixture
def told() -> _Told:
    """What the server says."""
    return _Told()


@pytest.fixture
def address(told: _Told) -> Iterator[str]:
    """Where it listens."""
    server = grpc.server(futures.ThreadPoolExecutor(4))
    add_OperationsServiceServicer_to_server(told, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0).wait()


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(address: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """(exit status, output, errors) of a command against the server, on 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("HEADWAY_API_KEY", raising=False)

    def call(command: str, *arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([command, "--address", address, *arguments])
        out, err = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, out, err

    return call


def cells(text: str, first: str) -> list[str]:
    """The words of the line that begins with `first`."""
    (line,) = [line for line in text.splitlines() if line.startswith(first)]
    return line.split()


def test_work_tenants_and_replicas_fit_on_80_columns(run: Run) -> None:
    """Every figure whole: nothing is cut where a person would need it."""
    status, out, _ = run("status")
    assert status == 0
    assert "…" not in out
    assert max(map(len, out.splitlines())) <= 80
    heading = out.splitlines()[0]
    assert "serving, SmolLM2, up 2 h 5 min, version 1.2.3" in heading
    assert cells(out, "interactive") == [
        *("interactive", "day", "0", "2", "1,234", "LATE", "56", "1", "24,680", "215", "-")
    ]
    assert cells(out, "batch")[:5] == ["batch", "night", "7", "0", "0"]
    assert cells(out, "night") == ["night", "0.5", "100", "-20", "0", "0", "batch"]
    assert cells(out, "day")[:5] == ["day", "2", "no", "limit", "-"]
    assert cells(out, "replica-0")[:5] == ["replica-0", "up", "0", "0", "25%"]
    assert cells(out, "replica-1")[1] == "drained"
    assert "replica-2 is down: killed by SIGKILL" in out


def test_a_tenant_that_is_no_operator_sees_its_part(run: Run, told: _Told) -> None:
    """Without an error: replicas are told of in short."""
    told.is_operator = False
    status, out, err = run("status")
    assert (status, err) == (0, "")
    assert cells(out, "replica-0") == ["replica-0", "up"]


def test_a_drained_server_says_so_in_its_first_line(run: Run, told: _Told) -> None:
    """In words, not by a colour alone."""
    told.is_draining = True
    assert "drained: no new work is taken" in run("status")[1].splitlines()[0]


def test_json_has_every_field_by_the_names_of_the_contract(run: Run) -> None:
    """One object a look, for programs."""
    status, out, _ = run("status", "--json")
    assert status == 0
    (line,) = out.splitlines()
    told = json.loads(line)
    assert told["status"]["draining"] is False
    assert told["status"]["classes"][0]["running"] == 2
    assert [one["name"] for one in told["tenants"]] == ["day", "night"]
    assert told["replicas"][0]["margin"] == 1.25


def test_watching_shows_each_state_until_the_server_goes(run: Run) -> None:
    """Then one line says why, and the status is not 0."""
    status, out, err = run("status", "--watch", "--json")
    assert status == 2
    assert len(out.splitlines()) == 3
    assert err == "headway: the server is being shut down\n"


def test_ctrl_c_ends_the_watching_well(told: _Told, address: str) -> None:
    """That is how a person ends it: status 0, and not a word."""
    told.is_endless = True
    process = subprocess.Popen(
        [
            *(sys.executable, "-c", "from headway.cli import main; main()"),
            *("status", "--address", address, "--watch", "--json"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        for _ in range(3):
            assert json.loads(process.stdout.readline())["status"]["model"] == "SmolLM2"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
        told.gone.set()
    assert (process.returncode, err) == (0, "")


def test_one_request_is_explained_in_its_first_line(run: Run) -> None:
    """By both of its names."""
    status, out, _ = run("status", "--request", "r1/obs-1")
    assert status == 0
    first, *facts = out.splitlines()
    assert first == "action-9 (r1/obs-1) waits: 3 requests of its queue come first"
    assert any(line.split() == ["left", "120", "ms"] for line in facts)


def test_a_request_that_is_not_known_is_one_line(run: Run) -> None:
    """As the server says it."""
    status, out, err = run("status", "--request", "action-0")
    assert (status, out) == (2, "")
    assert err == "headway: no live or recent request\n"


@pytest.mark.parametrize("command", ["status", "drain"])
def test_without_a_server_it_is_one_line(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Where it looked, and what to do."""
    with pytest.raises(SystemExit) as ended:
        main([command, "--address", "127.0.0.1:1"])
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert err.count("\n") == 1
    assert "no server at 127.0.0.1:1" in err
    assert "headway serve --dev" in err


def test_draining_says_what_is_left_to_finish(run: Run, told: _Told, address: str) -> None:
    """Of the server, or of one replica."""
    _, out, _ = run("drain")
    assert out == (
        f"the server at {address} takes no new work; left to finish: 2 running, 1 waiting\n"
    )
    run("drain", "--replica", "replica-1")
    assert told.calls == [("Drain", ""), ("Drain", "replica-1")]


def test_undoing_takes_it_into_service_again(run: Run, told: _Told) -> None:
    """The other way round, by the same command."""
    status, out, _ = run("drain", "--replica", "replica-1", "--undo")
    assert (status, out) == (0, "replica-1 takes new work again\n")
    assert told.calls == [("Undrain", "replica-1")]


def test_waiting_returns_when_nothing_is_left(run: Run, told: _Told) -> None:
    """Not before: two states have work, the third has none."""
    told.running = [2, 1, 0]
    status, out, _ = run("drain", "--wait")
    assert status == 0
    assert out.splitlines()[-1].endswith("has nothing left to finish")
    assert told.running == [0]
    assert told.calls == [("Drain", "")]


def test_waiting_ends_where_somebody_undid_it(run: Run, told: _Told) -> None:
    """It is not drained behind their back again."""
    told.running = [2]
    status, _, err = run("drain", "--replica", "replica-0", "--wait")
    assert status == 2
    assert "taken into service again" in err
    assert told.calls == [("Drain", "replica-0")]


def test_who_may_not_drain_is_told_so(run: Run, told: _Told) -> None:
    """In one line, with status 2."""
    told.is_operator = False
    status, out, err = run("drain")
    assert (status, out) == (2, "")
    assert err == "headway: tenant 'day' may not do that\n"


@pytest.mark.parametrize(
    "arguments", [("status", "--watch", "--request", "x"), ("drain", "--undo", "--wait")]
)
def test_options_that_exclude_each_other_are_one_line(run: Run, arguments: tuple[str, ...]) -> None:
    """Both are named."""
    status, _, err = run(*arguments)
    assert status == 2
    assert err.count("\n") == 1
    assert arguments[1] in err
