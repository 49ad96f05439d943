"""The status table of the contract, both ways: `Reason` <-> gRPC status <-> exception.

Servers turn a reason into a `Refusal` and abort the call with it; clients turn
the error that gRPC raises back into an exception with the same reason. Details
follow google.rpc (AIP-193): ErrorInfo always, RetryInfo where asking again
helps, QuotaFailure where a limit of the tenant was met, BadRequest where a
field is wrong.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, QuotaFailure, RetryInfo
from google.rpc.status_pb2 import Status

from headway.outcome import Reason
from headway.rpc.errors import (
    CallError,
    ConflictError,
    DeadlineMissedError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    PermissionDeniedError,
    RejectedError,
    UnauthenticatedError,
    UnavailableError,
)
from headway.rpc.foreign import is_too_large, plain_words
from headway.rpc.metadata import RETRY_PUSHBACK_MS, STATUS_DETAILS
from headway.v1 import robot_pb2

__all__ = [
    "DOMAIN",
    "STATUS_TABLE",
    "Refusal",
    "StatusRule",
    "duration_from_ns",
    "error_from_rejection",
    "error_from_rpc",
    "reason_from_wire",
    "refusal",
    "wire_reason",
]

DOMAIN = "headway"
_PREDICTED_S = "predicted_s"
_NS_PER_S = 1_000_000_000
_NS_PER_MS = 1_000_000
# gRPC reads the pushback as a 32-bit signed number.
_MAX_PUSHBACK_MS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class StatusRule:
    """How one reason is told, and what the client raises."""

    code: grpc.StatusCode
    error: type[CallError]
    is_retriable: bool = False  # Asking again, later or elsewhere, may help.
    is_quota: bool = False  # A limit of the tenant or of the queues was met.
    # On a session. Not set: such a reason ends the stream with its status.
    wire: "robot_pb2.RejectReason.ValueType" = robot_pb2.REJECT_REASON_UNSPECIFIED


_CODE = grpc.StatusCode

STATUS_TABLE: Mapping[Reason, StatusRule] = MappingProxyType(
    {
        Reason.LATE: StatusRule(
            _CODE.RESOURCE_EXHAUSTED, RejectedError, True, True, robot_pb2.REJECT_REASON_LATE
        ),
        Reason.FAIR_SHARE: StatusRule(
            _CODE.RESOURCE_EXHAUSTED, RejectedError, True, True, robot_pb2.REJECT_REASON_FAIR_SHARE
        ),
        Reason.QUEUE_FULL: StatusRule(
            _CODE.RESOURCE_EXHAUSTED, RejectedError, True, True, robot_pb2.REJECT_REASON_QUEUE_FULL
        ),
        Reason.QUOTA: StatusRule(
            _CODE.RESOURCE_EXHAUSTED, RejectedError, True, True, robot_pb2.REJECT_REASON_QUOTA
        ),
        Reason.DRAINING: StatusRule(
            _CODE.UNAVAILABLE, UnavailableError, True, False, robot_pb2.REJECT_REASON_DRAINING
        ),
        Reason.NO_ENGINE: StatusRule(
            _CODE.UNAVAILABLE, UnavailableError, True, False, robot_pb2.REJECT_REASON_NO_ENGINE
        ),
        Reason.ENGINE_LOST: StatusRule(
            _CODE.UNAVAILABLE, UnavailableError, True, False, robot_pb2.REJECT_REASON_ENGINE_LOST
        ),
        Reason.DEADLINE_MISSED: StatusRule(
            _CODE.DEADLINE_EXCEEDED,
            DeadlineMissedError,
            wire=robot_pb2.REJECT_REASON_DEADLINE_MISSED,
        ),
        Reason.CANCELLED: StatusRule(_CODE.CANCELLED, CallError),
        Reason.SUPERSEDED: StatusRule(
            _CODE.ABORTED, RejectedError, wire=robot_pb2.REJECT_REASON_SUPERSEDED
        ),
        Reason.INVALID: StatusRule(
            _CODE.INVALID_ARGUMENT, InvalidRequestError, wire=robot_pb2.REJECT_REASON_INVALID
        ),
        Reason.TOO_LARGE: StatusRule(
            _CODE.INVALID_ARGUMENT, InvalidRequestError, wire=robot_pb2.REJECT_REASON_TOO_LARGE
        ),
        Reason.UNAUTHENTICATED: StatusRule(_CODE.UNAUTHENTICATED, UnauthenticatedError),
        Reason.PERMISSION_DENIED: StatusRule(_CODE.PERMISSION_DENIED, PermissionDeniedError),
        Reason.NOT_FOUND: StatusRule(_CODE.NOT_FOUND, NotFoundError),
        Reason.CONFLICT: StatusRule(
            _CODE.ALREADY_EXISTS, ConflictError, wire=robot_pb2.REJECT_REASON_CONFLICT
        ),
        Reason.INTERNAL: StatusRule(
            _CODE.INTERNAL, InternalError, wire=robot_pb2.REJECT_REASON_INTERNAL
        ),
    }
)

_REASON_OF_WIRE: Mapping[int, Reason] = {
    int(rule.wire): reason
    for reason, rule in STATUS_TABLE.items()
    if rule.wire != robot_pb2.REJECT_REASON_UNSPECIFIED
}
_REASONS = frozenset(Reason)
_NUMBER_OF_CODE: Mapping[grpc.StatusCode, int] = {code: code.value[0] for code in _CODE}
_TYPE_URL: Mapping[type[Message], str] = {
    kind: f"type.googleapis.com/{kind.DESCRIPTOR.full_name}"
    for kind in (BadRequest, ErrorInfo, QuotaFailure, RetryInfo)
}
# For a status without our details: from gRPC itself, or from a proxy.
_ERROR_OF_CODE: Mapping[grpc.StatusCode, type[CallError]] = MappingProxyType(
    {
        **{rule.code: rule.error for rule in STATUS_TABLE.values()},
        _CODE.ABORTED: RejectedError,
        _CODE.FAILED_PRECONDITION: InvalidRequestError,
        _CODE.OUT_OF_RANGE: InvalidRequestError,
    }
)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A status, complete: `await context.abort(code, message, trailing_metadata)`."""

    code: grpc.StatusCode
    message: str
    trailing_metadata: tuple[tuple[str, str | bytes], ...]


