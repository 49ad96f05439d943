"""A collector that keeps what it is sent: OTLP over gRPC on a real socket."""

from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

__all__ = ["OtlpReceiver", "otlp_receiver"]


class OtlpReceiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps spans.

    Attributes:
        endpoint: as it is configured.
        spans: in the order in which they came.
    """

    def __init__(self) -> None:
        self.endpoint = ""
        self.spans: list[Any] = []

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        """As the service's contract has it."""
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans += scope.spans
        return trace_service_pb2.ExportTraceServiceResponse()


@contextmanager
def otlp_receiver() -> Iterator[OtlpReceiver]:
    """One that listens on a free port."""
    receiver = OtlpReceiver()
    server = grpc.server(futures.ThreadPoolExecutor(1))
    add: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
    add(receiver, server)
    receiver.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield receiver
    finally:
        server.stop(0).wait()
