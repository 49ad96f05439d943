"""The built kernels as operations on tensors."""

import ctypes
from ctypes import c_float, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cloud.engine.errors import EngineError
from cloud.engine.native.build import build_kernels
from cloud.engine.step_batch import StepBatch
from cloud.engine.torch_ops import Rotary

__all__ = ["NativeOps"]

# How each kernel is called, see kernels.cpp: p a pointer, i an int64, f a float32.
_SIGNATURES = {"rms_norm": "ppppiif", "gated": "ppii", "rotate": "ppppfppiiii"}
_SIGNATURES["attend"] = "pppppiiiiiip"
_TYPES = {"p": c_void_p, "i": c_int64, "f": c_float}
_SUFFIXES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class NativeOps:
    """`cloud.engine.torch_ops.Ops` on a CPU, each in one pass over its data.

    Args:
        dtype: float32 or bfloat16, of all tensors.
        folder: where the built library is kept.

    Raises:
        EngineError: it cannot be built or loaded; the message says why.
    """

    needs_groups = False

    def __init__(self, dtype: torch.dtype, folder: Path) -> None:
        self.dtype = dtype
        path = build_kernels(folder)
        try:
            library = ctypes.CDLL(str(path))
            kernels: dict[str, Any] = {
                name: getattr(library, f"{name}_{_SUFFIXES[dtype]}") for name in _SIGNATURES
            }
        except (OSError, AttributeError) as error:
            raise EngineError(f"{path} cannot be loaded ({error}); remove it") from error
        for name, letters in _SIGNATURES.items():
            kernels[name].argtypes = [_TYPES[letter] for letter in letters]
            kernels[name].restype = None
        self._rms_norm, self._gated = kernels["rms_norm"], kernels["gated"]
        self._rotate, self._attend = kernels["rotate"], kernels["attend"]

    def add_rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """See `Ops`."""
        out = torch.empty_like(x)
        self._rms_norm(
            x.data_ptr(),
            None if delta is None else delta.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            *x.shape,
            eps,
        )
        return out

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
        kv_heads = kv.shape[2] // 2
        num_rows, all_heads, head_dim = qkv.shape
        self._rotate(
            qkv.data_ptr(),
            rotary.cos.data_ptr(),
            rotary.sin.data_ptr(),
            None if norm is None else norm.data_ptr(),
            eps,
            kv.data_ptr(),
            write_rows.data_ptr(),
            num_rows,
            all_heads - 2 * kv_heads,
            kv_heads,
            head_dim,
        )

    def attend_decodes(self, qkv: Tensor, heads: int, kv: Tensor, batch: StepBatch) -> Tensor:
        """See `Ops`."""
        paged = batch.paged
        if paged is None:
            raise ValueError("the batch has no block tables; lay it out with needs_groups=False")
        num, head_dim = len(paged.lengths), qkv.shape[2]
        out = qkv.new_empty(num, heads, head_dim)
        if num:
            self._attend(
                qkv.data_ptr(),
                kv.data_ptr(),
                paged.blocks.data_ptr(),
                paged.first_blocks.data_ptr(),
                paged.lengths.data_ptr(),
                num,
                paged.longest,
                heads,
                kv.shape[2] // 2,
                head_dim,
                kv.shape[1],
                out.data_ptr(),
            )
        return out

    def gated(self, gate_up: Tensor) -> Tensor:
        """See `Ops`."""
        num_rows, width = gate_up.shape
        out = gate_up.new_empty(num_rows, width // 2)
        self._gated(gate_up.data_ptr(), out.data_ptr(), num_rows, width // 2)
        return out
