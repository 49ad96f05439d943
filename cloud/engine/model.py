"""The forward pass of a Llama-family model over one step's tokens.

All tokens of a step, prefill chunks and decodes alike, go through the matrix
multiplies as one flat batch (selective batching: Orca, OSDI'22, §4.2);
attention alone is per request, or per group of requests of like length.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import embedding

from cloud.engine.checkpoint import LayerWeights, Weights
from cloud.engine.linear import Linear
from cloud.engine.lora import AdapterLayer
from cloud.engine.model_config import ModelConfig
from cloud.engine.step_batch import StepBatch
from cloud.engine.torch_ops import Ops, Rotary, TorchOps, attend_chunks

__all__ = ["Model", "rope_frequencies"]


class Model:
    """Weights and rotary tables; keeps no state between calls.

    Args:
        config: shape of the model.
        weights: all in one dtype, on one device. Not kept: the matrices are
            rearranged.
        max_context_tokens: longest position that will be asked for.
        ops: what lies between the matrix multiplies; None: torch's.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        max_context_tokens: int,
        ops: Ops | None = None,
    ) -> None:
        self.config = config
        self.ops = ops or TorchOps()
        self.max_context_tokens = max_context_tokens
        self.dtype, self.device = weights.embedding.dtype, weights.embedding.device
        self._embedding = weights.embedding
        self._layers = [_Layer(config, layer, self.ops) for layer in weights.layers]
        self._final_norm = weights.final_norm
        self._head = Linear(weights.head)
        angles = torch.outer(
            torch.arange(max_context_tokens, dtype=torch.float32), rope_frequencies(config)
        )
        # [positions, 1, head_dim], see `Rotary`.
        cos = torch.cat([angles.cos(), angles.cos()], dim=-1)
        sin = torch.cat([-angles.sin(), angles.sin()], dim=-1)
        self._cos = cos.unsqueeze(1).to(device=self.device, dtype=self.dtype)
        self._sin = sin.unsqueeze(1).to(device=self.device, dtype=self.dtype)

    def forward(self, batch: StepBatch, kv: Sequence[Tensor]) -> Tensor:
        """Computes the step and writes its keys and values into `kv`.

        Args:
            batch: the step's rows.
            kv: per layer [num_blocks, block_tokens, 2·kv_heads, head_dim].

        Returns:
            Logits, float32 [len(batch.last_rows), vocabulary].
        """
        rotary = Rotary(self._cos[batch.positions], self._sin[batch.positions])
        x = embedding(batch.tokens, self._embedding)
        for rows, embeddings in batch.soft_tokens:
            x[rows] = embeddings
        delta: Tensor | None = None  # What the layer before adds to x.
        for index, (layer, layer_kv) in enumerate(zip(self._layers, kv, strict=True)):
            adapters = [(adapter.layers[index], rows) for adapter, rows in batch.adapted]
            delta = layer.forward(x, delta, rotary, batch, adapters, layer_kv)
        # The head is the largest matrix of a small model: only the rows that count.
        x = x[batch.last_rows]
        if delta is not None:
            delta = delta[batch.last_rows]
        x = self.ops.add_rms_norm(x, delta, self._final_norm, self.config.norm_eps)
        return self._head(x).float()


class _Layer:
    """One decoder layer."""

    def __init__(self, config: ModelConfig, weights: LayerWeights, ops: Ops) -> None:
        self._config = config
        self._ops = ops
        self._input_norm = weights.input_norm
        self._qkv = Linear(weights.qkv, weights.qkv_bias)
        self._qk_norm = weights.qk_norm
        self._output = Linear(weights.output, weights.output_bias)
        self._post_norm = weights.post_norm
        self._gate_up = Linear(weights.gate_up)
        self._down = Linear(weights.down)

    def forward(
        self,
        x: Tensor,
        delta: Tensor | None,
        rotary: Rotary,
        batch: StepBatch,
        adapters: Sequence[tuple[AdapterLayer, slice]],
        kv: Tensor,
    ) -> Tensor:
        """Adds to `x`, [rows, hidden], in place what the layer before and this one's
        attention give; returns what this one's second half gives.
        """
        eps = self._config.norm_eps
        h = self._ops.add_rms_norm(x, delta, self._input_norm, eps)
        qkv = self._qkv(h)
        for adapter, rows in adapters:
            if adapter.qkv is not None:
                adapter.qkv.add_to(qkv[rows], h[rows])
        attended = self._attend(qkv, rotary, batch, kv)
        output = self._output(attended)
        for adapter, rows in adapters:
            if adapter.output is not None:
                adapter.output.add_to(output[rows], attended[rows])
        h = self._ops.add_rms_norm(x, output, self._post_norm, eps)
        gate_up = self._gate_up(h)
        for adapter, rows in adapters:
            if adapter.gate_up is not None:
                adapter.gate_up.add_to(gate_up[rows], h[rows])
        inner = self._ops.gated(gate_up)
        down = self._down(inner)
        for adapter, rows in adapters:
            if adapter.down is not None:
                adapter.down.add_to(down[rows], inner[rows])
        return down

    def _attend(self, qkv: Tensor, rotary: Rotary, batch: StepBatch, kv: Tensor) -> Tensor:
        config, num_rows = self._config, qkv.shape[0]
        qkv = qkv.view(num_rows, -1, config.head_dim)
        self._ops.rotate_and_store(
            qkv, rotary, self._qk_norm, config.norm_eps, kv, batch.write_rows
        )
        attended = [
            self._ops.attend_decodes(qkv, config.heads, kv, batch),
            *attend_chunks(qkv[:, : config.heads], kv, batch),
        ]
        return torch.cat(attended).view(num_rows, -1)


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
