"""What a client raises when the answer is "no".

Every one carries the reason as a value, so that a robot decides by attributes
and never by text. `headway.rpc.status` makes them from a call's status.
"""

from headway.errors import HeadwayError
from headway.outcome import Reason

__all__ = [
    "CallError",
    "ConflictError",
    "DeadlineMissedError",
    "InternalError",
    "InvalidRequestError",
    "NotFoundError",
    "PermissionDeniedError",
    "RejectedError",
    "UnauthenticatedError",
    "UnavailableError",
]


class CallError(HeadwayError):
    """A call that was not answered with what it asked for.

    Attributes:
        message: one line for a person.
        reason: why, by the status table. None: the call never got a server's answer.
        retry_after_s: earliest span after which asking again makes sense. None:
            never for the same request, or not known.
        predicted_s: span from arrival until the answer would have been there.
            Present for LATE.
    """

    def __init__(
        self,
        message: str,
        *,
        reason: Reason | None = None,
        retry_after_s: float | None = None,
        predicted_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_s = retry_after_s
        self.predicted_s = predicted_s


class InvalidRequestError(CallError):
    """The call is malformed, its budget impossible, or larger than the model. Fix it."""


class UnauthenticatedError(CallError):
    """No credential, or a bad one."""


class PermissionDeniedError(CallError):
    """The credential does not allow this."""


class RejectedError(CallError):
    """Refused at once: it would be late, over a share, a queue or a bucket. Fall back now."""


class DeadlineMissedError(CallError):
    """No answer in time. Fall back now."""


class UnavailableError(CallError):
    """No server, no engine, or both are going. Another endpoint, or later."""


class NotFoundError(CallError):
    """The server does not know the model, job or adapter."""


class ConflictError(CallError):
    """The same id was used before with another payload."""


class InternalError(CallError):
    """A bug of the server; its log has the details. Report it."""
