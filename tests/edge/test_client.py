"""The robot's client against a real server on a real socket."""

import itertools
import math
import socket
import subprocess
import sys
import threading
import time
from typing import Any, NoReturn

import grpc
import psutil
import pytest

from edge.client import Priority, RobotClient
from edge.observation import Image, ImageEncoding, Observation, StateSource
from edge.text import FinishReason
from headway.clock import VirtualClock
from headway.outcome import Reason
from headway.rpc.channel import channel_options
from headway.rpc.errors import (
    DeadlineMissedError,
    InternalError,
    InvalidRequestError,
    RejectedError,
    UnavailableError,
)
from headway.v1 import robot_pb2
from tests.support.black_hole import BlackHole
from tests.support.robot_server import ScriptedRobotServer, action_chunk, refuse

MS = 1_000_000


def observation(name: str = "o-1") -> Observation:
    """Anything valid."""
    return Observation(name, task="go on", state=(StateSource("odometry", {"x": 1.5}, 0.25),))


def test_an_action_comes_back_with_its_timings_and_the_measured_round_trip() -> None:
    """Names, steps, period, timings and round trip, as the server sent and the robot measured."""
    with ScriptedRobotServer() as server, RobotClient.connect(server.address) as client:
        action = client.next_action(observation(), budget_s=5)
    assert action.observation_id == "o-1"
    assert action.names == ("linear_velocity", "angular_velocity")
    assert action.steps == ((0.5, 0.0),) * 10
    assert action.step_period_ns == 100 * MS
    assert action.timings.queue_ns == 1 * MS
    assert action.timings.prefill_ns == 2 * MS
    assert action.timings.decode_ns == 2 * MS
    assert action.timings.total_ns == 5 * MS
    assert 0 < action.round_trip_ns < 5_000 * MS
    assert action.model == "scripted"


def test_the_observation_arrives_whole() -> None:
    """State, ages, ids and embodiment are on the wire as the robot gave them."""
    with (
        ScriptedRobotServer() as server,
        RobotClient.connect(server.address, robot_id="amr-7", embodiment="arm") as client,
    ):
        client.next_action(observation(), budget_s=5)
    request = server.requests[0]
    assert (request.robot_id, request.embodiment) == ("amr-7", "arm")
    assert request.observation.task == "go on"
    source = request.observation.state[0]
    assert (source.name, source.values[0].name, source.values[0].value) == ("odometry", "x", 1.5)
    assert source.age.ToNanoseconds() == 250 * MS


def test_the_budget_that_is_sent_leaves_out_the_measured_network_time() -> None:
    """50 ms of network: R + 4·R/2 = 150 ms (RFC 6298); the connecting call is no measure."""
    clock = VirtualClock()

    def after_50_ms_of_network(
        request: robot_pb2.NextActionRequest, context: grpc.ServicerContext
    ) -> robot_pb2.ActionChunk:
        clock.advance(55 * MS)
        return action_chunk(request.observation.observation_id, total_ns=5 * MS)

    with ScriptedRobotServer([after_50_ms_of_network]) as server:
        channel = grpc.insecure_channel(server.address, options=channel_options())
        with RobotClient(channel, robot_id="r", embodiment="diff_drive", clock=clock) as client:
            for _ in range(3):
                client.next_action(observation(), budget_s=1)
    sent = [request.observation.budget.ToNanoseconds() for request in server.requests]
    # Nothing is known at first: RFC 6298's granularity alone.
    assert sent == [999 * MS, 999 * MS, 850 * MS]
    # The robot's own deadline is told to gRPC in full: the downlink is inside it.
    assert all(left > 0.9 for left in server.time_left_s)


def test_refusals_bring_a_margin_back_that_had_become_too_large() -> None:
    """A slow moment must not be the reason for refusals for ever after."""
    clock = VirtualClock()

    def slow_moment(
        request: robot_pb2.NextActionRequest, context: grpc.ServicerContext
    ) -> robot_pb2.ActionChunk:
        clock.advance(400 * MS)
        return action_chunk(request.observation.observation_id)

    def needs_800_ms(
        request: robot_pb2.NextActionRequest, context: grpc.ServicerContext
    ) -> robot_pb2.ActionChunk:
        clock.advance(2 * MS)
        if request.observation.budget.ToNanoseconds() < 800 * MS:
            refuse(context, Reason.LATE)
        return action_chunk(request.observation.observation_id)

    refusals = 0
    with ScriptedRobotServer([needs_800_ms, slow_moment, needs_800_ms]) as server:
        channel = grpc.insecure_channel(server.address, options=channel_options())
        with RobotClient(channel, robot_id="r", embodiment="diff_drive", clock=clock) as client:
            for _ in range(2):
                client.next_action(observation(), budget_s=1)
            for _ in range(40):
                try:
                    client.next_action(observation(), budget_s=1)
                    break
                except RejectedError:
                    refusals += 1
            else:
                pytest.fail("refused for ever")
    assert refusals > 0


