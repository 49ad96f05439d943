"""Reaction bounds in virtual time: whatever the phases, no reaction takes longer."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.runtime.device import ControlResult, Device, SceneEnd
from edge.runtime.planner import ChunkPlanner, InfeasibleBudgetError, ReactionConfig
from edge.runtime.schedule import ControlKind, DeviceSchedule, Wait
from edge.runtime.simulated import SimulatedBackend
from headway.clock import VirtualClock
from headway.cost_model import CostModel

MS = 1_000_000
US = 1_000
# 0.5 ms a chunk, 20 µs a token, 10 ns a pair: 4 ms for 128 tokens after 2,000.
COST = CostModel(t0_ns=0.5 * MS, prefill_ns=20.0 * US, pair_ns=10.0, margin=1.25)
TICKS = ReactionConfig(
    buckets=(16, 32, 64, 128, 256, 512),
    max_scene_tokens=4096,
    control_worst_ns=2 * MS,
    period_ns=20 * MS,
)
QUERIES = replace(TICKS, period_ns=None, query_bound_ns=12 * MS)
BOTH = replace(TICKS, query_bound_ns=16 * MS)


class World:
    """A device in virtual time, with queries that come at instants of a test's choice."""

    def __init__(
        self,
        config: ReactionConfig,
        *,
        chunk_noise: Callable[[], float] = lambda: 1.0,
        control_noise: Callable[[], float] = lambda: 1.0,
        cost: CostModel = COST,
        planner: Callable[[ReactionConfig, CostModel], ChunkPlanner] = ChunkPlanner,
    ) -> None:
        self.clock = VirtualClock()
        self.results: list[ControlResult] = []
        self.ends: list[SceneEnd] = []
        self.backend = SimulatedBackend(
            cost,
            config.control_worst_ns,
            self.clock,
            chunk_noise=chunk_noise,
            control_noise=control_noise,
        )
        self.schedule = DeviceSchedule(planner(config, cost), 0)
        self.device = Device(
            self.schedule,
            self.backend,
            self.clock,
            on_control=self.results.append,
            on_scene=self.ends.append,
        )

    def run(self, until_ns: int, queries: list[int] | None = None) -> None:
        """Up to an instant; a query that comes while the device is busy has waited since."""
        coming = sorted(queries or [])
        while self.clock.now_ns() < until_ns:
            while coming and coming[0] <= self.clock.now_ns():
                self.device.ask((0.0,), coming.pop(0))
            wait = self.device.turn()
            if isinstance(wait, Wait):
                instants = [until_ns, *coming[:1]]
                if wait.until_ns is not None:
                    instants.append(wait.until_ns)
                self.clock.advance_to(max(self.clock.now_ns(), min(instants)))


def reactions(world: World, kind: ControlKind) -> list[int]:
    """Of all control steps of that kind."""
    return [one.ended_ns - one.release_ns for one in world.results if one.kind is kind]


def test_ticks_wait_for_no_chunk() -> None:
    """At 50 Hz beside 4,096 tokens: every tick begins at its release, and the scene is read."""
    world = World(TICKS)
    world.device.submit(range(4096))
    world.run(3_000 * MS)
    assert reactions(world, ControlKind.TICK) == [2 * MS] * 150
    assert [one.is_complete for one in world.ends] == [True]
    read = [token for _, tokens, _ in world.backend.chunks for token in tokens]
    assert read == list(range(4096))
    # Read in one go it takes 0.5 + 4096 × 0.02 + 4096 × 4097 / 2 × 0.00001 = 166.3 ms.
    assert world.ends[0].at_ns <= 2.0 * 166.3 * MS


