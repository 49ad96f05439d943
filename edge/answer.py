"""What came of asking once, and of asking many times."""

import math
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from edge.action import Action
from headway.outcome import Reason
from headway.rpc.errors import CallError, DeadlineMissedError, RejectedError, UnavailableError

__all__ = ["Answer", "AnswerKind", "Tally", "percentile_ns"]

# Newest times that percentiles are taken of: bounds a robot that runs for weeks.
_MAX_TIMES = 10_000


class AnswerKind(Enum):
    """How an answer left the robot."""

    IN_TIME = "in time"
    REFUSED = "refused"  # A "no" at once: it can act safely on its own.
    LATE = "late"  # Admitted, or never heard of, and not there in time.
    UNREACHABLE = "unreachable"  # No server.
    FAILED = "failed"  # The server went away with it, or has a bug.


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one observation: an action, or the reason for none."""

    observation_id: str
    asked_ns: int  # The instant at which it was to be asked, not when it left.
    answered_ns: int
    action: Action | None = None
    error: CallError | None = None

    @property
    def elapsed_ns(self) -> int:
        """How long the robot waited."""
        return self.answered_ns - self.asked_ns

    @property
    def kind(self) -> AnswerKind:
        """How it left the robot."""
        if self.error is None:
            return AnswerKind.IN_TIME
        if isinstance(self.error, RejectedError):
            return AnswerKind.REFUSED
        if isinstance(self.error, DeadlineMissedError):
            return AnswerKind.LATE
        if isinstance(self.error, UnavailableError) and self.error.reason is None:
            return AnswerKind.UNREACHABLE
        return AnswerKind.FAILED

    @property
    def reason(self) -> str:
        """Why there is no action, as the contract names it; empty where there is one."""
        if self.error is None:
            return ""
        if self.error.reason is not None:
            return self.error.reason.value
        # Found out by the robot's own clock.
        return Reason.DEADLINE_MISSED.value if self.kind is AnswerKind.LATE else self.kind.name


class Tally:
    """Counts answers, and keeps the newest times for percentiles."""

    def __init__(self) -> None:
        self.kinds: Counter[AnswerKind] = Counter()
        self.reasons: Counter[str] = Counter()
        self._answer_ns: deque[int] = deque(maxlen=_MAX_TIMES)
        self._refusal_ns: deque[int] = deque(maxlen=_MAX_TIMES)

    @property
    def num_asked(self) -> int:
        """Observations that got an action or a reason."""
        return self.kinds.total()

    def add(self, answer: Answer) -> None:
        """Counts one answer."""
        self.kinds[answer.kind] += 1
        if answer.kind is AnswerKind.IN_TIME:
            self._answer_ns.append(answer.elapsed_ns)
        else:
            self.reasons[answer.reason] += 1
        if answer.kind is AnswerKind.REFUSED:
            self._refusal_ns.append(answer.elapsed_ns)

    def answer_percentile_ns(self, share: float) -> int | None:
        """Of the time to an action; None where there was none."""
        return percentile_ns(self._answer_ns, share)

    def refusal_percentile_ns(self, share: float) -> int | None:
        """Of the time to a refusal; None where there was none."""
        return percentile_ns(self._refusal_ns, share)


def percentile_ns(times_ns: Iterable[int], share: float) -> int | None:
    """The smallest time that at least `share` of them don't exceed (nearest rank)."""
    ordered = sorted(times_ns)
    if not ordered:
        return None
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
