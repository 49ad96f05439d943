"""A scripted RobotService on a real loopback socket, for tests of clients."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import NoReturn, Self

import grpc

from headway.outcome import Reason
from headway.rpc.channel import server_options
from headway.rpc.status import duration_from_ns, refusal
from headway.v1 import robot_pb2
from headway.v1.robot_pb2_grpc import RobotServiceServicer, add_RobotServiceServicer_to_server

__all__ = ["Script", "ScriptedRobotServer", "action_chunk", "refuse"]

# What the server does with one request: an answer, or an abort.
Script = Callable[[robot_pb2.NextActionRequest, grpc.ServicerContext], robot_pb2.ActionChunk]

_MS = 1_000_000


def action_chunk(observation_id: str, *, total_ns: int = 5 * _MS) -> robot_pb2.ActionChunk:
    """Ten steps of a diff_drive robot: straight on at 0.5 m/s."""
    chunk = robot_pb2.ActionChunk(
        observation_id=observation_id,
        names=["linear_velocity", "angular_velocity"],
        step_period=duration_from_ns(100 * _MS),
        timings=robot_pb2.Timings(
            queue=duration_from_ns(1 * _MS),
            prefill=duration_from_ns(2 * _MS),
            decode=duration_from_ns(total_ns - 3 * _MS),
            total=duration_from_ns(total_ns),
        ),
        model="scripted",
    )
    for _ in range(10):
        chunk.steps.add(values=[0.5, 0.0])
    return chunk


def refuse(
    context: grpc.ServicerContext,
    reason: Reason,
    *,
    retry_after_ns: int | None = None,
    predicted_ns: int | None = None,
) -> NoReturn:
    """Ends the call with `reason`, as the product's server does."""
    no = refusal(reason, f"no: {reason}", retry_after_ns=retry_after_ns, predicted_ns=predicted_ns)
    context.set_trailing_metadata(no.trailing_metadata)
    context.abort(no.code, no.message)


def _answer(
    request: robot_pb2.NextActionRequest, context: grpc.ServicerContext
) -> robot_pb2.ActionChunk:
    return action_chunk(request.observation.observation_id)


@dataclass
class ScriptedRobotServer(RobotServiceServicer):
    """Answers request i by script i, and the rest by the last one.

    Attributes:
        requests: what came, in order.
        time_left_s: gRPC deadline of each, as the server saw it.
        generate_cancelled: set once a Generate stream was cancelled by its client.
        is_hanging: set once all pieces are out. A cancel that comes while a
            message is on its way is sometimes lost by gRPC's blocking server.
    """

    scripts: list[Script] = field(default_factory=lambda: [_answer])
    pieces: list[robot_pb2.GenerateResponse] = field(default_factory=list)
    hangs_after_pieces: bool = False
    requests: list[robot_pb2.NextActionRequest] = field(default_factory=list)
    prompts: list[robot_pb2.GenerateRequest] = field(default_factory=list)
    time_left_s: list[float] = field(default_factory=list)
    generate_cancelled: threading.Event = field(default_factory=threading.Event)
    is_hanging: threading.Event = field(default_factory=threading.Event)
    port: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._server = grpc.server(ThreadPoolExecutor(16), options=server_options())
        add_RobotServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        self._server.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.stop(grace=0).wait()

    def NextAction(  # noqa: N802 - gRPC's name.
        self, request: robot_pb2.NextActionRequest, context: grpc.ServicerContext
    ) -> robot_pb2.NextActionResponse:
        """One scripted answer."""
        with self._lock:
            script = self.scripts[min(len(self.requests), len(self.scripts) - 1)]
            self.requests.append(request)
            self.time_left_s.append(context.time_remaining())
        return robot_pb2.NextActionResponse(action=script(request, context))

    def Session(  # noqa: N802 - gRPC's name.
        self, request_iterator: Iterator[robot_pb2.SessionRequest], context: grpc.ServicerContext
    ) -> Iterator[robot_pb2.SessionResponse]:
        """Not scripted."""
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "not scripted")

    def Generate(  # noqa: N802 - gRPC's name.
        self, request: robot_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[robot_pb2.GenerateResponse]:
        """The scripted pieces; then the end, or silence until the client leaves."""
        self.prompts.append(request)
        is_over = threading.Event()
        context.add_callback(is_over.set)
        yield from self.pieces
        if self.hangs_after_pieces:
            self.is_hanging.set()
            if is_over.wait(30):
                self.generate_cancelled.set()
