"""A small Llama-shaped GGUF file, as llama.cpp's converter would write it."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from tokenizers import pre_tokenizers

from tests.support.small_tokenizer import CHATML, SPECIAL_TOKENS

__all__ = ["HEADS", "HEAD_DIM", "HIDDEN", "KV_HEADS", "small_weights", "write_small_gguf"]

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, LAYERS = 64, 4, 2, 16, 96, 2
MERGES = ("h e", "l l", "he ll", "hell o", "Ġ t", "Ġ Ġ")

_TENSORS = {
    "attn_norm": ("input_layernorm", (HIDDEN,)),
    "attn_q": ("self_attn.q_proj", (HEADS * HEAD_DIM, HIDDEN)),
    "attn_k": ("self_attn.k_proj", (KV_HEADS * HEAD_DIM, HIDDEN)),
    "attn_v": ("self_attn.v_proj", (KV_HEADS * HEAD_DIM, HIDDEN)),
    "attn_output": ("self_attn.o_proj", (HIDDEN, HEADS * HEAD_DIM)),
    "ffn_norm": ("post_attention_layernorm", (HIDDEN,)),
    "ffn_gate": ("mlp.gate_proj", (INNER, HIDDEN)),
    "ffn_up": ("mlp.up_proj", (INNER, HIDDEN)),
    "ffn_down": ("mlp.down_proj", (HIDDEN, INNER)),
}


def small_vocabulary() -> list[str]:
    """Special tokens, then the bytes, then what the merges make."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [*SPECIAL_TOKENS, *alphabet, *(merge.replace(" ", "") for merge in MERGES)]


def small_weights(seed: int = 0) -> dict[str, npt.NDArray[np.float32]]:
    """Weights under Hugging Face's names, float32, [out, in]."""
    random = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (len(small_vocabulary()), HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        for name, shape in _TENSORS.values():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    return {
        name: random.standard_normal(shape, dtype=np.float32) / np.float32(8)
        for name, shape in shapes.items()
    }


def rotary_rows(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Rows as llama.cpp wants them: of each head, rows j and j + head_dim/2 become
    neighbours 2j and 2j + 1.
    """
    out = np.empty_like(weight)
    for head in range(heads):
        first = head * HEAD_DIM
        for j in range(HEAD_DIM // 2):
            out[first + 2 * j] = weight[first + j]
            out[first + 2 * j + 1] = weight[first + j + HEAD_DIM // 2]
    return out


def write_small_gguf(path: Path, *, seed: int = 0, **changes: Any) -> None:
    """Writes the model of `small_weights(seed)` to `path`, unquantised.

    Args:
        path: where to.
        seed: of the weights.
        changes: `architecture`, `pre` and `kinds` instead of the usual ones,
            `extra_tensor` beside them, `merges`.
    """
    writer = gguf.GGUFWriter(path, changes.get("architecture", "llama"))
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    vocabulary = small_vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changes.get("pre", "smollm"))
    writer.add_token_list(vocabulary)
    special = len(SPECIAL_TOKENS)
    writer.add_token_types(changes.get("kinds", [3] * special + [1] * (len(vocabulary) - special)))
    writer.add_token_merges(list(changes.get("merges", MERGES)))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHATML)
    weights = small_weights(seed)
    writer.add_tensor("token_embd.weight", weights["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", weights["model.norm.weight"])
    for layer in range(LAYERS):
        for theirs, (name, _) in _TENSORS.items():
            weight = weights[f"model.layers.{layer}.{name}.weight"]
            heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(theirs)
            rows = weight if heads is None else rotary_rows(weight, heads)
            writer.add_tensor(f"blk.{layer}.{theirs}.weight", rows)
    if "extra_tensor" in changes:
        writer.add_tensor(changes["extra_tensor"], np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
