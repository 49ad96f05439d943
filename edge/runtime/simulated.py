"""A device without models, in virtual time: steps take what a cost model says."""

from collections.abc import Callable, Sequence

from edge.runtime.backend import BackendError
from headway.clock import VirtualClock
from headway.cost_model import CostModel, StepShape

__all__ = ["SimulatedBackend"]


class SimulatedBackend:
    """Moves its clock by what each step takes; remembers what it was told.

    Args:
        cost: of a chunk, margin left out.
        control_ns: of a control step.
        clock: moved by every step.
        chunk_noise: factor on each chunk's time; asked once for each.
        control_noise: the same of control steps.

    Attributes:
        chunks: (start, tokens, bucket) of every chunk that was computed.
        fails_next: whether the next call fails, having taken its time.
    """

    name = "simulated"
    model_digest = "simulated"

    def __init__(
        self,
        cost: CostModel,
        control_ns: int,
        clock: VirtualClock,
        *,
        chunk_noise: Callable[[], float] = lambda: 1.0,
        control_noise: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self._cost = cost
        self._control_ns = control_ns
        self._clock = clock
        self._chunk_noise = chunk_noise
        self._control_noise = control_noise
        self.chunks: list[tuple[int, tuple[int, ...], int]] = []
        self.fails_next = False

    def prefill(
        self, tokens: Sequence[int], start: int, bucket: int, *, is_last: bool
    ) -> tuple[int, ...] | None:
        """All tokens of the scene, once it is complete."""
        span_ns = self._cost.predict_ns(StepShape.of([(start, bucket)], []))
        self._clock.advance(round(span_ns * self._chunk_noise()))
        self._fail_if_told()
        self.chunks.append((start, tuple(tokens), bucket))
        return tuple(tokens) if is_last else None

    def control(self, observation: Sequence[float], scene: object) -> tuple[float, ...]:
        """What was observed."""
        del scene
        self._clock.advance(round(self._control_ns * self._control_noise()))
        self._fail_if_told()
        return tuple(observation)

    def close(self) -> None:
        """Nothing to give back."""

    def _fail_if_told(self) -> None:
        if self.fails_next:
            self.fails_next = False
            raise BackendError("told to fail")
