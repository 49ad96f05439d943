"""The forward pass of a Llama-family model over one step's tokens.

All tokens of a step, prefill chunks and decodes alike, go through the matrix
multiplies as one flat batch (selective batching: Orca, OSDI'22, §4.2);
attention alone is per request.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm, silu

from cloud.engine.attention import attend
from cloud.engine.checkpoint import LayerWeights, Weights
from cloud.engine.model_config import ModelConfig

__all__ = ["Model", "Segment", "rope_frequencies"]


@dataclass(slots=True)
class Segment:
    """One request's rows of a flat batch, and where its KV rows are."""

    start: int  # First row.
    end: int  # One past the last row.
    # KV rows of all positions up to the last one computed: a run of rows, read
    # in place, or the index of each, int64 [length].
    slots: slice | Tensor
    mask: Tensor | None


class Model:
    """Weights and rotary tables; keeps no state between calls.

    Args:
        config: shape of the model.
        weights: all in one dtype, on one device.
        max_context_tokens: longest position that will be asked for.
    """

    def __init__(self, config: ModelConfig, weights: Weights, max_context_tokens: int) -> None:
        self.config = config
        self.weights = weights
        self.max_context_tokens = max_context_tokens
        dtype, device = weights.embedding.dtype, weights.embedding.device
        angles = torch.outer(
            torch.arange(max_context_tokens, dtype=torch.float32), rope_frequencies(config)
        )
        # [positions, 1, head_dim]. The sign of rotate_half is folded into sin.
        cos = torch.cat([angles.cos(), angles.cos()], dim=-1)
        sin = torch.cat([-angles.sin(), angles.sin()], dim=-1)
        self._cos = cos.unsqueeze(1).to(device=device, dtype=dtype)
        self._sin = sin.unsqueeze(1).to(device=device, dtype=dtype)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        write_slots: Tensor,
        segments: Sequence[Segment],
        last_rows: Tensor,
        kv: Sequence[Tensor],
    ) -> Tensor:
        """Computes the step and writes its keys and values into `kv`.

        Args:
            tokens: int64 [rows].
            positions: int64 [rows], of each token in its own request.
            write_slots: int64 [rows], the KV row of each token.
            segments: in row order, covering all rows.
            last_rows: int64 [n], the rows whose next token is wanted.
            kv: per layer [num_slots, 2·kv_heads, head_dim].

        Returns:
            Logits, float32 [n, vocabulary].
        """
        weights, eps = self.weights, self.config.norm_eps
        cos, sin = self._cos[positions], self._sin[positions]
        x = embedding(tokens, weights.embedding)
        for layer, layer_kv in zip(weights.layers, kv, strict=True):
            h = rms_norm(x, layer.input_norm.shape, layer.input_norm, eps)
            attended = self._attention(layer, h, cos, sin, write_slots, segments, layer_kv)
            x = x + linear(attended, layer.output, layer.output_bias)
            h = rms_norm(x, layer.post_norm.shape, layer.post_norm, eps)
            gate, up = linear(h, layer.gate_up).chunk(2, dim=-1)
            x = x + linear(silu(gate) * up, layer.down)
        # The head is the largest matrix of a small model: only the rows that count.
        x = rms_norm(x[last_rows], weights.final_norm.shape, weights.final_norm, eps)
        return linear(x, weights.head).float()

    def _attention(
        self,
        layer: LayerWeights,
        h: Tensor,
        cos: Tensor,
        sin: Tensor,
        write_slots: Tensor,
        segments: Sequence[Segment],
        kv: Tensor,
    ) -> Tensor:
        config = self.config
        rows, rotated = h.shape[0], config.heads + config.kv_heads
        qkv = linear(h, layer.qkv, layer.qkv_bias).view(rows, -1, config.head_dim)
        qk = qkv[:, :rotated]
        if layer.qk_norm is not None:
            qk = rms_norm(qk, (config.head_dim,), None, config.norm_eps) * layer.qk_norm
        # rotate_half(x)·sin == roll(x)·sin with the sign folded in.
        half_turned = qk.roll(config.head_dim // 2, dims=-1)
        qkv[:, :rotated] = torch.addcmul(qk * cos, half_turned, sin)
        kv.index_copy_(0, write_slots, qkv[:, config.heads :])
        query = qkv[:, : config.heads]
        attended = [
            attend(
                query[s.start : s.end],
                kv[s.slots] if isinstance(s.slots, slice) else kv.index_select(0, s.slots),
                s.mask,
            )
            for s in segments
        ]
        return torch.cat(attended).view(rows, -1)


def rope_frequencies(config: ModelConfig) -> Tensor:
    """Radians a position turns each pair of a head by, float32 [head_dim / 2].

    θ^(−2i/d) (RoFormer, §3.4.2), with the low frequencies stretched where the
    checkpoint asks for it (Llama 3.1's `apply_scaling`).
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = ((scaling.original_max_tokens / wavelengths - low) / (high - low)).clamp(0, 1)
    return frequencies * ((1 - smooth) / scaling.factor + smooth)
