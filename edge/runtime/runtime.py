"""The runtime on a robot: one thread owns the device; everybody else asks it.

gRPC and whatever else may be busy belongs into another process: a thread that holds
Python's lock for 5 ms delays control by as much.
"""

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from edge.runtime.backend import Backend
from edge.runtime.device import ControlResult, Device, SceneEnd
from edge.runtime.monitor import ReactionReport
from edge.runtime.planner import ChunkPlanner, ReactionConfig
from edge.runtime.schedule import ControlKind, DeviceSchedule
from headway.clock import Clock, MonotonicClock, s_from_ns
from headway.cost_model import CostModel, MeasuredStep, fit

__all__ = ["EdgeRuntime", "RuntimeReport"]

_log = logging.getLogger(__name__)
_JOIN_S = 10.0


@dataclass(frozen=True, slots=True)
class RuntimeReport:
    """How the runtime has done so far."""

    ticks: ReactionReport
    queries: ReactionReport
    overruns: int  # Chunks that took longer than margin × predicted.
    margin: float
    is_paused: bool  # The device is too slow for any chunk at present.
    scenes: int  # Complete ones.


class EdgeRuntime:
    """Reads scenes in chunks, and lets control react within a bound beside it.

    Use it with `with`, or `start` and `close` it.

    Args:
        backend: the device; closed by `close`.
        config: what control needs.
        cost: of a chunk; see `edge.runtime.calibration`.
        observe: what control is to know at a tick; called from the device's thread, must
            not wait.
        on_control: told each tick's result; the same.
        clock: steady.

    Raises:
        InfeasibleBudgetError: the device is too slow for what is asked.
    """

    def __init__(
        self,
        backend: Backend,
        config: ReactionConfig,
        cost: CostModel,
        *,
        observe: Callable[[], Sequence[float]] = tuple,
        on_control: Callable[[ControlResult], None] = lambda result: None,
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock if clock is not None else MonotonicClock()
        self._planner = ChunkPlanner(config, cost)
        self._backend = backend
        self._observe = observe
        self._on_tick = on_control
        self._calls: queue.SimpleQueue[Callable[[Device], None]] = queue.SimpleQueue()
        self._came = threading.Event()
        self._is_over = False
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._device: Device | None = None
        self._scenes: dict[int, Future[SceneEnd]] = {}
        self._queries: dict[int, Future[ControlResult]] = {}
        self._num_scenes = 0

    @property
    def tick_bound_ns(self) -> int | None:
        """Longest time from a tick's release to its result."""
        return self._planner.tick_bound_ns

    @property
    def query_bound_ns(self) -> int | None:
        """Longest time from a query to its result."""
        return self._planner.query_bound_ns

    def start(self) -> None:
        """Begins to tick. May be called once."""
        self._device = Device(
            DeviceSchedule(self._planner, self._clock.now_ns()),
            self._backend,
            self._clock,
            observe=self._observe,
            on_control=self._on_control,
            on_scene=self._on_scene,
        )
        self._thread = threading.Thread(target=self._run, name="headway-device", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread after what it is doing, and gives the device back.

        May be called twice.

        Raises:
            Exception: what ended the thread, if anything did.
        """
        self._is_over = True
        self._came.set()
        if self._thread is not None:
            self._thread.join(_JOIN_S)
            self._thread = None
        left: list[Future[Any]] = [*self._scenes.values(), *self._queries.values()]
        for future in left:
            future.cancel()
        self._backend.close()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def submit(self, tokens: Sequence[int]) -> "Future[SceneEnd]":
        """A new scene, which takes the place of one that is still read.

        Raises (from the future):
            ValueError: it is empty, or too long.
        """
        future: Future[SceneEnd] = Future()

        def call(device: Device) -> None:
            self._scenes[device.submit(tokens)] = future

        self._post(call, future)
        return future

    def query(self, observation: Sequence[float]) -> "Future[ControlResult]":
        """Control's answer to what was observed, within `query_bound_ns` of this call.

        Raises (from the future):
            ValueError: no bound is configured for queries.
        """
        future: Future[ControlResult] = Future()
        released_ns = self._clock.now_ns()

        def call(device: Device) -> None:
            self._queries[device.ask(observation, released_ns)] = future

        self._post(call, future)
        return future

    def refit(self, calibration: Sequence[MeasuredStep] = ()) -> CostModel:
        """Fits the cost model anew to what was measured of late, and goes by it.

        On the caller's thread: fitting takes longer than control has.

        Args:
            calibration: points to keep beside those: of late there may have been only
                short scenes.

        Raises:
            ValueError: too little was measured.
        """
        found: Future[list[MeasuredStep]] = Future()
        self._post(lambda device: found.set_result(list(device.measured)), found)
        cost = fit([*calibration, *found.result(_JOIN_S)]).model
        done: Future[None] = Future()

        def call(device: Device) -> None:
            device.schedule.planner.refit(cost)
            done.set_result(None)

        self._post(call, done)
        done.result(_JOIN_S)
        return cost

    def report(self) -> RuntimeReport:
        """How it has done so far."""
        device = self._device
        if device is None:
            raise RuntimeError("the runtime has not been started")
        schedule = device.schedule
        return RuntimeReport(
            schedule.ticks.report(),
            schedule.queries.report(),
            schedule.overruns,
            schedule.planner.margin,
            schedule.is_paused,
            self._num_scenes,
        )

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _post(
        self,
        call: Callable[[Device], None],
        future: "Future[Any]",
    ) -> None:
        """Has the device's thread do it; what it raises becomes the future's."""

        def guarded(device: Device) -> None:
            try:
                call(device)
            except ValueError as error:
                future.set_exception(error)

        self._calls.put(guarded)
        self._came.set()

    # --- the device's thread ---

    def _run(self) -> None:
        device = self._device
        if device is None:
            return
        try:
            while not self._is_over:
                self._came.clear()
                while not self._calls.empty():
                    self._calls.get()(device)
                wait = device.turn()
                if wait is None:
                    continue
                left_s = None
                if wait.until_ns is not None:
                    left_s = max(0.0, s_from_ns(wait.until_ns - self._clock.now_ns()))
                self._came.wait(left_s)
        except BaseException as error:
            self._failure = error
            _log.exception("the device's thread failed")

    def _on_control(self, result: ControlResult) -> None:
        if not result.kept_bound:
            _log.warning(
                "a %s took %.1f ms to react: %s",
                result.kind.value,
                (result.ended_ns - result.release_ns) / 1e6,
                result.problem or "the device was held up",
            )
        if result.kind is ControlKind.TICK:
            self._on_tick(result)
            return
        future = self._queries.pop(result.number)
        if not future.cancelled():
            future.set_result(result)

    def _on_scene(self, end: SceneEnd) -> None:
        self._num_scenes += end.is_complete
        future = self._scenes.pop(end.epoch, None)
        if future is not None and not future.cancelled():
            future.set_result(end)
