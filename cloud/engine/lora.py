"""LoRA adapters: small additions to a base model's matrices, in PEFT's file format.

W·x becomes W·x + (α/r)·B·(A·x) (Hu et al., ICLR'22, §4.1), with α/√r where the
adapter says so (rsLoRA, Kalajdzievski 2023).
"""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.functional import linear

from cloud.engine.errors import CheckpointError
from cloud.engine.model_config import ModelConfig

__all__ = ["Adapter", "AdapterLayer", "LowRank", "load_adapter"]

# Of a stored number; shorter ones mean something only with their scales.
_LEAST_BYTES = 2

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_KEY = re.compile(
    r"base_model\.model\.(?P<module>model\.layers\.(?P<layer>\d+)"
    r"\.(?:self_attn\.[qkvo]|mlp\.(?:gate|up|down))_proj)\.lora_(?P<part>[AB])\.weight"
)
# The matrices that are multiplied as one, and their parts in order.
_FUSED = {
    "qkv": ("q", "k", "v"),
    "output": ("o",),
    "gate_up": ("gate", "up"),
    "down": ("down",),
}


@dataclass(frozen=True, slots=True)
class LowRank:
    """What is added to one matrix multiply; the scale is in `up`."""

    down: Tensor  # [rank, in]
    up: Tensor  # [out, rank]

    def add_to(self, product: Tensor, x: Tensor) -> None:
        """Adds (x·downᵀ)·upᵀ to `product`, in place."""
        product += linear(linear(x, self.down), self.up)


@dataclass(frozen=True, slots=True)
class AdapterLayer:
    """One decoder layer's additions; None where a matrix is left as it is."""

    qkv: LowRank | None = None
    output: LowRank | None = None
    gate_up: LowRank | None = None
    down: LowRank | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """A whole adapter, for the base model that it was loaded with."""

    name: str
    layers: tuple[AdapterLayer, ...]


