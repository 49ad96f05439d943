"""The forward pass against Hugging Face transformers, on random weights."""

from pathlib import Path
from typing import Any

import pytest
import torch

from cloud.engine.api import EngineRequest
from cloud.engine.tiny import tiny_config, write_random_checkpoint
from cloud.engine.torch_executor import TorchExecutor
from tests.support.executor_driver import ExecutorDriver

_PROMPT = tuple((7 * i + i * i) % 514 for i in range(75))
_SMALL: dict[str, Any] = {"num_hidden_layers": 3, "hidden_size": 96, "intermediate_size": 160}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    # Short, so that some of the 75 positions' frequencies fall in each of the three bands.
    "original_max_position_embeddings": 64,
}
_CONFIGS: dict[str, dict[str, Any]] = {
    "llama_tied": {},
    "llama3_untied_mha": {
        "rope_scaling": _LLAMA3,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "num_key_value_heads": 6,
    },
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    # As in real Qwen3 models, heads × head_dim is not the hidden size.
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 48,
        "rms_norm_eps": 1e-6,
    },
}


@pytest.mark.parametrize("name", _CONFIGS)
def test_logits_and_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """A prompt in three chunks and five decodes give the reference's logits to 1e-4."""
    transformers = pytest.importorskip("transformers")
    write_random_checkpoint(tmp_path, tiny_config(**_SMALL, **_CONFIGS[name]), seed=3)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    executor = TorchExecutor.load(tmp_path, num_blocks=16, block_tokens=16)
    driver = ExecutorDriver(executor)
    driver.open(EngineRequest("a", _PROMPT))
    driver.step(("a", 33))
    driver.step(("a", 5))

    for _ in range(6):
        known = [*_PROMPT, *driver.outputs["a"]]
        with torch.inference_mode():
            expected = reference(torch.tensor([known])).logits[0, -1]
        plan = driver.plan([("a", driver.remaining("a"))])
        logits = executor.step_logits(plan, driver.take_opened())

        torch.testing.assert_close(logits[0], expected, atol=1e-4, rtol=0)
        # The same step again is harmless: it writes the same keys and values.
        [output] = executor.execute(plan, []).outputs
        assert output.token == int(expected.argmax())
        driver.outputs["a"].append(output.token)
