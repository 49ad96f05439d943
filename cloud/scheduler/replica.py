"""One replica as the scheduler sees it: its memory, its batch and what is bound to it."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cloud.scheduler.bucket import TokenBucket
from cloud.scheduler.config import SchedulerConfig
from cloud.scheduler.kv import BlockPool, blocks_for
from cloud.scheduler.lane import StarvationLane
from cloud.scheduler.margin import OnlineMargin
from cloud.scheduler.queues import PromisedQueue
from cloud.scheduler.request_state import LiveRequest, Stage
from cloud.scheduler.swap import HostMemory
from cloud.scheduler.types import ReplicaSpec
from headway.cost_model import CostModel, StepShape

if TYPE_CHECKING:
    from cloud.scheduler.load import Load

__all__ = ["Chunk", "Flight", "Replica"]

# After this long a step counts half in the forecast of interactive load.
_LOAD_HALF_LIFE_NS = 5_000_000_000


@dataclass(slots=True)
class Chunk:
    """A piece of one request's prefill in a step."""

    live: LiveRequest
    num_tokens: int
    samples: bool


@dataclass(slots=True)
class Flight:
    """The step that is being executed."""

    step_id: int
    started_ns: int
    predicted_ns: int
    shape: StepShape
    decodes: list[LiveRequest]
    chunks: list[Chunk] = field(default_factory=list)


