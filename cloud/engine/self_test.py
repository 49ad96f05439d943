"""A loaded model is tried before anybody relies on it."""

from torch import Tensor

from cloud.engine.api import EngineRequest
from cloud.engine.errors import EngineError
from cloud.engine.torch_executor import TorchExecutor
from cloud.scheduler.types import ScheduledItem, StepPlan

__all__ = ["self_test"]


def self_test(executor: TorchExecutor) -> None:
    """Computes one prompt whole and in two chunks.

    Raises:
        EngineError: logits are not finite, or the two ways disagree by more
            than rounding.
    """
    description = executor.describe()
    block_tokens = description.block_tokens
    num = min(2 * block_tokens, description.max_context_tokens)
    prompt = tuple(7 * i % description.vocabulary_tokens for i in range(num))
    blocks = tuple(range(-(-num // block_tokens)))
    cut = num // 2
    whole = ScheduledItem("whole", 0, num, True, True, blocks, True)
    head = ScheduledItem("cut", 0, cut, True, False, blocks, True)
    tail = ScheduledItem("cut", cut, num - cut, True, True)

    def logits_of(item: ScheduledItem, *opened: str) -> Tensor:
        requests = [EngineRequest(name, prompt) for name in opened]
        return executor.step_logits(StepPlan("self test", 0, (item,)), requests)

    expected = logits_of(whole, "whole")
    logits_of(head, "cut")
    found = logits_of(tail)
    executor.execute(StepPlan("self test", 0, (), closed=("whole", "cut")), ())
    if not bool(expected.isfinite().all()):
        raise EngineError(
            "self-test: the model gives logits that are not finite; check the weights"
        )
    error = float((found - expected).abs().max())
    # bfloat16 keeps 8 bits, float32 24; layers add up their rounding.
    tolerance = float(expected.abs().max()) * (0.1 if executor.is_low_precision else 1e-3)
    if error > tolerance:
        raise EngineError(
            f"self-test: a prompt in chunks differs from the whole one by {error:.3g} "
            f"(at most {tolerance:.3g} is rounding); this build of torch is not usable here"
        )
