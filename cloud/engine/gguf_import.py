"""A Llama-shaped GGUF file, as llama.cpp writes them, made a checkpoint folder.

GGUF: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import errno
import json
import math
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from cloud.engine.errors import CheckpointError
from cloud.engine.gguf_metadata import GgufMetadata
from cloud.engine.gguf_tokenizer import write_tokenizer

__all__ = ["convert_gguf", "undo_rope_permutation"]

_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_LAYER = re.compile(r"blk\.(?P<index>\d+)\.(?P<part>.+)")


def convert_gguf(source: Path, folder: Path) -> None:
    """Writes the model in `source` to `folder` as a Hugging Face folder.

    Quantised tensors are dequantised, and all are stored as bfloat16. The folder
    must exist; nothing is undone on failure.

    Raises:
        CheckpointError: not a GGUF file, damaged, or a model that this engine
            cannot run.
        OSError: `folder` cannot be written.
    """
    try:
        reader = gguf.GGUFReader(source)
    except OSError:
        raise
    except Exception as error:  # On damage the library raises whatever numpy does.
        raise CheckpointError(source, f"damaged, or not a GGUF file ({error})") from error
    metadata = GgufMetadata(source, reader)
    config = _config(metadata, {tensor.name for tensor in reader.tensors})
    weights = _weights(source, reader, config["num_attention_heads"], config["num_key_value_heads"])
    config["vocab_size"] = weights["model.embed_tokens.weight"].shape[0]
    write_tokenizer(metadata, folder)
    _write_json(folder / "config.json", config)
    ends = {key: value for key, value in config.items() if key.endswith("_token_id")}
    _write_json(folder / "generation_config.json", ends)
    target = folder / "model.safetensors"
    try:
        save_file(weights, target, metadata={"format": "pt"})
    except SafetensorError as error:  # What the library makes of a full disk.
        raise OSError(errno.EIO, str(error), str(target)) from error


def undo_rope_permutation(
    weight: npt.NDArray[np.float32], num_heads: int
) -> npt.NDArray[np.float32]:
    """The rows of a query or key projection in the order of Hugging Face.

    llama.cpp rotates neighbouring rows (2j, 2j+1) of a head and orders them for
    that; Hugging Face rotates row j with row j + head_dim/2. Source: `permute` in
    llama.cpp's convert_hf_to_gguf.py, whose inverse this is.

    Args:
        weight: [num_heads·head_dim, hidden].
        num_heads: heads that `weight` holds.
    """
    rows, hidden = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, hidden)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, hidden))


def _config(metadata: GgufMetadata, tensor_names: set[str]) -> dict[str, Any]:
    """config.json, but for the size of the vocabulary."""
    architecture = metadata.value("general.architecture", str)
    if architecture != "llama":
        raise CheckpointError(
            metadata.source, f"architecture is {architecture!r}; only 'llama' can be converted"
        )
    if metadata.get("llama.expert_count") or metadata.get("llama.rope.scaling.type"):
        raise CheckpointError(metadata.source, "mixtures of experts and scaled RoPE are not known")
    hidden = metadata.value("llama.embedding_length", int)
    heads = metadata.value("llama.attention.head_count", int)
    if heads < 1 or hidden % heads:
        raise CheckpointError(metadata.source, f"{hidden} features do not split into {heads} heads")
    epsilon = metadata.value("llama.attention.layer_norm_rms_epsilon", float)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": metadata.value("llama.feed_forward_length", int),
        "num_hidden_layers": metadata.value("llama.block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.value("llama.attention.head_count_kv", int),
        "head_dim": metadata.get("llama.attention.key_length") or hidden // heads,
        "hidden_act": "silu",
        # Stored as float32; the shortest decimal is what it was made from.
        "rms_norm_eps": float(str(np.float32(epsilon))),
        "rope_theta": metadata.value("llama.rope.freq_base", float),
        "max_position_embeddings": metadata.value("llama.context_length", int),
        "tie_word_embeddings": "output.weight" not in tensor_names,
        "torch_dtype": "bfloat16",
    }
    for role in ("bos", "eos"):
        token = metadata.get(f"tokenizer.ggml.{role}_token_id")
        if token is not None:
            config[f"{role}_token_id"] = token
    return config


def _weights(
    source: Path, reader: gguf.GGUFReader, heads: int, kv_heads: int
) -> dict[str, torch.Tensor]:
    """The tensors under Hugging Face's names, bfloat16, [out, in]."""
    weights: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        name = _hugging_face_name(source, tensor.name)
        permuted_heads = _permuted_heads(tensor.name, heads, kv_heads)
        try:
            values = np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise CheckpointError(source, f"{tensor.name} is {kind}: not known") from error
        if permuted_heads is not None:
            if values.shape[0] % (2 * permuted_heads):
                raise CheckpointError(
                    source,
                    f"{tensor.name} has {values.shape[0]} rows; {permuted_heads} heads do not fit",
                )
            values = undo_rope_permutation(values, permuted_heads)
        if not math.isfinite(values.sum(dtype=np.float64)):
            raise CheckpointError(source, f"{tensor.name} holds values that are no numbers")
        weights[name] = torch.from_numpy(values).to(torch.bfloat16)
    if "model.embed_tokens.weight" not in weights:
        raise CheckpointError(source, "tensor token_embd.weight is missing")
    return weights


def _hugging_face_name(source: Path, name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    match = _LAYER.fullmatch(name)
    if match is None or match["part"] not in _LAYER_NAMES:
        raise CheckpointError(source, f"tensor {name} has no place in a Llama model")
    return f"model.layers.{match['index']}.{_LAYER_NAMES[match['part']]}"


def _permuted_heads(name: str, heads: int, kv_heads: int) -> int | None:
    """How many heads llama.cpp permuted in the tensor; None where it is as it was."""
    match = _LAYER.fullmatch(name)
    part = None if match is None else match["part"]
    return {"attn_q.weight": heads, "attn_k.weight": kv_heads}.get(part or "")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
