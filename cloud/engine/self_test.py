"""A loaded model is tried before anybody relies on it."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cloud.engine.api import EngineRequest
from cloud.engine.errors import CheckpointError, EngineError
from cloud.engine.torch_executor import TorchExecutor
from cloud.scheduler.types import ScheduledItem, StepPlan

__all__ = ["REFERENCE_FILE", "check_reference", "self_test", "write_reference"]

REFERENCE_FILE = "headway-reference.npz"
_REFERENCE_TOKENS = 8


def self_test(executor: TorchExecutor) -> None:
    """Computes one prompt whole and in two chunks.

    Raises:
        EngineError: logits are not finite, or the two ways disagree by more
            than rounding.
    """
    description = executor.describe()
    prompt = _prompt(executor, min(2 * description.block_tokens, description.max_context_tokens))
    expected = _logits(executor, prompt, len(prompt))
    if not bool(expected.isfinite().all()):
        raise EngineError(
            f"self-test: the model {description.model} gives logits that are not finite; "
            "its weights are damaged, or too large for this dtype"
        )
    found = _logits(executor, prompt, len(prompt) // 2)
    _compare(executor, expected, found, "a prompt in chunks differs from the whole one")


def write_reference(executor: TorchExecutor, folder: Path) -> None:
    """Keeps what the model says now beside it, for `check_reference` at every later start.

    Args:
        executor: the model of `folder`, with room for eight tokens.
        folder: gets `REFERENCE_FILE`: tokens int64 [8], logits float32 [vocabulary].
    """
    prompt = _prompt(executor, min(_REFERENCE_TOKENS, executor.describe().max_context_tokens))
    logits = _logits(executor, prompt, len(prompt))
    np.savez(folder / REFERENCE_FILE, tokens=np.array(prompt), logits=logits.numpy())


def check_reference(executor: TorchExecutor, folder: Path) -> None:
    """Compares the model with what it said when it was pulled. Passes one that has no
    reference, or whose reference is longer than the executor's context.

    Raises:
        CheckpointError: the reference is damaged.
        EngineError: the model says something else by more than rounding.
    """
    path = folder / REFERENCE_FILE
    if not path.exists():
        return
    try:
        # Opened here, as what is damaged is not closed by numpy.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            prompt = tuple(int(token) for token in stored["tokens"])
            expected = torch.from_numpy(stored["logits"].astype(np.float32))
    except Exception as error:  # zipfile, numpy and the keys each have their own.
        raise CheckpointError(path, f"is damaged ({error}); pull the model again") from error
    if len(prompt) > executor.describe().max_context_tokens:
        return
    found = _logits(executor, prompt, len(prompt))
    if found.shape != expected.shape:
        raise CheckpointError(
            path, f"is of a model with {len(expected)} tokens, this one has {len(found)}"
        )
    _compare(executor, expected, found, f"the model differs from its reference in {path.name}")


def _prompt(executor: TorchExecutor, num: int) -> tuple[int, ...]:
    vocabulary = executor.describe().vocabulary_tokens
    return tuple(7 * i % vocabulary for i in range(num))


def _logits(executor: TorchExecutor, prompt: tuple[int, ...], cut: int) -> Tensor:
    """Float32 [vocabulary] after the prompt, computed in chunks up to and from `cut`."""
    num, block_tokens = len(prompt), executor.describe().block_tokens
    blocks = tuple(range(-(-num // block_tokens)))
    opened = [EngineRequest("self test", prompt)]
    if cut < num:
        head = ScheduledItem("self test", 0, cut, True, False, blocks, True)
        executor.step_logits(StepPlan("self test", 0, (head,)), opened)
        rest, opened = ScheduledItem("self test", cut, num - cut, True, True), []
    else:
        rest = ScheduledItem("self test", 0, num, True, True, blocks, True)
    logits = executor.step_logits(StepPlan("self test", 0, (rest,)), opened)[0]
    executor.step_logits(StepPlan("self test", 0, (), closed=("self test",)), ())
    return logits.cpu()


def _compare(executor: TorchExecutor, expected: Tensor, found: Tensor, what: str) -> None:
    error = float((found - expected).abs().max())
    # bfloat16 keeps 8 bits, float32 24; layers add up their rounding.
    tolerance = float(expected.abs().max()) * (0.1 if executor.is_low_precision else 1e-3)
    if not error <= tolerance:
        raise EngineError(
            f"self-test: {what} by {error:.3g} (at most {tolerance:.3g} is rounding); "
            "this build of torch is not usable here"
        )
