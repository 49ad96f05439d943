"""Cases in which other schedulers are known to go wrong, and the right behaviour."""

import random
from dataclasses import replace

import pytest

from cloud.scheduler.config import ClassConfig, SchedulerConfig, TenantConfig
from cloud.scheduler.simulated import Arrival, SimulatedSteps
from cloud.scheduler.types import Admitted, Ended, TokenEmitted
from cloud.scheduler.virtual import VirtualDriver
from headway.cost_model import CostModel, StepShape
from headway.outcome import Outcome
from tests.support.scheduling import (
    COST,
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
from tests.support.verifier import verify


def _shape(plan_items: list[tuple[int, int, bool]]) -> StepShape:
    chunks = [(context, num) for context, num, is_prefill in plan_items if is_prefill]
    return StepShape.of(
        chunks, [context for context, _, is_prefill in plan_items if not is_prefill]
    )


def test_a_600_000_token_prefill_does_not_hold_up_101_token_requests() -> None:
    """20 short requests behind it have their first token within a few steps; it still ends."""
    cost = CostModel(t0_ns=5.0 * MS, prefill_ns=0.005 * MS)
    bench = Bench(spec=replica(num_blocks=40_000, max_context_tokens=700_000, cost_model=cost))
    bench.submit(batch("long", prompt_tokens=600_000, max_output_tokens=1))
    bench.step()
    for number in range(20):
        bench.submit(batch(f"short{number}", prompt_tokens=101, max_output_tokens=1))
    bench.steps(4)
    done = {one.request_id for one in bench.events if isinstance(one, Ended)}
    assert done == {f"short{number}" for number in range(20)}
    # 600,000 tokens at 19,000 a full step of 100 ms, half of it its own: 64 steps at most.
    bench.steps(64)
    assert "long" in {one.request_id for one in bench.events if isinstance(one, Ended)}


def test_what_a_victim_would_have_cost_is_not_in_the_step() -> None:
    """The evicted decode is neither in the plan nor in its time, and its blocks are given on."""
    bench = Bench(SchedulerConfig(max_running=2), replica(num_blocks=12))
    for name in ("b0", "b1"):
        bench.submit(batch(name, prompt_tokens=60, max_output_tokens=30))
    bench.steps(3)
    bench.submit(interactive("robot", bench.now_ns + S, prompt_tokens=64, max_output_tokens=4))
    plan = bench.plan()
    assert ids(plan) == ["b0", "robot"]
    expected = _shape(
        [(item.context_tokens, item.num_tokens, item.is_prefill) for item in plan.items]
    )
    assert plan.predicted_ns == COST.predict_ns(expected)
    bench.finish(plan)
    assert verify(bench.scheduler.records, is_complete=False) == []


def test_preemption_does_not_feed_on_itself() -> None:
    """Six growing requests in memory for three: all end, few evictions, no endless resuming."""
    bench = Bench(spec=replica(num_blocks=16))
    for number in range(6):
        bench.submit(batch(f"b{number}", prompt_tokens=40, max_output_tokens=40))
    for _ in range(2_000):
        if bench.step().is_empty:
            break
    ended = [one for one in bench.events if isinstance(one, Ended)]
    assert [one.outcome for one in ended] == [Outcome.COMPLETED] * 6
    evictions = [one["id"] for one in bench.scheduler.records if one["kind"] == "preempt"]
    assert len(evictions) <= 6
    # Each is computed at most twice: once, and once more after an eviction.
    computed = sum(
        item[2] for one in bench.scheduler.records if one["kind"] == "plan" for item in one["items"]
    )
    assert computed <= 2 * 6 * (40 + 40)


def test_decodes_do_not_starve_a_prefill() -> None:
    """Decodes that fill the TPOT target by themselves leave a new prompt its smallest chunk."""
    config = SchedulerConfig(
        standard=ClassConfig(default_budget_ns=60 * S, tpot_target_ns=22 * MS), max_running=64
    )
    bench = Bench(config, replica(num_blocks=4096))
    for number in range(10):  # 20 ms + 10 x 0.2 ms = the target.
        bench.submit(standard(f"s{number}", prompt_tokens=16, max_output_tokens=400))
    while len(ids(bench.step(), prefill=False)) < 10:
        pass
    bench.submit(standard("late", prompt_tokens=160, max_output_tokens=2))
    # 16 tokens at least in every step: ten of them.
    plans = bench.steps(10)
    assert sum(1 for plan in plans if "late" in ids(plan, prefill=True)) == 10
    assert "late" in {one.request_id for one in bench.events if isinstance(one, TokenEmitted)}


def test_prefills_do_not_starve_a_decode() -> None:
    """One new prompt after the other: who decodes has a token in every step, within its target."""
    config = SchedulerConfig(standard=ClassConfig(default_budget_ns=60 * S, tpot_target_ns=60 * MS))
    bench = Bench(config, replica(num_blocks=4096))
    bench.submit(standard("reader", max_output_tokens=200))
    bench.step()
    for number in range(100):
        bench.submit(standard(f"s{number}", prompt_tokens=900, max_output_tokens=1))
        plan = bench.step()
        assert "reader" in ids(plan, prefill=False)
        assert plan.predicted_ns <= 60 * MS


def test_a_cancel_in_the_final_chunk_gives_no_token() -> None:
    """The last piece of a prompt is being computed when the caller gives up."""
    bench = Bench()
    bench.submit(standard("s", 60 * S, prompt_tokens=1500))
    plans = [bench.step(), bench.plan()]
    assert [plan.items[0].samples for plan in plans] == [False, True]
    (end,) = bench.scheduler.cancel("s", bench.now_ns)
    assert isinstance(end, Ended)
    assert end.outcome is Outcome.CANCELLED
    assert bench.finish(plans[1]) == ()
    assert bench.scheduler.snapshot(bench.now_ns).replicas[0].blocks_held == 0
    assert verify(bench.scheduler.records) == []


def test_an_id_that_ended_in_mid_step_and_came_again_gets_no_token_of_the_old_one() -> None:
    """The result of the old request's step is nobody's."""
    bench = Bench()
    bench.submit(standard("s", 60 * S, prompt_tokens=64))
    plan = bench.plan()
    bench.scheduler.cancel("s", bench.now_ns)
    assert isinstance(bench.submit(standard("s", 60 * S, prompt_tokens=64)), Admitted)
    assert bench.finish(plan) == ()
    while not bench.step().is_empty:
        pass
    tokens = [one.index for one in bench.events if isinstance(one, TokenEmitted)]
    assert tokens == list(range(8))


def test_a_late_cancel_of_a_longer_id_hits_nobody() -> None:
    """Ids are compared whole: neither a beginning nor a continuation of one counts."""
    bench = Bench()
    bench.submit(standard("robot-1", 60 * S))
    for name in ("robot", "robot-", "robot-11", "obot-1", ""):
        assert bench.scheduler.cancel(name, bench.now_ns) == ()
    assert len(bench.scheduler.cancel("robot-1", bench.now_ns)) == 1


def test_refusals_of_every_kind_leave_the_bucket_full() -> None:
    """Late, too large, over a full queue: afterwards the whole burst can still be had."""
    config = SchedulerConfig(
        standard=ClassConfig(default_budget_ns=2 * S, max_queued_requests=1),
        tenants={"office": TenantConfig(tokens_per_s=1.0, burst_tokens=64 + 2 * 8 + 72)},
    )
    bench = Bench(config, replica(num_blocks=64))
    assert isinstance(bench.submit(standard("first", 60 * S, prompt_tokens=56)), Admitted)
    refused = [
        standard("late", 1 * MS),
        standard("large", 60 * S, prompt_tokens=4000),
        standard("queued", 60 * S),
    ]
    assert not any(isinstance(bench.submit(one), Admitted) for one in refused)
    bench.step()
    # 152 weighted tokens less 56 + 2 x 8: exactly 64 + 2 x 8 are left.
    assert isinstance(bench.submit(standard("last", 60 * S, prompt_tokens=64)), Admitted)


@pytest.mark.parametrize("factor", [3.0, 1 / 3])
def test_a_predictor_wrong_by_three_either_way_neither_swings_nor_refuses_for_ever(
    factor: float,
) -> None:
    """Robots ask for three quarters of what the engine can do; it can do it, so it is done.

    Steps really take `COST`; the predictor says three times more or less. From 20 s on
    what is let in stays the same from one 10 s to the next, and is kept.
    """
    wrong = replace(
        COST,
        t0_ns=COST.t0_ns / factor,
        prefill_ns=COST.prefill_ns / factor,
        decode_ns=COST.decode_ns / factor,
    )
    generator = random.Random(2)
    driver = VirtualDriver(CheckedScheduler())
    driver.add_replica(
        replica(cost_model=wrong),
        SimulatedSteps(COST, lambda now_ns, shape: generator.uniform(0.97, 1.0)),
    )
    arrivals = [
        Arrival(at_ns, interactive(f"r{at_ns}", at_ns + 400 * MS, max_output_tokens=3))
        for at_ns in range(0, 60 * S, 40 * MS)
    ]
    driver.add(arrivals)
    driver.run()
    shares = []
    for start_s in (20, 30, 40, 50):
        asked = [one for one in arrivals if start_s * S <= one.at_ns < (start_s + 10) * S]
        names = [one.request.request_id for one in asked]
        let_in = [name for name in names if isinstance(driver.decisions[name], Admitted)]
        shares.append(len(let_in) / len(names))
        assert all(driver.ended[name].outcome is Outcome.COMPLETED for name in let_in)
    assert min(shares) >= 0.95
    assert max(shares) - min(shares) <= 0.03


def test_aged_batch_work_of_many_does_not_delay_robots() -> None:
    """715 batch requests beyond their patience, a robot every 100 ms: all robots are served."""
    config = SchedulerConfig(batch=ClassConfig(tpot_target_ns=None, patience_ns=1 * S))
    scheduler = CheckedScheduler(config)
    driver = VirtualDriver(scheduler)
    driver.add_replica(replica(cost_model=replace(COST, t0_ns=5.0 * MS)))
    driver.add(
        Arrival(0, batch(f"b{number}", prompt_tokens=300, tenant=f"t{number % 7}"))
        for number in range(715)
    )
    robots = [
        Arrival(at_ns, interactive(f"r{at_ns}", at_ns + 250 * MS))
        for at_ns in range(3 * S, 8 * S, 100 * MS)
    ]
    driver.add(robots)
    driver.run()
    for robot in robots:
        name = robot.request.request_id
        assert isinstance(driver.decisions[name], Admitted)
        assert driver.ended[name].outcome is Outcome.COMPLETED
        # The step that runs when it comes, at most, is before its own.
        assert driver.ended[name].queue_ns <= config.max_step_ns
    batch_ended = [one for name, one in driver.ended.items() if name.startswith("b")]
    assert {one.outcome for one in batch_ended} == {Outcome.COMPLETED}
    assert verify(scheduler.records, idle_tolerance_ns=0) == []


def test_a_kept_promise_gives_way_before_an_open_one() -> None:
    """Slots for two: who has its first token goes, though the other one came later."""
    bench = Bench(SchedulerConfig(max_running=2))
    bench.submit(standard("kept", 60 * S, max_output_tokens=100))
    bench.steps(2)
    bench.submit(standard("open", 60 * S, prompt_tokens=4000))
    bench.step()
    bench.submit(interactive("robot", bench.now_ns + S))
    bench.step()
    evicted = [one["id"] for one in bench.scheduler.records if one["kind"] == "preempt"]
    assert evicted == ["kept"]


def test_a_successor_has_its_predecessors_place() -> None:
    """Same deadline as one that came between them: it is before that one, as the older was."""
    bench = Bench(SchedulerConfig(max_running=1))
    bench.submit(interactive("first", 10 * S))
    bench.submit(interactive("second", 10 * S))
    bench.submit(interactive("third", 10 * S, supersedes="first"))
    assert ids(bench.step()) == ["third"]


def test_the_lane_takes_its_share_and_no_more() -> None:
    """5 % of 12 s for starving batch work, and at most a second's worth ahead of time.

    100 of them decode when standard prompts begin to fill every step and are left over;
    the promises are far off and would not stop batch work from taking a fifth of the time.
    """
    config = SchedulerConfig(batch=ClassConfig(tpot_target_ns=None, patience_ns=1))
    bench = Bench(config, replica(num_blocks=40_000))
    for number in range(100):
        bench.submit(batch(f"b{number}", prompt_tokens=16, max_output_tokens=4000))
    while len(ids(bench.step(), prefill=False)) < 100:
        pass
    for number in range(50):
        bench.submit(standard(f"s{number}", 100 * S, prompt_tokens=4000, max_output_tokens=1))
    started_ns, decodes = bench.now_ns, 0
    while bench.now_ns < started_ns + 12 * S:
        decodes += len(ids(bench.step(), prefill=False))
    spent_ns = decodes * COST.decode_ns
    assert 0.03 * 12 * S <= spent_ns <= 0.05 * (12 * S + 1 * S) + COST.decode_ns
