"""Where one request's tokens lie in KV memory."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["BlockTable"]


class BlockTable:
    """Maps a request's positions to KV rows, block by block."""

    __slots__ = ("_block_tokens", "_blocks", "_num_blocks", "_run_length")

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._blocks: NDArray[np.int64] = np.empty(8, dtype=np.int64)
        self._num_blocks = 0
        self._run_length = 0  # Blocks at the beginning that follow one another in memory.

    def clear(self) -> None:
        """Forgets all blocks."""
        self._num_blocks = self._run_length = 0

    def append(self, blocks: Sequence[int]) -> None:
        """Adds `blocks` at the end."""
        end = self._num_blocks + len(blocks)
        if end > len(self._blocks):
            grown = np.empty(max(end, 2 * len(self._blocks)), dtype=np.int64)
            grown[: self._num_blocks] = self._blocks[: self._num_blocks]
            self._blocks = grown
        for block in blocks:
            is_next = not self._num_blocks or self._blocks[self._num_blocks - 1] + 1 == block
            if is_next and self._run_length == self._num_blocks:
                self._run_length += 1
            self._blocks[self._num_blocks] = block
            self._num_blocks += 1

    def rows(self, start: int, end: int) -> NDArray[np.int64]:
        """KV rows of positions `start` to `end`, int64."""
        positions = np.arange(start, end)
        within = positions % self._block_tokens
        return self._blocks[positions // self._block_tokens] * self._block_tokens + within

    def upto(self, length: int) -> NDArray[np.int64]:
        """Blocks of the first `length` positions, int64. A view: use it before the next change."""
        return self._blocks[: -(-length // self._block_tokens)]

    def run_upto(self, length: int) -> slice | None:
        """KV rows of the first `length` positions, where they follow one another."""
        if length > self._run_length * self._block_tokens:
            return None
        first = int(self._blocks[0]) * self._block_tokens
        return slice(first, first + length)
