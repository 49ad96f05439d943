"""What is wrong with a checkpoint folder is said in one line that names the file."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cloud.engine.checkpoint import check_weights, load_weights
from cloud.engine.errors import CheckpointError
from cloud.engine.model_config import load_model_config
from cloud.engine.tiny import write_tiny_checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny checkpoint that a test may spoil."""
    write_tiny_checkpoint(tmp_path)
    return tmp_path


def _edit_config(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


def _edit_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return edit


def _truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _index(weight_map: object) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        text = json.dumps({"weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(text)

    return write


_SPOILT: list[tuple[Callable[[Path], object], str]] = [
    (lambda f: (f / "config.json").unlink(), r"config\.json: cannot be read \(No such file"),
    (lambda f: (f / "config.json").write_text("{"), r"config\.json: is not JSON"),
    (lambda f: (f / "config.json").write_text("[]"), r"config\.json: expected a JSON object"),
    (lambda f: (f / "model.safetensors").unlink(), r"model\.safetensors: no such file"),
    (_truncate, r"model\.safetensors: truncated, or not a safetensors file"),
    (lambda f: (f / "model.safetensors").write_bytes(b""), r"model\.safetensors: truncated"),
    (
        _edit_tensors(lambda t: t.pop("model.layers.2.mlp.up_proj.weight")),
        r"tensor model\.layers\.2\.mlp\.up_proj\.weight is in none of \['model\.safetensors'\]",
    ),
    (
        _edit_tensors(lambda t: t.update({"model.norm.weight": torch.ones(191)})),
        r"model\.norm\.weight has shape \[191\]; config\.json implies \[192\]",
    ),
    (
        _edit_tensors(lambda t: t.update({"model.norm.weight": torch.ones(192).to(torch.int8)})),
        r"model\.norm\.weight is stored as I8; expected one of F32, BF16, F16, F64 \(quantised",
    ),
    (_edit_config(tie_word_embeddings=False), r"tensor lm_head\.weight is in none of"),
    (_edit_config(architectures=["MambaForCausalLM"]), r"expected one of LlamaForCausalLM, Qwen2"),
    (_edit_config(architectures=None), r"architectures is \[\]"),
    (_edit_config(hidden_act="gelu"), r"hidden_act is 'gelu'; this engine runs 'silu' only"),
    (_edit_config(mlp_bias=True), r"mlp_bias is True"),
    (_edit_config(use_sliding_window=True), r"use_sliding_window is True"),
    (_edit_config(rope_scaling={"type": "yarn"}), r"RoPE scaling 'yarn'"),
    (_edit_config(rope_scaling={"rope_type": "llama3"}), r"RoPE scaling 'llama3' needs factor"),
    (_edit_config(rope_scaling=[1]), r"rope_scaling must be an object"),
    (_edit_config(hidden_size="many"), r"hidden_size must be a whole number .* got 'many'"),
    (_edit_config(num_key_value_heads=4), r"6 is not a multiple of num_key_value_heads 4"),
    (_edit_config(head_dim=31), r"head_dim must be even"),
    (_edit_config(rms_norm_eps=-1), r"rms_norm_eps must be a number above 0, got -1"),
    (_edit_config(eos_token_id="end"), r"eos_token_id must be a token id or a list of them"),
    (_index({"a": "../../secret"}), r"'\.\./\.\./secret' is not a file name in the same folder"),
    (_index(["a"]), r"expected a JSON object with a weight_map"),
    (_index({"a": "gone.safetensors"}), r"gone\.safetensors: no such file"),
]


@pytest.mark.parametrize(("spoil", "problem"), _SPOILT, ids=[problem for _, problem in _SPOILT])
def test_a_spoilt_folder_is_refused_in_one_line(
    folder: Path, spoil: Callable[[Path], object], problem: str
) -> None:
    """Before any weight is read, and naming the file."""
    spoil(folder)
    with pytest.raises(CheckpointError) as caught:
        check_weights(folder)
    message = str(caught.value)
    assert re.search(problem, message)
    assert message.startswith(str(folder))
    assert "\n" not in message


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """And what it should have been is said."""
    with pytest.raises(CheckpointError, match="no such folder; expected a Hugging Face checkpoint"):
        check_weights(tmp_path / "nowhere")


def test_a_sharded_checkpoint_is_the_same_model(folder: Path) -> None:
    """Two files and an index load to the tensors of the one file."""
    config = load_model_config(folder)
    cpu = torch.device("cpu")
    whole = load_weights(folder, config, torch.float32, cpu)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for part in set(weight_map.values()):
        save_file({n: t for n, t in tensors.items() if weight_map[n] == part}, folder / part)
    _index(weight_map)(folder)

    sharded = load_weights(folder, config, torch.float32, cpu)

    assert torch.equal(sharded.head, whole.head)
    for mine, theirs in zip(sharded.layers, whole.layers, strict=True):
        assert torch.equal(mine.qkv, theirs.qkv)
        assert torch.equal(mine.gate_up, theirs.gate_up)
        assert torch.equal(mine.down, theirs.down)


def test_the_generation_config_decides_what_ends_an_answer(folder: Path) -> None:
    """Chat models end turns with another token than texts, and say so there."""
    (folder / "generation_config.json").write_text('{"eos_token_id": [257, 3]}')
    assert load_model_config(folder).eos_tokens == (257, 3)


def test_kv_of_a_70b_llama_is_320_kib_a_token(folder: Path) -> None:
    """The design's worked number: 80 layers, 8 KV heads of 128, 2 bytes: 327,680 B."""
    _edit_config(
        num_hidden_layers=80,
        hidden_size=8192,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
    )(folder)
    assert load_model_config(folder).kv_bytes_per_token(2) == 327_680
