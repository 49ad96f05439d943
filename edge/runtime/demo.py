"""A scene beside control at 50 Hz, read in several ways: for the demonstration and the benchmark.

Needs torch.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from edge.runtime.backend import Backend
from edge.runtime.calibration import Calibration
from edge.runtime.device import ControlResult, Device, SceneEnd
from edge.runtime.planner import Chunk, ChunkPlanner, ReactionConfig
from edge.runtime.schedule import DeviceSchedule, Wait
from edge.runtime.shapes import ControlShape, SceneShape
from headway.clock import MonotonicClock
from headway.cost_model import CostModel, StepShape

__all__ = [
    "BUCKETS",
    "CONTROL",
    "FIXED_TOKENS",
    "PERIOD_NS",
    "SCENE",
    "SceneRun",
    "Span",
    "UnboundedPlanner",
    "planners",
    "run_scene",
]

# So small that one slow core can read a scene in chunks of milliseconds; a device with an
# accelerator carries a model that is larger by as much as it is quicker.
SCENE = SceneShape(
    vocabulary=1024, width=128, layers=2, heads=2, kv_heads=1, hidden=352, max_tokens=4096
)
CONTROL = ControlShape(inputs=16, hidden=256, layers=3, outputs=8)
BUCKETS = (16, 32, 64, 96, 128, 192, 256, 384, 512)
PERIOD_NS = 20_000_000
FIXED_TOKENS = 512
_GUARD_NS = 500_000
# Ticks go on for so long after the scene was read.
_AFTER_NS = 200_000_000


class UnboundedPlanner(ChunkPlanner):
    """Chunks of one size, whatever control needs: what the others are compared with."""

    def __init__(self, config: ReactionConfig, cost: CostModel, size: int) -> None:
        super().__init__(config, cost)
        self._size = size

    def choose(
        self, start: int, remaining: int, now_ns: int, next_release_ns: int | None
    ) -> Chunk | None:
        """The next piece of that size."""
        predicted_ns = self._cost.predict_ns(StepShape.of([(start, self._size)], []))
        return Chunk(start, min(self._size, remaining), self._size, predicted_ns)

    def observe(self, chunk: Chunk, elapsed_ns: int) -> bool:
        """Learns nothing: it goes by no prediction."""
        return True


@dataclass(frozen=True, slots=True)
class Span:
    """What the device did in a span of time."""

    is_control: bool
    start_ns: int  # Since the scene was submitted.
    end_ns: int
    num_tokens: int  # Of a chunk.


@dataclass(frozen=True, slots=True)
class SceneRun:
    """One scene, and control beside it."""

    prefill_ns: int
    reactions_ns: tuple[int, ...]  # Of every tick that was served.
    num_skipped: int  # Ticks that were given up, since the next one was due.
    num_chunks: int
    num_overruns: int
    spans: tuple[Span, ...]

    @property
    def num_missed(self) -> int:
        """Ticks whose result came after the next one, or never."""
        return self.num_skipped + sum(one > PERIOD_NS for one in self.reactions_ns)

    @property
    def longest_silence_ns(self) -> int:
        """From one of control's answers to the next, at most: a period, if all is well."""
        ends = [one.end_ns for one in self.spans if one.is_control]
        return max((after - before for before, after in pairwise(ends)), default=0)

    @property
    def num_ticks(self) -> int:
        """All of them."""
        return self.num_skipped + len(self.reactions_ns)


def planners(calibration: Calibration) -> dict[str, ChunkPlanner]:
    """A fresh planner for each way to read a scene, by its name.

    Raises:
        InfeasibleBudgetError: this device is too slow for the period.
    """
    config = ReactionConfig(
        buckets=BUCKETS,
        max_scene_tokens=SCENE.max_tokens,
        control_worst_ns=calibration.control_worst_ns,
        period_ns=PERIOD_NS,
        guard_ns=_GUARD_NS,
    )
    cost = calibration.cost
    return {
        "in one go": UnboundedPlanner(config, cost, SCENE.max_tokens),
        f"{FIXED_TOKENS} at a time": UnboundedPlanner(config, cost, FIXED_TOKENS),
        "bounded chunks": ChunkPlanner(config, cost),
    }


def run_scene(backend: Backend, planner: ChunkPlanner) -> SceneRun:
    """Reads a scene once, in this thread, and goes on ticking a little.

    Raises:
        BackendError: never; what the device fails is computed again.
    """
    clock = MonotonicClock()
    ends: list[SceneEnd] = []
    reactions: list[int] = []
    recording = _Recording(backend, clock)

    def note(result: ControlResult) -> None:
        reactions.append(result.ended_ns - result.release_ns)

    schedule = DeviceSchedule(planner, clock.now_ns())
    device = Device(
        schedule,
        recording,
        clock,
        observe=lambda: (0.1,) * CONTROL.inputs,
        on_control=note,
        on_scene=ends.append,
    )
    began_ns = recording.origin_ns = clock.now_ns()
    device.submit([number % SCENE.vocabulary for number in range(SCENE.max_tokens)])
    until_ns: int | None = None
    while until_ns is None or clock.now_ns() < until_ns:
        wait = device.turn()
        if isinstance(wait, Wait) and wait.until_ns is not None:
            time.sleep(max(0, wait.until_ns - clock.now_ns()) / 1e9)
        if ends and until_ns is None:
            until_ns = clock.now_ns() + _AFTER_NS
    return SceneRun(
        ends[0].at_ns - began_ns,
        tuple(reactions),
        schedule.ticks.report().skipped,
        len(device.measured),
        schedule.overruns,
        tuple(recording.spans),
    )


class _Recording:
    """A backend that notes when it did what."""

    def __init__(self, backend: Backend, clock: MonotonicClock) -> None:
        self.name = backend.name
        self.model_digest = backend.model_digest
        self.origin_ns = 0
        self.spans: list[Span] = []
        self._backend = backend
        self._clock = clock

    def prefill(self, tokens: Sequence[int], start: int, bucket: int, *, is_last: bool) -> Any:
        """As the backend does."""
        began_ns = self._clock.now_ns()
        found = self._backend.prefill(tokens, start, bucket, is_last=is_last)
        self._note(began_ns, len(tokens))
        return found

    def control(self, observation: Sequence[float], scene: Any) -> tuple[float, ...]:
        """As the backend does."""
        began_ns = self._clock.now_ns()
        found = self._backend.control(observation, scene)
        self._note(began_ns, 0)
        return found

    def close(self) -> None:
        """The backend is its owner's."""

    def _note(self, began_ns: int, num_tokens: int) -> None:
        end_ns = self._clock.now_ns() - self.origin_ns
        self.spans.append(Span(not num_tokens, began_ns - self.origin_ns, end_ns, num_tokens))
