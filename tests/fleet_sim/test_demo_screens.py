"""What the demo shows, given what was measured."""

import io

import pytest
from rich.console import Console

from edge.action import Action, Timings
from edge.answer import Answer
from fleet_sim.demo.measures import FleetMeasures
from fleet_sim.demo.pilot import Pilot
from fleet_sim.demo.server_process import ServerProcess, ServerProcessError
from fleet_sim.demo.summary import summary_lines
from fleet_sim.demo.view import LiveScreen, PlainScreen, View
from headway.outcome import Reason
from headway.rpc.errors import DeadlineMissedError, RejectedError
from headway.v1 import operations_pb2

MS = 1_000_000
ACTION = Action("o", ("v",), ((0.0,),), 1, Timings(0, 0, 0, 0), 0, "m")


def measured(num_late: int = 0) -> FleetMeasures:
    """8 residents, of which one is refused; 3 visitors, of which 2 are refused."""
    measures = FleetMeasures()
    for index in range(7):
        answer = Answer("o", 0, (90 + index) * MS, action=ACTION)
        measures.add_resident(f"amr-{index + 1}", answer)
    refused = Answer("o", 0, 4 * MS, error=RejectedError("x", reason=Reason.LATE))
    full = Answer("o", 0, 5 * MS, error=RejectedError("x", reason=Reason.QUEUE_FULL))
    measures.add_resident("amr-8", refused)
    measures.add_visitor(refused)
    measures.add_visitor(full)
    measures.add_visitor(Answer("o", 0, 200 * MS, action=ACTION))
    for _ in range(num_late):
        missed = DeadlineMissedError("x", reason=Reason.DEADLINE_MISSED)
        measures.add_resident("amr-1", Answer("o", 0, 301 * MS, error=missed))
    return measures


def status() -> operations_pb2.GetStatusResponse:
    """Two classes that have done something."""
    state = operations_pb2.GetStatusResponse()
    interactive = state.classes.add(
        request_class="interactive", tenant="default", admitted=1_234_567, output_tokens=25_000_000
    )
    interactive.rejected.add(reason="LATE", count=12_345)
    interactive.rejected.add(reason="QUEUE_FULL", count=7)
    interactive.latency_p99.FromMilliseconds(12_345)
    state.classes.add(
        request_class="batch",
        tenant="default",
        completed=40,
        output_tokens=1_000,
        prompt_tokens=2_000,
    )
    return state


def view(elapsed_s: float = 12.0, phase: str = "Before the burst") -> View:
    """An instant."""
    return View(elapsed_s, 30.0, phase, status(), measured())


