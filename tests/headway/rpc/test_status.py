"""The status table over a real server, against the table of the design."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, QuotaFailure, RetryInfo
from google.rpc.status_pb2 import Status

from headway.outcome import Reason
from headway.rpc import errors
from headway.rpc.channel import (
    DEFAULT_MAX_MESSAGE_BYTES,
    channel_options,
    server_options,
)
from headway.rpc.status import (
    Refusal,
    error_from_rejection,
    error_from_rpc,
    reason_from_wire,
    refusal,
    wire_reason,
)
from headway.v1 import robot_pb2

# From the design's wire contract: reason -> (status, exception, retried, quota).
# SUPERSEDED and CANCELLED are the client's own doing, and not in its table.
CONTRACT: dict[Reason, tuple[grpc.StatusCode, type[errors.CallError], bool, bool]] = {
    Reason.LATE: (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.RejectedError, True, True),
    Reason.FAIR_SHARE: (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.RejectedError, True, True),
    Reason.QUEUE_FULL: (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.RejectedError, True, True),
    Reason.QUOTA: (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.RejectedError, True, True),
    Reason.DRAINING: (grpc.StatusCode.UNAVAILABLE, errors.UnavailableError, True, False),
    Reason.NO_ENGINE: (grpc.StatusCode.UNAVAILABLE, errors.UnavailableError, True, False),
    Reason.ENGINE_LOST: (grpc.StatusCode.UNAVAILABLE, errors.UnavailableError, True, False),
    Reason.DEADLINE_MISSED: (
        grpc.StatusCode.DEADLINE_EXCEEDED,
        errors.DeadlineMissedError,
        False,
        False,
    ),
    Reason.CANCELLED: (grpc.StatusCode.CANCELLED, errors.CallError, False, False),
    Reason.SUPERSEDED: (grpc.StatusCode.ABORTED, errors.RejectedError, False, False),
    Reason.INVALID: (grpc.StatusCode.INVALID_ARGUMENT, errors.InvalidRequestError, False, False),
    Reason.TOO_LARGE: (grpc.StatusCode.INVALID_ARGUMENT, errors.InvalidRequestError, False, False),
    Reason.UNAUTHENTICATED: (
        grpc.StatusCode.UNAUTHENTICATED,
        errors.UnauthenticatedError,
        False,
        False,
    ),
    Reason.PERMISSION_DENIED: (
        grpc.StatusCode.PERMISSION_DENIED,
        errors.PermissionDeniedError,
        False,
        False,
    ),
    Reason.NOT_FOUND: (grpc.StatusCode.NOT_FOUND, errors.NotFoundError, False, False),
    Reason.CONFLICT: (grpc.StatusCode.ALREADY_EXISTS, errors.ConflictError, False, False),
    Reason.INTERNAL: (grpc.StatusCode.INTERNAL, errors.InternalError, False, False),
}
HINT_NS = 1_250_000_000
PREDICTED_NS = 512_000_000


@asynccontextmanager
async def refusing_server(
    *refusals: Refusal, max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES
) -> AsyncIterator[str]:
    """Aborts call i with refusal i; its address."""
    left = list(refusals)

    async def handler(data: bytes, context: Any) -> bytes:
        told = left.pop(0)
        await context.abort(told.code, told.message, told.trailing_metadata)
        return data

    server = grpc.aio.server(options=server_options(max_message_bytes=max_message_bytes))
    method: Any = grpc.unary_unary_rpc_method_handler(handler)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("test.Refuser", {"Ask": method}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        # With none to cancel; at once, the client would be told so, and log it.
        await server.stop(10)


def raw_call(channel: Any) -> Any:
    """The method of `refusing_server`, bytes in and out."""
    return channel.unary_unary("/test.Refuser/Ask")


async def ask(address: str) -> grpc.aio.AioRpcError:
    """The error of one call."""
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await raw_call(channel)(b"")
    return caught.value


def details_of(error: grpc.aio.AioRpcError) -> dict[str, Any]:
    """google.rpc details by short type name, read as any gRPC client would."""
    found: dict[str, Any] = {}
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            for detail in Status.FromString(value).details:
                for kind in (ErrorInfo, RetryInfo, QuotaFailure, BadRequest):
                    message = kind()
                    if detail.Unpack(message):
                        found[kind.DESCRIPTOR.name] = message
        elif key == "grpc-retry-pushback-ms":
            found["pushback"] = value
    return found


def test_contract_table_of_this_test_is_complete() -> None:
    """A new reason must be given a status."""
    assert set(CONTRACT) == set(Reason)


@pytest.mark.parametrize("reason", list(Reason))
async def test_every_reason_arrives_as_the_contract_says(reason: Reason) -> None:
    """Code, details and exception, over a socket and back."""
    code, kind, is_retriable, is_quota = CONTRACT[reason]
    told = refusal(
        reason,
        "no: übermorgen",
        retry_after_ns=HINT_NS,
        predicted_ns=PREDICTED_NS,
        subject="tenant:acme",
    )
    async with refusing_server(told) as address:
        error = await ask(address)
    assert error.code() is code
    found = details_of(error)
    assert (found["ErrorInfo"].reason, found["ErrorInfo"].domain) == (reason.value, "headway")
    assert ("RetryInfo" in found) == ("pushback" in found) == is_retriable
    assert ("QuotaFailure" in found) == is_quota
    if is_retriable:
        assert (found["RetryInfo"].retry_delay.seconds, found["pushback"]) == (1, "1250")
    if is_quota:
        assert found["QuotaFailure"].violations[0].subject == "tenant:acme"

    raised = error_from_rpc(error)
    assert type(raised) is kind
    assert raised.reason is reason
    assert raised.message == "no: übermorgen"
    assert raised.predicted_s == 0.512
    assert raised.retry_after_s == (1.25 if is_retriable else None)


async def test_blocking_clients_read_the_same() -> None:
    """GRPC's other Python API has an error class of its own."""
    async with refusing_server(refusal(Reason.LATE, "late", retry_after_ns=HINT_NS)) as address:

        def blocking() -> errors.CallError:
            with grpc.insecure_channel(address, options=channel_options()) as channel:
                try:
                    raw_call(channel)(b"", timeout=10)
                except grpc.RpcError as error:
                    return error_from_rpc(error)
            raise AssertionError("the call was answered")

        raised = await asyncio.to_thread(blocking)
    assert (type(raised), raised.reason, raised.retry_after_s) == (
        errors.RejectedError,
        Reason.LATE,
        1.25,
    )


