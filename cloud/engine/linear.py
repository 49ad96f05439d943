"""Matrix multiplies by weights that never change."""

import torch
from torch import Tensor
from torch.nn.functional import linear

__all__ = ["Linear"]

# Rows that the layout of weights is chosen for; it is right for any number, and
# the quickest, or close to it, from 1 to 512.
_TYPICAL_ROWS = 32


class Linear:
    """x·Wᵀ + b, with W laid out once the way the chip reads it best.

    oneDNN rearranges a plain matrix in every multiply; done once, a decode takes
    0.45 of the time at one row and 0.7 at 32 (bfloat16, AVX-512). Elsewhere
    than on a CPU with oneDNN it is torch's `linear`.

    Args:
        weight: [out, in]. No longer needed afterwards where it was rearranged.
        bias: [out].
    """

    __slots__ = ("_bias", "_is_packed", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._bias = bias
        # The operators that torch.compile freezes weights with; not public.
        operators = torch.ops.mkldnn
        self._is_packed = (
            weight.device.type == "cpu"
            and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
            and hasattr(operators, "_linear_pointwise")
            and (weight.dtype == torch.float32 or operators._is_mkldnn_bf16_supported())  # noqa: SLF001
        )
        self._weight = (
            operators._reorder_linear_weight(weight, _TYPICAL_ROWS)  # noqa: SLF001
            if self._is_packed
            else weight
        )

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]."""
        if not self._is_packed:
            return linear(x, self._weight, self._bias)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(  # noqa: SLF001
            x, self._weight, self._bias, "none", [], ""
        )
        return product
