"""Metrics over HTTP, for Prometheus to come and read.

Needs the cloud extra (prometheus_client).
"""

from types import TracebackType

from prometheus_client import CollectorRegistry, start_http_server

from headway.errors import HeadwayError

__all__ = ["MetricsServer"]


class MetricsServer:
    """Answers Prometheus on a thread of its own until it is closed."""

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise HeadwayError(
                f"cannot serve metrics on {host}:{port}: {error.strerror or error}. "
                "Choose another server.metrics_port, or 0 for none"
            ) from error
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Stops, and waits for the thread. May be called twice."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> "MetricsServer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
