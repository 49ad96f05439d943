"""The scene decoder and the control network in torch: the reference of every other backend.

Needs torch.
"""

import hashlib
import itertools
import math
from dataclasses import astuple, dataclass

import torch
from torch import Tensor
from torch.nn import functional

from edge.runtime.shapes import ControlShape, SceneShape

__all__ = ["ControlNetwork", "Layer", "SceneDecoder", "SceneWeights", "merge_by_lse"]


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer, each (out, in)."""

    norm_in: Tensor
    qkv: Tensor  # Queries, keys and values, one after the other.
    out: Tensor
    norm_mlp: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class SceneWeights:
    """All of a scene decoder's weights."""

    shape: SceneShape
    embedding: Tensor  # (vocabulary, width).
    layers: tuple[Layer, ...]
    norm_out: Tensor

    @classmethod
    def random(
        cls, shape: SceneShape, seed: int, dtype: torch.dtype = torch.float32
    ) -> "SceneWeights":
        """Of an untrained model, the same for the same seed."""
        generator = torch.Generator().manual_seed(seed)

        def matrix(rows: int, columns: int) -> Tensor:
            values = torch.randn(rows, columns, generator=generator, dtype=torch.float32)
            return (values / math.sqrt(columns)).to(dtype)

        ones = torch.ones(shape.width, dtype=dtype)
        qkv_rows = (shape.heads + 2 * shape.kv_heads) * shape.head_width
        layers = tuple(
            Layer(
                ones,
                matrix(qkv_rows, shape.width),
                matrix(shape.width, shape.width),
                ones,
                matrix(2 * shape.hidden, shape.width),
                matrix(shape.width, shape.hidden),
            )
            for _ in range(shape.layers)
        )
        return cls(shape, matrix(shape.vocabulary, shape.width), layers, ones)

    @property
    def digest(self) -> str:
        """Of shape and numbers: the same for the same model."""
        found = hashlib.sha256(repr(astuple(self.shape)).encode())
        for tensor in (
            self.embedding,
            self.norm_out,
            *(t for one in self.layers for t in _of(one)),
        ):
            found.update(tensor.contiguous().float().numpy().tobytes())
        return found.hexdigest()