def load_adapter(
    name: str, folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> Adapter:
    """Reads a folder that PEFT's `save_pretrained` wrote.

    Args:
        name: what requests call it.
        folder: holds adapter_config.json and adapter_model.safetensors.
        config: of the base model.
        dtype: of the base model.
        device: where the base model is.

    Raises:
        CheckpointError: a file is missing or damaged, the adapter is of a kind
            that this engine does not run, or it does not fit the base model.
    """
    settings = _Settings(folder / _CONFIG)
    pairs = _read_pairs(folder / _WEIGHTS, config)
    scaled = {
        module: (down, up * settings.scale(module, down.shape[0]))
        for module, (down, up) in pairs.items()
    }
    layers = tuple(
        AdapterLayer(
            **{fused: _fuse(scaled, index, fused, config, dtype, device) for fused in _FUSED}
        )
        for index in range(config.layers)
    )
    return Adapter(name, layers)


class _Settings:
    """adapter_config.json: what scale each matrix has, and the refusal of what is not LoRA."""

    def __init__(self, path: Path) -> None:
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise CheckpointError(
                path, f"cannot be read ({error.strerror}); expected a folder that PEFT wrote"
            ) from error
        except ValueError as error:
            raise CheckpointError(path, f"is not JSON ({error})") from error
        if not isinstance(raw, dict):
            raise CheckpointError(path, "expected a JSON object")
        for key, only in (
            ("peft_type", "LORA"),
            ("bias", "none"),
            ("use_dora", False),
            ("fan_in_fan_out", False),
            ("modules_to_save", None),
            ("lora_bias", False),
        ):
            if (value := raw.get(key, only)) != only:
                raise CheckpointError(path, f"{key} is {value!r}; this engine runs {only!r} only")
        self._path = path
        self._is_rank_stabilised = bool(raw.get("use_rslora", False))
        self._alpha = self._number("lora_alpha", raw.get("lora_alpha"))
        patterns = raw.get("alpha_pattern") or {}
        if not isinstance(patterns, dict):
            raise CheckpointError(path, f"alpha_pattern must be an object, got {patterns!r}")
        self._alpha_of = {
            str(key): self._number("alpha_pattern", value) for key, value in patterns.items()
        }

    def scale(self, module: str, rank: int) -> float:
        """What B·A of `module` is multiplied with."""
        alpha = self._alpha
        for pattern, value in self._alpha_of.items():
            # As PEFT matches: the end of the module's path, from a dot on.
            if re.fullmatch(rf"(.*\.)?({pattern})", module):
                alpha = value
                break
        return alpha / (math.sqrt(rank) if self._is_rank_stabilised else rank)

    def _number(self, key: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(self._path, f"{key} must be a number, got {value!r}")
        return float(value)


def _read_pairs(path: Path, config: ModelConfig) -> dict[str, tuple[Tensor, Tensor]]:
    """A [rank, in] and B [out, rank] of each module, float32, shapes checked."""
    parts: dict[str, dict[str, Tensor]] = {}
    for key, tensor in _read_tensors(path).items():
        match = _KEY.fullmatch(key)
        if match is None:
            raise CheckpointError(
                path, f"tensor {key} is no LoRA of q, k, v, o, gate, up or down; cannot be applied"
            )
        if int(match["layer"]) >= config.layers:
            raise CheckpointError(
                path, f"tensor {key}: the base model {config.name} has {config.layers} layers"
            )
        parts.setdefault(match["module"], {})[match["part"]] = tensor.float()
    if not parts:
        raise CheckpointError(path, "holds no tensors; expected LoRA weights")
    pairs = {}
    for module, found in parts.items():
        if set(found) != {"A", "B"}:
            raise CheckpointError(path, f"{module} has lora_{min(found)} alone; expected A and B")
        out, into = _sizes(config)[module.rpartition(".")[2].removesuffix("_proj")]
        down, up = found["A"], found["B"]
        rank = down.shape[0]
        if down.shape != (rank, into) or up.shape != (out, rank):
            raise CheckpointError(
                path,
                f"{module} has A {list(down.shape)} and B {list(up.shape)}; the base model "
                f"{config.name} implies [rank, {into}] and [{out}, rank]",
            )
        pairs[module] = (down, up)
    return pairs


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise CheckpointError(path, "no such file; expected a folder that PEFT wrote") from error
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            path, f"truncated, or not a safetensors file ({error}); copy it again"
        ) from error
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or tensor.dtype.itemsize < _LEAST_BYTES:
            raise CheckpointError(
                path, f"{name} is stored as {tensor.dtype}; expected float32, bfloat16 or float16"
            )
        if not bool(tensor.isfinite().all()):
            raise CheckpointError(path, f"{name} holds values that are not finite; train it anew")
    return tensors


def _sizes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """(out, in) of each projection."""
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    hidden, inner = config.hidden, config.intermediate
    return {
        "q": (q, hidden),
        "k": (kv, hidden),
        "v": (kv, hidden),
        "o": (hidden, q),
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
    }


def _fuse(
    pairs: dict[str, tuple[Tensor, Tensor]],
    layer: int,
    fused: str,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> LowRank | None:
    """The pairs of matrices that are multiplied as one: A below A, B block by block."""
    downs: list[Tensor] = []
    ups: list[Tensor] = []
    for name in _FUSED[fused]:
        place = "self_attn" if name in ("q", "k", "v", "o") else "mlp"
        out, into = _sizes(config)[name]
        pair = pairs.get(f"model.layers.{layer}.{place}.{name}_proj")
        down, up = pair or (torch.empty(0, into), torch.empty(out, 0))
        downs.append(down)
        ups.append(up)
    if not any(map(len, downs)):
        return None
    below = torch.cat(downs)
    beside = torch.zeros(sum(map(len, ups)), len(below))
    row = column = 0
    for up in ups:
        out, rank = up.shape
        beside[row : row + out, column : column + rank] = up
        row, column = row + out, column + rank
    return LowRank(below.to(device=device, dtype=dtype), beside.to(device=device, dtype=dtype))
