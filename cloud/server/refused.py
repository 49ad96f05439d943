"""A "no" on its way to the client: one exception inside, one status or message outside."""

from typing import NoReturn

import grpc

from cloud.scheduler.types import Ended, Rejected
from headway.clock import ns_from_s
from headway.outcome import Outcome, Reason
from headway.rpc.status import duration_from_ns, refusal, wire_reason
from headway.telemetry.trace_context import TraceParent
from headway.v1 import robot_pb2

__all__ = ["CallRefused", "abort", "rejection"]

_MESSAGES = {
    Reason.DEADLINE_MISSED: "admitted, but not completed before its deadline",
    Reason.SUPERSEDED: "a newer observation of the same robot took its place",
    Reason.ENGINE_LOST: "the engine that worked on it was lost",
    Reason.DRAINING: "the server takes no new work; ask another one",
    Reason.CANCELLED: "cancelled",
}


class CallRefused(Exception):  # noqa: N818 - an expected answer, and no error of the server's.
    """Ends a call with `reason`.

    Attributes:
        reason: why.
        message: one line for the client.
        field: path of the field at fault, or empty.
        retry_after_ns: earliest span after which asking again makes sense.
        predicted_ns: span until the answer would have been there.
        is_counted: what became of its request is in the ledger already, or no
            request ends with it.
        label: what a person knows the request by, for the log.
        trace: the span of its client that it belongs to, if it named one.
    """

    def __init__(
        self,
        reason: Reason,
        message: str,
        *,
        field: str = "",
        retry_after_ns: int | None = None,
        predicted_ns: int | None = None,
        is_counted: bool = False,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.field = field
        self.retry_after_ns = retry_after_ns
        self.predicted_ns = predicted_ns
        self.is_counted = is_counted
        self.label = ""
        self.trace: TraceParent | None = None

    @classmethod
    def invalid(cls, field: str, problem: str) -> "CallRefused":
        """The call is wrong at `field`: `problem` says what was got and expected."""
        return cls(Reason.INVALID, f"{field}: {problem}", field=field)

    @classmethod
    def stream_ended(cls, reason: Reason, message: str) -> "CallRefused":
        """Ends a stream, and not a request: each of those comes to an end of its own."""
        return cls(reason, message, is_counted=True)

    @classmethod
    def of_rejected(cls, rejected: Rejected) -> "CallRefused":
        """What the scheduler answered at once."""
        return cls(
            rejected.reason,
            rejected.message,
            retry_after_ns=rejected.retry_after_ns,
            predicted_ns=rejected.predicted_ns,
            is_counted=True,
        )

    @classmethod
    def of_ended(cls, ended: Ended, retry_after_ns: int | None = None) -> "CallRefused":
        """What became of an admitted request that was not completed."""
        reason = ended.reason
        if reason is None:
            expired = ended.outcome is Outcome.EXPIRED
            reason = Reason.DEADLINE_MISSED if expired else Reason.INTERNAL
        return cls(
            reason,
            _MESSAGES.get(reason, f"ended as {ended.outcome}: {reason}"),
            retry_after_ns=retry_after_ns,
            is_counted=True,
        )


async def abort(
    context: "grpc.aio.ServicerContext[bytes, bytes]", refused: CallRefused, tenant: str = ""
) -> NoReturn:
    """Ends the call with the status of `refused`; raises what gRPC wants raised."""
    left_s = context.time_remaining()
    told = refusal(
        refused.reason,
        refused.message,
        retry_after_ns=refused.retry_after_ns,
        predicted_ns=refused.predicted_ns,
        remaining_ns=None if left_s is None else ns_from_s(left_s),
        subject=f"tenant:{tenant}" if tenant else "",
        field=refused.field,
    )
    await context.abort(told.code, told.message, told.trailing_metadata)


def rejection(observation_id: str, refused: CallRefused) -> robot_pb2.Rejection:
    """The same "no" as a message on a session.

    Raises:
        ValueError: such a reason ends the stream with its status instead.
    """
    message = robot_pb2.Rejection(
        observation_id=observation_id,
        reason=wire_reason(refused.reason),
        message=refused.message,
    )
    if refused.retry_after_ns is not None:
        message.retry_after.CopyFrom(duration_from_ns(refused.retry_after_ns))
    if refused.predicted_ns is not None:
        message.predicted.CopyFrom(duration_from_ns(refused.predicted_ns))
    return message
