"""Many replicas: where work goes, and what becomes of it when one is lost."""

import pytest

from cloud.scheduler.config import SchedulerConfig
from cloud.scheduler.types import Admitted, Ended, Rejected, ReplicaSpec
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


def _with(*specs: ReplicaSpec, config: SchedulerConfig | None = None) -> CheckedScheduler:
    scheduler = CheckedScheduler(config)
    for spec in specs:
        scheduler.replica_up(spec, 0)
    return scheduler


def test_a_promise_is_bound_where_it_is_done_first() -> None:
    """The second request goes to the replica that has nothing yet."""
    scheduler = _with(replica("a"), replica("b"))
    places = []
    for number in range(4):
        decision = scheduler.submit(interactive(f"r{number}", S, prompt_tokens=300), 0)
        assert isinstance(decision, Admitted)
        places.append(decision.replica_id)
    assert places == ["a", "b", "a", "b"]


def test_a_known_prefix_draws_a_request() -> None:
    """Its replica is done first, even with some work ahead."""
    bench = Bench()
    keys = tuple(bytes([n]) for n in range(20))
    request = interactive("first", S, prompt_tokens=320, prefix_hashes=keys, max_output_tokens=1)
    bench.submit(request)
    bench.step()
    bench.scheduler.replica_up(replica("r1"), bench.now_ns)
    now_ns = bench.now_ns
    bench.scheduler.submit(interactive("work", now_ns + S, prompt_tokens=100), now_ns)
    decision = bench.scheduler.submit(
        interactive("again", now_ns + S, prompt_tokens=320, prefix_hashes=keys), now_ns
    )
    assert isinstance(decision, Admitted)
    assert decision.replica_id == "r0"


def test_batch_work_is_shared() -> None:
    """Whichever replica plans next takes it."""
    scheduler = _with(replica("a"), replica("b"), config=SchedulerConfig(max_running=1))
    scheduler.submit(batch("one"), 0)
    scheduler.submit(batch("two"), 0)
    assert ids(scheduler.plan("b", 0)) == ["one"]
    assert ids(scheduler.plan("a", 0)) == ["two"]


def test_a_dedicated_replica_serves_its_tenants_only() -> None:
    """Others never run there, its tenants run everywhere."""
    scheduler = _with(replica("own", tenants=frozenset({"fleet"})), replica("all"))
    for number in range(3):
        other = scheduler.submit(interactive(f"o{number}", S, tenant="other"), 0)
        assert isinstance(other, Admitted)
        assert other.replica_id == "all"
    mine = scheduler.submit(interactive("mine", S), 0)
    assert isinstance(mine, Admitted)
    assert mine.replica_id == "own"
    scheduler.submit(batch("night"), 0)
    assert ids(scheduler.plan("own", 0)) == ["mine"]


def test_a_tenant_without_an_open_replica_may_come_back() -> None:
    """Its own may be restarting: that is not the request's fault, as its size would be."""
    scheduler = _with(replica("own", tenants=frozenset({"fleet"})))
    no = scheduler.submit(interactive("o", S, tenant="other"), 0)
    assert isinstance(no, Rejected)
    assert no.reason is Reason.NO_ENGINE
    assert no.retry_after_ns is not None
    # Sizes are told of the replicas that it may use, however large others' are.
    scheduler.replica_up(replica("all", max_context_tokens=64), 0)
    large = scheduler.submit(interactive("p", S, tenant="other", prompt_tokens=100), 0)
    assert isinstance(large, Rejected)
    assert (large.reason, large.retry_after_ns) == (Reason.TOO_LARGE, None)
    assert "at most 64 tokens" in large.message


