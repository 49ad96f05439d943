"""The robot's side of the contract, for synchronous code."""

import re
import threading
from collections.abc import Iterator
from enum import Enum
from types import TracebackType
from typing import Self

import grpc

from edge.action import Action
from edge.network_margin import NetworkMargin
from edge.observation import MAX_ID_BYTES, Observation
from edge.text import TextPiece
from edge.wire import action_from_wire, observation_to_wire, sendable, text_piece_from_wire
from headway.clock import Clock, MonotonicClock, ns_from_s, s_from_ns
from headway.outcome import Reason
from headway.rpc.credentials import NO_CREDENTIALS, Credentials, open_channel
from headway.rpc.errors import (
    CallError,
    DeadlineMissedError,
    InvalidRequestError,
    RejectedError,
    UnavailableError,
)
from headway.rpc.status import duration_from_ns, error_from_rpc
from headway.v1 import robot_pb2
from headway.v1.robot_pb2_grpc import RobotServiceStub

__all__ = ["Priority", "RobotClient"]

# A name, an IPv4 or a bracketed IPv6 address; a port.
_ADDRESS = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.%a-z]+\]):[0-9]{1,5}")
# Longer budgets are no control deadlines; also what a Duration can carry.
_MAX_BUDGET_S = 86_400.0
# Waits between attempts where the server gave no hint: doubled each time.
_FIRST_RETRY_WAIT_NS = 20_000_000
_LAST_RETRY_WAIT_NS = 320_000_000


class Priority(Enum):
    """How urgent a text is."""

    INTERACTIVE = robot_pb2.PRIORITY_INTERACTIVE  # A robot waits; where the tenant may.
    STANDARD = robot_pb2.PRIORITY_STANDARD  # A person waits.
    BATCH = robot_pb2.PRIORITY_BATCH  # Nobody waits.


