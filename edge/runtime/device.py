"""Carries out what the schedule decides, one thing at a time. No thread of its own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from edge.runtime.backend import Backend, BackendError
from edge.runtime.schedule import ChunkWork, ControlKind, ControlWork, DeviceSchedule, Wait
from headway.clock import Clock
from headway.cost_model import MeasuredStep, StepShape

__all__ = ["ControlResult", "Device", "SceneEnd"]

# Steps that a refit is made of, beside the calibration's.
_NUM_MEASURED = 1024


@dataclass(frozen=True, slots=True)
class ControlResult:
    """What came of one control step."""

    kind: ControlKind
    number: int
    values: tuple[float, ...] | None  # None where the device failed.
    problem: str  # Why there are none; else empty.
    scene_epoch: int  # Of the scene that it knew; 0: none.
    release_ns: int
    ended_ns: int
    kept_bound: bool


@dataclass(frozen=True, slots=True)
class SceneEnd:
    """What became of a scene."""

    epoch: int
    is_complete: bool  # Else the device failed it, or a newer one took its place.
    problem: str
    at_ns: int


class Device:
    """Drives a backend by a schedule. All calls are from one thread.

    Args:
        schedule: decides.
        backend: computes.
        clock: of both.
        observe: what control is to know at a tick, float32 values.
        on_control: told each control step's result, at once.
        on_scene: told each scene's end.

    Attributes:
        measured: the latest chunks, for a refit.
    """

    def __init__(
        self,
        schedule: DeviceSchedule,
        backend: Backend,
        clock: Clock,
        *,
        observe: Callable[[], Sequence[float]] = tuple,
        on_control: Callable[[ControlResult], None] = lambda result: None,
        on_scene: Callable[[SceneEnd], None] = lambda end: None,
    ) -> None:
        self.schedule = schedule
        self.backend = backend
        self.measured: list[MeasuredStep] = []
        self._clock = clock
        self._observe = observe
        self._on_control = on_control
        self._on_scene = on_scene
        self._tokens: Sequence[int] = ()
        self._reading = 0  # Epoch of those tokens; 0: none are left to read.
        self._questions: dict[int, Sequence[float]] = {}
        self._scene: Any = None
        self._scene_epoch = 0

    def submit(self, tokens: Sequence[int]) -> int:
        """A new scene; its epoch.

        Raises:
            ValueError: it is empty, or too long.
        """
        epoch = self.schedule.scene(len(tokens))
        self._give_up("a newer scene took its place")
        self._tokens, self._reading = tokens, epoch
        return epoch

    def cancel(self) -> None:
        """Gives up the scene that is read; the last complete one stays."""
        self.schedule.cancel_scene()
        self._give_up("cancelled")

    def ask(self, observation: Sequence[float], now_ns: int) -> int:
        """A query; its number.

        Raises:
            ValueError: no bound is configured for queries.
        """
        number = self.schedule.query(now_ns)
        self._questions[number] = observation
        return number

    def turn(self) -> Wait | None:
        """Does the next thing; or says until when there is nothing to do."""
        work = self.schedule.next(self._clock.now_ns())
        if isinstance(work, Wait):
            return work
        if isinstance(work, ControlWork):
            self._control(work)
        else:
            self._prefill(work)
        return None

    def _control(self, work: ControlWork) -> None:
        started_ns = self._clock.now_ns()
        values: tuple[float, ...] | None = None
        problem = ""
        try:
            if work.kind is ControlKind.QUERY:
                observation = self._questions.pop(work.number)
            else:
                observation = self._observe()
            values = self.backend.control(observation, self._scene)
        except BackendError as error:
            problem = error.message
        ended_ns = self._clock.now_ns()
        if values is None:
            self.schedule.failed(work, ended_ns)
            kept = False
        else:
            kept = self.schedule.done(work, started_ns, ended_ns)
        self._on_control(
            ControlResult(
                work.kind,
                work.number,
                values,
                problem,
                self._scene_epoch,
                work.release_ns,
                ended_ns,
                kept,
            )
        )

    def _prefill(self, work: ChunkWork) -> None:
        chunk = work.chunk
        end = chunk.start + chunk.num_tokens
        is_last = end == len(self._tokens)
        started_ns = self._clock.now_ns()
        try:
            scene = self.backend.prefill(
                self._tokens[chunk.start : end], chunk.start, chunk.bucket, is_last=is_last
            )
        except BackendError as error:
            if self.schedule.failed(work, self._clock.now_ns()):
                self._give_up(error.message)
            return
        ended_ns = self._clock.now_ns()
        shape = StepShape.of([(chunk.start, chunk.bucket)], [])
        self.measured.append(MeasuredStep(shape, ended_ns - started_ns))
        del self.measured[:-_NUM_MEASURED]
        if self.schedule.done(work, started_ns, ended_ns):
            self._scene, self._scene_epoch = scene, work.epoch
            self._tokens, self._reading = (), 0
            self._on_scene(SceneEnd(work.epoch, True, "", ended_ns))

    def _give_up(self, problem: str) -> None:
        epoch, self._reading = self._reading, 0
        self._tokens = ()
        if epoch:
            self._on_scene(SceneEnd(epoch, False, problem, self._clock.now_ns()))
