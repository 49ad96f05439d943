"""One robot's stream: observations in, actions and typed rejections out.

A "no" is a message and not the end. What ends a stream: the robot closes it,
says something that has no place in it, is silent or reads nothing for too
long, or the server goes.
"""

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import grpc
import structlog

from cloud.server.action import Embodiment
from cloud.server.calls import Context
from cloud.server.identity import Identity
from cloud.server.next_action import ActionCall, ActionRequests
from cloud.server.refused import CallRefused, rejection
from cloud.server.validation import check_id, parse
from headway.clock import Clock, ns_from_s, s_from_ns
from headway.config import ActionSettings, ServerSettings
from headway.outcome import Reason
from headway.rpc.status import STATUS_TABLE, duration_from_ns
from headway.telemetry.trace_context import trace_parent_of
from headway.v1 import robot_pb2

__all__ = ["RobotSession", "Sessions"]

_log = structlog.get_logger()


class Sessions:
    """The Session method, and all streams that are open.

    Args:
        requests: asks for actions.
        server: intervals, time-outs and limits.
        actions: what the settings message says of chunks.
        clock: of the dispatcher.
    """

    def __init__(
        self,
        requests: ActionRequests,
        server: ServerSettings,
        actions: ActionSettings,
        clock: Clock,
    ) -> None:
        self.requests = requests
        self.server = server
        self.clock = clock
        self.settings = robot_pb2.SessionSettings(
            heartbeat_interval=duration_from_ns(ns_from_s(server.heartbeat_interval_s)),
            idle_timeout=duration_from_ns(ns_from_s(server.idle_timeout_s)),
            max_message_bytes=server.max_message_bytes,
            chunk_steps=actions.chunk_steps,
            step_period=duration_from_ns(ns_from_s(actions.step_period_s)),
        )
        self._open: set[RobotSession] = set()

    @property
    def num_open(self) -> int:
        """Streams that are open."""
        return len(self._open)

    async def serve(self, incoming: object, identity: Identity, context: Context) -> None:
        """One stream, from its first message to its end.

        Raises:
            CallRefused: what ended it, where that was not the robot's own wish.
        """
        del incoming  # Read by `context.read`.
        session = RobotSession(self, identity, context)
        self._open.add(session)
        try:
            await session.run()
        finally:
            self._open.discard(session)

    def close(self) -> None:
        """Ends every stream: the server goes."""
        for session in self._open:
            session.end(CallRefused.stream_ended(Reason.DRAINING, "the server is being shut down"))


