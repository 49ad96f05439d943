"""From a call's traceparent to the collector and the log, over real sockets."""

import sys
from typing import Any

import grpc
import pytest
import structlog

from cloud.server.app import Server
from headway.errors import ConfigError, HeadwayError
from headway.v1 import robot_pb2
from tests.support.otlp_receiver import otlp_receiver
from tests.support.running_server import observation, running_server, settings

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADER = (("traceparent", f"00-{TRACE}-{SPAN}-01"),)


def attributes(span: Any) -> dict[str, Any]:
    """Of a span as it is on the wire."""
    return {one.key: one.value.string_value or one.value.int_value for one in span.attributes}


async def test_spans_of_requests_reach_a_collector() -> None:
    """An action, a text and a refusal, all of the trace of their caller."""
    with otlp_receiver() as collector, structlog.testing.capture_logs() as lines:
        config = settings(telemetry__otlp_endpoint=collector.endpoint)
        async with running_server(config) as running:
            await running.next_action(observation(), metadata=HEADER)
            request = robot_pb2.GenerateRequest(prompt="hi", max_tokens=3)
            async for _ in running.robots.Generate(request, metadata=HEADER):
                pass
            with pytest.raises(grpc.aio.AioRpcError):
                await running.next_action(observation("late", budget_s=0.001), metadata=HEADER)
        spans = collector.spans
    assert {span.trace_id.hex() for span in spans} == {TRACE}
    ended = [attributes(span) for span in spans if span.parent_span_id.hex() == SPAN]
    told = [
        (one["headway.class"], one["headway.outcome"], one.get("headway.reason")) for one in ended
    ]
    assert sorted(told, key=str) == [
        ("interactive", "COMPLETED", None),
        ("interactive", "REJECTED", "LATE"),
        ("standard", "COMPLETED", None),
    ]
    (action,) = [one for one in ended if one.get("headway.label") == "r1/obs-1"]
    assert action["gen_ai.usage.output_tokens"] == 20
    assert {"queue", "prefill", "decode"} <= {span.name for span in spans}
    events = ("request_finished", "request_refused")
    assert [line["trace_id"] for line in lines if line["event"] in events] == [TRACE] * 3


async def test_a_session_s_requests_belong_to_its_trace() -> None:
    """The header comes once, with the stream; no collector is needed for the log."""
    with structlog.testing.capture_logs() as lines:
        async with running_server(settings()) as running:
            stream = running.robots.Session(metadata=HEADER)
            hello = robot_pb2.Hello(robot_id="r1", embodiment="diff_drive", rate_hz=10)
            await stream.write(robot_pb2.SessionRequest(hello=hello))
            await stream.write(robot_pb2.SessionRequest(observation=observation()))
            await stream.write(robot_pb2.SessionRequest(observation=observation("")))
            await stream.done_writing()
            async for _ in stream:
                pass
    events = ("request_finished", "request_refused")
    told = {line["event"]: line["trace_id"] for line in lines if line["event"] in events}
    assert told == dict.fromkeys(events, TRACE)


@pytest.mark.parametrize("header", ["garbage", f"00-{'0' * 32}-{SPAN}-01", "x" * 4000])
async def test_a_header_that_is_not_valid_changes_nothing(header: str) -> None:
    """The call is answered, and nothing of it is in the log."""
    with structlog.testing.capture_logs() as lines:
        async with running_server(settings()) as running:
            chunk = await running.next_action(observation(), metadata=(("traceparent", header),))
    assert len(chunk.steps) == 10
    assert not any("trace_id" in line or header in str(line) for line in lines)


async def test_without_a_collector_that_answers_robots_are_served() -> None:
    """And the server stops: what cannot be sent is dropped."""
    config = settings(telemetry__otlp_endpoint="http://127.0.0.1:1")
    async with running_server(config) as running:
        chunk = await running.next_action(observation())
    assert len(chunk.steps) == 10


def test_without_the_extra_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before anything is started."""
    monkeypatch.delitem(sys.modules, "headway.telemetry.tracing", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(HeadwayError) as raised:
        Server(settings(telemetry__otlp_endpoint="http://127.0.0.1:4317"))
    assert "pip install 'headway[otel]'" in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4317", "ftp://x:1", "http://host", "http:// x:1"])
def test_an_endpoint_of_another_form_is_one_line(endpoint: str) -> None:
    """With an example of the right one."""
    with pytest.raises(ConfigError) as raised:
        settings(telemetry__otlp_endpoint=endpoint)
    assert "telemetry.otlp_endpoint" in str(raised.value)
    assert "http://127.0.0.1:4317" in str(raised.value)
