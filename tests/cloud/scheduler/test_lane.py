"""The starvation lane: a small, bounded share for work that waited too long."""

import dataclasses

from cloud.scheduler.config import ClassConfig, SchedulerConfig
from cloud.scheduler.lane import StarvationLane
from cloud.scheduler.simulated import Arrival
from cloud.scheduler.types import Admitted
from cloud.scheduler.virtual import VirtualDriver
from headway.outcome import Outcome
from tests.support.scheduling import (
    COST,
    MS,
    Bench,
    CheckedScheduler,
    S,
    batch,
    interactive,
    replica,
    standard,
)


def test_the_lane_earns_its_share_and_no_more_than_a_window() -> None:
    """5 % over 1 s: 10 ms after 200 ms, never more than 50 ms."""
    lane = StarvationLane(0.05, S)
    assert lane.accrue(0, is_starving=True) == 0
    assert lane.accrue(200 * MS, is_starving=True) == 10 * MS
    assert lane.accrue(60 * S, is_starving=True) == 50 * MS
    lane.spend(80 * MS)
    assert lane.accrue(60 * S, is_starving=True) == 0


def test_a_closed_lane_earns_nothing() -> None:
    """Nobody starves, or the share is 0."""
    assert StarvationLane(0.0, S).accrue(S, is_starving=True) == 0
    lane = StarvationLane(0.05, S)
    lane.accrue(0, is_starving=False)
    assert lane.accrue(S, is_starving=False) == 0
    assert not lane.is_open


def _night_beside_a_full_day(lane_share: float) -> tuple[int, int, int]:
    """Batch tokens, standard admissions and standard misses in 30 s of overload."""
    config = SchedulerConfig(
        batch=ClassConfig(tpot_target_ns=None, patience_ns=2 * S), lane_share=lane_share
    )
    driver = VirtualDriver(CheckedScheduler(config))
    driver.add_replica(replica())
    driver.add(
        Arrival(0, batch(f"b{n}", prompt_tokens=200, max_output_tokens=10)) for n in range(50)
    )
    driver.add(
        Arrival(
            n * 20 * MS,
            standard(f"s{n}", n * 20 * MS + S, prompt_tokens=400, max_output_tokens=1),
        )
        for n in range(1500)
    )
    driver.run(30 * S)
    admitted = [
        name
        for name, one in driver.decisions.items()
        if isinstance(one, Admitted) and name.startswith("s")
    ]
    missed = [
        n
        for n in admitted
        if n in driver.ended and driver.ended[n].outcome is not Outcome.COMPLETED
    ]
    tokens = sum(len(given) for name, given in driver.tokens.items() if name.startswith("b"))
    return tokens, len(admitted), len(missed)


def test_starving_batch_work_gets_its_share_and_breaks_no_promise() -> None:
    """With the lane some of the night is done; the promises beside it are all kept."""
    closed = _night_beside_a_full_day(0.0)
    opened = _night_beside_a_full_day(0.05)
    assert opened[0] > closed[0]
    assert closed[2] == opened[2] == 0
    assert opened[1] >= 0.9 * closed[1]


def test_the_lane_leaves_the_room_that_a_promise_waits_for() -> None:
    """A standard request waits for 12 blocks, 8 are free, and a starving one would need 4."""
    config = SchedulerConfig(
        batch=ClassConfig(tpot_target_ns=None, patience_ns=10 * MS), use_prefix_cache=False
    )
    bench = Bench(config, replica(num_blocks=18))
    bench.submit(interactive("robot", 20 * S, prompt_tokens=120, max_output_tokens=40))
    bench.step()
    told = bench.submit(standard("question", 20 * S, prompt_tokens=180, max_output_tokens=4))
    assert isinstance(told, Admitted)
    bench.submit(batch("night", prompt_tokens=50, max_output_tokens=8))
    plans = bench.steps(45)
    ran = [{item.request_id for item in plan.items} for plan in plans]
    first = next(number for number, names in enumerate(ran) if "question" in names)
    # Long beyond its patience, and the lane has had time to save.
    assert sum(plan.predicted_ns for plan in plans[:first]) > 300 * MS
    assert all("night" not in names for names in ran[:first])
    assert any("night" in names for names in ran[first:])


def test_many_aged_requests_do_not_turn_the_day_into_a_queue() -> None:
    """715 batch requests beyond their patience: standard work is still done first."""
    config = SchedulerConfig(batch=ClassConfig(tpot_target_ns=None, patience_ns=1))
    driver = VirtualDriver(CheckedScheduler(config))
    driver.add_replica(replica(cost_model=dataclasses.replace(COST, t0_ns=5 * MS)))
    driver.add(Arrival(0, batch(f"b{n}", max_output_tokens=1)) for n in range(715))
    driver.add(
        Arrival(S + n * 10 * MS, standard(f"s{n}", S + n * 10 * MS + 500 * MS)) for n in range(100)
    )
    driver.run(20 * S)
    waits = [driver.ended[f"s{n}"].queue_ns for n in range(100)]
    assert max(waits) <= 200 * MS
