"""Adapters against PEFT, alone and mixed; and files that do not fit."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cloud.engine.api import EngineRequest
from cloud.engine.errors import CheckpointError
from cloud.engine.lora import load_adapter
from cloud.engine.model_config import load_model_config
from cloud.engine.tiny import tiny_config, write_random_checkpoint
from cloud.engine.torch_executor import TorchExecutor
from tests.support.executor_driver import ExecutorDriver

# PEFT asks transformers by a name that is going away; nothing of ours.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

_SMALL: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 96, "intermediate_size": 160}
_ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# Each as peft.LoraConfig takes it.
_ADAPTERS: dict[str, dict[str, Any]] = {
    "act": {"r": 8, "lora_alpha": 32, "target_modules": _ALL},
    "summarise": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "patterned": {
        "r": 4,
        "lora_alpha": 16,
        "target_modules": ["k_proj", "o_proj", "down_proj"],
        "rank_pattern": {"o_proj": 6},
        "alpha_pattern": {"layers.1.self_attn.k_proj": 5, "down_proj": 40},
    },
    "rank_stabilised": {"r": 16, "lora_alpha": 8, "target_modules": _ALL, "use_rslora": True},
}


def _prompt(length: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, 514, (length,), generator=generator).tolist())


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Llama."""
    folder = tmp_path_factory.mktemp("base")
    write_random_checkpoint(folder, tiny_config(**_SMALL), seed=2)
    return folder


