"""Weights of a Hugging Face folder, checked and fused for the forward pass."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cloud.engine.errors import CheckpointError
from cloud.engine.model_config import ModelConfig, load_model_config

__all__ = ["LayerWeights", "Weights", "check_weights", "load_weights"]

# As safetensors names them. Other kinds are codes that mean something only with their scales.
_DTYPES = ("F32", "BF16", "F16", "F64")


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer; every matrix is [out, in]."""

    input_norm: Tensor  # [hidden]
    qkv: Tensor  # [(heads + 2·kv_heads)·head_dim, hidden]: q, then k, then v.
    qkv_bias: Tensor | None
    qk_norm: Tensor | None  # [heads + kv_heads, head_dim]: q's weight, then k's.
    output: Tensor  # [hidden, heads·head_dim]
    output_bias: Tensor | None
    post_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2·intermediate, hidden]: gate, then up.
    down: Tensor  # [hidden, intermediate]


@dataclass(frozen=True, slots=True)
class Weights:
    """A whole model in one dtype on one device."""

    embedding: Tensor  # [vocabulary, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [hidden]
    head: Tensor  # [vocabulary, hidden]; the embedding itself where they are tied.


def load_weights(
    folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> Weights:
    """Reads the weights of `folder`.

    Raises:
        CheckpointError: a file is missing or truncated, or a tensor is missing
            or has another shape than config.json implies.
    """
    with _TensorFiles(folder, dtype, device) as files:
        _check_shapes(files, config)
        embedding = files.read("model.embed_tokens.weight")
        return Weights(
            embedding=embedding,
            layers=tuple(_load_layer(files, config, i) for i in range(config.layers)),
            final_norm=files.read("model.norm.weight"),
            head=embedding if config.has_tied_head else files.read("lm_head.weight"),
        )


def check_weights(folder: Path) -> tuple[ModelConfig, int]:
    """Checks that `folder` holds all that its config.json implies; reads headers only.

    Returns:
        The configuration, and how many parameters there are.

    Raises:
        CheckpointError: as `load_weights`.
    """
    config = load_model_config(folder)
    with _TensorFiles(folder, torch.float32, torch.device("cpu")) as files:
        return config, _check_shapes(files, config)


def _load_layer(files: "_TensorFiles", config: ModelConfig, index: int) -> LayerWeights:
    prefix = f"model.layers.{index}."
    attention = prefix + "self_attn."
    fused = [attention + f"{name}_proj" for name in "qkv"]
    qk_norm = None
    if config.has_qk_norm:
        q_norm = files.read(attention + "q_norm.weight").expand(config.heads, -1)
        k_norm = files.read(attention + "k_norm.weight").expand(config.kv_heads, -1)
        qk_norm = torch.cat([q_norm, k_norm])
    return LayerWeights(
        input_norm=files.read(prefix + "input_layernorm.weight"),
        qkv=files.read_fused([name + ".weight" for name in fused]),
        qkv_bias=(
            files.read_fused([name + ".bias" for name in fused]) if config.has_qkv_bias else None
        ),
        qk_norm=qk_norm,
        output=files.read(attention + "o_proj.weight"),
        output_bias=files.read(attention + "o_proj.bias") if config.has_output_bias else None,
        post_norm=files.read(prefix + "post_attention_layernorm.weight"),
        gate_up=files.read_fused([prefix + f"mlp.{n}_proj.weight" for n in ("gate", "up")]),
        down=files.read(prefix + "mlp.down_proj.weight"),
    )


def _expected_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, q = config.hidden, config.heads * config.head_dim
    kv = config.kv_heads * config.head_dim
    yield "model.embed_tokens.weight", (config.vocabulary_tokens, hidden)
    yield "model.norm.weight", (hidden,)
    if not config.has_tied_head:
        yield "lm_head.weight", (config.vocabulary_tokens, hidden)
    for index in range(config.layers):
        prefix = f"model.layers.{index}."
        yield prefix + "input_layernorm.weight", (hidden,)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            yield prefix + f"self_attn.{name}_proj.weight", (rows, hidden)
            if config.has_qkv_bias:
                yield prefix + f"self_attn.{name}_proj.bias", (rows,)
        yield prefix + "self_attn.o_proj.weight", (hidden, q)
        if config.has_output_bias:
            yield prefix + "self_attn.o_proj.bias", (hidden,)
        if config.has_qk_norm:
            yield prefix + "self_attn.q_norm.weight", (config.head_dim,)
            yield prefix + "self_attn.k_norm.weight", (config.head_dim,)
        yield prefix + "mlp.gate_proj.weight", (config.intermediate, hidden)
        yield prefix + "mlp.up_proj.weight", (config.intermediate, hidden)
        yield prefix + "mlp.down_proj.weight", (hidden, config.intermediate)


def _check_shapes(files: "_TensorFiles", config: ModelConfig) -> int:
    num_parameters = 0
    for name, expected in _expected_shapes(config):
        shape = files.shape(name)
        if shape != expected:
            raise CheckpointError(
                files.path_of(name),
                f"tensor {name} has shape {list(shape)}; config.json implies {list(expected)}",
            )
        if (stored := files.stored_dtype(name)) not in _DTYPES:
            raise CheckpointError(
                files.path_of(name),
                f"tensor {name} is stored as {stored}; expected one of {', '.join(_DTYPES)} "
                "(quantised weights are not run)",
            )
        count = 1
        for size in shape:
            count *= size
        num_parameters += count
    return num_parameters


class _TensorFiles:
    """The safetensors files of a folder, found by tensor name."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._folder = folder
        self._dtype = dtype
        self._device = device
        self._stack = ExitStack()
        self._open: dict[Path, Any] = {}  # safe_open has no type of its own.
        self._path_of: dict[str, Path] = {}

    def __enter__(self) -> "_TensorFiles":
        try:
            for path in self._paths():
                self._open[path] = self._open_file(path)
                self._path_of.update(dict.fromkeys(self._open[path].keys(), path))
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def path_of(self, name: str) -> Path:
        """The file that holds tensor `name`."""
        path = self._path_of.get(name)
        if path is None:
            raise CheckpointError(
                self._folder, f"tensor {name} is in none of {[p.name for p in self._open]}"
            )
        return path

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of tensor `name`, from the header alone."""
        return tuple(self._open[self.path_of(name)].get_slice(name).get_shape())

    def stored_dtype(self, name: str) -> str:
        """What tensor `name` is stored as, in safetensors' words, from the header alone."""
        return str(self._open[self.path_of(name)].get_slice(name).get_dtype())

    def read(self, name: str) -> Tensor:
        """Tensor `name` on the device, in the dtype asked for."""
        tensor: Tensor = self._open[self.path_of(name)].get_tensor(name)
        return tensor.to(device=self._device, dtype=self._dtype).contiguous()

    def read_fused(self, names: list[str]) -> Tensor:
        """The tensors `names`, one below the other."""
        return torch.cat([self.read(name) for name in names])

    def _paths(self) -> list[Path]:
        index = self._folder / "model.safetensors.index.json"
        if not index.exists():
            return [self._folder / "model.safetensors"]
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(index, "expected a JSON object with a weight_map") from error
        for name in names:
            if Path(name).name != name:
                raise CheckpointError(index, f"{name!r} is not a file name in the same folder")
        return [self._folder / name for name in sorted(names)]

    def _open_file(self, path: Path) -> Any:
        try:
            return self._stack.enter_context(safe_open(path, framework="pt"))
        except FileNotFoundError as error:
            raise CheckpointError(path, "no such file; download the checkpoint again") from error
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                path, f"truncated, or not a safetensors file ({error}); download it again"
            ) from error
