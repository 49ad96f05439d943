"""Seeded random traffic for a scheduler in virtual time, of all classes and sizes."""

import random

from cloud.scheduler.config import ClassConfig, SchedulerConfig, TenantConfig
from cloud.scheduler.simulated import Arrival
from cloud.scheduler.types import DeadlineCovers, ReplicaSpec, Request
from headway.cost_model import CostModel
from headway.outcome import RequestClass

__all__ = ["random_arrivals", "random_config", "random_replica"]

_MS = 1_000_000
_BLOCK_TOKENS = 16


def random_config(rng: random.Random) -> SchedulerConfig:
    """Settings within what is sensible."""
    return SchedulerConfig(
        interactive=ClassConfig(tpot_target_ns=rng.choice([None, 50 * _MS])),
        standard=ClassConfig(default_budget_ns=2000 * _MS),
        tenants={"b": TenantConfig(weight=2.0)},
        max_running=rng.choice([2, 4, 8, 32]),
        max_step_ns=rng.choice([30 * _MS, 100 * _MS]),
    )


def random_replica(rng: random.Random, replica_id: str, *, swap_blocks: int = 0) -> ReplicaSpec:
    """A replica with a few requests' worth of KV and a cost like a real one's."""
    cost = CostModel(
        t0_ns=rng.choice([2.0, 5.0, 10.0]) * _MS,
        prefill_ns=rng.choice([0.01, 0.05, 0.1]) * _MS,
        pair_ns=rng.choice([0.0, 5.0]),
        decode_ns=rng.choice([0.05, 0.2]) * _MS,
        kv_ns=rng.choice([0.0, 20.0]),
    )
    return ReplicaSpec(
        replica_id,
        rng.choice([30, 60, 400]),
        _BLOCK_TOKENS,
        4096,
        cost,
        num_swap_blocks=swap_blocks,
        swap_block_ns=0.01 * _MS,
    )


def random_arrivals(
    rng: random.Random,
    count: int,
    span_ns: int,
    *,
    prefix: str = "q",
    classes: tuple[RequestClass, ...] = tuple(RequestClass),
    are_lengths_known: bool = False,
) -> list[Arrival]:
    """Requests spread over a span, most with deadlines that can just be kept.

    Args:
        rng: where chance comes from.
        count: how many.
        span_ns: over what time.
        prefix: of their ids.
        classes: to choose from.
        are_lengths_known: whether each gives as many tokens as it may.
    """
    arrivals = []
    for number in range(count):
        request_class = rng.choice(classes)
        at_ns = rng.randrange(span_ns)
        most = rng.choice([1, 4, 8, 20, 40])
        request_id, tenant = f"{prefix}{number}", rng.choice("abc")
        prompt = rng.choice([5, 30, 60, 150, 300])
        family = rng.choice(["", "", "x"])
        deadline_ns = None
        if request_class.is_promised:
            deadline_ns = at_ns + rng.choice([40, 80, 150, 300, 600, 1500]) * _MS
        request = Request(
            request_id,
            tenant,
            request_class,
            prompt,
            most,
            deadline_ns,
            rng.choice(list(DeadlineCovers)),
            prefix_hashes=tuple(
                f"{tenant}/{family or request_id}/{place}".encode()
                for place in range(prompt // _BLOCK_TOKENS)
            ),
        )
        length = rng.choice([None, rng.randrange(1, most + 1)])
        arrivals.append(Arrival(at_ns, request, None if are_lengths_known else length))
    return sorted(arrivals, key=lambda one: one.at_ns)