@pytest.fixture(scope="module")
def folders(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every adapter as PEFT writes it, both of its matrices random."""
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    made = {}
    for seed, (name, settings) in enumerate(_ADAPTERS.items()):
        model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        tuned = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter_name, parameter in tuned.named_parameters():
                if "lora_" in parameter_name:
                    # PEFT starts with B = 0, an adapter that does nothing.
                    parameter.normal_(0, 0.1, generator=generator)
        made[name] = tmp_path_factory.mktemp("adapter")
        tuned.save_pretrained(made[name])
    return made


@pytest.fixture(scope="module")
def references(base: Path, folders: dict[str, Path]) -> Callable[[str, list[int]], torch.Tensor]:
    """(adapter or "", tokens) -> PEFT's logits after the last one."""
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    models = {"": transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)}
    for name, folder in folders.items():
        model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        models[name] = peft.PeftModel.from_pretrained(model, folder)

    def logits(name: str, tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            found: torch.Tensor = models[name](torch.tensor([tokens])).logits[0, -1]
        return found

    return logits


def _load(base: Path, folders: dict[str, Path]) -> TorchExecutor:
    return TorchExecutor.load(base, num_blocks=64, block_tokens=8, adapters=folders)


def test_adapters_mixed_in_one_step_give_pefts_logits(
    base: Path,
    folders: dict[str, Path],
    references: Callable[[str, list[int]], torch.Tensor],
) -> None:
    """Six requests of four adapters and none: chunks and decodes side by side, to 1e-4."""
    driver = ExecutorDriver(_load(base, folders))
    adapter_of = dict(zip("abcdef", [*_ADAPTERS, "", "act"], strict=True))
    prompts = {name: _prompt(20 + 3 * i, i) for i, name in enumerate(adapter_of)}
    for name, adapter in adapter_of.items():
        driver.open(EngineRequest(name, prompts[name], adapter=adapter))
    driver.step(("a", 20), ("f", 9), ("b", 5))

    num_compared = 0
    for _ in range(5):
        shares = [(name, min(11, driver.remaining(name))) for name in adapter_of]
        for name, found in driver.step_logits(*shares).items():
            known = [*prompts[name], *driver.outputs[name][:-1]]
            expected = references(adapter_of[name], known)
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
            num_compared += 1
    assert num_compared > 20
    # The adapters matter: without one, the same prompt goes elsewhere.
    plain = references("", list(prompts["a"]))
    assert float((references("act", list(prompts["a"])) - plain).abs().max()) > 0.1


def test_scale_is_folded_in_as_the_paper_has_it(base: Path, folders: dict[str, Path]) -> None:
    """(α/r)·B·A, or α/√r where the adapter is rank-stabilised."""
    config = load_model_config(base)
    for name, scale in (("act", 32 / 8), ("rank_stabilised", 8 / math.sqrt(16))):
        adapter = load_adapter(name, folders[name], config, torch.float32, torch.device("cpu"))
        tensors = load_file(folders[name] / "adapter_model.safetensors")
        prefix = "base_model.model.model.layers.1.self_attn.o_proj.lora_"
        expected = scale * tensors[prefix + "B.weight"] @ tensors[prefix + "A.weight"]
        pair = adapter.layers[1].output
        assert pair is not None
        torch.testing.assert_close(pair.up @ pair.down, expected)


def _edit_config(**changes: object) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


def _edit_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "adapter_model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return edit


def _truncate(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


_Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
_SPOILT: list[tuple[Callable[[Path], object], str]] = [
    (lambda f: (f / "adapter_config.json").unlink(), "cannot be read .* folder that PEFT wrote"),
    (lambda f: (f / "adapter_config.json").write_text("{"), "is not JSON"),
    (lambda f: (f / "adapter_config.json").write_text("[]"), "expected a JSON object"),
    (lambda f: (f / "adapter_model.safetensors").unlink(), "no such file"),
    (_truncate, "truncated, or not a safetensors file"),
    (_edit_config(peft_type="IA3"), "peft_type is 'IA3'; this engine runs 'LORA' only"),
    (_edit_config(use_dora=True), "use_dora is True"),
    (_edit_config(bias="all"), "bias is 'all'"),
    (_edit_config(modules_to_save=["lm_head"]), "modules_to_save is"),
    (_edit_config(lora_alpha="much"), "lora_alpha must be a number, got 'much'"),
    (_edit_config(alpha_pattern=[1]), "alpha_pattern must be an object"),
    (_edit_tensors(lambda t: t.clear()), "holds no tensors"),
    (_edit_tensors(lambda t: t.pop(_Q + "B.weight")), "q_proj has lora_A alone"),
    (
        _edit_tensors(lambda t: t.update({_Q + "A.weight": torch.ones(8, 96).to(torch.int8)})),
        r"q_proj\.lora_A\.weight is stored as torch\.int8; expected float32",
    ),
    (
        _edit_tensors(lambda t: t[_Q + "A.weight"].fill_(math.nan)),
        r"q_proj\.lora_A\.weight holds values that are not finite",
    ),
    (
        _edit_tensors(lambda t: t.update({_Q + "A.weight": torch.ones(8, 64)})),
        r"q_proj has A \[8, 64\] .* implies \[rank, 96\] and \[192, rank\]",
    ),
    (
        _edit_tensors(lambda t: t.update({_Q.replace("0", "7") + "A.weight": torch.ones(8, 96)})),
        "has 2 layers",
    ),
    (
        _edit_tensors(
            lambda t: t.update({"base_model.model.lm_head.lora_A.weight": torch.ones(8)})
        ),
        "is no LoRA of q, k, v",
    ),
]


@pytest.mark.parametrize(("spoil", "problem"), _SPOILT, ids=[problem for _, problem in _SPOILT])
def test_an_adapter_that_does_not_fit_is_refused_in_one_line(
    base: Path,
    folders: dict[str, Path],
    tmp_path: Path,
    spoil: Callable[[Path], object],
    problem: str,
) -> None:
    """Before anything is served, and naming the file."""
    for path in folders["act"].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    spoil(tmp_path)
    with pytest.raises(CheckpointError, match=problem) as caught:
        _load(base, {"act": tmp_path})
    assert str(caught.value).startswith(str(tmp_path))
    assert "\n" not in str(caught.value)
