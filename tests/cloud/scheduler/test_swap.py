"""Victims' KV in host memory: copied where that is cheaper than computing it again."""

import random

import pytest

from cloud.scheduler.config import SchedulerConfig
from cloud.scheduler.scheduler import Scheduler
from cloud.scheduler.virtual import VirtualDriver
from tests.support.random_traffic import random_arrivals, random_config, random_replica
from tests.support.scheduling import COST, MS, Bench, S, batch, interactive, replica
from tests.support.verifier import verify


def _with_a_victim(*, num_swap_blocks: int = 64, swap_block_ns: float = 0.01 * MS) -> Bench:
    """A batch request of 128 tokens, that a robot's request will evict: the pool has 18 blocks."""
    spec = replica(num_blocks=18, num_swap_blocks=num_swap_blocks, swap_block_ns=swap_block_ns)
    bench = Bench(SchedulerConfig(use_prefix_cache=False), spec)
    bench.submit(batch("night", prompt_tokens=128, max_output_tokens=80))
    bench.steps(4)
    bench.submit(interactive("robot", bench.now_ns + S, prompt_tokens=160, max_output_tokens=3))
    return bench


def test_a_victim_goes_on_where_it_was() -> None:
    """8 blocks of 10 µs out and in cost less than 131 tokens of 100 µs each."""
    bench = _with_a_victim()
    out = bench.step()
    assert [device for device, _ in out.swap_out] == list(dict.fromkeys(dict(out.swap_out)))
    assert len(out.swap_out) == 9  # 131 tokens.
    assert out.predicted_ns == round(COST.t0_ns + 160 * COST.prefill_ns + 9 * 0.01 * MS)
    plans = bench.steps(4)
    back = next(plan for plan in plans if plan.swap_in)
    item = next(item for item in back.items if item.request_id == "night")
    assert (item.context_tokens, item.num_tokens) == (131, 1)
    assert [host for host, _ in back.swap_in] == [host for _, host in out.swap_out]
    assert [device for _, device in back.swap_in] == list(item.new_blocks[:9])


@pytest.mark.parametrize(
    ("num_swap_blocks", "swap_block_ns"), [(0, 0.01 * MS), (8, 0.01 * MS), (64, 0.8 * MS), (64, 0)]
)
def test_what_costs_more_to_copy_or_has_no_room_is_computed_again(
    num_swap_blocks: int, swap_block_ns: float
) -> None:
    """No host memory, too little, 14.4 ms of copies against 13.1 ms, and an unknown time."""
    bench = _with_a_victim(num_swap_blocks=num_swap_blocks, swap_block_ns=swap_block_ns)
    plans = bench.steps(5)
    assert not any(plan.swap_out or plan.swap_in for plan in plans)
    again = [i for plan in plans for i in plan.items if i.request_id == "night" and i.is_prefill]
    assert again[0].context_tokens == 0


def test_a_cancelled_victim_gives_its_host_memory_back() -> None:
    """The books are compared after each call; afterwards the next victim finds room."""
    bench = _with_a_victim(num_swap_blocks=9)
    bench.step()
    bench.scheduler.cancel("night", bench.now_ns)
    bench.submit(batch("next", prompt_tokens=128, max_output_tokens=80))
    bench.steps(5)
    bench.submit(interactive("late", bench.now_ns + S, prompt_tokens=160, max_output_tokens=3))
    assert len(bench.step().swap_out) > 0


def test_a_lost_replica_takes_what_was_swapped_with_it() -> None:
    """The victim waits on, and is computed from its beginning by the next replica."""
    bench = _with_a_victim()
    assert bench.step().swap_out
    events = bench.scheduler.replica_down("r0", bench.now_ns)
    assert [event.request_id for event in events] == ["robot"]
    bench.scheduler.replica_up(bench.spec, bench.now_ns)
    plan = bench.step()
    assert [(item.request_id, item.context_tokens) for item in plan.items] == [("night", 0)]
    assert not plan.swap_in


def test_what_another_replica_takes_over_is_computed_there_and_leaves_no_copy() -> None:
    """Host memory is the replica's own: the copy is given up, and the next victim has its room."""
    bench = _with_a_victim(num_swap_blocks=9)
    assert len(bench.step().swap_out) == 9
    scheduler = bench.scheduler
    scheduler.replica_up(replica("r1", num_blocks=64, num_swap_blocks=9), bench.now_ns)
    plan = scheduler.plan("r1", bench.now_ns)
    assert [(item.request_id, item.context_tokens) for item in plan.items] == [("night", 0)]
    assert not plan.swap_in
    bench.submit(batch("next", prompt_tokens=128, max_output_tokens=80))
    bench.steps(6)
    bench.submit(interactive("late", bench.now_ns + S, prompt_tokens=160, max_output_tokens=3))
    assert len(bench.step().swap_out) > 0


def test_copies_do_not_hold_a_robot_up() -> None:
    """Beyond a sixteenth of the longest step, 6.25 ms, victims are computed again."""
    bench = _with_a_victim(swap_block_ns=0.7 * MS)  # 12.6 ms in all, 6.3 ms of it out.
    assert not bench.step().swap_out


def test_logs_with_swapping_pass_the_verifier() -> None:
    """Random servers that are short of memory: every block comes back to its place."""
    num_copies = 0
    for seed in range(40):
        rng = random.Random(seed)
        log: list[dict[str, object]] = []
        driver = VirtualDriver(Scheduler(random_config(rng), log=log.append))
        driver.add_replica(random_replica(rng, "r0", swap_blocks=40))
        driver.add(random_arrivals(rng, 60, 600 * MS))
        driver.run()
        num_copies += sum(len(record.get("swap_in", ())) for record in log)  # type: ignore[arg-type, misc]
        broken = verify(log, idle_tolerance_ns=0)
        assert not broken, f"seed {seed}: {broken[:3]}"
    assert num_copies > 100