def test_a_query_that_comes_just_after_the_longest_chunk_began_is_in_time() -> None:
    """The critical instant: 1 ns after the start, with the chunk as slow as the margin allows."""
    world = World(QUERIES)
    world.device.submit(range(4096))
    starts = []
    while not world.ends:
        began_ns = world.clock.now_ns()
        world.device.turn()
        starts.append((world.clock.now_ns() - began_ns, began_ns))
    longest_ns, began_ns = max(starts)
    worst = World(QUERIES)
    worst.device.submit(range(4096))
    worst.run(began_ns + 100 * MS, [began_ns + 1])
    (reaction_ns,) = reactions(worst, ControlKind.QUERY)
    assert reaction_ns == longest_ns - 1 + 2 * MS
    assert reaction_ns <= 12 * MS


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([TICKS, QUERIES, BOTH]),
    st.integers(0, 2**32),
    st.lists(st.integers(0, 400), max_size=20),
)
def test_no_reaction_is_longer_than_its_bound(
    config: ReactionConfig, seed: int, gaps_ms: list[int]
) -> None:
    """With chunks and control as slow as the margin and the worst case allow, at random."""
    rng = random.Random(seed)
    world = World(
        config,
        chunk_noise=lambda: rng.uniform(0.5, COST.margin),
        control_noise=lambda: rng.uniform(0.1, 1.0),
    )
    queries, at_ns = [], 0
    if config.query_bound_ns is not None:
        for gap_ms in gaps_ms:
            # Two are at least a bound apart: so it is configured.
            at_ns += config.query_bound_ns + gap_ms * MS + rng.randrange(MS)
            queries.append(at_ns)
    world.device.submit(range(rng.randrange(1, 4097)))
    world.run(at_ns + 1_000 * MS, queries)
    planner = world.schedule.planner
    for kind, bound_ns in (
        (ControlKind.TICK, planner.tick_bound_ns),
        (ControlKind.QUERY, planner.query_bound_ns),
    ):
        assert all(one <= (bound_ns or 0) for one in reactions(world, kind)), kind
    assert world.schedule.ticks.report().violations == 0
    assert world.schedule.queries.report().violations == 0
    assert world.schedule.overruns == 0
    assert [one.is_complete for one in world.ends] == [True]


@pytest.mark.parametrize("config", [TICKS, QUERIES, BOTH])
def test_what_cannot_fit_is_refused_with_what_would(config: ReactionConfig) -> None:
    """Before anything runs; the period or bound that is named does fit, and no less."""
    dear = replace(COST, prefill_ns=2_000.0 * US)
    with pytest.raises(InfeasibleBudgetError) as caught:
        ChunkPlanner(config, dear)
    feasible_ns = caught.value.feasible_ns
    name = "period_ns" if config.period_ns is not None else "query_bound_ns"
    enough = {name: feasible_ns}
    if config is BOTH:
        enough["query_bound_ns"] = 10 * feasible_ns
    ChunkPlanner(replace(config, **enough), dear)  # type: ignore[arg-type]
    with pytest.raises(InfeasibleBudgetError):
        ChunkPlanner(replace(config, **{**enough, name: feasible_ns - 1}), dear)  # type: ignore[arg-type]


def test_a_shorter_scene_that_would_fit_is_named() -> None:
    """Attention over a long scene is what takes the time."""
    dear = replace(COST, pair_ns=300.0)
    with pytest.raises(InfeasibleBudgetError) as caught:
        ChunkPlanner(TICKS, dear)
    tokens = caught.value.feasible_scene_tokens
    # 18 ms of room: 1.25 × (0.5 + 16 × 0.02 + 16 × (context + 8.5) × 0.0003) ms.
    assert tokens == int(((18 / 1.25 - 0.5 - 16 * 0.02) / 0.0003 / 16) - 8.5)
    ChunkPlanner(replace(TICKS, max_scene_tokens=tokens), dear)


def test_the_bounds_are_stated() -> None:
    """A tick: control alone. A query: the longest chunk that may run, and control."""
    assert ChunkPlanner(TICKS, COST).tick_bound_ns == 2 * MS
    assert ChunkPlanner(QUERIES, COST).query_bound_ns == 12 * MS
    both = ChunkPlanner(BOTH, COST)
    # Each may find the other's control step running.
    assert (both.tick_bound_ns, both.query_bound_ns) == (4 * MS, 16 * MS)
    small = ChunkPlanner(replace(QUERIES, buckets=(16,)), COST)
    # 16 tokens after 4,096: 0.5 + 0.32 + 16 × 4104.5 × 0.00001 = 1.47672 ms, × 1.25.
    assert small.query_bound_ns == pytest.approx(2 * MS + 1.8459 * MS, abs=10)
