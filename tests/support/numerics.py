"""The engine beside transformers and PEFT: the same requests, every output token's logits.

Needs peft and transformers; skips where they are missing.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from cloud.engine.api import EngineRequest
from cloud.engine.checkpoint import load_weights
from cloud.engine.lora import load_adapter
from cloud.engine.model import Model
from cloud.engine.model_config import load_model_config
from cloud.engine.torch_executor import TorchExecutor
from cloud.engine.torch_ops import Ops
from tests.support.executor_driver import ExecutorDriver

__all__ = ["ADAPTERS", "BLOCK_TOKENS", "Run", "Subject", "random_prompt"]

# By name, what each is attached to.
ADAPTERS = {"act": ["q_proj", "o_proj", "up_proj"], "summarise": ["v_proj", "down_proj"]}
BLOCK_TOKENS = 8
_GAP = 2e-4


class Subject:
    """A checkpoint with adapters, and what transformers and PEFT make of it.

    Args:
        base: the checkpoint.
        folder: where the adapters are written.
        ops: of the engine.
        spread: standard deviation of the adapters' numbers.
        dtype: in which the reference computes; the engine in float32.
        atol: how far a logit may be from the reference's.
        rtol: what is allowed of its size beside that.
    """

    def __init__(
        self,
        base: Path,
        folder: Path,
        ops: Ops,
        *,
        spread: float = 0.1,
        dtype: torch.dtype = torch.float32,
        atol: float = 1e-4,
        rtol: float = 0.0,
    ) -> None:
        peft = pytest.importorskip("peft")
        transformers = pytest.importorskip("transformers")
        self._atol, self._rtol = atol, rtol
        self._models = {}
        adapters = {}
        for seed, (name, targets) in enumerate({"": [], **ADAPTERS}.items()):
            model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
            if name:
                config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=targets)
                model = peft.get_peft_model(model, config)
                _randomise(model, seed, spread)
                model.save_pretrained(folder / name)
                adapters[name] = folder / name
            self._models[name] = model
        config, cpu = load_model_config(base), torch.device("cpu")
        self._model = Model(config, load_weights(base, config, torch.float32, cpu), 512, ops)
        self._adapters = [
            load_adapter(name, path, config, torch.float32, cpu) for name, path in adapters.items()
        ]

    def driver(self, seed: int) -> ExecutorDriver:
        """Drives a fresh executor; blocks are scrambled by `seed`."""
        executor = TorchExecutor(
            self._model,
            num_blocks=256,
            block_tokens=BLOCK_TOKENS,
            num_swap_blocks=128,
            adapters=self._adapters,
        )
        return ExecutorDriver(executor, seed=seed)

    def check(self, request: EngineRequest, outputs: list[int], logits: list[Tensor]) -> int:
        """Compares all output steps of a request with the reference.

        Returns:
            At how many of them the greedy token was clear, and so compared.
        """
        tokens = torch.tensor([[*request.prompt, *outputs]])
        with torch.inference_mode():
            everything = self._models[request.adapter](tokens).logits[0]
        expected = everything[len(request.prompt) - 1 : -1]
        found = torch.stack(logits).to(expected.dtype)
        torch.testing.assert_close(found, expected, atol=self._atol, rtol=self._rtol)
        best = expected.topk(2).values
        is_clear = best[:, 0] - best[:, 1] > _GAP
        chosen = torch.tensor(outputs)
        assert torch.equal(chosen[is_clear], expected.argmax(dim=-1)[is_clear])
        return int(is_clear.sum())


def _randomise(model: torch.nn.Module, seed: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:  # PEFT starts with B = 0, an adapter that does nothing.
                parameter.normal_(0, spread, generator=generator)


def random_prompt(length: int, seed: int) -> tuple[int, ...]:
    """Tokens that every model here knows."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, 514, (length,), generator=generator).tolist())


class Run:
    """Requests in a driver, with the logits of all their output tokens."""

    def __init__(self, subject: Subject, seed: int = 0) -> None:
        self.driver = subject.driver(seed)
        self.logits: dict[str, list[Tensor]] = {}
        self._subject = subject
        self._requests: dict[str, EngineRequest] = {}

    def open(self, name: str, prompt: tuple[int, ...], adapter: str = "") -> None:
        """Makes a request known."""
        self._requests[name] = EngineRequest(name, prompt, adapter=adapter)
        self.driver.open(self._requests[name])
        self.logits[name] = []

    def step(self, *shares: tuple[str, int]) -> None:
        """Computes (request, at most so many tokens) each."""
        bounded = [(name, min(num, self.driver.remaining(name))) for name, num in shares]
        for name, row in self.driver.step_logits(*bounded).items():
            self.logits[name].append(row)

    def check(self) -> int:
        """Compares everything with the reference; how many tokens were clear."""
        return sum(
            self._subject.check(request, self.driver.outputs[name], self.logits[name])
            for name, request in self._requests.items()
        )