def duration_from_ns(span_ns: int) -> Duration:
    """`span_ns` (not negative) as a protobuf Duration."""
    return Duration(seconds=span_ns // _NS_PER_S, nanos=span_ns % _NS_PER_S)


def refusal(
    reason: Reason,
    message: str,
    *,
    retry_after_ns: int | None = None,
    predicted_ns: int | None = None,
    remaining_ns: int | None = None,
    subject: str = "",
    field: str = "",
) -> Refusal:
    """The status that tells `reason`, with its details.

    Args:
        reason: why the answer is "no".
        message: one line for a person; goes to the client as it is.
        retry_after_ns: earliest span after which asking again makes sense.
        predicted_ns: span from arrival until the answer would have been there.
        remaining_ns: what is left of the call's deadline; None: no deadline.
        subject: whose limit was met, such as "tenant:acme".
        field: path of the field at fault, such as "observation.budget".
    """
    rule = STATUS_TABLE[reason]
    status = Status(code=_NUMBER_OF_CODE[rule.code], message=message)
    info = ErrorInfo(reason=reason.value, domain=DOMAIN)
    if predicted_ns is not None:
        info.metadata[_PREDICTED_S] = f"{predicted_ns / _NS_PER_S:.6f}"
    _add(status, info)
    pushback: tuple[tuple[str, str | bytes], ...] = ()
    if rule.is_retriable:
        if retry_after_ns is not None:
            _add(status, RetryInfo(retry_delay=duration_from_ns(retry_after_ns)))
        pushback = ((RETRY_PUSHBACK_MS, str(_pushback_ms(retry_after_ns, remaining_ns))),)
    if rule.is_quota:
        quota = QuotaFailure()
        quota.violations.add(subject=subject, description=message)
        _add(status, quota)
    if field:
        wrong = BadRequest()
        wrong.field_violations.add(field=field, description=message)
        _add(status, wrong)
    details = (STATUS_DETAILS, status.SerializeToString())
    return Refusal(rule.code, message, (details, *pushback))


def _add(status: Status, detail: Message) -> None:
    # As `Any.Pack` does it, in half the time: an overloaded server says "no" all day.
    status.details.add(type_url=_TYPE_URL[type(detail)], value=detail.SerializeToString())


def _pushback_ms(retry_after_ns: int | None, remaining_ns: int | None) -> int:
    # -1: do not retry. A client that waited longer than its deadline would
    # report the deadline, and hide the rejection until then.
    if retry_after_ns is None:
        return -1
    if remaining_ns is not None and retry_after_ns >= remaining_ns:
        return -1
    return min(-(-retry_after_ns // _NS_PER_MS), _MAX_PUSHBACK_MS)


def error_from_rpc(error: grpc.RpcError, *, address: str = "") -> CallError:
    """The exception that a failed call means, from either of gRPC's Python APIs.

    Args:
        error: what the call raised.
        address: where it went, for the message where no server answered.
    """
    code, details = error.code(), error.details() or ""
    found = _details(error.trailing_metadata())
    if found is None:
        message = plain_words(code, details, address)
        if is_too_large(details):
            # To gRPC it is a resource that is exhausted; asking again would not help.
            return InvalidRequestError(message, reason=Reason.TOO_LARGE)
        return _ERROR_OF_CODE.get(code, InternalError)(message)
    reason, retry_after_s, predicted_s = found
    return STATUS_TABLE[reason].error(
        details or code.name, reason=reason, retry_after_s=retry_after_s, predicted_s=predicted_s
    )


def _details(
    trailing_metadata: Iterable[Any] | None,
) -> tuple[Reason, float | None, float | None] | None:
    """(reason, retry_after_s, predicted_s), or None where they are not ours."""
    data = None
    for key, value in trailing_metadata or ():
        if key == STATUS_DETAILS:
            data = value
    if not isinstance(data, bytes):
        return None
    reason = retry_after_s = predicted_s = None
    info, retry = ErrorInfo(), RetryInfo()
    try:
        for detail in Status.FromString(data).details:
            if detail.Unpack(info) and info.domain == DOMAIN and info.reason in _REASONS:
                reason = Reason(info.reason)
                predicted = info.metadata.get(_PREDICTED_S)
                predicted_s = None if predicted is None else float(predicted)
            elif detail.Unpack(retry):
                delay = retry.retry_delay
                retry_after_s = delay.seconds + delay.nanos / _NS_PER_S
    except (DecodeError, ValueError):
        return None  # Not what a server of ours sends; the code still counts.
    return None if reason is None else (reason, retry_after_s, predicted_s)


def wire_reason(reason: Reason) -> "robot_pb2.RejectReason.ValueType":
    """`reason` for a Rejection on a session.

    Raises:
        ValueError: such a reason ends the stream with its status instead.
    """
    wire = STATUS_TABLE[reason].wire
    if wire == robot_pb2.REJECT_REASON_UNSPECIFIED:
        raise ValueError(f"{reason} is not told on a session; end the stream with its status")
    return wire


def reason_from_wire(wire: int) -> Reason | None:
    """The reason of a Rejection; None for one of a later version of the contract."""
    return _REASON_OF_WIRE.get(wire)


def error_from_rejection(rejection: robot_pb2.Rejection) -> CallError:
    """The exception that a Rejection on a session means."""
    reason = reason_from_wire(rejection.reason)
    error = RejectedError if reason is None else STATUS_TABLE[reason].error
    return error(
        rejection.message,
        reason=reason,
        retry_after_s=_seconds(rejection.retry_after)
        if rejection.HasField("retry_after")
        else None,
        predicted_s=_seconds(rejection.predicted) if rejection.HasField("predicted") else None,
    )


def _seconds(span: Duration) -> float:
    return span.seconds + span.nanos / _NS_PER_S