def test_long_contexts_have_a_pool_of_their_own() -> None:
    """Above the threshold there, below it elsewhere; without such a pool, anywhere."""
    config = SchedulerConfig(long_context_tokens=1000)
    scheduler = _with(replica("long", is_long_context=True), replica("short"), config=config)
    long = scheduler.submit(standard("l", 9 * S, prompt_tokens=2000), 0)
    short = scheduler.submit(standard("s", 9 * S), 0)
    assert isinstance(long, Admitted)
    assert isinstance(short, Admitted)
    assert (long.replica_id, short.replica_id) == ("long", "short")
    alone = _with(replica("short"), config=config)
    assert isinstance(alone.submit(standard("l", 9 * S, prompt_tokens=2000), 0), Admitted)


def test_a_lost_replica_s_work_moves_or_ends_at_once() -> None:
    """What has streamed ends as lost, once; what has not keeps its deadline elsewhere."""
    bench = Bench()
    bench.submit(interactive("streamed", S, max_output_tokens=8))
    bench.submit(batch("night", prompt_tokens=2000))
    bench.steps(2)
    bench.submit(interactive("fresh", bench.now_ns + S))
    bench.scheduler.replica_up(replica("r1"), bench.now_ns)
    bench.plan()
    (ended,) = bench.scheduler.replica_down("r0", bench.now_ns)
    assert isinstance(ended, Ended)
    assert (ended.request_id, ended.outcome, ended.reason) == (
        "streamed",
        Outcome.FAILED,
        Reason.ENGINE_LOST,
    )
    assert ids(bench.scheduler.plan("r1", bench.now_ns)) == ["fresh", "night"]


def test_a_promise_that_no_other_replica_can_keep_fails_now() -> None:
    """Not at its deadline: the robot can act on a no at once."""
    bench = Bench()
    bench.submit(interactive("robot", 100 * MS))
    (ended,) = bench.scheduler.replica_down("r0", 50 * MS)
    assert isinstance(ended, Ended)
    assert (ended.outcome, ended.reason) == (Outcome.FAILED, Reason.ENGINE_LOST)
    (state,) = bench.scheduler.snapshot(0).tenants
    assert (state.failed, state.missed) == (1, 1)


def test_batch_work_survives_without_any_replica() -> None:
    """It waits for the next one."""
    bench = Bench()
    bench.submit(batch("night"))
    bench.plan()
    assert bench.scheduler.replica_down("r0", 1) == ()
    bench.scheduler.replica_up(replica("r1"), 2)
    (item,) = bench.scheduler.plan("r1", 3).items
    assert (item.request_id, item.context_tokens, item.resets_table) == ("night", 0, True)


def test_losing_a_replica_twice_is_harmless() -> None:
    """The second time there is nothing to lose."""
    bench = Bench()
    bench.scheduler.replica_down("r0", 0)
    assert bench.scheduler.replica_down("r0", 0) == ()


def test_a_replica_is_up_once() -> None:
    """A second one of the same name is the caller's mistake."""
    with pytest.raises(ValueError, match="is up already"):
        _with(replica("a"), replica("a"))


def test_a_replica_that_comes_back_starts_anew() -> None:
    """Step numbers begin at one, and its memory is empty."""
    bench = Bench()
    bench.submit(batch("a", max_output_tokens=2))
    bench.steps(2)
    bench.scheduler.replica_down("r0", bench.now_ns)
    bench.scheduler.replica_up(replica("r0"), bench.now_ns)
    bench.submit(batch("b"))
    assert bench.plan().step_id == 1


def test_a_pool_that_cannot_do_its_work_leaves_it_to_the_others() -> None:
    """A long-context replica of another tenant, or a small one, strands nobody."""
    config = SchedulerConfig(long_context_tokens=1000)
    own = replica("own", is_long_context=True, tenants=frozenset({"fleet"}))
    small = replica("small", is_long_context=True, num_blocks=70)
    scheduler = _with(replica("short"), config=config)
    assert isinstance(scheduler.submit(batch("b", prompt_tokens=2000), 0), Admitted)
    scheduler.replica_up(own, 0)
    scheduler.replica_up(small, 0)
    assert scheduler.has_work("short")
    assert ids(scheduler.plan("short", 0)) == ["b"]
