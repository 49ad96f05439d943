"""Whatever became of a request is counted once, for operators, Prometheus and the log alike."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
import structlog

from cloud.server.gauges import Gauges
from headway.clock import MonotonicClock
from headway.config import Settings, parse_settings
from headway.telemetry.metrics import Metrics
from headway.v1 import operations_pb2, robot_pb2
from tests.support.running_server import (
    RunningServer,
    observation,
    read_error,
    running_server,
    settings,
    until,
)


def counted(**overrides: object) -> Settings:
    """An engine of 5 ms a step, with metrics."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    chosen = {"server__metrics_port": port, "engine__simulated__t0_s": 0.005}
    return settings(**(chosen | overrides))


class Told:
    """What a server says of its requests."""

    def __init__(self, running: RunningServer, lines: list[Any]) -> None:
        self.running = running
        self._lines = lines

    async def classes(self) -> dict[str, operations_pb2.ClassStatus]:
        """GetStatus, by class."""
        status = await self.running.operations.GetStatus(operations_pb2.GetStatusRequest())
        return {one.request_class: one for one in status.classes}

    async def refusals(self) -> dict[tuple[str, str], int]:
        """How many were refused by (class, reason): GetStatus, metrics and log must agree."""
        by_status = {
            (name, one.reason): one.count
            for name, of_class in (await self.classes()).items()
            for one in of_class.rejected
        }
        by_metrics = {
            (sample.labels["class"], sample.labels["reason"]): int(sample.value)
            for family in self.running.server._metrics.registry.collect()
            for sample in family.samples
            if sample.name == "headway_requests_rejected_total"
        }
        by_log: dict[tuple[str, str], int] = {}
        for line in self._lines:
            if line["event"] == "request_refused":
                key = (line["request_class"], line["reason"])
                by_log[key] = by_log.get(key, 0) + 1
        assert by_status == by_metrics == by_log
        return by_status


@asynccontextmanager
async def told_by(config: Settings) -> AsyncIterator[Told]:
    """A server with everything that it says."""
    with structlog.testing.capture_logs() as lines:
        async with running_server(config) as running:
            yield Told(running, lines)


