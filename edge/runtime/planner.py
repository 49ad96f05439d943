"""How large a chunk of the scene may be, so that control is never late.

Pure: standard library and the cost model alone.

The device runs one thing at a time and is never interrupted. So whoever is released
waits at most for what runs: one chunk. That is what the bounds are made of:

    periodic    a chunk is begun only where margin × its predicted time is over before
                the next release, so a tick waits for no chunk at all
    sporadic    a query comes at any time, and waits for one chunk at most:
                bound = longest permitted chunk × margin + control's worst case

(Non-preemptive blocking of one lower-priority job, as in George, Rivierre and Spuri
1996, "Preemptive and non-preemptive real-time uniprocessor scheduling", section 3.)
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from headway.cost_model import CostModel, StepShape
from headway.errors import HeadwayError

__all__ = ["Chunk", "ChunkPlanner", "InfeasibleBudgetError", "ReactionConfig"]

# Chunks by which the margin follows a device that became slower.
_NUM_RATIOS = 256


class InfeasibleBudgetError(HeadwayError):
    """No chunk fits into the time that control leaves.

    Attributes:
        feasible_ns: the period or bound that would do.
        feasible_scene_tokens: the longest scene that would do; 0 where none would.
    """

    def __init__(self, message: str, feasible_ns: int, feasible_scene_tokens: int) -> None:
        super().__init__(message)
        self.feasible_ns = feasible_ns
        self.feasible_scene_tokens = feasible_scene_tokens


@dataclass(frozen=True, slots=True)
class ReactionConfig:
    """What control needs, and what the scene model offers.

    Attributes:
        buckets: chunk sizes in tokens, ascending; a shorter rest is padded to one.
        max_scene_tokens: longest scene.
        control_worst_ns: worst case of one control step on the device.
        period_ns: between two control ticks; None: there are none.
        query_bound_ns: within which a query is to be answered; None: none are taken.
            Two queries are at least so long apart.
        guard_ns: kept free before a tick, for the time that waking up takes.

    Raises:
        ValueError: a value is impossible by itself.
    """

    buckets: tuple[int, ...]
    max_scene_tokens: int
    control_worst_ns: int
    period_ns: int | None = None
    query_bound_ns: int | None = None
    guard_ns: int = 0

    def __post_init__(self) -> None:
        """Checks each value."""
        if not self.buckets or list(self.buckets) != sorted(set(self.buckets)):
            raise ValueError(f"buckets must be ascending and not empty, got {self.buckets}")
        if self.buckets[0] < 1 or self.max_scene_tokens < 1 or self.control_worst_ns < 1:
            raise ValueError("buckets, max_scene_tokens and control_worst_ns must be at least 1")
        if self.guard_ns < 0:
            raise ValueError(f"guard_ns must be at least 0, got {self.guard_ns}")
        if self.period_ns is None and self.query_bound_ns is None:
            raise ValueError("control needs a period_ns, a query_bound_ns or both")


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next piece of a scene."""

    start: int  # Tokens of the scene before it.
    num_tokens: int
    bucket: int  # Size that is computed; the rest of it is padding.
    predicted_ns: int  # Margin left out.


