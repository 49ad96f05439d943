"""Whether a model folder runs and makes sense: a few words, chosen greedily."""

from pathlib import Path

import torch

from cloud.engine.api import EngineRequest, Executor
from cloud.engine.checkpoint import check_weights
from cloud.engine.errors import EngineError
from cloud.engine.manifest import PromptTest
from cloud.engine.self_test import check_reference, self_test, write_reference
from cloud.engine.tokenizer import load_tokenizer
from cloud.engine.torch_executor import TorchExecutor
from cloud.scheduler.types import ScheduledItem, StepPlan

__all__ = ["continue_greedily", "run_prompt_test"]

# Parameters from which on float32 is not worth its memory for a test.
_LARGE = 1_000_000_000


def run_prompt_test(folder: Path, test: PromptTest, *, keeps_reference: bool = False) -> str:
    """Loads the model in `folder` on the CPU, tries it, and continues the prompt.

    Args:
        folder: a checkpoint.
        test: prompt and what is expected of it.
        keeps_reference: write down what the model says, if it passes; see `write_reference`.

    Returns:
        The continuation.

    Raises:
        EngineError: the model does not load, computes nonsense, or says
            something else than is expected.
    """
    tokenizer = load_tokenizer(folder)
    prompt = tokenizer.encode(test.prompt)
    length = len(prompt) + test.num_tokens
    _, num_parameters = check_weights(folder)
    dtype = torch.float32 if num_parameters < _LARGE else torch.bfloat16
    executor = TorchExecutor.load(folder, dtype=dtype, block_tokens=length, num_blocks=1)
    self_test(executor)
    check_reference(executor, folder)
    text = tokenizer.decode(continue_greedily(executor, prompt, test.num_tokens))
    if test.expected not in text:
        raise EngineError(
            f"{folder}: after {test.prompt!r} the model says {text!r}; "
            f"expected {test.expected!r} in it"
        )
    if keeps_reference:
        write_reference(executor, folder)
    return text


def continue_greedily(
    executor: Executor, prompt: tuple[int, ...], num_tokens: int
) -> tuple[int, ...]:
    """The `num_tokens` most likely tokens after `prompt`.

    Args:
        executor: has no live request; its first KV block holds prompt and output.
        prompt: token ids, at least one.
        num_tokens: at least 1.
    """
    tokens: list[int] = []
    for step in range(num_tokens):
        item = ScheduledItem(
            "prompt-test",
            context_tokens=len(prompt) + step - 1 if step else 0,
            num_tokens=1 if step else len(prompt),
            is_prefill=step == 0,
            samples=True,
            new_blocks=() if step else (0,),
        )
        opened = () if step else (EngineRequest("prompt-test", prompt),)
        result = executor.execute(StepPlan("prompt-test", step, (item,)), opened)
        tokens.append(result.outputs[0].token)
    return tuple(tokens)
