"""What a replica's running requests still need, summed up, and the quick test on it.

Most of the time a replica has far more time than it was promised to anybody. Then a
newcomer needs no look at the single requests: if everything promised is done before the
earliest deadline of all, in whatever order, nobody is late.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from cloud.scheduler.config import SchedulerConfig
from cloud.scheduler.kv import blocks_for
from cloud.scheduler.laxity import GUARD
from cloud.scheduler.replica import Replica
from cloud.scheduler.request_state import NEVER_NS, LiveRequest

__all__ = ["Load", "load_of", "quick_finish_ns"]


class Load(NamedTuple):
    """Requests of one class or more. Sums, and the most or least of one of them."""

    num: int = 0
    prefill_ns: float = 0.0  # Predicted time of their prefills.
    outputs: int = 0  # Output tokens, at most.
    held: int = 0  # Tokens of KV times the steps that hold them, at most.
    blocks: int = 0  # At their ends.
    kv_tokens: int = 0  # Of the one with the most, at its end.
    steps: int = 0  # Until the promise that needs the most is kept, its prefill left out.
    due_ns: int = NEVER_NS  # Earliest deadline of an open promise.

    def plus(self, other: Load) -> Load:
        """Both together."""
        return Load(
            self.num + other.num,
            self.prefill_ns + other.prefill_ns,
            self.outputs + other.outputs,
            self.held + other.held,
            self.blocks + other.blocks,
            max(self.kv_tokens, other.kv_tokens),
            max(self.steps, other.steps),
            min(self.due_ns, other.due_ns),
        )


def load_of(replica: Replica, rank: int) -> Load:
    """All that runs of classes down to `rank`. Summed up once between two changes."""
    loads = replica.loads
    if not loads:
        for each in range(len(replica.waiting)):
            upper = loads[-1] if loads else Load()
            own = _sum(replica, (*replica.decoding[each], *replica.prefilling[each]))
            loads.append(upper.plus(own))
    return loads[rank]


def _sum(replica: Replica, lives: Iterable[LiveRequest]) -> Load:
    cost, block_tokens = replica.cost, replica.spec.block_tokens
    num = outputs = held = blocks = most_kv = most_steps = 0
    prefill_ns = 0.0
    due_ns = NEVER_NS
    for live in lives:
        left = live.max_output - live.num_output
        kv_tokens = live.prompt_tokens + live.max_output - 1
        num += 1
        outputs += left
        held += left * kv_tokens
        blocks += blocks_for(kv_tokens, block_tokens)
        most_kv = max(most_kv, kv_tokens)
        if live.prefill_left > 1:
            prefill_ns += cost.chunk_ns(live.computed, live.prefill_left)
        if not live.is_met:
            most_steps = max(most_steps, left if live.covers_last else 1)
            due_ns = min(due_ns, live.deadline_ns)
    return Load(num, prefill_ns, outputs, held, blocks, most_kv, most_steps, due_ns)


def quick_finish_ns(
    replica: Replica, config: SchedulerConfig, newcomer: LiveRequest, now_ns: int, stretch: float
) -> int | None:
    """When a newcomer's promise is predicted to be kept, where no look at single requests
    is needed: everything promised in its class and above is done before the earliest
    deadline, even if everybody decodes in every step from the start, all prefills come
    first, and each step lacks the smallest piece of being full.

    None where it is not so, which says nothing: the roll-forward decides. O(1), save for
    the sum over what runs.
    """
    rank, cost = newcomer.rank, replica.cost
    load = load_of(replica, rank)
    queues = replica.waiting[: rank + 1]
    num = load.num + sum(map(len, queues)) + 1
    kv_tokens = max(load.kv_tokens, newcomer.kv_tokens_at_most, *(q.most_kv for q in queues))
    due_ns = min(load.due_ns, newcomer.deadline_ns)
    context = replica.known_tokens(newcomer, config)
    prefill_ns = load.prefill_ns + cost.chunk_ns(context, newcomer.total_tokens - context)
    steps = max(load.steps, newcomer.promised_output_left)
    waiting_tokens = 0
    for queue in queues:
        if queue:
            due_ns = min(due_ns, queue.first_due_ns)
            prefill_ns += queue.demand.work_ns
            steps = max(steps, queue.most_steps)
            waiting_tokens += queue.kv_tokens
    block_tokens = replica.spec.block_tokens
    blocks = load.blocks + blocks_for(
        waiting_tokens + newcomer.kv_tokens_at_most + (num - load.num) * (block_tokens - 1),
        block_tokens,
    )
    if num > config.max_running or blocks > replica.spec.num_blocks:
        return None
    decode_ns = cost.t0_ns + num * (cost.decode_ns + cost.kv_ns * kv_tokens)
    target_ns = float(config.longest_step_ns(rank))
    if replica.lane.is_open:
        target_ns *= 1 - config.lane_share
    room_ns = target_ns - decode_ns - cost.chunk_ns(kv_tokens, config.min_chunk_tokens)
    if room_ns <= 0:
        return None
    fills = math.ceil(prefill_ns / room_ns)
    # Each piece of a prefill reads what was computed before it.
    read_ns = (fills + 1) * cost.kv_ns * kv_tokens
    own_ns = prefill_ns + read_ns + (fills + 1 + steps) * decode_ns
    total_ns = stretch * own_ns + replica.margin.step_excess * target_ns
    start_ns = replica.step_end_ns(now_ns)
    if start_ns + total_ns * (1 + 4 * GUARD) > due_ns:
        return None
    # That is the bound. What is to be expected is less: those who decode now, and itself.
    decode_ns = cost.t0_ns + load.num * (cost.decode_ns + cost.kv_ns * kv_tokens)
    own_ns = prefill_ns + max(1, fills) * decode_ns
    if newcomer.covers_last:
        own_ns += (newcomer.max_output - newcomer.num_output - 1) * (
            decode_ns + cost.decode_ns + cost.kv_ns * newcomer.total_tokens
        )
    return start_ns + int(stretch * own_ns)
