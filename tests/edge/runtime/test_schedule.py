"""What the device does next: order, scenes, failures, and a device that becomes slow."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.runtime.planner import ChunkPlanner
from edge.runtime.schedule import ChunkWork, ControlKind, ControlWork, DeviceSchedule, Wait
from tests.edge.runtime.test_bounds import BOTH, COST, MS, QUERIES, TICKS, World, reactions


def test_control_comes_before_any_chunk() -> None:
    """At a release there is always control first, then what fits before the next one."""
    schedule = DeviceSchedule(ChunkPlanner(TICKS, COST), 0)
    schedule.scene(4096)
    work = schedule.next(0)
    assert work == ControlWork(ControlKind.TICK, 0, 1)
    schedule.done(work, 0, 2 * MS)
    chunk = schedule.next(2 * MS)
    assert isinstance(chunk, ChunkWork)
    # 18 ms are left: (0.5 + 512 × 0.02 + 512 × 256.5 × 0.00001) × 1.25 = 15.07 ms.
    assert (chunk.chunk.start, chunk.chunk.bucket) == (0, 512)


def test_one_thing_is_in_flight_at_a_time() -> None:
    """Asking for more before the last one has ended is a bug of the caller."""
    schedule = DeviceSchedule(ChunkPlanner(TICKS, COST), 0)
    schedule.next(0)
    with pytest.raises(RuntimeError, match="one thing at a time"):
        schedule.next(0)


def test_without_work_there_is_a_wait_until_the_next_release() -> None:
    """Or, without ticks, until something comes."""
    schedule = DeviceSchedule(ChunkPlanner(TICKS, COST), 5 * MS)
    assert schedule.next(0) == Wait(5 * MS)
    assert DeviceSchedule(ChunkPlanner(QUERIES, COST), 0).next(0) == Wait(None)


def test_what_was_released_first_runs_first() -> None:
    """A query before the tick that comes after it, and the other way round."""
    schedule = DeviceSchedule(ChunkPlanner(BOTH, COST), 10 * MS)
    schedule.query(9 * MS)
    schedule.query(11 * MS)
    order = []
    for at_ms in (12, 14, 16):
        work = schedule.next(at_ms * MS)
        assert isinstance(work, ControlWork)
        order.append((work.kind.value, work.release_ns // MS))
        schedule.done(work, at_ms * MS, (at_ms + 2) * MS)
    assert order == [("query", 9), ("tick", 10), ("query", 11)]


def test_ticks_that_were_missed_are_given_up_and_counted() -> None:
    """A robot has no use for a tick whose successor is due."""
    schedule = DeviceSchedule(ChunkPlanner(TICKS, COST), 0)
    work = schedule.next(65 * MS)
    assert work == ControlWork(ControlKind.TICK, 60 * MS, 4)
    assert schedule.ticks.report().skipped == 3
    schedule.done(work, 65 * MS, 67 * MS)
    assert schedule.ticks.report().violations == 1
    assert schedule.next(67 * MS) == Wait(80 * MS)


def test_a_new_scene_takes_over_at_the_next_boundary() -> None:
    """The chunk that runs ends; then the new one begins at its first token."""
    world = World(QUERIES)
    old = world.device.submit(range(4096))
    world.device.turn()
    new = world.device.submit(range(10_000, 10_100))
    while len(world.ends) < 2:
        world.device.turn()
    assert [(end.epoch, end.is_complete) for end in world.ends] == [(old, False), (new, True)]
    first, *rest = world.backend.chunks
    assert first[0] == 0
    assert rest[0][0] == 0
    assert [token for _, tokens, _ in rest for token in tokens] == list(range(10_000, 10_100))


def test_a_result_of_a_scene_that_was_replaced_is_not_used() -> None:
    """Also where its last chunk was already running."""
    schedule = DeviceSchedule(ChunkPlanner(QUERIES, COST), 0)
    schedule.scene(16)
    work = schedule.next(0)
    schedule.scene(32)
    assert not schedule.done(work, 0, 1 * MS)
    assert schedule.progress == (0, 32)


def test_control_knows_the_last_scene_that_is_complete() -> None:
    """Not the one that is being read."""
    world = World(TICKS)
    first = world.device.submit(range(100))
    world.run(100 * MS)
    world.device.submit(range(4096))
    world.run(200 * MS)
    epochs = [result.scene_epoch for result in world.results]
    assert epochs[0] == 0
    assert set(epochs[1:]) == {first}


def test_a_chunk_that_fails_is_computed_again_and_control_is_served() -> None:
    """Nothing of it counts; every token is read once in the end."""
    world = World(TICKS)
    world.device.submit(range(1000))
    world.device.turn()
    world.backend.fails_next = True
    world.device.turn()
    assert world.schedule.progress == (0, 1000)
    world.run(500 * MS)
    assert [end.is_complete for end in world.ends] == [True]
    assert [token for _, tokens, _ in world.backend.chunks for token in tokens] == list(range(1000))
    assert reactions(world, ControlKind.TICK) == [2 * MS] * 25


def test_a_scene_that_fails_again_and_again_is_given_up() -> None:
    """With the device's words, and control goes on."""
    world = World(TICKS)
    world.device.submit(range(1000))
    for _ in range(3):
        while not isinstance(world.schedule.next(world.clock.now_ns()), ChunkWork):
            world.schedule._running = None
            world.clock.advance(MS)
        world.schedule._running = None
        world.backend.fails_next = True
        world.device.turn()
    assert [(end.is_complete, end.problem) for end in world.ends] == [(False, "told to fail")]
    num_results = len(world.results)
    world.run(world.clock.now_ns() + 100 * MS)
    assert len(world.results) >= num_results + 4