@pytest.mark.parametrize("budget_s", [0.0, -1.0, math.nan, math.inf, -math.inf, 1e-10, 1e9])
def test_an_impossible_budget_is_refused_before_anything_is_sent(budget_s: float) -> None:
    """Zero, negative, NaN, infinite, less than a nanosecond, more than a day."""
    with ScriptedRobotServer() as server, RobotClient.connect(server.address) as client:
        with pytest.raises(InvalidRequestError, match="budget must be more than 0"):
            client.next_action(observation(), budget_s)
        assert server.requests == []


def test_an_answer_that_is_late_by_the_robots_clock_is_no_action() -> None:
    """The server answered; the robot's clock says that the budget was over."""
    clock = VirtualClock()

    def late(
        request: robot_pb2.NextActionRequest, context: grpc.ServicerContext
    ) -> robot_pb2.ActionChunk:
        clock.advance(301 * MS)
        return action_chunk(request.observation.observation_id)

    with ScriptedRobotServer([late]) as server:
        channel = grpc.insecure_channel(server.address, options=channel_options())
        with (
            RobotClient(channel, robot_id="r", embodiment="diff_drive", clock=clock) as client,
            pytest.raises(DeadlineMissedError) as missed,
        ):
            client.next_action(observation(), budget_s=0.3)
    assert missed.value.reason is Reason.DEADLINE_MISSED


@pytest.mark.parametrize("wrong", ["other id", "nan", "short step", "no steps", "no period"])
def test_an_answer_that_no_robot_may_play_is_no_action(wrong: str) -> None:
    """Another observation's answer, and malformed ones, raise."""

    def script(
        request: robot_pb2.NextActionRequest, context: grpc.ServicerContext
    ) -> robot_pb2.ActionChunk:
        chunk = action_chunk(request.observation.observation_id)
        match wrong:
            case "other id":
                chunk.observation_id = "o-0"
            case "nan":
                chunk.steps[3].values[1] = math.nan
            case "short step":
                del chunk.steps[3].values[1]
            case "no steps":
                del chunk.steps[:]
            case _:
                chunk.ClearField("step_period")
        return chunk

    with (
        ScriptedRobotServer([script]) as server,
        RobotClient.connect(server.address) as client,
        pytest.raises(InternalError, match="dropped"),
    ):
        client.next_action(observation(), budget_s=5)


def test_a_refusal_tells_reason_hint_and_prediction_and_is_not_retried() -> None:
    """RESOURCE_EXHAUSTED becomes RejectedError after one attempt."""

    def late(request: robot_pb2.NextActionRequest, context: grpc.ServicerContext) -> NoReturn:
        refuse(context, Reason.LATE, retry_after_ns=40 * MS, predicted_ns=700 * MS)

    with (
        ScriptedRobotServer([late]) as server,
        RobotClient.connect(server.address) as client,
        pytest.raises(RejectedError) as refused,
    ):
        client.next_action(observation(), budget_s=5)
    assert refused.value.reason is Reason.LATE
    assert refused.value.retry_after_s == pytest.approx(0.04)
    assert refused.value.predicted_s == pytest.approx(0.7)
    assert len(server.requests) == 1


def test_a_server_that_is_away_is_asked_again_while_there_is_budget() -> None:
    """UNAVAILABLE with a short hint, then an action, inside one budget."""

    def draining(request: robot_pb2.NextActionRequest, context: grpc.ServicerContext) -> NoReturn:
        refuse(context, Reason.NO_ENGINE, retry_after_ns=5 * MS)

    def then(
        request: robot_pb2.NextActionRequest, context: grpc.ServicerContext
    ) -> robot_pb2.ActionChunk:
        return action_chunk(request.observation.observation_id)

    with (
        ScriptedRobotServer([draining, draining, then]) as server,
        RobotClient.connect(server.address) as client,
    ):
        action = client.next_action(observation(), budget_s=5)
    assert action.observation_id == "o-1"
    assert len(server.requests) == 3
    budgets = [request.observation.budget.ToNanoseconds() for request in server.requests]
    assert all(later < earlier for earlier, later in itertools.pairwise(budgets))


