"""Who gives way, and that nobody is lost or thrashed by it."""

from cloud.scheduler.config import SchedulerConfig
from cloud.scheduler.draft import StepDraft
from cloud.scheduler.types import Admitted, DeadlineCovers, Ended
from headway.outcome import Outcome
from tests.support.scheduling import Bench, S, batch, ids, interactive, replica, standard


def _preempted(bench: Bench) -> list[str]:
    return [r["id"] for r in bench.scheduler.records if r["kind"] == "preempt"]


def test_only_as_many_give_way_as_are_needed() -> None:
    """The newest batch request goes; the others keep their blocks."""
    bench = Bench(spec=replica(num_blocks=20))
    for number in range(4):
        bench.submit(batch(f"b{number}", prompt_tokens=64, max_output_tokens=16))
    bench.step()
    bench.submit(interactive("robot", bench.now_ns + S, prompt_tokens=64, max_output_tokens=16))
    bench.step()
    assert _preempted(bench) == ["b3"]


def test_nobody_gives_way_where_it_would_not_be_enough() -> None:
    """As much as is needed, or nothing: an equal is never evicted for a newcomer."""
    bench = Bench(spec=replica(num_blocks=20))
    bench.submit(interactive("r0", 20 * S, prompt_tokens=200, max_output_tokens=57))
    bench.step()
    bench.submit(batch("b", prompt_tokens=32, max_output_tokens=16))
    bench.step()
    bench.submit(interactive("r1", 20 * S, prompt_tokens=200, max_output_tokens=4))
    bench.steps(3)
    assert _preempted(bench) == []
    assert "r1" not in ids(bench.plan())


def test_small_requests_do_not_starve_a_large_head() -> None:
    """The room that comes free goes to the one whose turn it is."""
    bench = Bench(spec=replica(num_blocks=20))
    bench.submit(interactive("r0", 30 * S, prompt_tokens=128, max_output_tokens=30))
    bench.step()
    bench.submit(interactive("large", 30 * S, prompt_tokens=250, max_output_tokens=4))
    for number in range(10):
        bench.submit(interactive(f"small{number}", 31 * S, prompt_tokens=16, max_output_tokens=30))
    order = [name for plan in bench.steps(45) for name in ids(plan, prefill=True)]
    assert order.index("large") < order.index("small0")


def test_a_victim_is_not_back_in_the_step_that_it_gave_way_in() -> None:
    """It gave way for somebody there; in the next step, or where nobody is, it may come."""
    bench = Bench(SchedulerConfig(max_running=1))
    bench.submit(batch("night", prompt_tokens=64, max_output_tokens=30))
    bench.steps(2)
    victim = bench.scheduler._live["night"]
    bench.submit(interactive("robot", bench.now_ns + S, max_output_tokens=3))
    bench.plan()
    live, server = bench.scheduler._live["robot"], bench.scheduler._replicas["r0"]
    server.step_id -= 1  # As it was while the step was put together.
    draft = StepDraft(server, min_chunk_tokens=16)
    assert not draft.has_given_way(victim)
    draft.add_decodes((live,), 1, live.computed)
    assert draft.has_given_way(victim)
    assert not draft.has_given_way(live)
    server.step_id += 1
    assert not draft.has_given_way(victim)


def test_growth_evicts_the_newest_of_the_lowest_class() -> None:
    """When blocks run out the oldest batch request goes on, the newest waits."""
    bench = Bench(spec=replica(num_blocks=12))
    for number in range(3):
        bench.submit(batch(f"b{number}", prompt_tokens=60, max_output_tokens=60))
    while bench.scheduler.has_work("r0"):
        bench.step()
    assert _preempted(bench)[0] == "b2"
    ended = {e.request_id: e for e in bench.events if isinstance(e, Ended)}
    assert {e.outcome for e in ended.values()} == {Outcome.COMPLETED}
    assert [ended[f"b{n}"].output_tokens for n in range(3)] == [60, 60, 60]


def test_a_victim_resumes_only_with_room_for_its_whole_need() -> None:
    """So that nobody is evicted twice in a row: no preempt-resume loop."""
    bench = Bench(spec=replica(num_blocks=12))
    for number in range(3):
        bench.submit(batch(f"b{number}", prompt_tokens=60, max_output_tokens=60))
    while bench.scheduler.has_work("r0"):
        bench.step()
    assert max(_preempted(bench).count(f"b{n}") for n in range(3)) == 1


def test_an_open_promise_is_never_evicted_for_growth() -> None:
    """A batch request that cannot grow stands still or goes; the promise stays."""
    bench = Bench(spec=replica(num_blocks=9))
    bench.submit(interactive("robot", 30 * S, prompt_tokens=64, max_output_tokens=17))
    bench.submit(batch("b", prompt_tokens=60, max_output_tokens=30))
    while bench.scheduler.has_work("r0"):
        bench.step()
    assert "robot" not in _preempted(bench)
    ended = {e.request_id: e.outcome for e in bench.events if isinstance(e, Ended)}
    assert ended == {"robot": Outcome.COMPLETED, "b": Outcome.COMPLETED}


def test_recomputation_gives_the_same_output_once() -> None:
    """After an eviction the tokens go on where they stopped; none comes twice."""
    bench = Bench(SchedulerConfig(max_running=1))
    bench.submit(batch("b", max_output_tokens=6))
    bench.steps(3)
    bench.submit(interactive("robot", bench.now_ns + S, max_output_tokens=2))
    while bench.scheduler.has_work("r0"):
        bench.step()
    tokens = [(e.token, e.index) for e in bench.events if not isinstance(e, Ended)]
    batch_tokens = [
        (e.token, e.index) for e in bench.events if not isinstance(e, Ended) and e.request_id == "b"
    ]
    assert batch_tokens == [(n, n) for n in range(6)]
    assert len(tokens) == 8


