"""What the device does next: pure. The thread on a robot and virtual time both follow it.

One thing at a time: control first, by its release; then a chunk of the newest scene, as
large as the planner lets it be; else nothing, until a release.
"""

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from edge.runtime.monitor import ReactionMonitor
from edge.runtime.planner import Chunk, ChunkPlanner

__all__ = ["ChunkWork", "ControlKind", "ControlWork", "DeviceSchedule", "Wait", "Work"]

# A chunk that fails so often in a row is given up, and its scene with it.
_MAX_FAILURES = 3
# A device that became too slow for any chunk is tried again after so long.
_PAUSE_NS = 1_000_000_000


class ControlKind(Enum):
    """Why control runs."""

    TICK = "tick"
    QUERY = "query"


@dataclass(frozen=True, slots=True)
class ControlWork:
    """One control step."""

    kind: ControlKind
    release_ns: int
    number: int  # Of the query, or of the tick.


@dataclass(frozen=True, slots=True)
class ChunkWork:
    """One chunk of the scene of that epoch."""

    epoch: int
    chunk: Chunk


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing may be begun before that instant; None: before something comes."""

    until_ns: int | None


Work: TypeAlias = ControlWork | ChunkWork | Wait


@dataclass(slots=True)
class _Scene:
    epoch: int
    num_tokens: int
    done: int = 0
    failures: int = 0


class DeviceSchedule:
    """Decides; strictly next -> (run it) -> done or failed -> next.

    Args:
        planner: bounds chunks.
        now_ns: the first tick's release.

    Attributes:
        ticks: reactions of ticks.
        queries: reactions of queries.
        overruns: chunks that took longer than margin × predicted.
        is_paused: no chunk is begun for a while: the device is too slow for the bounds.
    """

    def __init__(self, planner: ChunkPlanner, now_ns: int) -> None:
        self.planner = planner
        self.ticks = ReactionMonitor(planner.tick_bound_ns)
        self.queries = ReactionMonitor(planner.query_bound_ns)
        self.overruns = 0
        self._period_ns = planner.config.period_ns
        self._next_tick_ns = now_ns
        self._num_ticks = self._num_queries = 0
        self._queries: deque[ControlWork] = deque()
        self._scene: _Scene | None = None
        self._epoch = 0
        self._running: Work | None = None
        self._resume_ns: int | None = None

    @property
    def epoch(self) -> int:
        """Of the newest scene; results of any other are of the past."""
        return self._epoch

    @property
    def progress(self) -> tuple[int, int]:
        """(tokens computed, tokens) of the scene that is read; (0, 0) of none."""
        scene = self._scene
        return (scene.done, scene.num_tokens) if scene is not None else (0, 0)

    @property
    def is_paused(self) -> bool:
        """Whether no chunk is begun at present."""
        return self._resume_ns is not None

    def scene(self, num_tokens: int) -> int:
        """A new scene takes the old one's place, at the next chunk's boundary.

        Returns:
            Its epoch.

        Raises:
            ValueError: it is empty, or longer than was configured.
        """
        most = self.planner.config.max_scene_tokens
        if not 1 <= num_tokens <= most:
            raise ValueError(f"a scene must have 1 to {most} tokens, got {num_tokens}")
        self._epoch += 1
        self._scene = _Scene(self._epoch, num_tokens)
        return self._epoch

    def cancel_scene(self) -> None:
        """Gives the scene up, at the next chunk's boundary."""
        self._epoch += 1
        self._scene = None

    def query(self, now_ns: int) -> int:
        """Somebody needs control's answer now.

        Returns:
            Its number.

        Raises:
            ValueError: no bound is configured for queries.
        """
        if self.planner.config.query_bound_ns is None:
            raise ValueError("queries need a query_bound_ns in the configuration")
        self._num_queries += 1
        self._queries.append(ControlWork(ControlKind.QUERY, now_ns, self._num_queries))
        return self._num_queries

    def next(self, now_ns: int) -> Work:
        """What to do now.

        Raises:
            RuntimeError: what was begun before has not ended.
        """
        if self._running is not None:
            raise RuntimeError("one thing at a time: the last one has not ended")
        work = self._control(now_ns) or self._chunk(now_ns)
        if work is None:
            return Wait(self._wake_ns())
        self._running = work
        return work

    def done(self, work: Work, started_ns: int, ended_ns: int) -> bool:
        """`work` has ended well.

        Returns:
            For a chunk, whether its scene is complete now; for control, whether its
            bound was kept.
        """
        self._end(work)
        if isinstance(work, ControlWork):
            monitor = self.ticks if work.kind is ControlKind.TICK else self.queries
            return monitor.add(ended_ns - work.release_ns)
        if isinstance(work, ChunkWork):
            self._learn(work.chunk, ended_ns - started_ns, ended_ns)
            return self._advance(work)
        return False

    def failed(self, work: Work, ended_ns: int) -> bool:
        """`work` came to nothing: what it was to compute is not there.

        Returns:
            For a chunk, whether its scene was given up.
        """
        self._end(work)
        if isinstance(work, ControlWork):
            monitor = self.ticks if work.kind is ControlKind.TICK else self.queries
            monitor.add(ended_ns - work.release_ns)
            return False
        scene = self._scene
        if not isinstance(work, ChunkWork) or scene is None or scene.epoch != work.epoch:
            return False
        scene.failures += 1
        if scene.failures < _MAX_FAILURES:
            return False
        self._scene = None
        return True

    def _control(self, now_ns: int) -> ControlWork | None:
        """The control step that was released first, if any was."""
        tick_ns = self._next_tick_ns if self._period_ns is not None else None
        query = self._queries[0] if self._queries else None
        if query is not None and (tick_ns is None or query.release_ns <= tick_ns):
            return self._queries.popleft()
        if tick_ns is None or tick_ns > now_ns:
            return self._queries.popleft() if query is not None else None
        return self._tick(now_ns)

    def _tick(self, now_ns: int) -> ControlWork:
        period_ns = self._period_ns or 0
        # Ticks whose successor is due are given up: a robot has no use for them.
        late = (now_ns - self._next_tick_ns) // period_ns
        self.ticks.skip(late)
        release_ns = self._next_tick_ns + late * period_ns
        self._num_ticks += 1 + late
        self._next_tick_ns = release_ns + period_ns
        return ControlWork(ControlKind.TICK, release_ns, self._num_ticks)

    def _chunk(self, now_ns: int) -> ChunkWork | None:
        scene = self._scene
        if scene is None:
            return None
        if self._resume_ns is not None:
            if now_ns < self._resume_ns:
                return None
            self._resume_ns = None
            self.planner.forget()
        release_ns = self._next_tick_ns if self._period_ns is not None else None
        remaining = scene.num_tokens - scene.done
        chunk = self.planner.choose(scene.done, remaining, now_ns, release_ns)
        return None if chunk is None else ChunkWork(scene.epoch, chunk)

    def _wake_ns(self) -> int | None:
        instants = [self._resume_ns] if self._scene is not None and self._resume_ns else []
        if self._period_ns is not None:
            instants.append(self._next_tick_ns)
        return min(instants, default=None)

    def _learn(self, chunk: Chunk, elapsed_ns: int, ended_ns: int) -> None:
        if self.planner.observe(chunk, elapsed_ns):
            return
        self.overruns += 1
        if not self.planner.is_feasible:
            # No chunk is safe any more. Control goes on alone, and after a while the
            # device is tried again: it may have been held up by others.
            self._resume_ns = ended_ns + _PAUSE_NS

    def _advance(self, work: ChunkWork) -> bool:
        scene = self._scene
        if scene is None or scene.epoch != work.epoch:
            return False  # A newer scene took its place meanwhile.
        scene.failures = 0
        scene.done += work.chunk.num_tokens
        if scene.done < scene.num_tokens:
            return False
        self._scene = None
        return True

    def _end(self, work: Work) -> None:
        if work != self._running:
            raise RuntimeError("what has ended is not what was begun")
        self._running = None