def test_a_hint_beyond_the_budget_ends_the_call_at_once() -> None:
    """Waiting would only hide the reason until the deadline."""

    def draining(request: robot_pb2.NextActionRequest, context: grpc.ServicerContext) -> NoReturn:
        refuse(context, Reason.DRAINING, retry_after_ns=60_000 * MS)

    with (
        ScriptedRobotServer([draining]) as server,
        RobotClient.connect(server.address) as client,
        pytest.raises(UnavailableError) as away,
    ):
        client.next_action(observation(), budget_s=5)
    assert away.value.reason is Reason.DRAINING
    assert len(server.requests) == 1


def test_no_server_is_an_error_inside_the_budget() -> None:
    """Nobody listens: the call ends by itself."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with RobotClient.connect(address) as client, pytest.raises(UnavailableError) as away:
        client.next_action(observation(), budget_s=0.2)
    assert away.value.reason is None
    assert str(away.value) == f"no server at {address}: nobody listens there"


def test_a_message_larger_than_may_be_sent_is_a_wrong_request() -> None:
    """Nothing is sent, and the network is not thought to be slow by it."""
    picture = Image("front", ImageEncoding.RGB8, 2000, 1000, bytes(6_000_000))
    with ScriptedRobotServer() as server, RobotClient.connect(server.address) as client:
        with pytest.raises(InvalidRequestError) as wrong:
            client.next_action(Observation("o-1", images=(picture,)), budget_s=30)
        assert wrong.value.reason is Reason.TOO_LARGE
        # 4 MiB, as docs/contract.md says.
        assert str(wrong.value).endswith("bytes; expected at most 4,194,304")
        with pytest.raises(InvalidRequestError):
            list(client.generate("x" * 6_000_000, max_tokens=1))
        assert (server.requests, server.prompts) == ([], [])


def test_a_silent_peer_is_an_error_inside_the_budget() -> None:
    """A socket that accepts and never says a word ends in an exception."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with (
            RobotClient.connect(address) as client,
            pytest.raises((DeadlineMissedError, UnavailableError)),
        ):
            client.next_action(observation(), budget_s=0.3)


def test_closing_ends_a_call_in_flight() -> None:
    """Another thread's call raises instead of waiting for its budget."""
    arrived, release = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def hang(
        request: robot_pb2.NextActionRequest, context: grpc.ServicerContext
    ) -> robot_pb2.ActionChunk:
        arrived.set()
        release.wait(30)
        return action_chunk(request.observation.observation_id)

    with ScriptedRobotServer([hang]) as server:
        client = RobotClient.connect(server.address)

        def ask() -> None:
            try:
                client.next_action(observation(), budget_s=60)
            except UnavailableError as error:
                errors.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        assert arrived.wait(30)
        client.close()
        asking.join(30)
        assert not asking.is_alive()
        release.set()
    assert len(errors) == 1
    with pytest.raises(UnavailableError, match="closed"):
        client.next_action(observation(), budget_s=1)
    client.close()


def test_a_hundred_clients_leave_no_thread_and_no_file() -> None:
    """Connect, ask, close, again and again."""
    process = psutil.Process()
    with ScriptedRobotServer() as server:

        def once() -> None:
            with RobotClient.connect(server.address) as client:
                client.next_action(observation(), budget_s=5)

        once()  # gRPC's own threads and descriptors, which belong to the process.
        once()
        before = {thread.ident for thread in threading.enumerate()}
        open_before = process.num_fds()
        for _ in range(100):
            once()
        deadline = time.monotonic() + 30
        # Threads of a closed channel end by themselves; when, gRPC does not say.
        while time.monotonic() < deadline and (
            {t.ident for t in threading.enumerate() if "channel" in t.name.lower()} - before
            or process.num_fds() > open_before + 4
        ):
            threading.Event().wait(0.05)
        new = [t.name for t in threading.enumerate() if t.ident not in before]
        assert [name for name in new if not name.startswith("ThreadPoolExecutor")] == []
        assert process.num_fds() <= open_before + 4


def test_text_comes_in_pieces_and_ends_with_a_summary() -> None:
    """The texts in order; usage and timings in the last piece alone."""
    summary = robot_pb2.GenerateSummary(
        finish_reason=robot_pb2.FINISH_REASON_STOP, prompt_tokens=7, output_tokens=3, model="m"
    )
    pieces = [
        robot_pb2.GenerateResponse(text="he"),
        robot_pb2.GenerateResponse(text="llo", summary=summary),
    ]
    with (
        ScriptedRobotServer(pieces=pieces) as server,
        RobotClient.connect(server.address) as client,
    ):
        got = list(client.generate("say hello", max_tokens=9, priority=Priority.BATCH, stop=("!",)))
    assert [piece.text for piece in got] == ["he", "llo"]
    assert got[0].summary is None
    assert got[1].summary is not None
    assert got[1].summary.finish_reason is FinishReason.STOP
    assert got[1].summary.output_tokens == 3
    request = server.prompts[0]
    assert (request.prompt, request.max_tokens, list(request.stop)) == ("say hello", 9, ["!"])
    assert request.priority == robot_pb2.PRIORITY_BATCH
    assert not request.HasField("budget")


