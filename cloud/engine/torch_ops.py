"""What lies between a step's matrix multiplies, in torch: on any device, in any dtype."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from cloud.engine.attention import attend_chunk, attend_decodes
from cloud.engine.step_batch import StepBatch

__all__ = ["Ops", "Rotary", "TorchOps", "attend_chunks"]


@dataclass(frozen=True, slots=True)
class Rotary:
    """How queries and keys are turned in one step.

    The sign of rotate_half is folded into `sin`: rotate_half(x)·sin == roll(x)·sin.
    """

    cos: Tensor  # [rows, 1, head_dim].
    sin: Tensor


class Ops(Protocol):
    """Everything of a layer but its matrix multiplies and its chunks' attention."""

    needs_groups: bool  # Whether decodes are to be laid out in groups of like length.

    def add_rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Adds `delta` to `x` in place; the RMS norm of the sum. All [rows, hidden]."""

    def rotate_and_store(
        self,
        qkv: Tensor,
        rotary: Rotary,
        norm: Tensor | None,
        eps: float,
        kv: Tensor,
        write_rows: Tensor,
    ) -> None:
        """Turns queries and keys in place, and writes keys and values into `kv`.

        Args:
            qkv: [rows, heads + 2·kv_heads, head_dim].
            rotary: of the rows.
            norm: weights of the norm of queries and keys before they are turned,
                [heads + kv_heads, head_dim].
            eps: of that norm.
            kv: [num_blocks, block_tokens, 2·kv_heads, head_dim].
            write_rows: int64 [rows], the KV row of each.
        """

    def attend_decodes(self, qkv: Tensor, heads: int, kv: Tensor, batch: StepBatch) -> Tensor:
        """Attention of the step's decodes, [num_decodes, heads, head_dim]."""

    def gated(self, gate_up: Tensor) -> Tensor:
        """silu(gate)·up, [rows, 2·inner] -> [rows, inner]."""


class TorchOps:
    """The operations as torch has them."""

    needs_groups = True

    def add_rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """See `Ops`."""
        if delta is not None:
            x.add_(delta)
        return rms_norm(x, weight.shape, weight, eps)

    def rotate_and_store(
        self,
        qkv: Tensor,
        rotary: Rotary,
        norm: Tensor | None,
        eps: float,
        kv: Tensor,
        write_rows: Tensor,
    ) -> None:
        """See `Ops`."""
        kv_heads, head_dim = kv.shape[2] // 2, qkv.shape[2]
        rotated = qkv.shape[1] - kv_heads
        qk = qkv[:, :rotated]
        if norm is not None:
            qk = rms_norm(qk, (head_dim,), None, eps) * norm
        half_turned = qk.roll(head_dim // 2, dims=-1)
        qkv[:, :rotated] = torch.addcmul(qk * rotary.cos, half_turned, rotary.sin)
        rows = kv.view(-1, *kv.shape[2:])
        rows.index_copy_(0, write_rows, qkv[:, rotated - kv_heads :])

    def attend_decodes(self, qkv: Tensor, heads: int, kv: Tensor, batch: StepBatch) -> Tensor:
        """See `Ops`."""
        query = qkv[:, :heads]
        blocks, rows = kv.view(kv.shape[0], -1), kv.view(-1, *kv.shape[2:])
        attended = []
        for decodes in batch.decodes:
            num = decodes.rows.stop - decodes.rows.start
            if decodes.run is not None:
                own = rows[decodes.run]
            else:
                own = blocks.index_select(0, decodes.blocks.view(-1))
            own = own.view(num, -1, *kv.shape[2:])
            attended.append(attend_decodes(query[decodes.rows], own, decodes.mask))
        return torch.cat(attended) if attended else query[:0]

    def gated(self, gate_up: Tensor) -> Tensor:
        """See `Ops`."""
        gate, up = gate_up.chunk(2, dim=-1)
        return silu(gate).mul_(up)


def attend_chunks(query: Tensor, kv: Tensor, batch: StepBatch) -> Sequence[Tensor]:
    """Attention of each of the step's chunks, [rows, heads, head_dim] each."""
    blocks = kv.view(kv.shape[0], -1)
    attended = []
    for chunk in batch.chunks:
        own = blocks.index_select(0, chunk.blocks).view(-1, *kv.shape[2:])
        attended.append(attend_chunk(query[chunk.rows], own[: chunk.length], chunk.mask))
    return attended
