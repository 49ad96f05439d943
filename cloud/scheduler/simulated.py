"""An engine without a model, for a driver in virtual time."""

from collections.abc import Callable
from dataclasses import dataclass

from cloud.scheduler.types import Request, StepOutput, StepPlan, StepResult
from headway.cost_model import CostModel, StepShape

__all__ = ["Arrival", "SimulatedSteps"]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request at an instant, with what only the engine knows: its true length."""

    at_ns: int
    request: Request
    output_tokens: int | None = None  # None: as long as it may be.


class SimulatedSteps:
    """An engine without a model: steps take what `cost_model` says times `noise`.

    Args:
        cost_model: how long steps really take.
        noise: factor on a step's time, asked once a step with its start and shape.
    """

    def __init__(
        self, cost_model: CostModel, noise: Callable[[int, StepShape], float] | None = None
    ) -> None:
        self._cost_model = cost_model
        self._noise = noise
        self._lengths: dict[str, int] = {}
        self._given: dict[str, int] = {}

    def open(self, request_id: str, output_tokens: int) -> None:
        """Says how many tokens a request gives before it stops by itself."""
        self._lengths[request_id] = output_tokens

    def execute(self, plan: StepPlan, now_ns: int) -> StepResult:
        """One step: token i of a request is i."""
        outputs = []
        for item in plan.items:
            if item.samples:
                index = self._given.get(item.request_id, 0)
                self._given[item.request_id] = index + 1
                is_stop = index + 1 >= self._lengths.get(item.request_id, 1 << 62)
                outputs.append(StepOutput(item.request_id, index, is_stop))
        shape = StepShape.of(
            [(item.context_tokens, item.num_tokens) for item in plan.items if item.is_prefill],
            [item.context_tokens for item in plan.items if not item.is_prefill],
        )
        factor = self._noise(now_ns, shape) if self._noise is not None else 1.0
        elapsed_ns = max(1, round(self._cost_model.predict_ns(shape) * factor))
        return StepResult(plan.step_id, tuple(outputs), elapsed_ns)
