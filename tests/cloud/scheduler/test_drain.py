"""A replica that is drained: nothing new comes, nothing promised is lost."""

import pytest

from cloud.scheduler.config import SchedulerConfig
from cloud.scheduler.types import Admitted, Ended, Rejected
from headway.outcome import Outcome, Reason
from tests.support.scheduling import (
    MS,
    Bench,
    CheckedScheduler,
    S,
    batch,
    ids,
    interactive,
    replica,
    standard,
)


def _two() -> CheckedScheduler:
    scheduler = CheckedScheduler()
    scheduler.replica_up(replica("a"), 0)
    scheduler.replica_up(replica("b"), 0)
    return scheduler


def _place(scheduler: CheckedScheduler, name: str) -> str:
    decision = scheduler.submit(interactive(name, S), 0)
    assert isinstance(decision, Admitted)
    return decision.replica_id


def test_nothing_new_is_placed_on_a_drained_replica() -> None:
    """Neither a promise nor batch work, until it is undrained."""
    scheduler = _two()
    scheduler.drain_replica("a", 0)
    assert [_place(scheduler, f"r{number}") for number in range(3)] == ["b", "b", "b"]
    scheduler.submit(batch("night"), 0)
    assert not scheduler.has_work("a")
    assert scheduler.plan("a", 0).is_empty
    scheduler.undrain_replica("a", 0)
    assert _place(scheduler, "again") == "a"
    assert ids(scheduler.plan("a", 0)) == ["again", "night"]


def test_what_runs_on_a_drained_replica_is_finished_there() -> None:
    """A robot's chunk and the night's text, each with all its tokens."""
    bench = Bench()
    bench.submit(interactive("robot", S))
    bench.submit(batch("night"))
    bench.step()
    bench.scheduler.drain_replica("r0", bench.now_ns)
    bench.steps(8)
    ended = {one.request_id: one for one in bench.events if isinstance(one, Ended)}
    assert {name: one.outcome for name, one in ended.items()} == {
        "robot": Outcome.COMPLETED,
        "night": Outcome.COMPLETED,
    }
    assert (ended["robot"].output_tokens, ended["night"].output_tokens) == (4, 8)


def test_waiting_promises_move_to_a_replica_that_can_keep_them() -> None:
    """With the deadline that they had."""
    scheduler = _two()
    assert _place(scheduler, "robot") == "a"
    scheduler.drain_replica("a", 0)
    assert not scheduler.has_work("a")
    assert ids(scheduler.plan("b", 0)) == ["robot"]


def test_waiting_promise_that_nobody_else_can_keep_stays() -> None:
    """It is kept on the drained replica: a drain breaks no promise."""
    scheduler = CheckedScheduler(SchedulerConfig(max_running=1))
    scheduler.replica_up(replica("a"), 0)
    scheduler.replica_up(replica("b"), 0)
    # 100 ms each at least; the other replica is done with its own after that.
    for name in ("one", "two"):
        assert isinstance(scheduler.submit(interactive(name, 150 * MS), 0), Admitted)
    scheduler.drain_replica("a", 0)
    assert ids(scheduler.plan("a", 0)) == ["one"]
    assert ids(scheduler.plan("b", 0)) == ["two"]


@pytest.mark.parametrize("request_", [interactive("new", S), standard("new"), batch("new")])
def test_with_every_replica_drained_new_work_is_told_so(request_: object) -> None:
    """Not that it is too large, and not that there is no engine."""
    bench = Bench()
    bench.scheduler.drain_replica("r0", 0)
    decision = bench.submit(request_)  # type: ignore[arg-type]
    assert isinstance(decision, Rejected)
    assert decision.reason is Reason.DRAINING


def test_what_is_too_large_is_so_beside_a_drained_replica_too() -> None:
    """Waiting for the drain to end would not help."""
    bench = Bench()
    bench.scheduler.drain_replica("r0", 0)
    decision = bench.submit(batch("huge", prompt_tokens=20_000))
    assert isinstance(decision, Rejected)
    assert decision.reason is Reason.TOO_LARGE


def test_a_drained_server_takes_work_again_when_it_is_undrained() -> None:
    """As if nothing had been."""
    bench = Bench()
    bench.scheduler.drain(0)
    assert isinstance(bench.submit(batch("early")), Rejected)
    bench.scheduler.undrain(0)
    assert isinstance(bench.submit(batch("late")), Admitted)


def test_draining_what_is_not_up_is_harmless() -> None:
    """The engine may be lost at that very moment."""
    bench = Bench()
    bench.scheduler.drain_replica("gone", 0)
    bench.scheduler.undrain_replica("gone", 0)
    assert isinstance(bench.submit(batch("work")), Admitted)
