"""A request that was admitted, from its service's point of view."""

from collections.abc import Callable

from cloud.engine.api import EngineRequest
from cloud.scheduler.types import Ended, Request
from headway.telemetry.trace_context import TraceParent

__all__ = ["Call"]


class Call:
    """A request, and what has come of it so far.

    Attributes:
        request: as the scheduler knows it.
        prompt: as the engine is to know it.
        arrived_ns: when it came in.
        predicted_ns: instant of the promised token, as predicted when it was admitted;
            0 before.
        tokens: its output so far; grows until `ended`.
        ended: its one end; None while it lives.
        label: what a person knows it by, for the log.
        trace: the span of its client that it belongs to, if it named one.
        is_started: whether an engine has worked on it.
        is_stopped: whether its text ended at a stop string.
    """

    __slots__ = (
        "arrived_ns",
        "ended",
        "is_started",
        "is_stopped",
        "label",
        "on_ended",
        "on_token",
        "predicted_ns",
        "prompt",
        "request",
        "tokens",
        "trace",
    )

    def __init__(
        self,
        request: Request,
        prompt: EngineRequest,
        arrived_ns: int,
        on_ended: Callable[["Call"], None],
        on_token: Callable[["Call"], None] | None = None,
        label: str = "",
        trace: TraceParent | None = None,
    ) -> None:
        self.request = request
        self.prompt = prompt
        self.arrived_ns = arrived_ns
        self.on_ended = on_ended
        self.on_token = on_token
        self.label = label
        self.trace = trace
        self.predicted_ns = 0
        self.tokens: list[int] = []
        self.ended: Ended | None = None
        self.is_started = False
        self.is_stopped = False