def test_a_control_step_that_fails_is_told_without_values() -> None:
    """And counts as an answer that took so long."""
    world = World(TICKS)
    world.backend.fails_next = True
    world.device.turn()
    assert (world.results[0].values, world.results[0].problem) == (None, "told to fail")
    assert world.schedule.ticks.report().count == 1


def test_a_slower_device_is_met_with_smaller_chunks() -> None:
    """The margin follows what was measured; once it has, no bound is broken."""
    factor = 1.0
    world = World(TICKS, chunk_noise=lambda: factor)
    world.device.submit(range(4096))
    world.run(40 * MS)
    factor = 2.0
    world.run(100 * MS)
    assert world.schedule.overruns > 0
    assert world.schedule.planner.margin == pytest.approx(2.0, abs=0.01)
    broken = world.schedule.ticks.report().violations
    world.run(5_000 * MS)
    assert world.schedule.ticks.report().violations == broken
    assert [end.is_complete for end in world.ends] == [True]


def test_a_device_that_is_too_slow_for_any_chunk_serves_control_alone() -> None:
    """And is tried again after a second: it may have been held up by others."""
    factor = 1.0
    world = World(TICKS, chunk_noise=lambda: factor)
    world.device.submit(range(4096))
    world.run(20 * MS)
    factor, before = 20.0, len(world.backend.chunks)
    world.device.turn()
    while not world.schedule.is_paused:
        world.device.turn()
    factor = 1.0
    paused_ns = world.clock.now_ns()
    world.run(paused_ns + 900 * MS)
    assert len(world.backend.chunks) <= before + 2
    assert reactions(world, ControlKind.TICK)[-40:] == [2 * MS] * 40
    world.run(paused_ns + 3_000 * MS)
    assert [end.is_complete for end in world.ends] == [True]


@given(
    st.sets(st.integers(1, 600), min_size=1, max_size=5), st.integers(1, 4096), st.integers(1, 30)
)
def test_every_token_is_read_once_whatever_the_buckets(
    buckets: set[int], num_tokens: int, control_ms: int
) -> None:
    """In order; a rest is padded to the smallest bucket that holds it."""
    config = replace(
        QUERIES,
        buckets=tuple(sorted(buckets)),
        control_worst_ns=control_ms * MS,
        query_bound_ns=10_000 * MS,
    )
    world = World(config)
    world.device.submit(range(num_tokens))
    while not world.ends:
        world.device.turn()
    chunks = world.backend.chunks
    assert [token for _, tokens, _ in chunks for token in tokens] == list(range(num_tokens))
    assert all(len(tokens) <= bucket for _, tokens, bucket in chunks)
    rest = len(chunks[-1][1])
    assert chunks[-1][2] == min(bucket for bucket in buckets if bucket >= rest)


def test_an_impossible_scene_is_refused() -> None:
    """Empty, or longer than the memory that was set aside for it."""
    schedule = DeviceSchedule(ChunkPlanner(TICKS, COST), 0)
    for num_tokens in (0, 4097):
        with pytest.raises(ValueError, match="1 to 4096 tokens"):
            schedule.scene(num_tokens)


def test_queries_need_a_bound() -> None:
    """None is promised where none was configured."""
    with pytest.raises(ValueError, match="query_bound_ns"):
        DeviceSchedule(ChunkPlanner(TICKS, COST), 0).query(0)