@pytest.mark.parametrize("width", [80, 120])
def test_the_live_table_fits_and_says_everything(width: int) -> None:
    """Every figure is there in full, even large ones, and no line is cut."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=width, height=30, color_system=None)
    with LiveScreen(console) as screen:
        screen.show(view())
    text = out.getvalue()
    for expected in (
        "interactive", "batch", "default", "1,234,567", "LATE 12,345", "QUEUE_FULL 7",
        "25,000,000", "12,345", "residents", "visitors", "amr-1 ok 90 ms", "amr-8 no 4 ms",
        "12 of 30 s", "Before the burst",
    ):  # fmt: skip
        assert expected in text
    assert "…" not in text
    assert max(len(line) for line in text.splitlines() if "\x1b" not in line) <= width


def test_plain_output_is_a_line_every_three_seconds_and_one_a_phase() -> None:
    """Frames in between write nothing."""
    out = io.StringIO()
    with PlainScreen(Console(file=out, width=80)) as screen:
        for elapsed_s in (0.0, 1.0, 2.9, 3.0, 4.0):
            screen.show(view(elapsed_s, phase="Before"))
        screen.show(view(5.0, phase="Burst"))
    lines = out.getvalue().splitlines()
    assert [line[:6] for line in lines] == ["   0 s", "   0 s", "   3 s", "   5 s"]
    assert lines[1].endswith("8 in time, 3 refused, 0 late, p99 96 ms; batch 1,000 tokens written")


def summary(measures: FleetMeasures, num_visitors: int = 3) -> str:
    """The end of a demo of ten seconds."""
    return "\n".join(
        summary_lines(
            measures,
            status(),
            num_robots=8,
            num_visitors=num_visitors,
            budget_s=0.3,
            elapsed_s=10.0,
        )
    )


def test_the_summary_says_what_was_asked_answered_and_refused() -> None:
    """By hand: 7 of 8 in time, median the 4th (93 ms), p99 the 7th (96 ms); 300 tokens/s."""
    text = summary(measured())
    for expected in (
        "8 robots asked 8 times for their next action, each within 300 ms.",
        "7 answered in time: half within 93 ms, 99 of 100 within 96 ms",
        "1 refused, 99 of 100 told within 4 ms:",
        "1 x LATE, the answer would have come too late",
        "3 visitors asked 3 times",
        "2 refused, 99 of 100 told within 5 ms:",
        "1 x QUEUE_FULL, too much was waiting already",
        "40 texts done,",
        "2,000 tokens read and 1,000 written",
        "(300 a second)",
        "No answer came late.",
    ):
        assert expected in text
    assert max(map(len, text.splitlines())) <= 80


def test_the_summary_says_why_not_one_visitor_was_served() -> None:
    """A word more where all were refused as late, and none where one was served."""
    measures = FleetMeasures()
    measures.add_resident("amr-1", Answer("o", 0, 90 * MS, action=ACTION))
    refused = Answer("o", 0, 4 * MS, error=RejectedError("x", reason=Reason.LATE))
    for _ in range(3):
        measures.add_visitor(refused)
    text = summary(measures)
    assert "Not one was taken on" in text
    assert max(map(len, text.splitlines())) <= 80
    measures.add_visitor(Answer("o", 0, 200 * MS, action=ACTION))
    assert "Not one was taken on" not in summary(measures)


def test_the_pilot_s_questions_are_shown_beside_the_others() -> None:
    """The server counts them: without them its figures would not add up."""
    measures = measured()
    assert "pilot" not in summary(measures)
    for _ in range(14):
        measures.add_pilot(Answer("o", 0, 60 * MS, action=ACTION))
    assert "A pilot asked 14 times, alone" in summary(measures)
    out = io.StringIO()
    with LiveScreen(Console(file=out, force_terminal=True, width=80, color_system=None)) as screen:
        screen.show(View(12.0, 30.0, "x", status(), measures))
    assert "pilot         14       14        0" in out.getvalue()


def test_the_summary_does_not_gloss_over_late_answers() -> None:
    """A late answer is called a fault."""
    text = summary(measured(num_late=2))
    assert "2 came too late, although promised" in text
    assert max(map(len, text.splitlines())) <= 80
    assert "No answer came late" not in text


def test_the_summary_is_frank_where_nothing_was_answered() -> None:
    """No praise for refusing everything."""
    measures = FleetMeasures()
    refused = Answer("o", 0, 4 * MS, error=RejectedError("x", reason=Reason.LATE))
    measures.add_resident("amr-1", refused)
    text = summary(measures)
    assert "Fewer than half were answered in time" in text
    assert "No answer came late" not in text
    assert "visitors" not in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("action_ms", "prefill_ms", "budget_s", "num_visitors"),
    [
        (40, 50, 0.4, 16),  # 5 x 40 = 200: the least budget. 2 x 400 / 50.
        (101, 110, 0.55, 10),  # 505 in whole 50 ms. 2 x 550 / 110.
        (20, 1, 0.4, 20),  # 800 visitors are more than needed for a show.
        (500, 2_000, 2.5, 8),  # 3 would not look like a burst.
    ],
)
def test_budget_and_burst_follow_from_what_was_measured(
    action_ms: int, prefill_ms: int, budget_s: float, num_visitors: int
) -> None:
    """By hand, from the rules that the class states."""
    pilot = Pilot(action_ms * MS, prefill_ms * MS)
    assert pilot.budget_s == budget_s
    assert pilot.num_visitors == num_visitors


def test_a_server_that_is_not_ready_has_no_address() -> None:
    """Asking too early is an error, not an empty string."""
    with pytest.raises(ServerProcessError, match="not ready"):
        _ = ServerProcess().address