class Replica:
    """State of one replica. Whoever changes the batch does it through these methods."""

    __slots__ = (
        "batch_served_ns",
        "closed",
        "cost",
        "decode_kv",
        "decoding",
        "evictions",
        "flight",
        "growth_evictions",
        "host",
        "interactive_load",
        "is_draining",
        "lane",
        "last_step_ns",
        "loads",
        "long_prefill",
        "margin",
        "num_steps",
        "peers",
        "pool",
        "prefilling",
        "replica_id",
        "room_blocks",
        "running",
        "spec",
        "step_id",
        "threshold_tokens",
        "waiting",
    )

    def __init__(self, spec: ReplicaSpec, config: SchedulerConfig, now_ns: int) -> None:
        self.spec = spec
        self.replica_id = spec.replica_id
        self.cost: CostModel = spec.cost_model
        self.pool = BlockPool(spec.num_blocks, spec.block_tokens)
        self.host = HostMemory(spec, config.max_step_ns)
        self.margin = OnlineMargin(
            spec.cost_model.margin,
            miss_share=config.target_miss_share,
            half_life_ns=config.margin_half_life_ns,
            span_ns=config.margin_span_ns,
        )
        self.lane = StarvationLane(config.lane_share, config.lane_window_ns)
        self.is_draining = False  # Nothing new is placed here.
        # Replicas of the other pool, and up to how many tokens they must take for
        # this one to leave them their pool's work. Empty where there is one pool.
        self.peers: tuple[Replica, ...] = ()
        self.threshold_tokens = 0
        # Promised work bound here, by class.
        self.waiting = (PromisedQueue(), PromisedQueue())
        # The batch, in the order of joining; for each class who decodes (in the
        # order in which step time is given out when it is short) and who does
        # not yet, by deadline.
        self.running: dict[LiveRequest, None] = {}
        self.decoding: tuple[dict[LiveRequest, None], ...] = ({}, {}, {})
        self.prefilling: tuple[list[LiveRequest], ...] = ([], [], [])
        self.decode_kv = [0, 0, 0]  # Tokens of KV that the decodes of each class read.
        self.room_blocks = [0, 0, 0]  # Blocks held and reserved by each class.
        self.long_prefill: LiveRequest | None = None
        self.flight: Flight | None = None
        self.step_id = 0
        self.num_steps = 0
        self.closed: list[str] = []
        self.batch_served_ns = now_ns
        self.last_step_ns = now_ns
        self.interactive_load = 0.0  # Decayed share of time that interactive work takes.
        # What runs, by class, summed up; empty after a change. See `load`.
        self.loads: list[Load] = []
        self.growth_evictions = _rate_cap(config.max_growth_evictions_per_s, now_ns)
        self.evictions = _rate_cap(config.max_evictions_per_s, now_ns)

    @property
    def num_running(self) -> int:
        """Requests in the batch."""
        return len(self.running)

    def held_tables(self) -> Iterator[list[int]]:
        """Block tables of everything that holds KV here."""
        return (live.blocks for live in self.running)

    def takes(self, tenant: str, is_long: bool) -> bool:
        """Whether work of the tenant and pool may run here."""
        if not self.is_open_to(tenant):
            return False
        if is_long == self.spec.is_long_context or not self.peers:
            return True
        # The other pool's work, unless nobody there can do it.
        needed = self.capacity_tokens if is_long else self.threshold_tokens
        return not any(
            peer.is_open_to(tenant) and peer.capacity_tokens >= min(needed, self.capacity_tokens)
            for peer in self.peers
        )

    @property
    def capacity_tokens(self) -> int:
        """Tokens of the longest request that it takes."""
        spec = self.spec
        return min(spec.max_context_tokens, spec.num_blocks * spec.block_tokens)

    def is_open_to(self, tenant: str) -> bool:
        """Whether new work of the tenant may be placed here."""
        return not self.is_draining and self.is_meant_for(tenant)

    def is_meant_for(self, tenant: str) -> bool:
        """Whether the replica is everybody's, or reserved for this tenant too."""
        return not self.spec.tenants or tenant in self.spec.tenants

    def fits_alone(self, prompt_tokens: int, max_output: int) -> bool:
        """Whether the request could ever run here: the formula of joining a batch."""
        return (
            prompt_tokens + max_output <= self.spec.max_context_tokens
            and blocks_for(prompt_tokens + max_output - 1, self.spec.block_tokens)
            <= self.spec.num_blocks
        )

    def decode_cost_ns(self, rank: int) -> float:
        """What all decodes of a class add to a step."""
        return (
            self.cost.decode_ns * len(self.decoding[rank]) + self.cost.kv_ns * self.decode_kv[rank]
        )

    @property
    def alone_step_ns(self) -> float:
        """Expected time of a step with a single decode, with no margin."""
        return (self.cost.t0_ns + self.cost.decode_ns) * self.margin.level

    def step_end_ns(self, now_ns: int) -> int:
        """When a step can begin in which a newcomer is, with the margin: when the running
        one is over, and victims' KV is out of the way.

        One that is overdue is taken to last as long again as it is overdue: a stall shows
        itself in nothing else, and whoever comes meanwhile must not be promised the time.
        """
        copies_ns = int(self.host.most_ns) if self.running else 0
        if self.flight is None:
            return now_ns + copies_ns
        expected_ns = self.flight.started_ns + int(self.flight.predicted_ns * self.margin.value)
        return now_ns + abs(expected_ns - now_ns) + copies_ns

    def need(self, live: LiveRequest, config: SchedulerConfig) -> tuple[list[int], int, int]:
        """What joining takes: cached blocks to share, tokens to reserve, blocks lacking."""
        pool = self.pool
        cached: list[int] = []
        is_swapped = live.host is self.host
        if config.use_prefix_cache and live.request.prefix_hashes and not is_swapped:
            cached = pool.match(live.request.prefix_hashes, live.prompt_tokens)
        reserve = live.tokens_to_join
        wanted = blocks_for(reserve, pool.block_tokens) - len(cached) + pool.num_unheld(cached)
        return cached, reserve, wanted - pool.num_available

    def known_tokens(self, live: LiveRequest, config: SchedulerConfig) -> int:
        """Tokens of a waiting request whose KV is in memory here."""
        if live.host is self.host:
            return live.computed
        hashes = live.request.prefix_hashes
        if not (hashes and config.use_prefix_cache):
            return 0
        return len(self.pool.match(hashes, live.prompt_tokens)) * self.spec.block_tokens

    def waiting_room(self) -> tuple[int, int]:
        """Slots and blocks, at most, that the promised work needs that waits here."""
        num = sum(map(len, self.waiting))
        tokens = sum(queue.kv_tokens for queue in self.waiting)
        # Each one may leave all but a token of its last block empty.
        return num, blocks_for(tokens + num * (self.spec.block_tokens - 1), self.spec.block_tokens)

    # --- the batch ---

    def enter(self, live: LiveRequest, cached: list[int], reserve_tokens: int) -> None:
        """Takes a request into the batch, with a reservation, and the cached blocks or
        what was swapped out of it here.
        """
        live.stage = Stage.RUNNING
        live.replica = self
        self.loads.clear()
        self.running[live] = None
        if live.host is self.host:
            live.blocks = self.pool.allocate(len(live.host_blocks))
            self.host.load(live, live.blocks)
        else:
            self.pool.take(cached)
            live.blocks = list(cached)
            live.computed = len(cached) * self.spec.block_tokens
        live.capacity = len(live.blocks) * self.spec.block_tokens
        live.fresh_blocks = tuple(live.blocks)
        live.resets_table = True
        needed = blocks_for(reserve_tokens, self.spec.block_tokens)
        live.reserved_blocks = max(0, needed - len(live.blocks))
        self.pool.reserved += live.reserved_blocks
        self.room_blocks[live.rank] += len(live.blocks) + live.reserved_blocks
        insort(self.prefilling[live.rank], live, key=_key)

    def grow(self, live: LiveRequest, tokens: int) -> None:
        """Allocates blocks so that the request can hold `tokens`; its reservation first.

        Callers have seen to it that there are enough.
        """
        lacking = blocks_for(tokens, self.spec.block_tokens) - len(live.blocks)
        if lacking <= 0:
            return
        from_reserve = min(lacking, live.reserved_blocks)
        live.reserved_blocks -= from_reserve
        self.pool.reserved -= from_reserve
        self.room_blocks[live.rank] += lacking - from_reserve
        given = self.pool.allocate(lacking)
        live.blocks += given
        live.capacity = len(live.blocks) * self.spec.block_tokens
        live.fresh_blocks += tuple(given)

    def start_decoding(self, live: LiveRequest) -> None:
        """Moves a request whose prefill is complete to those that decode."""
        self.prefilling[live.rank].remove(live)
        self.decoding[live.rank][live] = None
        self.decode_kv[live.rank] += live.computed
        if self.long_prefill is live:
            self.long_prefill = None

    def leave(self, live: LiveRequest) -> None:
        """Takes a request out of the batch and all its blocks back."""
        rank = live.rank
        self.loads.clear()
        del self.running[live]
        if live in self.decoding[rank]:
            del self.decoding[rank][live]
            self.decode_kv[rank] -= live.computed
        else:
            self.prefilling[rank].remove(live)
            if self.long_prefill is live:
                self.long_prefill = None
        self.pool.release(live.blocks)
        self.pool.reserved -= live.reserved_blocks
        self.room_blocks[rank] -= len(live.blocks) + live.reserved_blocks
        live.blocks = []
        live.capacity = live.reserved_blocks = 0
        live.fresh_blocks = ()

    def computed(self, live: LiveRequest, num_tokens: int) -> None:
        """Counts a piece of a prefill as done; its full prompt blocks can be shared."""
        before = live.computed // self.spec.block_tokens
        live.computed += num_tokens
        hashes = live.request.prefix_hashes
        for place in range(before, min(live.computed // self.spec.block_tokens, len(hashes))):
            self.pool.register(live.blocks[place], hashes[place])

    def observe(self, flight: Flight, elapsed_ns: int, now_ns: int) -> None:
        """Learns from a step how far predictions can be trusted, and who takes the time."""
        self.loads.clear()
        self.margin.observe(flight.predicted_ns, elapsed_ns, now_ns)
        own_ns = sum(
            self.cost.chunk_ns(chunk.live.computed, chunk.num_tokens)
            for chunk in flight.chunks
            if chunk.live.rank == 0
        )
        own_ns += self.decode_cost_ns(0)
        # Of what a step has beside its t0, which everybody in it needs.
        share = min(1.0, own_ns / max(1.0, flight.predicted_ns - self.cost.t0_ns))
        # A decayed average over time, the idle time before the step included.
        self._decay_load(flight.started_ns, now_ns, share)

    def _decay_load(self, started_ns: int, now_ns: int, share: float) -> None:
        idle = 0.5 ** ((started_ns - self.last_step_ns) / _LOAD_HALF_LIFE_NS)
        busy = 0.5 ** ((now_ns - started_ns) / _LOAD_HALF_LIFE_NS)
        self.interactive_load = self.interactive_load * idle * busy + share * (1 - busy)
        self.last_step_ns = now_ns

    def release_reserve(self, live: LiveRequest) -> None:
        """Gives back what was reserved for a promise that is kept now."""
        self.loads.clear()
        self.pool.reserved -= live.reserved_blocks
        self.room_blocks[live.rank] -= live.reserved_blocks
        live.reserved_blocks = 0


def _rate_cap(per_s: float, now_ns: int) -> TokenBucket:
    return TokenBucket(per_s, math.ceil(per_s), now_ns)


def _key(live: LiveRequest) -> tuple[int, int, int]:
    return live.key
