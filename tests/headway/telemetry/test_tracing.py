"""Spans of requests, as the SDK's own exporter in memory gets them."""

from typing import Any

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from headway.outcome import Outcome, Reason
from headway.telemetry.request_span import RequestSpan
from headway.telemetry.trace_context import TraceParent
from headway.telemetry.tracing import Tracing

MS = 1_000_000
NOW_NS = 1_700_000_000_000_000_000
PARENT = TraceParent("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", is_sampled=True)


def request(**changes: Any) -> RequestSpan:
    """240 ms: 1 before the queue, 9 in it, 30 to the first token, 200 to the last."""
    values: dict[str, Any] = {
        "request_id": "action-1",
        "label": "r1/obs-1",
        "request_class": "interactive",
        "tenant": "acme",
        "outcome": Outcome.COMPLETED,
        "reason": None,
        "total_ns": 240 * MS,
        "queue_ns": 9 * MS,
        "prefill_ns": 30 * MS,
        "decode_ns": 200 * MS,
        "prompt_tokens": 120,
        "cached_tokens": 64,
        "output_tokens": 20,
    }
    return RequestSpan(**{**values, **changes})


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    """Keeps what it is given."""
    return InMemorySpanExporter()


@pytest.fixture
def tracing(exporter: InMemorySpanExporter) -> Tracing:
    """At an instant that stands still."""
    return Tracing(SimpleSpanProcessor(exporter), lambda: NOW_NS)


def by_name(exporter: InMemorySpanExporter) -> dict[str, Any]:
    """What was exported."""
    return {span.name: span for span in exporter.get_finished_spans()}


def test_a_completed_request_is_a_span_with_its_phases(
    tracing: Tracing, exporter: InMemorySpanExporter
) -> None:
    """Of the caller's trace, under the caller's span; phases follow one another."""
    assert tracing.ended(request(), PARENT) == PARENT.trace_id
    spans = by_name(exporter)
    assert set(spans) == {"interactive request", "queue", "prefill", "decode"}
    server = spans["interactive request"]
    assert server.kind is SpanKind.SERVER
    assert f"{server.context.trace_id:032x}" == PARENT.trace_id
    assert f"{server.parent.span_id:016x}" == PARENT.span_id
    assert (server.start_time, server.end_time) == (NOW_NS - 240 * MS, NOW_NS)
    assert server.status.status_code is StatusCode.UNSET
    assert dict(server.attributes) == {
        "headway.request_id": "action-1",
        "headway.label": "r1/obs-1",
        "headway.class": "interactive",
        "headway.tenant": "acme",
        "headway.outcome": "COMPLETED",
        "gen_ai.usage.input_tokens": 120,
        "gen_ai.usage.output_tokens": 20,
        "headway.cached_tokens": 64,
    }
    times = [
        (spans[name].start_time - NOW_NS, spans[name].end_time - NOW_NS)
        for name in ("queue", "prefill", "decode")
    ]
    assert times == [(-239 * MS, -230 * MS), (-230 * MS, -200 * MS), (-200 * MS, 0)]
    for name in ("queue", "prefill", "decode"):
        assert spans[name].parent.span_id == server.context.span_id
    assert server.resource.attributes["service.name"] == "headway"


@pytest.mark.parametrize(
    ("outcome", "reason", "status"),
    [
        (Outcome.EXPIRED, Reason.DEADLINE_MISSED, StatusCode.ERROR),
        (Outcome.FAILED, Reason.ENGINE_LOST, StatusCode.ERROR),
        (Outcome.REJECTED, Reason.LATE, StatusCode.UNSET),
        (Outcome.CANCELLED, Reason.CANCELLED, StatusCode.UNSET),
    ],
)
def test_a_broken_promise_is_an_error_and_a_no_is_none(
    tracing: Tracing,
    exporter: InMemorySpanExporter,
    outcome: Outcome,
    reason: Reason,
    status: StatusCode,
) -> None:
    """Refusing in time is what the server is for."""
    tracing.ended(request(outcome=outcome, reason=reason), PARENT)
    server = by_name(exporter)["interactive request"]
    assert server.status.status_code is status
    assert server.attributes["headway.reason"] == reason.value


def test_without_a_caller_s_span_a_trace_begins(
    tracing: Tracing, exporter: InMemorySpanExporter
) -> None:
    """One for each request; its id is what the log says."""
    ids = [tracing.ended(request(), None) for _ in range(2)]
    spans = [span for span in exporter.get_finished_spans() if span.kind is SpanKind.SERVER]
    assert [f"{span.context.trace_id:032x}" for span in spans if span.context] == ids
    assert len(set(ids)) == 2
    assert all(span.parent is None for span in spans)


def test_what_the_caller_does_not_record_is_not_sent(
    tracing: Tracing, exporter: InMemorySpanExporter
) -> None:
    """Sampling is decided once, where the trace begins; the log has the id all the same."""
    silent = TraceParent(PARENT.trace_id, PARENT.span_id, is_sampled=False)
    assert tracing.ended(request(), silent) == PARENT.trace_id
    assert not exporter.get_finished_spans()


def test_phases_that_never_were_have_no_span(
    tracing: Tracing, exporter: InMemorySpanExporter
) -> None:
    """Expired in the queue: nothing was read, nothing decoded."""
    tracing.ended(request(prefill_ns=0, decode_ns=0, outcome=Outcome.EXPIRED), PARENT)
    assert set(by_name(exporter)) == {"interactive request", "queue"}


def test_closing_twice_is_once(tracing: Tracing) -> None:
    """A shutdown that is interrupted may come back."""
    tracing.close()
    tracing.close()
