"""Counting answers."""

import pytest

from edge.action import Action, Timings
from edge.answer import Answer, AnswerKind, Tally, percentile_ns
from headway.outcome import Reason
from headway.rpc.errors import (
    CallError,
    DeadlineMissedError,
    InternalError,
    RejectedError,
    UnavailableError,
)

ACTION = Action("o", ("v",), ((0.0,),), 1, Timings(0, 0, 0, 0), 0, "m")


@pytest.mark.parametrize(
    ("error", "kind", "reason"),
    [
        (RejectedError("x", reason=Reason.LATE), AnswerKind.REFUSED, "LATE"),
        (RejectedError("x", reason=Reason.FAIR_SHARE), AnswerKind.REFUSED, "FAIR_SHARE"),
        (
            DeadlineMissedError("x", reason=Reason.DEADLINE_MISSED),
            AnswerKind.LATE,
            "DEADLINE_MISSED",
        ),
        (DeadlineMissedError("x"), AnswerKind.LATE, "DEADLINE_MISSED"),
        (UnavailableError("x"), AnswerKind.UNREACHABLE, "UNREACHABLE"),
        (UnavailableError("x", reason=Reason.ENGINE_LOST), AnswerKind.FAILED, "ENGINE_LOST"),
        (InternalError("x", reason=Reason.INTERNAL), AnswerKind.FAILED, "INTERNAL"),
    ],
)
def test_every_no_has_a_kind_and_a_reason(error: CallError, kind: AnswerKind, reason: str) -> None:
    """As the contract's table says what the robot is to do."""
    answer = Answer("o", 0, 1, error=error)
    assert (answer.kind, answer.reason) == (kind, reason)


@pytest.mark.parametrize(
    ("share", "expected"), [(0.05, 15), (0.30, 20), (0.40, 20), (0.50, 35), (1.0, 50)]
)
def test_percentiles_are_by_nearest_rank(share: float, expected: int) -> None:
    """The textbook example of the nearest-rank method: 15, 20, 35, 40, 50."""
    assert percentile_ns([40, 15, 50, 20, 35], share) == expected
    assert percentile_ns([], share) is None


def test_a_tally_counts_kinds_reasons_and_times() -> None:
    """Times to answers and to refusals are kept apart."""
    tally = Tally()
    tally.add(Answer("a", 100, 150, action=ACTION))
    tally.add(Answer("b", 100, 190, action=ACTION))
    tally.add(Answer("c", 100, 103, error=RejectedError("x", reason=Reason.LATE)))
    tally.add(Answer("d", 100, 700, error=DeadlineMissedError("x", reason=Reason.DEADLINE_MISSED)))
    assert tally.num_asked == 4
    assert tally.kinds == {AnswerKind.IN_TIME: 2, AnswerKind.REFUSED: 1, AnswerKind.LATE: 1}
    assert tally.reasons == {"LATE": 1, "DEADLINE_MISSED": 1}
    assert (tally.answer_percentile_ns(0.5), tally.answer_percentile_ns(0.99)) == (50, 90)
    assert tally.refusal_percentile_ns(0.99) == 3
