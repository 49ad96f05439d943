"""What happened, in words that need no knowledge of schedulers."""

from collections import Counter

from edge.answer import AnswerKind, Tally
from fleet_sim.demo.measures import FleetMeasures
from headway.v1 import operations_pb2

__all__ = ["summary_lines"]

_REASONS = {
    "LATE": "the answer would have come too late",
    "FAIR_SHARE": "its tenant had its share while others waited",
    "QUEUE_FULL": "too much was waiting already",
    "QUOTA": "its tenant's allowance was used up",
}


def summary_lines(
    measures: FleetMeasures,
    status: operations_pb2.GetStatusResponse,
    *,
    num_robots: int,
    num_visitors: int,
    budget_s: float,
    elapsed_s: float,
) -> list[str]:
    """The end of the demo.

    Args:
        measures: the robots' side.
        status: the server's side.
        num_robots: robots that were there all the time.
        num_visitors: robots that came for the burst; 0 where there was none.
        budget_s: what each allowed.
        elapsed_s: how long it ran.
    """
    budget_ms = budget_s * 1e3
    lines = ["What happened", ""]
    if measures.pilot.num_asked:
        lines.append(
            f"  A pilot asked {_times(measures.pilot.num_asked)}, alone, to find out how quick "
            "this machine is."
        )
    lines += _group(f"{num_robots} robots", measures.residents, budget_ms)
    if measures.visitors.num_asked:
        lines += _group(f"{num_visitors} visitors", measures.visitors, budget_ms)
        if measures.visitors.reasons["LATE"] == measures.visitors.num_asked:
            lines += [
                "    Not one was taken on: beside what the robots and the other visitors ask, and",
                "    with step times that vary as they do here, none was sure to be in time.",
            ]
    lines += [*_batch(status, elapsed_s), "", "What it means", ""]
    lines += _meaning(measures)
    lines += [
        "",
        "What to try next (after 'make': the command is .venv/bin/headway)",
        "",
        "  headway serve --dev                    a server of your own, on this machine",
        "  headway robot --rate 2 --budget 0.3    one robot beside it, a line an answer",
        "  headway demo --robots 24 --seconds 60  a larger fleet",
        "  examples/robot.py                      a robot in a few lines",
    ]
    return lines


def _group(who: str, tally: Tally, budget_ms: float) -> list[str]:
    in_time, refused, late = (
        tally.kinds[kind] for kind in (AnswerKind.IN_TIME, AnswerKind.REFUSED, AnswerKind.LATE)
    )
    other = tally.num_asked - in_time - refused - late
    lines = [
        f"  {who} asked {_times(tally.num_asked)} for their next action, "
        f"each within {budget_ms:.0f} ms."
    ]
    if in_time:
        lines.append(
            f"    {in_time:5} answered in time: half within {_ms(tally, 0.5)}, "
            f"99 of 100 within {_ms(tally, 0.99)}"
        )
    if refused:
        told = tally.refusal_percentile_ns(0.99) or 0
        lines.append(f"    {refused:5} refused, 99 of 100 told within {told / 1e6:.0f} ms:")
        lines += _why(tally.reasons)
    lines.append(f"    {late:5} came late")
    if other:
        lines.append(f"    {other:5} failed, or found no server")
    return lines


def _why(reasons: Counter[str]) -> list[str]:
    return [
        f"            {count} x {reason}, {_REASONS[reason]}"
        for reason, count in reasons.most_common()
        if reason in _REASONS
    ]


def _batch(status: operations_pb2.GetStatusResponse, elapsed_s: float) -> list[str]:
    rows = [row for row in status.classes if row.request_class == "batch"]
    num_read = sum(row.prompt_tokens for row in rows)
    num_written = sum(row.output_tokens for row in rows)
    texts = sum(row.completed for row in rows)
    return [
        f"  Batch work beside them, in the time that no robot needed: {texts:,} texts done,",
        f"    {num_read:,} tokens read and {num_written:,} written "
        f"({(num_read + num_written) / elapsed_s:,.0f} a second).",
    ]


def _meaning(measures: FleetMeasures) -> list[str]:
    both = (measures.residents, measures.visitors)
    refused = sum(tally.kinds[AnswerKind.REFUSED] for tally in both)
    late = sum(tally.kinds[AnswerKind.LATE] for tally in both)
    lines = []
    if late:
        lines += [
            f"  {late} came too late, although promised. Late is as bad as never for a robot,",
            "  so each of these is a fault: this machine was busy with other things, or its",
            "  step times changed faster than they were measured.",
        ]
    if 2 * measures.residents.kinds[AnswerKind.IN_TIME] < measures.residents.num_asked:
        return [
            *lines,
            "  Fewer than half were answered in time: this machine is too slow, or so busy",
            "  with other things that its step times vary too much to promise anything.",
            "  Close what else runs on it, and try again.",
        ]
    if not late:
        lines += [
            "  No answer came late. What the server took on, it finished in time, although",
            "  batch work would have kept the machine busy all the time.",
        ]
    if refused:
        lines += [
            "  What it could not finish in time it refused at once, so that the robot had",
            "  most of its budget left to slow down or to decide for itself.",
        ]
    return lines


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def _ms(tally: Tally, share: float) -> str:
    return f"{(tally.answer_percentile_ns(share) or 0) / 1e6:.0f} ms"