@pytest.mark.parametrize(
    ("retry_after_ns", "remaining_ns", "pushback"),
    [
        (20_000_000, 100_000_000, "20"),
        (20_000_001, 100_000_000, "21"),  # Rounded up: never too early.
        (20_000_000, None, "20"),
        (100_000_000, 100_000_000, "-1"),
        (200_000_000, 100_000_000, "-1"),  # Would hide the rejection until the deadline.
        (None, 100_000_000, "-1"),
        (10**18, None, "2147483647"),
    ],
)
def test_pushback_never_outlasts_the_deadline(
    retry_after_ns: int | None, remaining_ns: int | None, pushback: str
) -> None:
    """GRFC A6: negative means do not retry; the value is a 32-bit number of ms."""
    told = refusal(Reason.LATE, "late", retry_after_ns=retry_after_ns, remaining_ns=remaining_ns)
    assert dict(told.trailing_metadata)["grpc-retry-pushback-ms"] == pushback


async def test_wrong_field_is_named() -> None:
    """A client can show which field to fix without reading the text."""
    told = refusal(Reason.INVALID, "must be more than 0", field="observation.budget")
    async with refusing_server(told) as address:
        error = await ask(address)
    (violation,) = details_of(error)["BadRequest"].field_violations
    assert (violation.field, violation.description) == (
        "observation.budget",
        "must be more than 0",
    )


async def test_grpc_s_own_retries_obey_the_pushback() -> None:
    """With -1 the rejection arrives at once; with a hint the same call is tried again."""
    policy = (
        '{"methodConfig": [{"name": [{}], "retryPolicy": {"maxAttempts": 2, '
        '"initialBackoff": "0.001s", "maxBackoff": "0.001s", "backoffMultiplier": 1, '
        '"retryableStatusCodes": ["RESOURCE_EXHAUSTED"]}}]}'
    )
    options = [*channel_options(), ("grpc.service_config", policy)]
    never = refusal(Reason.LATE, "first", retry_after_ns=None)
    soon = refusal(Reason.LATE, "second", retry_after_ns=1_000_000)
    async with (
        refusing_server(never, soon, refusal(Reason.QUOTA, "third")) as address,
        grpc.aio.insecure_channel(address, options=options) as channel,
    ):
        messages = []
        for _ in range(2):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await raw_call(channel)(b"")
            messages.append(caught.value.details())
    assert messages == ["first", "third"]


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.UnavailableError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineMissedError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.RejectedError),
        (grpc.StatusCode.UNIMPLEMENTED, errors.InternalError),
        (grpc.StatusCode.UNKNOWN, errors.InternalError),
        (grpc.StatusCode.INVALID_ARGUMENT, errors.InvalidRequestError),
    ],
)
@pytest.mark.parametrize("details", [b"", b"\xff\xff", Status(code=8).SerializeToString()])
async def test_status_without_our_details_still_has_an_exception(
    code: grpc.StatusCode, kind: type[errors.CallError], details: bytes
) -> None:
    """From gRPC itself, from a proxy, or with details that are rubbish."""
    trailing = (("grpc-status-details-bin", details),) if details else ()
    async with refusing_server(Refusal(code, "of another hand", trailing)) as address:
        raised = error_from_rpc(await ask(address))
    assert (type(raised), raised.reason) == (kind, None)


