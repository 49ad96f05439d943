"""A tiny checkpoint with random weights: for demos, tests and benchmarks.

Shaped like a SmolLM2 and run by the same code. Its answers mean nothing.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

__all__ = ["ACTION_TOKENS", "tiny_config", "write_random_checkpoint", "write_tiny_checkpoint"]

ACTION_TOKENS = 256
_SPECIALS = ("<|bos|>", "<|eos|>")


def write_tiny_checkpoint(folder: Path, *, seed: int = 0) -> None:
    """Writes a Llama-shaped model of 1.7 million parameters to `folder`.

    The same seed gives the same bytes. Its tokenizer has one token per byte,
    `<|bos|>` (256), `<|eos|>` (257) and `<act_000>` … `<act_255>` (258 … 513).
    """
    write_random_checkpoint(folder, tiny_config(), seed=seed)


def tiny_config(**changes: Any) -> dict[str, Any]:
    """config.json of the tiny model, with `changes`."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 256 + len(_SPECIALS) + ACTION_TOKENS,
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "torch_dtype": "float32",
        "headway_untrained": True,
    } | changes


def write_random_checkpoint(folder: Path, config: dict[str, Any], *, seed: int = 0) -> None:
    """Writes a checkpoint with random weights for the Llama-family `config`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    _byte_tokenizer().save(str(folder / "tokenizer.json"))
    # Last: a folder with weights is a complete one.
    save_file(
        _random_tensors(config, seed), folder / "model.safetensors", metadata={"format": "pt"}
    )


def _random_tensors(config: dict[str, Any], seed: int) -> dict[str, np.ndarray[Any, Any]]:
    random = np.random.default_rng(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    architecture = config["architectures"][0]

    def normal(*shape: int, scale: float | None = None) -> np.ndarray[Any, Any]:
        # 1/sqrt(inputs) keeps activations near 1 through any number of layers.
        spread = shape[-1] ** -0.5 if scale is None else scale
        return random.standard_normal(shape, dtype=np.float32) * np.float32(spread)

    def norm_weight(size: int) -> np.ndarray[Any, Any]:
        return 1 + normal(size, scale=0.1)

    tensors = {"model.embed_tokens.weight": normal(config["vocab_size"], hidden, scale=0.1)}
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        tensors[layer + "input_layernorm.weight"] = norm_weight(hidden)
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            tensors[layer + f"self_attn.{name}_proj.weight"] = normal(rows, hidden)
            if architecture == "Qwen2ForCausalLM":
                tensors[layer + f"self_attn.{name}_proj.bias"] = normal(rows, scale=0.1)
        if architecture == "Qwen3ForCausalLM":
            tensors[layer + "self_attn.q_norm.weight"] = norm_weight(config["head_dim"])
            tensors[layer + "self_attn.k_norm.weight"] = norm_weight(config["head_dim"])
        tensors[layer + "self_attn.o_proj.weight"] = normal(hidden, q)
        tensors[layer + "post_attention_layernorm.weight"] = norm_weight(hidden)
        tensors[layer + "mlp.gate_proj.weight"] = normal(inner, hidden)
        tensors[layer + "mlp.up_proj.weight"] = normal(inner, hidden)
        tensors[layer + "mlp.down_proj.weight"] = normal(hidden, inner)
    tensors["model.norm.weight"] = norm_weight(hidden)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = normal(config["vocab_size"], hidden, scale=0.1)
    return tensors


def _byte_tokenizer() -> Tokenizer:
    """One token per byte: the byte-level alphabet of GPT-2, without merges."""
    tokenizer = Tokenizer(models.BPE(vocab=_byte_vocabulary(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = [*_SPECIALS, *(f"<act_{i:03d}>" for i in range(ACTION_TOKENS))]
    tokenizer.add_special_tokens(
        [AddedToken(special, special=True, normalized=False) for special in specials]
    )
    return tokenizer


def _byte_vocabulary() -> dict[str, int]:
    """The printable stand-in of each byte (GPT-2's bytes_to_unicode), byte as id."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_ins = iter(range(0x100, 0x200))
    return {chr(byte if byte in printable else next(stand_ins)): byte for byte in range(256)}