def test_leaving_a_text_early_cancels_it_at_the_server() -> None:
    """Closing the iterator is the cancel."""
    pieces = [robot_pb2.GenerateResponse(text="a")]
    with (
        ScriptedRobotServer(pieces=pieces, hangs_after_pieces=True) as server,
        RobotClient.connect(server.address) as client,
    ):
        texts = client.generate("x", max_tokens=9)
        assert next(texts).text == "a"
        assert server.is_hanging.wait(30)
        texts.close()  # type: ignore[attr-defined]
        assert server.generate_cancelled.wait(30)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"prompt": "", "max_tokens": 1}, "prompt must not be empty"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"prompt": "x", "max_tokens": 1, "budget_s": math.nan}, "budget"),
        ({"prompt": "x", "max_tokens": 1, "seed": -1}, "seed"),
    ],
)
def test_an_impossible_text_request_is_refused_at_the_call(
    arguments: dict[str, object], says: str
) -> None:
    """Not first while iterating."""
    with ScriptedRobotServer() as server, RobotClient.connect(server.address) as client:
        with pytest.raises(InvalidRequestError, match=says):
            client.generate(**arguments)  # type: ignore[arg-type]
        assert server.prompts == []


@pytest.mark.parametrize(
    "address",
    ["", "127.0.0.1", ":50051", "host:", "host:0", "host:65536", "http://host:1", "::1:1", "a b:1"],
)
def test_an_address_that_is_none_is_refused_at_once(address: str) -> None:
    """Asking on until somebody is there would be waiting for ever."""
    with pytest.raises(InvalidRequestError, match="must be host:port"):
        RobotClient.connect(address)


@pytest.mark.parametrize("robot_id", ["", "x" * 65, "a\nb", "ö"])
def test_a_robot_id_that_is_none_is_refused_at_once(robot_id: str) -> None:
    """Not with the first call."""
    with pytest.raises(InvalidRequestError, match="robot_id must be 1 to 64"):
        RobotClient.connect("127.0.0.1:1", robot_id=robot_id)


def test_what_no_message_can_hold_is_a_wrong_request_and_no_crash() -> None:
    """A robot's loop knows what to do with a `CallError`, and with nothing else."""
    half = "\ud800"  # Half of a surrogate pair, as a damaged file name has it.
    picture = Image("front", ImageEncoding.JPEG, 2**33, 1, b"x")
    with ScriptedRobotServer() as server, RobotClient.connect(server.address) as client:
        for wrong in (Observation("o-1", task=half), Observation("o-1", images=(picture,))):
            with pytest.raises(InvalidRequestError, match="cannot be sent"):
                client.next_action(wrong, budget_s=5)
        for fields in ({"prompt": half}, {"stop": (half,)}, {"max_tokens": 2**32}):
            arguments: dict[str, Any] = {"prompt": "x", "max_tokens": 1} | fields
            with pytest.raises(InvalidRequestError, match="cannot be sent"):
                client.generate(**arguments)
        assert (server.requests, server.prompts) == ([], [])


def test_a_network_that_swallows_everything_is_an_error_inside_the_budget() -> None:
    """The connection stands and nothing comes back; once it does, the robot is served again.

    What then comes late is the answer to an old question, and none to the new one.
    """
    with (
        ScriptedRobotServer() as server,
        BlackHole(server.port) as network,
        RobotClient.connect(network.address) as client,
    ):
        assert client.next_action(observation("o-1"), budget_s=5).observation_id == "o-1"
        network.holds_back = True
        for number in range(2, 5):
            with pytest.raises((DeadlineMissedError, UnavailableError)):
                client.next_action(observation(f"o-{number}"), budget_s=0.1)
        network.holds_back = False
        assert client.next_action(observation("o-5"), budget_s=30).observation_id == "o-5"


def test_importing_the_client_imports_no_torch_and_leaves_logging_alone() -> None:
    """A robot's own program keeps its logging, and needs no gigabyte of torch."""
    program = (
        "import logging, sys\n"
        "before = (logging.root.level, list(logging.root.handlers), logging.lastResort)\n"
        "import edge, edge.client, edge.asking, edge.command\n"
        "assert before == (logging.root.level, list(logging.root.handlers), logging.lastResort)\n"
        "assert not {'torch', 'numpy', 'cloud', 'structlog'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
