"""Host memory for the KV of victims: where copying is cheaper than computing again.

A victim's blocks are copied out in the step that takes its room, and back in the step in
which it joins again. An executor carries out a plan's copies before its items, those out
before those in; so a host block that a plan reads is given out again with the next one.
"""

from __future__ import annotations

from cloud.scheduler.kv import blocks_for
from cloud.scheduler.request_state import LiveRequest
from cloud.scheduler.types import ReplicaSpec

__all__ = ["HostMemory"]

# Most of the longest step that copies out may take: a promise waits for them.
_SHARE_OF_STEP = 1 / 16


class HostMemory:
    """One replica's host memory, and the copies of its next plan."""

    __slots__ = ("_block_ns", "_block_tokens", "_free", "_in", "_most_ns", "_num", "_out", "_read")

    def __init__(self, spec: ReplicaSpec, max_step_ns: int) -> None:
        self._num = spec.num_swap_blocks if spec.swap_block_ns > 0 else 0
        self._free = list(range(self._num - 1, -1, -1))
        self._block_ns = spec.swap_block_ns
        self._block_tokens = spec.block_tokens
        self._most_ns = _SHARE_OF_STEP * max_step_ns if self._num else 0.0
        self._out: list[tuple[int, int]] = []
        self._in: list[tuple[int, int]] = []
        self._read: list[int] = []  # Free once the next plan is out.

    @property
    def most_ns(self) -> float:
        """Longest that copies out may add to a step."""
        return self._most_ns

    @property
    def copies_ns(self) -> float:
        """Predicted time of the copies of the next plan."""
        return (len(self._out) + len(self._in)) * self._block_ns

    def save(self, live: LiveRequest, recompute_ns: float) -> bool:
        """Copies a victim's KV out, where there is room and that is cheaper.

        Args:
            live: still with its blocks.
            recompute_ns: predicted time of computing its KV again.
        """
        num = blocks_for(live.computed, self._block_tokens)
        if not 0 < num <= len(self._free) or 2 * num * self._block_ns >= recompute_ns:
            return False
        if (len(self._out) + num) * self._block_ns > self._most_ns:
            return False
        live.host = self
        live.host_blocks = [self._free.pop() for _ in range(num)]
        self._out += zip(live.blocks, live.host_blocks, strict=False)
        return True

    def load(self, live: LiveRequest, blocks: list[int]) -> None:
        """Copies a request's KV back into as many device blocks."""
        self._in += zip(live.host_blocks, blocks, strict=True)
        self._read += live.host_blocks
        live.host, live.host_blocks = None, []

    def drop(self, live: LiveRequest) -> None:
        """Forgets a request's KV."""
        self._free += live.host_blocks
        live.host, live.host_blocks = None, []
        live.computed = 0

    def take_copies(self) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
        """(device, host) and (host, device) copies of a plan that goes out now."""
        copies = tuple(self._out), tuple(self._in)
        self._out.clear()
        self._in.clear()
        self._free += self._read
        self._read.clear()
        return copies

    def is_balanced(self, held: list[int]) -> bool:
        """Whether each block is free, read by the next plan, or in one request."""
        return sorted([*self._free, *self._read, *held]) == list(range(self._num))
