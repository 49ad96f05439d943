"""Where one request's tokens lie in KV memory."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["BlockTable"]


class BlockTable:
    """Maps a request's positions to KV rows, block by block."""

    __slots__ = ("_block_tokens", "_is_run", "_length", "_slots")

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._slots: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._length = 0
        self._is_run = True  # The rows are consecutive: they can be read in place.

    def clear(self) -> None:
        """Forgets all blocks."""
        self._length = 0
        self._is_run = True

    def append(self, blocks: Sequence[int]) -> None:
        """Adds `blocks` at the end."""
        size = self._block_tokens
        end = self._length + len(blocks) * size
        if end > len(self._slots):
            grown = np.empty(max(end, 2 * len(self._slots)), dtype=np.int64)
            grown[: self._length] = self._slots[: self._length]
            self._slots = grown
        for block in blocks:
            first = block * size
            if self._length and self._slots[self._length - 1] + 1 != first:
                self._is_run = False
            self._slots[self._length : self._length + size] = np.arange(first, first + size)
            self._length += size

    def span(self, start: int, end: int) -> NDArray[np.int64]:
        """Rows of positions `start` to `end`, int64. A view: use it before the next change."""
        return self._slots[start:end]

    def upto(self, length: int, device: torch.device) -> slice | Tensor:
        """Rows of the first `length` positions, in the form that is quickest to read."""
        if self._is_run:
            first = int(self._slots[0])
            return slice(first, first + length)
        return torch.from_numpy(self._slots[:length]).to(device)