class RobotClient:
    """One robot's connection to a server.

    Safe to use from several threads. Opens the connection when it is first
    needed and again after it was lost. `close` ends every call in flight and
    leaves no thread behind.

    Args:
        channel: the connection; the client closes it.
        robot_id: who asks. Must be one that the credential may speak for.
        embodiment: the kind of robot, which fixes what an action looks like.
        address: where the channel goes, for messages; empty where that is not known.
        credentials: shown with each call.
        clock: what lateness is judged by.

    Raises:
        InvalidRequestError: `robot_id` is none.
    """

    def __init__(
        self,
        channel: grpc.Channel,
        *,
        robot_id: str,
        embodiment: str,
        address: str = "",
        credentials: Credentials = NO_CREDENTIALS,
        clock: Clock | None = None,
    ) -> None:
        if not (
            1 <= len(robot_id) <= MAX_ID_BYTES and robot_id.isascii() and robot_id.isprintable()
        ):
            raise InvalidRequestError(
                f"robot_id must be 1 to {MAX_ID_BYTES} printable ASCII characters, got {robot_id!r}"
            )
        self._channel = channel
        self._address = address
        self._stub = RobotServiceStub(channel)
        self._robot_id = robot_id
        self._embodiment = embodiment
        self._metadata = credentials.metadata
        self._clock = clock if clock is not None else MonotonicClock()
        self._margin = NetworkMargin()
        self._margin_lock = threading.Lock()
        self._is_first_word = True
        self._is_closed = threading.Event()

    @classmethod
    def connect(
        cls,
        address: str,
        *,
        robot_id: str = "robot-1",
        embodiment: str = "diff_drive",
        credentials: Credentials = NO_CREDENTIALS,
    ) -> Self:
        """A client of the server at `address` ("host:port"); use it with `with`.

        Returns at once: a server that cannot be reached is told by the first
        call, which is bounded by its own budget.

        Raises:
            InvalidRequestError: `address` or `robot_id` is none.
            HeadwayError: a file of `credentials` cannot be read, or an API key
                would cross a network in the clear.
        """
        if not _ADDRESS.fullmatch(address) or not 0 < int(address.rpartition(":")[2]) < 2**16:
            raise InvalidRequestError(
                f"an address must be host:port, such as 127.0.0.1:50051, got {address!r}"
            )
        channel = open_channel(address, credentials)
        try:
            return cls(
                channel,
                robot_id=robot_id,
                embodiment=embodiment,
                address=address,
                credentials=credentials,
            )
        except InvalidRequestError:
            channel.close()
            raise

    def next_action(self, observation: Observation, budget_s: float) -> Action:
        """What to do next, or an exception before `budget_s` is spent.

        The budget covers everything from this call to its return: upload,
        waiting, inference and download. An answer that comes later by the
        robot's own clock is never returned. Only a server that is away is asked
        again, and only while there is budget.

        Args:
            observation: what the robot sees now.
            budget_s: seconds, finite and more than 0.

        Raises:
            InvalidRequestError: the budget or the observation is impossible.
            RejectedError: a "no" at once, with its reason and a retry hint.
            DeadlineMissedError: no answer in time.
            UnavailableError: no server, or it is going away.
            CallError: another "no" of the status table.
        """
        start_ns = self._clock.now_ns()
        deadline_ns = start_ns + _budget_ns(budget_s)
        wait_ns = _FIRST_RETRY_WAIT_NS
        while True:
            try:
                return self._ask_once(observation, start_ns, deadline_ns)
            except UnavailableError as error:
                self._wait_to_retry(error, wait_ns, deadline_ns)
                wait_ns = min(2 * wait_ns, _LAST_RETRY_WAIT_NS)

    def generate(
        self,
        prompt: str,
        *,
        max_tokens: int,
        budget_s: float | None = None,
        priority: Priority = Priority.STANDARD,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        stop: tuple[str, ...] = (),
        timeout_s: float = 600.0,
    ) -> Iterator[TextPiece]:
        """Text that goes on from `prompt`, piece by piece; the last has a summary.

        Closing the iterator before its end cancels the call.

        Args:
            prompt: not empty.
            max_tokens: at least 1.
            budget_s: until the first token. None: the class's own target.
            priority: how urgent.
            temperature: 0 (greedy) to 2.
            top_p: nucleus probability, more than 0, at most 1.
            seed: the same seed gives the same text.
            stop: decoding stops before any of these, at most 4.
            timeout_s: for the whole text.

        Raises:
            InvalidRequestError: an argument is impossible.
            CallError: as for `next_action`, while iterating.
        """
        if not prompt:
            raise InvalidRequestError("a prompt must not be empty")
        if max_tokens < 1:
            raise InvalidRequestError(f"max_tokens must be at least 1, got {max_tokens}")
        if not 0 <= seed < 2**64:
            raise InvalidRequestError(f"a seed must be at least 0 and below 2**64, got {seed}")
        budget = None if budget_s is None else duration_from_ns(_budget_ns(budget_s))
        with sendable("the text request"):
            request = robot_pb2.GenerateRequest(
                prompt=prompt,
                max_tokens=max_tokens,
                priority=priority.value,
                temperature=temperature,
                top_p=top_p,
                seed=seed,
                stop=stop,
                budget=budget,
            )
        return self._stream(request, s_from_ns(_budget_ns(timeout_s)))

    def close(self) -> None:
        """Ends the connection and every call in flight. May be called twice."""
        self._is_closed.set()
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _ask_once(self, observation: Observation, start_ns: int, deadline_ns: int) -> Action:
        self._refuse_if_closed()
        sent_ns = self._clock.now_ns()
        left_ns = deadline_ns - sent_ns
        if left_ns <= 0:
            raise _missed(start_ns, deadline_ns, sent_ns)
        with self._margin_lock:
            margin_ns = self._margin.margin_ns(left_ns)
        request = robot_pb2.NextActionRequest(
            robot_id=self._robot_id,
            embodiment=self._embodiment,
            observation=observation_to_wire(observation, left_ns - margin_ns),
        )
        try:
            response = self._stub.NextAction(
                request, timeout=s_from_ns(left_ns), metadata=self._metadata
            )
        except (grpc.RpcError, ValueError) as error:
            meant = self._error(error)
            self._learn_from_no(meant, sent_ns)
            raise meant from error
        now_ns = self._clock.now_ns()
        action = action_from_wire(response.action, observation.observation_id, now_ns - start_ns)
        # A late answer is no action, but still tells how slow the network is.
        self._learn(now_ns - sent_ns, action.timings.total_ns)
        if now_ns > deadline_ns:
            raise _missed(start_ns, deadline_ns, now_ns)
        return action

    def _stream(self, request: robot_pb2.GenerateRequest, timeout_s: float) -> Iterator[TextPiece]:
        self._refuse_if_closed()
        call = None
        try:
            call = self._stub.Generate(request, timeout=timeout_s, metadata=self._metadata)
            for response in call:
                yield text_piece_from_wire(response)
        except (grpc.RpcError, ValueError) as error:
            raise self._error(error) from error
        finally:
            if call is not None:
                call.cancel()

    def _wait_to_retry(self, error: UnavailableError, wait_ns: int, deadline_ns: int) -> None:
        """Waits until asking again makes sense; raises `error` where it never will."""
        if error.retry_after_s is not None:
            wait_ns = ns_from_s(error.retry_after_s)
        if wait_ns >= deadline_ns - self._clock.now_ns():
            raise error
        if self._is_closed.wait(s_from_ns(wait_ns)):
            raise error

    def _refuse_if_closed(self) -> None:
        if self._is_closed.is_set():
            raise UnavailableError("this client is closed; connect anew")

    def _error(self, error: grpc.RpcError | ValueError) -> CallError:
        # gRPC raises ValueError for a call on a channel that is being closed.
        if self._is_closed.is_set():
            return UnavailableError("this client was closed during the call")
        if isinstance(error, ValueError):
            raise error
        return error_from_rpc(error, address=self._address)

    def _learn_from_no(self, no: CallError, sent_ns: int) -> None:
        """What a "no" tells of the network."""
        if isinstance(no, RejectedError):
            # Refused at once: next to all of the time is the network's. Without
            # this, a margin that is too large would be refused for ever.
            self._learn(self._clock.now_ns() - sent_ns, 0)
        elif isinstance(no, DeadlineMissedError) and no.reason is None:
            with self._margin_lock:
                self._margin.observe_silence()

    def _learn(self, round_trip_ns: int, server_ns: int) -> None:
        with self._margin_lock:
            # The first word took the making of the connection as well.
            if not self._is_first_word:
                self._margin.observe(round_trip_ns, server_ns)
            self._is_first_word = False


def _budget_ns(budget_s: float) -> int:
    # Written so that NaN is refused as well.
    if not (0 < budget_s <= _MAX_BUDGET_S) or ns_from_s(budget_s) == 0:
        raise InvalidRequestError(
            f"a budget must be more than 0 and at most {_MAX_BUDGET_S:.0f} seconds, got {budget_s}"
        )
    return ns_from_s(budget_s)


def _missed(start_ns: int, deadline_ns: int, now_ns: int) -> DeadlineMissedError:
    return DeadlineMissedError(
        f"no answer within {(deadline_ns - start_ns) / 1e6:.0f} ms "
        f"(after {(now_ns - start_ns) / 1e6:.0f} ms); a late answer is dropped",
        reason=Reason.DEADLINE_MISSED,
    )