class _Said(grpc.RpcError):
    """A status that gRPC itself made; texts as its core 1.85 has them."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        self._said = (code, details)

    def code(self) -> grpc.StatusCode:
        """The status."""
        return self._said[0]

    def details(self) -> str:
        """Its text."""
        return self._said[1]

    def trailing_metadata(self) -> tuple[Any, ...]:
        """None: there was no server."""
        return ()


_REMOTE = "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.1:1: Failed to "


@pytest.mark.parametrize(
    ("details", "words"),
    [
        (_REMOTE + "connect to remote host: Connection refused", "nobody listens there"),
        (_REMOTE + "connect to remote host: connect() timed out", "it cannot be reached"),
        (_REMOTE + "connect to remote host: Network is unreachable", "it cannot be reached"),
        ("errors resolving x.invalid:1: [field:hostname lookup error]", "its name is not known"),
        ("DNS resolution failed for x.invalid:1", "its name is not known"),
        ("Socket closed", "the connection to the server at h:1 was lost"),
        ("recvmsg:Connection reset by peer", "the connection to the server at h:1 was lost"),
        ("GOAWAY received; Error code: 2", "the connection to the server at h:1 was lost"),
        ("keepalive watchdog timeout", "gave no sign of life"),
        ("upstream is warming up", "upstream is warming up"),
    ],
)
def test_what_grpc_says_of_an_absent_server_is_put_in_plain_words(details: str, words: str) -> None:
    """With the address; a proxy's own text is passed on."""
    said = _Said(grpc.StatusCode.UNAVAILABLE, details)
    raised = error_from_rpc(said, address="h:1")
    assert (type(raised), raised.reason) == (errors.UnavailableError, None)
    assert raised.message.endswith(words)
    assert ("h:1" in raised.message) is not (words == details)
    assert "h:1" not in error_from_rpc(said).message


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ((100, 10_000), "the message has 5,000 bytes; expected at most 100"),  # The client's.
        ((10_000, 100), "the message has 5,000 bytes; expected at most 100"),  # The server's.
    ],
)
async def test_a_message_that_is_too_large_is_a_wrong_request(
    limits: tuple[int, int], words: str
) -> None:
    """Whichever end refuses it: asking again would not help."""
    async with (
        refusing_server(max_message_bytes=limits[1]) as address,
        grpc.aio.insecure_channel(
            address, options=channel_options(max_message_bytes=limits[0])
        ) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await raw_call(channel)(bytes(5000))
    raised = error_from_rpc(caught.value)
    assert (type(raised), raised.reason) == (errors.InvalidRequestError, Reason.TOO_LARGE)
    assert raised.message == words


async def test_a_server_that_is_none_of_ours_is_named() -> None:
    """Another gRPC service answers at that address."""
    async with (
        refusing_server() as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        other: Any = channel.unary_unary("/test.Other/Ask")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await other(b"")
    assert error_from_rpc(caught.value, address="h:1").message == (
        "the server at h:1 does not know this call; expected a Headway server of this version"
    )


def test_every_wire_reason_has_one_reason_and_back() -> None:
    """The enum of the .proto is covered, save for the value that is never sent."""
    numbers = set(robot_pb2.RejectReason.values()) - {robot_pb2.REJECT_REASON_UNSPECIFIED}
    for number in numbers:
        reason = reason_from_wire(number)
        assert reason is not None
        assert robot_pb2.RejectReason.Name(number) == f"REJECT_REASON_{reason.value}"
        assert wire_reason(reason) == number


@pytest.mark.parametrize(
    "reason",
    [
        Reason.CANCELLED,
        Reason.UNAUTHENTICATED,
        Reason.PERMISSION_DENIED,
        Reason.NOT_FOUND,
    ],
)
def test_reason_that_ends_the_stream_is_no_message(reason: Reason) -> None:
    """The caller has to end the stream instead."""
    with pytest.raises(ValueError, match="end the stream"):
        wire_reason(reason)


def test_rejection_of_a_later_contract_is_still_a_no() -> None:
    """An unknown reason must not make a robot's client fall over."""
    raised = error_from_rejection(robot_pb2.Rejection(reason=77, message="new"))  # type: ignore[arg-type]
    assert (type(raised), raised.reason, raised.message) == (errors.RejectedError, None, "new")


def test_rejection_on_a_session_raises_the_same_as_the_status() -> None:
    """Robots handle one kind of "no", however it came."""
    message = robot_pb2.Rejection(reason=robot_pb2.REJECT_REASON_LATE, message="late")
    message.retry_after.nanos = 30_000_000
    message.predicted.seconds = 2
    raised = error_from_rejection(message)
    assert (type(raised), raised.reason) == (errors.RejectedError, Reason.LATE)
    assert (raised.retry_after_s, raised.predicted_s) == (0.03, 2.0)