async def code_of(call: Any) -> str:
    """Name of the status that a call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return str(caught.value.code().name)


async def test_every_refused_action_is_counted_once() -> None:
    """Bytes, ids and kinds that are wrong, and what the scheduler refuses: three and one."""
    async with told_by(counted()) as told:
        running = told.running
        assert await code_of(running.raw_unary("NextAction")(b"\xff")) == "INVALID_ARGUMENT"
        assert await code_of(running.next_action(observation(""))) == "INVALID_ARGUMENT"
        unknown = robot_pb2.NextActionRequest(
            robot_id="r1", embodiment="submarine", observation=observation()
        )
        assert await code_of(running.robots.NextAction(unknown)) == "INVALID_ARGUMENT"
        # 20 tokens at 5 ms a step are 0.1 s.
        assert await code_of(running.next_action(observation(budget_s=0.01))) == (
            "RESOURCE_EXHAUSTED"
        )
        await running.next_action(observation())
        assert await told.refusals() == {("interactive", "INVALID"): 3, ("interactive", "LATE"): 1}
        interactive = (await told.classes())["interactive"]
        assert (interactive.admitted, interactive.completed) == (1, 1)


async def test_refusals_on_a_session_are_counted_and_its_end_is_none() -> None:
    """Wrong bytes, a wrong observation and a late one; then the robot goes."""
    async with told_by(counted()) as told:
        stream: Any = told.running.channel.stream_stream(
            "/headway.v1.RobotService/Session",
            response_deserializer=robot_pb2.SessionResponse.FromString,
        )()
        hello = robot_pb2.Hello(robot_id="r1", embodiment="diff_drive", rate_hz=10)
        messages = [
            robot_pb2.SessionRequest(hello=hello).SerializeToString(),
            b"\xff",
            robot_pb2.SessionRequest(observation=observation("")).SerializeToString(),
            robot_pb2.SessionRequest(observation=observation(budget_s=0.01)).SerializeToString(),
        ]
        for message in messages:
            await stream.write(message)
        await stream.done_writing()
        answers = [answer async for answer in stream if not answer.HasField("heartbeat")]
        assert [one.WhichOneof("message") for one in answers] == ["settings", *["rejection"] * 3]
        assert await told.refusals() == {("interactive", "INVALID"): 2, ("interactive", "LATE"): 1}


async def test_session_that_is_refused_is_counted_once() -> None:
    """With its first message, and by the class that robots have."""
    async with told_by(counted()) as told:
        stream = told.running.robots.Session()
        hello = robot_pb2.Hello(robot_id="r1", embodiment="submarine", rate_hz=10)
        await stream.write(robot_pb2.SessionRequest(hello=hello))
        await read_error(stream)
        assert await told.refusals() == {("interactive", "INVALID"): 1}


async def test_silent_session_is_no_refusal() -> None:
    """Its requests, had there been any, would have ended each for itself."""
    config = counted(server__heartbeat_interval_s=0.02, server__idle_timeout_s=0.05)
    async with told_by(config) as told:
        stream = told.running.robots.Session()
        hello = robot_pb2.Hello(robot_id="r1", embodiment="diff_drive", rate_hz=10)
        await stream.write(robot_pb2.SessionRequest(hello=hello))
        await read_error(stream)
        assert await told.refusals() == {}


async def test_refused_texts_are_counted_by_their_class() -> None:
    """A field that is wrong, a text that no context holds; one before its class is known."""
    async with told_by(counted(engine__max_context_tokens=64)) as told:
        running = told.running

        async def ask(**fields: Any) -> str:
            return await code_of(
                running.robots.Generate(robot_pb2.GenerateRequest(**fields)).read()
            )

        batch, standard = robot_pb2.PRIORITY_BATCH, robot_pb2.PRIORITY_STANDARD
        await ask(prompt="", max_tokens=1, priority=batch)
        await ask(prompt="x" * 1000, max_tokens=1, priority=batch)
        # Short enough to be read; then its tokens are too many, which the scheduler says.
        await ask(prompt="x" * 100, max_tokens=1, priority=standard)
        await ask(prompt="x", max_tokens=1, priority=9)
        assert await told.refusals() == {
            ("batch", "INVALID"): 1,
            ("batch", "TOO_LARGE"): 1,
            ("standard", "TOO_LARGE"): 1,
            ("standard", "INVALID"): 1,
        }


async def test_denied_class_is_counted_where_it_was_asked_for() -> None:
    """Of a tenant that may only use others."""
    config = parse_settings(
        '[[tenants]]\nname = "default"\nclasses = ["standard"]\n',
        source="test",
        overrides={"server.port": 0, "server.development": True, "engine.kind": "simulated"},
    )
    with structlog.testing.capture_logs() as lines:
        async with running_server(config) as running:
            assert await code_of(running.next_action(observation())) == "PERMISSION_DENIED"
            status = await running.operations.GetStatus(operations_pb2.GetStatusRequest())
    (interactive,) = status.classes
    assert (interactive.request_class, interactive.tenant) == ("interactive", "default")
    assert [(one.reason, one.count) for one in interactive.rejected] == [("PERMISSION_DENIED", 1)]
    (line,) = [line for line in lines if line["event"] == "request_refused"]
    assert (line["label"], line["tenant"]) == ("r1/obs-1", "default")


async def test_call_beyond_the_most_is_counted_for_its_tenant() -> None:
    """One stream is open; no second call is let in."""
    with structlog.testing.capture_logs() as lines:
        async with running_server(counted(server__max_calls=1)) as running:
            stream = running.robots.Session()
            await until(lambda: running.server.num_open_calls == 1)
            assert await code_of(running.next_action(observation())) == "RESOURCE_EXHAUSTED"
            refused = running.server.dispatcher.ledger.refused
            assert {key: dict(of) for key, of in refused.items()} == {
                (0, "default"): {"QUEUE_FULL": 1}
            }
            stream.cancel()
    (line,) = [line for line in lines if line["event"] == "request_refused"]
    assert (line["tenant"], line["reason"]) == ("default", "QUEUE_FULL")


async def test_text_that_a_stop_string_ends_is_completed() -> None:
    """It is the answer that was asked for; nobody cancelled it."""
    async with told_by(counted()) as told:
        request = robot_pb2.GenerateRequest(prompt="hi", max_tokens=500, stop=["def"])
        text = "".join([part.text async for part in told.running.robots.Generate(request)])
        assert text == "abc"
        standard = (await told.classes())["standard"]
        assert (standard.admitted, standard.completed, standard.cancelled) == (1, 1, 0)
        assert standard.latency_p50.nanos > 0
        ended = {
            sample.labels["outcome"]: sample.value
            for family in told.running.server._metrics.registry.collect()
            for sample in family.samples
            if sample.name == "headway_requests_finished_total"
        }
        assert ended == {"COMPLETED": 1}


async def test_text_whose_reader_leaves_is_cancelled() -> None:
    """The other way to end before the last token."""
    async with told_by(counted()) as told:
        request = robot_pb2.GenerateRequest(prompt="hi", max_tokens=500, stop=["no such text"])
        call = told.running.robots.Generate(request)
        await call.read()
        call.cancel()
        await asyncio.wait_for(told.running.server.dispatcher.wait_idle(), 30)
        standard = (await told.classes())["standard"]
        assert (standard.completed, standard.cancelled) == (0, 1)


async def test_preemptions_reach_prometheus() -> None:
    """One slot: a robot takes it from a batch text, which then goes on."""
    async with told_by(counted(scheduler__max_running=1)) as told:
        running = told.running
        request = robot_pb2.GenerateRequest(
            prompt="hi", max_tokens=60, priority=robot_pb2.PRIORITY_BATCH
        )
        text = running.robots.Generate(request)
        await text.read()
        await running.next_action(observation())
        while await text.read() is not grpc.aio.EOF:
            pass
        metrics = Metrics()
        server = running.server
        gauges = Gauges(metrics, server._policy, server.dispatcher.replicas, MonotonicClock())
        gauges.look()
        gauges.look()  # Counted once.
        preempted = {
            name: metrics.registry.get_sample_value(
                "headway_num_preemptions_total", {"class": name}
            )
            for name in ("interactive", "standard", "batch")
        }
        assert preempted == {"interactive": 0, "standard": 0, "batch": 1}


async def test_steps_and_promises_are_compared_with_their_predictions() -> None:
    """One action of 20 tokens: 20 steps, the first of which reads the whole prompt."""
    async with told_by(counted()) as told:
        await told.running.next_action(observation())
        metrics = told.running.server._metrics.registry

        def value(name: str, **labels: str) -> float | None:
            return metrics.get_sample_value(f"headway_{name}", labels)

        (interactive,) = (await told.classes()).values()
        replica = {"replica": "replica-0"}
        assert value("step_prediction_ratio_count", **replica) == 20
        assert value("step_requests_sum", **replica) == 20
        assert value("step_prefill_tokens_sum", **replica) == interactive.prompt_tokens
        assert value("answer_prediction_ratio_count", **{"class": "interactive"}) == 1
        ratio = value("answer_prediction_ratio_sum", **{"class": "interactive"})
        assert ratio is not None
        # The engine takes what was predicted, and the machine around it a little more.
        assert ratio > 0.9
        server = told.running.server
        Gauges(server._metrics, server._policy, server.dispatcher.replicas, MonotonicClock()).look()
        spent = interactive.prompt_tokens + 2 * interactive.output_tokens
        who = {"class": "interactive", "tenant": "default"}
        assert value("fairness_counter_tokens", **who) == spent
        blocks = [
            value("kv_cache_blocks", state=state, **replica) for state in ("held", "cached", "free")
        ]
        assert blocks[0] == 0
        assert sum(one or 0 for one in blocks) == 1024
