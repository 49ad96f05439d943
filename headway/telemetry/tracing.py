"""OpenTelemetry: a span a request, sent to a collector over OTLP.

Needs the otel extra (opentelemetry-sdk, opentelemetry-exporter-otlp-proto-grpc).
"""

import time
from collections.abc import Callable, Mapping
from types import MappingProxyType

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    format_trace_id,
)

from headway import __version__
from headway.outcome import Outcome
from headway.telemetry.request_span import RequestSpan
from headway.telemetry.trace_context import TraceParent

__all__ = ["Tracing", "otlp_processor"]

# A collector that does not answer holds nothing up: spans are dropped instead.
_EXPORT_TIMEOUT_S = 5.0
_FAILED = frozenset({Outcome.EXPIRED, Outcome.FAILED})
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_UNSET = Status(StatusCode.UNSET)


def otlp_processor(endpoint: str) -> SpanProcessor:
    """Sends spans to a collector, in batches and on a thread of its own.

    Args:
        endpoint: "http://host:port", or https for TLS.
    """
    exporter = OTLPSpanExporter(
        endpoint=endpoint, insecure=endpoint.startswith("http:"), timeout=_EXPORT_TIMEOUT_S
    )
    return BatchSpanProcessor(exporter)


class Tracing:
    """Makes the spans of requests. Nothing is registered globally.

    A request is known whole when it ends, so its spans are made complete: the tracer of
    the SDK, which keeps spans open and locked, takes some five times as long on the loop.

    Whether one is recorded is the caller's word (its traceparent); without one it is.

    Args:
        processor: takes the spans that ended.
        wall_ns: nanoseconds since 1970; spans are told by it.
    """

    def __init__(self, processor: SpanProcessor, wall_ns: Callable[[], int] = time.time_ns) -> None:
        # Not `Resource.create`: that would look at the environment.
        self._resource = Resource({"service.name": "headway", "service.version": __version__})
        self._scope = InstrumentationScope("headway", __version__)
        self._processor = processor
        self._ids = RandomIdGenerator()
        self._wall_ns = wall_ns
        self._is_closed = False

    def ended(self, request: RequestSpan, parent: TraceParent | None) -> str:
        """Tells a request that ends now; the id of its trace, 32 hexadecimal digits."""
        if parent is not None and not parent.is_sampled:
            return parent.trace_id
        end_ns = self._wall_ns()
        caller = _remote(parent) if parent is not None else None
        own = self._new_context(caller.trace_id if caller else self._ids.generate_trace_id())
        start_ns = end_ns - request.queue_ns - request.prefill_ns - request.decode_ns
        for name, span_ns in (
            ("queue", request.queue_ns),
            ("prefill", request.prefill_ns),
            ("decode", request.decode_ns),
        ):
            if span_ns > 0:
                phase = self._new_context(own.trace_id)
                self._tell(name, phase, own, start_ns, start_ns + span_ns)
                start_ns += span_ns
        self._tell(
            f"{request.request_class} request",
            own,
            caller,
            end_ns - request.total_ns,
            end_ns,
            kind=SpanKind.SERVER,
            attributes=_attributes(request),
            status=_status(request),
        )
        return format_trace_id(own.trace_id)

    def close(self) -> None:
        """Sends what is left, and ends the thread that does it. May be called twice."""
        if not self._is_closed:
            self._is_closed = True
            self._processor.shutdown()

    def _new_context(self, trace_id: int) -> SpanContext:
        span_id = self._ids.generate_span_id()
        return SpanContext(trace_id, span_id, is_remote=False, trace_flags=_SAMPLED)

    def _tell(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        start_ns: int,
        end_ns: int,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Mapping[str, str | int] = MappingProxyType({}),
        status: Status = _UNSET,
    ) -> None:
        self._processor.on_end(
            ReadableSpan(
                name,
                context,
                parent,
                self._resource,
                attributes,
                kind=kind,
                instrumentation_scope=self._scope,
                status=status,
                start_time=start_ns,
                end_time=end_ns,
            )
        )


def _attributes(request: RequestSpan) -> dict[str, str | int]:
    attributes: dict[str, str | int] = {
        "headway.request_id": request.request_id,
        "headway.class": request.request_class,
        "headway.tenant": request.tenant,
        "headway.outcome": request.outcome.value,
        # Names of OpenTelemetry's conventions for generative models.
        "gen_ai.usage.input_tokens": request.prompt_tokens,
        "gen_ai.usage.output_tokens": request.output_tokens,
        "headway.cached_tokens": request.cached_tokens,
    }
    if request.label:
        attributes["headway.label"] = request.label
    if request.reason is not None:
        attributes["headway.reason"] = request.reason.value
    return attributes


def _status(request: RequestSpan) -> Status:
    if request.outcome not in _FAILED:
        return _UNSET
    return Status(StatusCode.ERROR, (request.reason or request.outcome).value)


def _remote(parent: TraceParent) -> SpanContext:
    return SpanContext(
        int(parent.trace_id, 16),
        int(parent.span_id, 16),
        is_remote=True,
        trace_flags=_SAMPLED,
    )
