"""A GGUF file becomes the very model that it was made from."""

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from cloud.engine.chat_template import ChatMessage
from cloud.engine.checkpoint import check_weights
from cloud.engine.errors import CheckpointError
from cloud.engine.gguf_import import convert_gguf, undo_rope_permutation
from cloud.engine.tokenizer import load_tokenizer
from tests.support.small_gguf import small_weights, write_small_gguf


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the small file becomes."""
    folder = tmp_path_factory.mktemp("converted")
    write_small_gguf(folder / "small.gguf")
    convert_gguf(folder / "small.gguf", folder)
    return folder


def test_the_weights_are_those_that_the_file_was_made_from(converted: Path) -> None:
    """Every tensor, in Hugging Face's order of rows, rounded to bfloat16 and no more."""
    weights = load_file(converted / "model.safetensors")
    expected = small_weights()
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(weights[name], torch.from_numpy(value).to(torch.bfloat16)), name


def test_the_configuration_is_that_of_the_file(converted: Path) -> None:
    """The engine can run the folder, and it has the shape that was written."""
    config, num_parameters = check_weights(converted)
    assert num_parameters == sum(value.size for value in small_weights().values())
    assert (config.hidden, config.heads, config.kv_heads, config.head_dim) == (64, 4, 2, 16)
    assert (config.norm_eps, config.rope_theta, config.max_context_tokens) == (1e-5, 1e4, 128)
    assert config.has_tied_head
    assert config.eos_tokens == (2,)


def test_rows_go_back_to_where_hugging_face_has_them() -> None:
    """Two heads of four rows: neighbours (0, 1), (2, 3) were (0, 2), (1, 3)."""
    rows = np.array([0, 2, 1, 3, 4, 6, 5, 7], np.float32)[:, None]
    assert undo_rope_permutation(rows, 2)[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


def test_a_block_of_four_bits_is_scale_times_level_plus_minimum(tmp_path: Path) -> None:
    """Q4_1: float16 d and m, then 32 levels, low halves first: d·q + m."""
    scale, minimum = 0.25, -2.0
    levels = [(7 * i) % 16 for i in range(32)]
    packed = bytes(levels[i] | levels[i + 16] << 4 for i in range(16))
    block = struct.pack("<ee", scale, minimum) + packed
    blocks = np.frombuffer(block * 2 * 64, np.uint8).reshape(64, 2 * len(block))
    path = tmp_path / "quantised.gguf"
    write_small_gguf(path)
    _replace_tensor(path, "blk.0.attn_v.weight", blocks[:32], gguf.GGMLQuantizationType.Q4_1)
    convert_gguf(path, tmp_path)
    value = load_file(tmp_path / "model.safetensors")["model.layers.0.self_attn.v_proj.weight"]
    assert value.shape == (32, 64)
    # Multiples of 1/4 below 2 are exact in bfloat16.
    assert value[5].tolist() == [scale * level + minimum for level in levels] * 2


def _replace_tensor(
    path: Path, name: str, data: np.ndarray[Any, Any], kind: gguf.GGMLQuantizationType
) -> None:
    """Writes the file anew with other data for one tensor."""
    reader = gguf.GGUFReader(path)
    tensors = [(t.name, np.array(t.data), t.tensor_type) for t in reader.tensors]
    other = path.with_suffix(".new")
    writer = gguf.GGUFWriter(other, "llama")
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            sub_type = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type)
    for tensor_name, values, values_kind in tensors:
        if tensor_name == name:
            writer.add_tensor(tensor_name, data, raw_dtype=kind)
        else:
            writer.add_tensor(tensor_name, values, raw_dtype=values_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    other.replace(path)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("hello", ["hello"]),
        ("a123", ["a", "1", "2", "3"]),
        # GPT-2's pattern alone would leave a space to the digit: digits go first.
        ("a  2", ["a", "  ", "2"]),
        ("to the", ["t", "o", " t", "he"]),
        ("é", ["�", "�"]),
    ],
)
def test_text_is_split_as_smollm_does(converted: Path, text: str, pieces: list[str]) -> None:
    """Every digit by itself, then GPT-2's pattern, then the merges in their order."""
    tokenizer = load_tokenizer(converted)
    assert [tokenizer.decode([token]) for token in tokenizer.encode(text)] == pieces


def test_the_chat_template_comes_along(converted: Path) -> None:
    """ChatML's special tokens keep their ids."""
    tokens = load_tokenizer(converted).encode_chat([ChatMessage("user", "hello")])
    assert [token for token in tokens if token < 3] == [1, 2, 1]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"architecture": "gemma"}, "architecture is 'gemma'"),
        ({"pre": "llama-bpe"}, "gpt2/llama-bpe"),
        ({"extra_tensor": "blk.0.attn_q.bias"}, "blk.0.attn_q.bias has no place"),
        ({"kinds": [6] * 265}, "unknown kind 6"),
        ({"merges": ["h e", "z zz"]}, "'z zz'"),
    ],
)
def test_what_cannot_be_converted_is_refused(
    tmp_path: Path, changes: dict[str, Any], complaint: str
) -> None:
    """Rather than answered wrongly."""
    path = tmp_path / "other.gguf"
    write_small_gguf(path, **changes)
    with pytest.raises(CheckpointError, match=complaint):
        convert_gguf(path, tmp_path)


@pytest.mark.parametrize("keep", [0, 3, 100, 2_000, 9_000, 100_000, -4])
def test_a_file_cut_short_is_one_clear_line(tmp_path: Path, keep: int) -> None:
    """In the header, in the metadata, in the tensors."""
    path = tmp_path / "cut.gguf"
    write_small_gguf(path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError) as caught:
        convert_gguf(path, tmp_path)
    assert caught.value.message.startswith(f"{path}: ")
    assert "\n" not in caught.value.message


def test_values_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    """A damaged scale would otherwise answer nonsense."""
    path = tmp_path / "nan.gguf"
    write_small_gguf(path)
    bad = np.full((32, 64), np.nan, np.float32)
    _replace_tensor(path, "blk.0.attn_v.weight", bad, gguf.GGMLQuantizationType.F32)
    with pytest.raises(CheckpointError, match="no numbers"):
        convert_gguf(path, tmp_path)


def test_the_configuration_is_plain_json(converted: Path) -> None:
    """Other software reads it too."""
    config = json.loads((converted / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["rms_norm_eps"] == 1e-5
