"""A cancel at every stage: blocks back, no token afterwards, the exact id only."""

from collections.abc import Callable

import pytest

from cloud.scheduler.config import SchedulerConfig
from cloud.scheduler.types import Ended, StepPlan
from headway.outcome import Outcome, Reason
from tests.support.scheduling import Bench, S, batch, interactive


def _queued(bench: Bench) -> StepPlan | None:
    bench.submit(batch("x"))
    return None


def _planned(bench: Bench) -> StepPlan | None:
    bench.submit(batch("x"))
    return bench.plan()


def _between_chunks(bench: Bench) -> StepPlan | None:
    bench.submit(batch("x", prompt_tokens=2000))
    bench.step()
    return None


def _in_the_final_chunk(bench: Bench) -> StepPlan | None:
    bench.submit(batch("x", prompt_tokens=1000))
    bench.step()
    return bench.plan()


def _decoding(bench: Bench) -> StepPlan | None:
    bench.submit(batch("x"))
    bench.steps(3)
    return bench.plan()


def _preempted(bench: Bench) -> StepPlan | None:
    bench.submit(batch("x"))
    bench.steps(2)
    bench.submit(interactive("robot", bench.now_ns + S, max_output_tokens=1))
    bench.step()
    return None


@pytest.mark.parametrize(
    "stage",
    [_queued, _planned, _between_chunks, _in_the_final_chunk, _decoding, _preempted],
)
def test_a_cancel_takes_everything_back(stage: Callable[[Bench], StepPlan | None]) -> None:
    """Whatever the stage, it ends once and leaves nothing behind."""
    bench = Bench(SchedulerConfig(max_running=1))
    plan = stage(bench)
    (ended,) = bench.scheduler.cancel("x", bench.now_ns)
    assert isinstance(ended, Ended)
    assert (ended.outcome, ended.reason) == (Outcome.CANCELLED, Reason.CANCELLED)
    before = len(bench.events)
    if plan is not None:
        bench.finish(plan)
    assert not [event for event in bench.events[before:] if event.request_id == "x"]
    assert bench.scheduler.cancel("x", bench.now_ns) == ()
    assert bench.plan().is_empty
    (state,) = bench.scheduler.snapshot(bench.now_ns).replicas
    assert state.blocks_held == 0


def test_a_cancel_after_the_end_is_normal() -> None:
    """It changes nothing and is no error; neither is one of an unknown id."""
    bench = Bench()
    bench.submit(batch("x", max_output_tokens=1))
    bench.step()
    assert bench.scheduler.cancel("x", bench.now_ns) == ()
    assert bench.scheduler.cancel("never", bench.now_ns) == ()


def test_a_cancel_hits_the_exact_id_only() -> None:
    """Not one that begins alike."""
    bench = Bench()
    bench.submit(batch("x"))
    bench.submit(batch("x1"))
    bench.scheduler.cancel("x", 0)
    assert [item.request_id for item in bench.plan().items] == ["x1"]


def test_the_engine_is_told_what_it_can_forget() -> None:
    """A request that it knew is closed with the next step, once."""
    bench = Bench()
    bench.submit(batch("known"))
    bench.submit(batch("other"))
    bench.step()
    bench.scheduler.cancel("known", bench.now_ns)
    assert bench.step().closed == ("known",)
    assert bench.step().closed == ()


def test_removing_a_runner_skips_no_other() -> None:
    """Two of four end in one step; the other two are in the next."""
    bench = Bench()
    for number in range(4):
        bench.submit(batch(f"b{number}", max_output_tokens=2 if number < 2 else 9))
    bench.steps(2)
    assert [item.request_id for item in bench.plan().items] == ["b2", "b3"]
