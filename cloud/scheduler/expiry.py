"""When a promise cannot be kept any more, whatever the scheduler does."""

from __future__ import annotations

import math

from cloud.scheduler.config import SchedulerConfig
from cloud.scheduler.request_state import NEVER_NS, LiveRequest, Stage

__all__ = ["hopeless_from_ns"]


def hopeless_from_ns(live: LiveRequest, config: SchedulerConfig) -> int:
    """First instant from which the request misses its deadline even if nothing else ran.

    For one that waits this is just behind its latest start. Where the engine may
    end the output early, only the next token is counted as certain.
    """
    if live.deadline_ns == NEVER_NS:
        return NEVER_NS
    replica = live.replica
    if replica is None:
        return live.deadline_ns + 1
    prefill = live.prefill_left
    steps = live.promised_output_left if live.request.has_fixed_output else 1
    cost = replica.cost
    is_running = live.stage is Stage.RUNNING
    if is_running and replica.flight is not None:
        # What the running step gives counts as given.
        steps -= 1
        needed_ns = steps * (cost.t0_ns + cost.decode_ns)
    else:
        context = live.computed if is_running else replica.known_tokens(live, config)
        prefill = live.total_tokens - context
        own_ns = cost.chunk_ns(context, prefill)
        # A prefill of several steps pays for each; one token is one step.
        room_ns = max(1.0, config.max_step_ns - cost.t0_ns)
        chunks = max(1, math.ceil(own_ns / room_ns))
        if is_running and prefill == 1:
            own_ns = cost.decode_ns
        needed_ns = own_ns + chunks * cost.t0_ns + (steps - 1) * (cost.t0_ns + cost.decode_ns)
    trust = min(1.0, replica.margin.value)
    return live.deadline_ns - int(needed_ns * trust) + 1
