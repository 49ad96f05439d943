"""The closed vocabulary of what can become of a request.

Shared by the scheduler (which decides), the wire (`headway.rpc.status`, which
translates) and the robot (which acts on it). Standard library only.
"""

from enum import IntEnum, StrEnum

__all__ = ["Outcome", "Reason", "RequestClass"]


class RequestClass(IntEnum):
    """Strict classes; a smaller value runs first."""

    INTERACTIVE = 0
    STANDARD = 1
    BATCH = 2

    @property
    def label(self) -> str:
        """Lower-case name, as it stands in logs, metrics and status."""
        return self.name.lower()

    @property
    def is_promised(self) -> bool:
        """Whether admission to this class is a promise of time."""
        return self is not RequestClass.BATCH


class Outcome(StrEnum):
    """How a request ended. Every request ends in exactly one."""

    COMPLETED = "COMPLETED"
    REJECTED = "REJECTED"
    EXPIRED = "EXPIRED"
    CANCELLED = "CANCELLED"
    FAILED = "FAILED"


class Reason(StrEnum):
    """Why a request did not complete. `ErrorInfo.reason` on the wire."""

    # Refused at admission: ask again after the hint.
    LATE = "LATE"
    FAIR_SHARE = "FAIR_SHARE"
    QUEUE_FULL = "QUEUE_FULL"
    QUOTA = "QUOTA"
    # Refused or failed for want of a server: ask elsewhere, or later.
    DRAINING = "DRAINING"
    NO_ENGINE = "NO_ENGINE"
    ENGINE_LOST = "ENGINE_LOST"
    # Admitted, and then not answered in time.
    DEADLINE_MISSED = "DEADLINE_MISSED"
    # Ended by the client.
    CANCELLED = "CANCELLED"
    SUPERSEDED = "SUPERSEDED"
    # The call itself is wrong.
    INVALID = "INVALID"
    TOO_LARGE = "TOO_LARGE"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    NOT_FOUND = "NOT_FOUND"
    CONFLICT = "CONFLICT"
    # A bug.
    INTERNAL = "INTERNAL"