class RobotSession:
    """One open stream. Its tasks end with `run`."""

    def __init__(self, sessions: Sessions, identity: Identity, context: Context) -> None:
        self._sessions = sessions
        self._identity = identity
        self._context = context
        self._clock = sessions.clock
        self._trace = trace_parent_of(context.invocation_metadata())
        self._robot_id = ""
        self._embodiment: Embodiment | None = None
        # Answers to be written: messages, or calls that ended.
        self._outbox: deque[robot_pb2.SessionResponse | ActionCall] = deque()
        self._has_output = asyncio.Event()
        self._live: set[ActionCall] = set()
        self._is_half_closed = False
        self._deadline_ns: int | None = None
        self._heard_ns = self._clock.now_ns()
        self._write_began_ns: int | None = None
        self._num_heartbeats = 0
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Reads and writes until the end.

        Raises:
            CallRefused: what ended the stream.
        """
        left_s = self._context.time_remaining()
        if left_s is not None:
            self._deadline_ns = self._clock.now_ns() + ns_from_s(left_s)
        writing = asyncio.create_task(self._guard(self._write()))
        listening = [
            asyncio.create_task(self._guard(self._read())),
            asyncio.create_task(self._guard(self._watch())),
        ]
        try:
            await asyncio.wait({self._end})
            self._stop_asking(listening)
            await self._flush(writing)
        finally:
            self._stop_asking(listening)
            writing.cancel()
            await asyncio.gather(writing, *listening, return_exceptions=True)
            if self._end.done():
                self._end.exception()  # Looked at, also where the robot left first.
        self._end.result()

    def end(self, refused: CallRefused | None = None) -> None:
        """Ends the stream: well, or with `refused`."""
        if self._end.done():
            return
        if refused is None:
            self._end.set_result(None)
        else:
            self._end.set_exception(refused)
        self._has_output.set()

    def _stop_asking(self, listening: "list[asyncio.Task[None]]") -> None:
        for task in listening:
            task.cancel()
        for call in tuple(self._live):
            self._sessions.requests.release(call, self._ended)

    async def _flush(self, writing: "asyncio.Task[None]") -> None:
        """Lets what was answered get to a robot that reads.

        gRPC takes no status while a message is on its way: the stream would end
        without one, and its robot never hear of it.
        """
        server = self._sessions.server
        waited_ns = 0
        if self._write_began_ns is not None:
            waited_ns = self._clock.now_ns() - self._write_began_ns
        left_ns = ns_from_s(server.write_timeout_s) - waited_ns
        await asyncio.wait({writing}, timeout=s_from_ns(max(0, left_ns)))

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        """Turns whatever ends one of the tasks into the end of the stream."""
        try:
            await work
        except CallRefused as refused:
            self.end(refused)
        except grpc.aio.BaseError:
            self.end()  # The peer is gone; nobody is left to be told.
        except Exception:
            _log.exception("session_failed")
            self.end(
                CallRefused.stream_ended(
                    Reason.INTERNAL, "internal error; the server's log says more"
                )
            )

    async def _read(self) -> None:
        # The stubs of gRPC forget that the end of a stream is no message.
        read: Callable[[], Awaitable[Any]] = self._context.read
        while (data := await read()) is not grpc.aio.EOF:
            self._heard_ns = self._clock.now_ns()
            if self._embodiment is None:
                self._greet(parse(robot_pb2.SessionRequest, data))
            else:
                self._take(data)
        self._is_half_closed = True
        self._has_output.set()

    def _greet(self, message: robot_pb2.SessionRequest) -> None:
        if not message.HasField("hello"):
            raise CallRefused.invalid("hello", "must be the first message of a session")
        hello = message.hello
        check_id("hello.robot_id", hello.robot_id)
        if not (math.isfinite(hello.rate_hz) and hello.rate_hz > 0):
            raise CallRefused.invalid(
                "hello.rate_hz", f"must be finite and more than 0, got {hello.rate_hz:g}"
            )
        self._identity.require_robot(hello.robot_id)
        self._embodiment = self._sessions.requests.embodiment(hello.embodiment, "hello.embodiment")
        self._robot_id = hello.robot_id
        self._send(robot_pb2.SessionResponse(settings=self._sessions.settings))

    def _take(self, data: bytes) -> None:
        self._identity.require_current()
        observation_id = ""
        try:
            message = parse(robot_pb2.SessionRequest, data)
            kind = message.WhichOneof("message")
            if kind == "observation":
                observation_id = message.observation.observation_id
                self._ask(message.observation)
            elif kind is None:
                raise CallRefused.invalid("message", "none of the contract's is set")
        except CallRefused as refused:
            self._refuse(observation_id, refused)
            return
        if kind == "hello":
            raise CallRefused.stream_ended(
                Reason.CONFLICT, "hello: only the first message may be one"
            )

    def _ask(self, observation: robot_pb2.Observation) -> None:
        if self._embodiment is None:
            return
        call = self._sessions.requests.submit(
            self._identity,
            self._robot_id,
            self._embodiment,
            observation,
            arrived_ns=self._heard_ns,
            call_deadline_ns=self._deadline_ns,
            on_ended=self._ended,
            trace=self._trace,
        )
        if call.ended is None:
            self._live.add(call)

    def _ended(self, call: ActionCall) -> None:
        self._live.discard(call)
        if not self._end.done():
            self._send(call)

    def _refuse(self, observation_id: str, refused: CallRefused) -> None:
        """Tells a "no" as a message, or ends the stream where there is none for it."""
        if not STATUS_TABLE[refused.reason].wire:
            raise refused
        refused.trace = self._trace
        self._sessions.requests.refuse(self._identity, refused)
        # Only an id that could stand in a log is sent back.
        name = observation_id if observation_id.isascii() and observation_id.isprintable() else ""
        self._send(robot_pb2.SessionResponse(rejection=rejection(name[:64], refused)))

    def _send(self, answer: robot_pb2.SessionResponse | ActionCall) -> None:
        if len(self._outbox) >= self._sessions.server.send_queue_messages:
            self.end(
                CallRefused.stream_ended(
                    Reason.CANCELLED,
                    f"{len(self._outbox)} answers wait unread; the stream is dropped",
                )
            )
            return
        self._outbox.append(answer)
        self._has_output.set()

    async def _write(self) -> None:
        write, outbox = self._context.write, self._outbox
        while True:
            while outbox:
                message = self._message(outbox.popleft())
                self._write_began_ns = self._clock.now_ns()
                await write(message.SerializeToString())
                self._write_began_ns = None
            if self._end.done():
                return
            if self._is_half_closed and not self._live:
                self.end()
                return
            self._has_output.clear()
            await self._has_output.wait()

    def _message(self, answer: robot_pb2.SessionResponse | ActionCall) -> robot_pb2.SessionResponse:
        if isinstance(answer, robot_pb2.SessionResponse):
            return answer
        response = robot_pb2.SessionResponse()
        try:
            self._sessions.requests.fill(response.action, answer)
        except CallRefused as refused:
            response.rejection.CopyFrom(rejection(answer.observation_id, refused))
        return response

    async def _watch(self) -> None:
        """Gives signs of life, and ends a stream that gives none."""
        server = self._sessions.server
        idle_ns = ns_from_s(server.idle_timeout_s)
        write_ns = ns_from_s(server.write_timeout_s)
        while True:
            await asyncio.sleep(server.heartbeat_interval_s)
            self._identity.require_current()
            now_ns = self._clock.now_ns()
            if now_ns - self._heard_ns > idle_ns and not self._is_half_closed:
                raise CallRefused.stream_ended(
                    Reason.CANCELLED,
                    f"silent for {server.idle_timeout_s:g} s; send heartbeats",
                )
            if self._write_began_ns is not None and now_ns - self._write_began_ns > write_ns:
                raise CallRefused.stream_ended(
                    Reason.CANCELLED,
                    f"nothing was read for {server.write_timeout_s:g} s; the stream is dropped",
                )
            if self._embodiment is not None:
                self._num_heartbeats += 1
                heartbeat = robot_pb2.Heartbeat(sequence=self._num_heartbeats)
                self._send(robot_pb2.SessionResponse(heartbeat=heartbeat))