def test_recomputation_is_free_of_charge() -> None:
    """The tenant pays for its prompt and output once, preempted or not (64 + 2·6)."""
    bench = Bench(SchedulerConfig(max_running=1))
    bench.submit(batch("b", max_output_tokens=6))
    bench.steps(3)
    bench.submit(interactive("robot", bench.now_ns + S, max_output_tokens=2))
    while bench.scheduler.has_work("r0"):
        bench.step()
    (night,) = [t for t in bench.scheduler.snapshot(0).tenants if t.tenant == "night"]
    assert night.counter == 64 + 2 * 6
    assert night.preemptions == 1


def test_interactive_takes_step_time_from_batch_decodes() -> None:
    """Batch decodes stand still in steps that a promise needs for itself."""
    bench = Bench(SchedulerConfig(max_running=300), spec=replica(num_blocks=8192))
    for number in range(200):
        bench.submit(batch(f"b{number}", prompt_tokens=16, max_output_tokens=200))
    bench.steps(12)
    decision = bench.submit(interactive("robot", bench.now_ns + 240 * S // 1000))
    assert isinstance(decision, Admitted)
    bench.steps(12)
    (ended,) = [e for e in bench.events if isinstance(e, Ended)]
    assert (ended.request_id, ended.outcome) == ("robot", Outcome.COMPLETED)


def test_paused_decodes_take_turns() -> None:
    """When step time is short, those that stood still come first in the next step."""
    config = SchedulerConfig(max_running=300, max_step_ns=30_000_000)
    bench = Bench(config, spec=replica(num_blocks=8192))
    for number in range(100):
        bench.submit(batch(f"b{number}", prompt_tokens=16, max_output_tokens=500))
    bench.steps(150)
    counts = {f"b{n}": 0 for n in range(100)}
    running = set(ids(bench.step(), prefill=False))
    for plan in bench.steps(10):
        running |= set(ids(plan, prefill=False))
        for name in ids(plan, prefill=False):
            counts[name] += 1
    served = [counts[name] for name in running]
    assert max(served) - min(served) <= 1


def test_a_standard_request_evicts_batch_for_a_slot_and_interactive_evicts_standard() -> None:
    """Strictly lower classes give way, the lowest first."""
    bench = Bench(SchedulerConfig(max_running=2))
    bench.submit(batch("b", max_output_tokens=100))
    bench.submit(standard("s0", 60 * S, max_output_tokens=100))
    bench.step()
    bench.submit(standard("s1", 60 * S, max_output_tokens=100))
    bench.step()
    assert _preempted(bench) == ["b"]
    bench.submit(interactive("robot", bench.now_ns + S))
    bench.step()
    assert _preempted(bench) == ["b", "s1"]


def test_a_victim_that_cannot_make_it_any_more_is_not_executed_again() -> None:
    """What it lost has to be computed anew: it ends when that no longer fits."""
    bench = Bench(SchedulerConfig(max_running=1))
    promise = standard(
        "s",
        300_000_000,
        prompt_tokens=700,
        max_output_tokens=10,
        deadline_covers=DeadlineCovers.LAST_TOKEN,
        has_fixed_output=True,
    )
    bench.submit(promise)
    bench.steps(5)
    bench.submit(interactive("robot", bench.now_ns + S, max_output_tokens=1))
    later = bench.steps(3)
    assert [ids(plan) for plan in later] == [["robot"], [], []]
    ended = {e.request_id: e.outcome for e in bench.events if isinstance(e, Ended)}
    assert ended == {"robot": Outcome.COMPLETED, "s": Outcome.EXPIRED}
    assert bench.now_ns < 300_000_000


def test_who_gave_way_too_often_is_spared_while_others_can() -> None:
    """The newest goes first, and the second time the other one."""
    bench = Bench(SchedulerConfig(max_evictions_each=1), replica(num_blocks=20))
    for number in range(2):
        bench.submit(batch(f"b{number}", prompt_tokens=64, max_output_tokens=60))
    bench.step()
    for number in range(2):
        bench.submit(
            interactive(f"r{number}", bench.now_ns + S, prompt_tokens=160, max_output_tokens=3)
        )
        bench.steps(6)
    assert _preempted(bench) == ["b1", "b0"]


def test_batch_work_does_not_join_only_to_be_evicted_again() -> None:
    """A robot every 100 ms needs all the memory: beyond the cap it finds one to evict,
    without a cap up to nine that hold two blocks each.
    """
    capped = _evictions_beside_a_robot(SchedulerConfig(max_evictions_per_s=1.0))
    free = _evictions_beside_a_robot(SchedulerConfig(max_evictions_per_s=1000.0))
    assert capped <= 100 + 11  # Robots, and what the cap allows in 10 s.
    assert free > 1.5 * capped


def _evictions_beside_a_robot(config: SchedulerConfig) -> int:
    bench = Bench(config, replica(num_blocks=20))
    for number in range(40):
        bench.submit(batch(f"b{number}", prompt_tokens=32, max_output_tokens=100))
    asked = 0
    while bench.now_ns < 10 * S:
        if bench.now_ns >= asked * S // 10:
            asked += 1
            name = f"r{asked}"
            bench.submit(
                interactive(name, bench.now_ns + S, prompt_tokens=300, max_output_tokens=2)
            )
        bench.step()
    return len(_preempted(bench))