class ChunkPlanner:
    """Chooses chunks, and states the bounds that follow.

    Args:
        config: what is needed.
        cost: of a chunk: `t0 + c_p·n + c_a·n·(context + (n+1)/2) + c_kv·context`. Its
            margin is the least that predictions are multiplied with.

    Raises:
        InfeasibleBudgetError: not even the smallest bucket at the largest context fits.
    """

    def __init__(self, config: ReactionConfig, cost: CostModel) -> None:
        self.config = config
        self._cost = cost
        self._ratios: deque[float] = deque(maxlen=_NUM_RATIOS)
        self.margin = cost.margin
        for room_ns, what in self._rooms():
            self._require_fit(room_ns, what)

    @property
    def tick_bound_ns(self) -> int | None:
        """Longest time from a tick's release to its result."""
        if self.config.period_ns is None:
            return None
        return self._num_controls * self.config.control_worst_ns

    @property
    def query_bound_ns(self) -> int | None:
        """Longest time from a query to its result: that of the configuration, or less where
        no bucket is that long.
        """
        room_ns = self._query_room_ns()
        if room_ns is None:
            return None
        longest_ns = self._guarded_ns(self.config.max_scene_tokens, self.config.buckets[-1])
        return min(room_ns, longest_ns) + self._num_controls * self.config.control_worst_ns

    def choose(
        self, start: int, remaining: int, now_ns: int, next_release_ns: int | None
    ) -> Chunk | None:
        """The largest chunk that may begin now; None: not even the smallest one.

        Args:
            start: tokens of the scene that are computed.
            remaining: tokens that are not; at least 1.
            now_ns: this instant.
            next_release_ns: of the next tick; None where there are none.
        """
        room_ns = self._query_room_ns()
        if next_release_ns is not None:
            until_ns = next_release_ns - now_ns - self.config.guard_ns
            room_ns = until_ns if room_ns is None else min(room_ns, until_ns)
        if room_ns is None:
            raise ValueError("nothing bounds a chunk")
        best: int | None = None
        for bucket in self.config.buckets:
            if self._guarded_ns(start, bucket) > room_ns:
                break
            best = bucket
            if bucket >= remaining:
                break  # A larger one would only compute padding.
        if best is None:
            return None
        predicted_ns = self._cost.predict_ns(StepShape.of([(start, best)], []))
        return Chunk(start, min(best, remaining), best, predicted_ns)

    def observe(self, chunk: Chunk, elapsed_ns: int) -> bool:
        """Takes in how long a chunk took; whether the margin held."""
        ratio = elapsed_ns / max(1, chunk.predicted_ns)
        held = ratio <= self.margin
        self._ratios.append(ratio)
        self.margin = max(self._cost.margin, *self._ratios)
        return held

    def refit(self, cost: CostModel) -> None:
        """Another cost model from now on, and nothing that was learned by the old one."""
        self._cost = cost
        self.forget()

    def forget(self) -> None:
        """Begins again with the margin of the calibration."""
        self._ratios.clear()
        self.margin = self._cost.margin

    @property
    def is_feasible(self) -> bool:
        """Whether the smallest chunk fits at the largest context, by the margin of now."""
        smallest_ns = self._guarded_ns(self.config.max_scene_tokens, self.config.buckets[0])
        return all(smallest_ns <= room_ns for room_ns, _ in self._rooms())

    @property
    def _num_controls(self) -> int:
        """Control steps that one release may have to sit through, its own included: where
        there are ticks and queries, one of each.
        """
        return (self.config.period_ns is not None) + (self.config.query_bound_ns is not None)

    def _query_room_ns(self) -> int | None:
        """What a query's bound leaves for a chunk."""
        bound_ns = self.config.query_bound_ns
        if bound_ns is None:
            return None
        return bound_ns - self._num_controls * self.config.control_worst_ns

    def _rooms(self) -> Sequence[tuple[int, str]]:
        """What each kind of control leaves for a chunk, with its name."""
        rooms = []
        config = self.config
        if config.period_ns is not None:
            busy_ns = self._num_controls * config.control_worst_ns + config.guard_ns
            rooms.append((config.period_ns - busy_ns, "period_ns"))
        room_ns = self._query_room_ns()
        if room_ns is not None:
            rooms.append((room_ns, "query_bound_ns"))
        return rooms

    def _guarded_ns(self, context: int, bucket: int) -> int:
        """What a chunk may take at most: margin × predicted."""
        return int(self.margin * self._cost.predict_ns(StepShape.of([(context, bucket)], []))) + 1

    def _require_fit(self, room_ns: int, what: str) -> None:
        config = self.config
        smallest = config.buckets[0]
        needed_ns = self._guarded_ns(config.max_scene_tokens, smallest)
        if needed_ns <= room_ns:
            return
        given_ns = config.period_ns if what == "period_ns" else config.query_bound_ns
        feasible_ns = (given_ns or 0) - room_ns + needed_ns
        tokens = self._longest_scene(room_ns)
        other = f", or a scene of at most {tokens:,} tokens" if tokens else ""
        raise InfeasibleBudgetError(
            f"{what}: {(given_ns or 0) / 1e6:.3f} ms leave {max(0, room_ns) / 1e6:.3f} ms for a "
            f"chunk, and the smallest one ({smallest} tokens after {config.max_scene_tokens:,}) "
            f"may take {needed_ns / 1e6:.3f} ms; {feasible_ns / 1e6:.3f} ms would do{other}",
            feasible_ns,
            tokens,
        )

    def _longest_scene(self, room_ns: int) -> int:
        """Most tokens of a scene after which the smallest bucket still fits; 0: none."""
        low, high = 0, self.config.max_scene_tokens
        while low < high:
            middle = (low + high + 1) // 2
            if self._guarded_ns(middle, self.config.buckets[0]) <= room_ns:
                low = middle
            else:
                high = middle - 1
        return low
