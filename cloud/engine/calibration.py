"""Measures real steps of an executor, for the fit of the cost model."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from cloud.engine.api import EngineDescription, EngineRequest, Executor
from cloud.scheduler.types import ScheduledItem, StepPlan
from headway.cost_model import MeasuredStep, StepShape

__all__ = ["measure_steps", "measure_swap_ns"]

_MAX_ROUNDS = 5
# Blocks that are copied at once, and how often, to measure what one takes.
_SWAP_BLOCKS, _SWAP_REPEATS = 16, 9


@dataclass(frozen=True, slots=True)
class _Probe:
    """One step to measure: (context, chunk) of each prefill, context of each decode."""

    chunks: tuple[tuple[int, int], ...] = ()
    decodes: tuple[int, ...] = ()

    @property
    def shape(self) -> StepShape:
        return StepShape.of(self.chunks, self.decodes)


def measure_steps(executor: Executor, *, budget_s: float) -> tuple[MeasuredStep, ...]:
    """The shortest time of each of a grid of steps: chunks of several sizes behind
    contexts of several lengths, decodes of several batch sizes, and mixes.

    Each step runs once unmeasured (memory is touched, kernels are chosen), then
    once in each of at most five rounds, while the budget lasts. The KV that the
    probes read is whatever lies there: its values do not change the time.
    The shortest, because what else runs on the machine only ever adds (see
    Python's timeit); how much it adds is for the margin that is kept while
    serving.

    Args:
        executor: fresh, without requests; it is left without any.
        budget_s: most time to spend, after the first measured round.
    """
    description = executor.describe()
    probes = [p for p in _grid(description) if _fits(p, description)]
    times: dict[_Probe, list[int]] = {probe: [] for probe in probes}
    deadline = time.monotonic() + budget_s
    for probe in probes:
        _run(executor, probe)
    for round_index in range(_MAX_ROUNDS):
        for probe in probes:
            if round_index and time.monotonic() > deadline:
                break
            times[probe].append(_run(executor, probe))
    return tuple(MeasuredStep(probe.shape, min(taken)) for probe, taken in times.items())


def _grid(description: EngineDescription) -> Iterator[_Probe]:
    longest = description.max_context_tokens - 1
    contexts = tuple(sorted({0, *(min(longest, context) for context in (16, 128, 512, 2048))}))
    for context in contexts:
        for chunk in (1, 16, 64, 256, 512):
            yield _Probe(chunks=((context, chunk),))
    for context in contexts[1:]:
        for num in (1, 2, 4, 8, 16, 32, 64):
            yield _Probe(decodes=(context,) * num)
    for num in (1, 4, 16):
        for chunk in (32, 128, 256):
            yield _Probe(chunks=((0, chunk),), decodes=(contexts[1],) * num)
            yield _Probe(
                chunks=((contexts[-1], chunk), (0, chunk // 2)), decodes=contexts[1:2] * num
            )


def _fits(probe: _Probe, description: EngineDescription) -> bool:
    sizes = _sizes(probe)
    blocks = sum(-(-(context + num) // description.block_tokens) for context, num in sizes)
    longest = max(context + num for context, num in sizes)
    return blocks <= description.num_blocks and longest <= description.max_context_tokens


def _sizes(probe: _Probe) -> list[tuple[int, int]]:
    return [*probe.chunks, *((context, 1) for context in probe.decodes)]


def _run(executor: Executor, probe: _Probe) -> int:
    """Nanoseconds of one step of the probe's shape."""
    block_tokens = executor.describe().block_tokens
    opened, items, used = [], [], 0
    for index, (context, num) in enumerate(_sizes(probe)):
        name = f"probe-{index}"
        num_blocks = -(-(context + num) // block_tokens)
        blocks = tuple(range(used, used + num_blocks))
        used += num_blocks
        is_prefill = index < len(probe.chunks)
        opened.append(EngineRequest(name, (0,) * (context + num)))
        items.append(ScheduledItem(name, context, num, is_prefill, True, blocks, True))
    # Opening is a once-only cost of a request, and none of the step's shape.
    plan = StepPlan("calibration", 1, tuple(items))
    executor.execute(StepPlan("calibration", 0, ()), opened)
    elapsed_ns = executor.execute(plan, ()).elapsed_ns
    closed = tuple(request.request_id for request in opened)
    executor.execute(StepPlan("calibration", 2, (), closed), ())
    return elapsed_ns


def measure_swap_ns(executor: Executor) -> float:
    """Time to copy one block of KV to host memory or back, the median of several; 0 where
    there is no host memory. Overwrites KV: before the first request.
    """
    description = executor.describe()
    num = min(_SWAP_BLOCKS, description.num_swap_blocks, description.num_blocks)
    if not num:
        return 0.0
    pairs = tuple((block, block) for block in range(num))
    times = []
    for step_id in range(_SWAP_REPEATS):
        plan = StepPlan("calibration", step_id, (), swap_out=pairs, swap_in=pairs)
        times.append(executor.execute(plan, ()).elapsed_ns / (2 * num))
    return median(times)