class SceneDecoder:
    """Reads a scene chunk by chunk into KV memory that is set aside once.

    A chunk's queries see all that came before it, and of the chunk itself what came up to
    them: the lower-right causal mask. The two parts are attended to apart, without any
    mask of the past, and merged by their log-sum-exp (Dao et al. 2022, FlashAttention,
    section 3.1).

    Args:
        weights: of the model; decides the dtype.
    """

    def __init__(self, weights: SceneWeights) -> None:
        shape = weights.shape
        self._weights = weights
        self._shape = shape
        dtype = weights.embedding.dtype
        size = (shape.layers, shape.kv_heads, shape.max_tokens, shape.head_width)
        self._keys = torch.zeros(size, dtype=dtype)
        self._values = torch.zeros(size, dtype=dtype)
        half = shape.head_width // 2
        rates = shape.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(shape.max_tokens, dtype=torch.float64)[:, None] * rates
        self._cos, self._sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def chunk(self, tokens: Tensor, start: int) -> Tensor:
        """Computes a chunk.

        Args:
            tokens: (n,) int64.
            start: tokens before it, all of them computed.

        Returns:
            (n, width): the last layer's output, normed.
        """
        weights, epsilon = self._weights, self._shape.epsilon
        hidden = weights.embedding[tokens]
        end = start + len(tokens)
        cos, sin = self._cos[start:end], self._sin[start:end]
        for number, layer in enumerate(weights.layers):
            normed = functional.rms_norm(hidden, hidden.shape[-1:], layer.norm_in, epsilon)
            hidden = hidden + self._attend(normed, number, layer, (start, end), (cos, sin))
            normed = functional.rms_norm(hidden, hidden.shape[-1:], layer.norm_mlp, epsilon)
            gate, up = functional.linear(normed, layer.gate_up).chunk(2, dim=-1)
            hidden = hidden + functional.linear(functional.silu(gate) * up, layer.down)
        return functional.rms_norm(hidden, hidden.shape[-1:], weights.norm_out, epsilon)

    def _attend(
        self,
        hidden: Tensor,
        number: int,
        layer: Layer,
        span: tuple[int, int],
        rope: tuple[Tensor, Tensor],
    ) -> Tensor:
        shape, (start, end) = self._shape, span
        n, width, groups = end - start, shape.head_width, shape.heads // shape.kv_heads
        qkv = functional.linear(hidden, layer.qkv).view(n, -1, width)
        queries, keys, values = torch.split(
            qkv, [shape.heads, shape.kv_heads, shape.kv_heads], dim=1
        )
        queries = _rotate(queries, *rope).transpose(0, 1)  # (heads, n, width).
        keys, values = _rotate(keys, *rope).transpose(0, 1), values.transpose(0, 1)
        self._keys[number, :, start:end] = keys
        self._values[number, :, start:end] = values
        # Own chunk: causal, each key head beside its group of query heads.
        own, own_lse = _attention(
            queries, keys.repeat_interleave(groups, 0), values.repeat_interleave(groups, 0), True
        )
        if start:
            # The past: no mask, so that a group's queries can be one long list.
            past, past_lse = _attention(
                queries.reshape(shape.kv_heads, groups * n, width),
                self._keys[number, :, :start],
                self._values[number, :, :start],
                False,
            )
            past = past.reshape(shape.heads, n, width)
            own = merge_by_lse(own, own_lse, past, past_lse.reshape(shape.heads, n))
        return functional.linear(own.transpose(0, 1).reshape(n, -1), layer.out)


class ControlNetwork:
    """From what was measured and what the scene is to commands.

    Args:
        shape: of the network.
        scene_width: of what the scene decoder gives.
        seed: of its random weights.
    """

    def __init__(self, shape: ControlShape, scene_width: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        widths = [shape.inputs + scene_width, *[shape.hidden] * (shape.layers - 1), shape.outputs]
        self.shape = shape
        self.matrices = [
            torch.randn(out, into, generator=generator) / math.sqrt(into)
            for into, out in itertools.pairwise(widths)
        ]
        self._nothing = torch.zeros(scene_width)

    def step(self, observation: Tensor, scene: Tensor | None) -> Tensor:
        """One control step.

        Args:
            observation: (inputs,) float32.
            scene: (scene width,) float32; None: none was read yet.

        Returns:
            (outputs,) float32, each from -1 to 1.
        """
        hidden = torch.cat([observation, self._nothing if scene is None else scene])
        for matrix in self.matrices:
            hidden = torch.tanh(matrix @ hidden)
        return hidden


def merge_by_lse(left: Tensor, left_lse: Tensor, right: Tensor, right_lse: Tensor) -> Tensor:
    """Attention over two sets of keys, from that over each and its log-sum-exp.

    Args:
        left: (heads, n, width).
        left_lse: (heads, n) float32, natural logarithm.
        right: as `left`.
        right_lse: as `left_lse`.
    """
    share = torch.sigmoid(left_lse - right_lse).unsqueeze(-1).to(left.dtype)
    return right + share * (left - right)


def _attention(
    queries: Tensor, keys: Tensor, values: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """(output (heads, n, width), log-sum-exp (heads, n) float32)."""
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(  # noqa: SLF001
        queries.unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0), 0.0, is_causal
    )
    return output[0], lse[0]


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions, halves side by side as in Llama; heads are (n, heads, width)."""
    left, right = heads.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


def _of(layer: Layer) -> tuple[Tensor, ...]:
    return (layer.norm_in, layer.qkv, layer.out, layer.norm_mlp, layer.gate_up, layer.down)
