"""What a queue of promised work asks for, by deadline.

Kept in buckets of deadlines, so that a test costs the same however many wait.
"""

from __future__ import annotations

from bisect import insort
from itertools import accumulate
from typing import NamedTuple

from cloud.scheduler.request_state import LiveRequest

__all__ = ["Demand", "Due", "bucket_start_ns"]

# Deadlines are told apart by 134 ms.
_BUCKET_BITS = 27


class Due(NamedTuple):
    """All work due by a time."""

    start_ns: int = 0  # Of the bucket that it includes last.
    work_ns: float = 0.0  # Prefills.
    outputs: int = 0  # Output tokens, at most.
    held: int = 0  # Tokens of KV times the steps that hold them, at most.

    def plus(self, other: Due) -> Due:
        """Both together."""
        return Due(
            self.start_ns,
            self.work_ns + other.work_ns,
            self.outputs + other.outputs,
            self.held + other.held,
        )


class Demand:
    """Work of waiting requests by deadline: O(1) a change, save for a new bucket."""

    __slots__ = ("_held", "_keys", "_outputs", "_work_ns", "work_ns")

    def __init__(self) -> None:
        self._keys: list[int] = []
        self._work_ns: dict[int, float] = {}
        self._outputs: dict[int, int] = {}
        self._held: dict[int, int] = {}  # Tokens of KV times the steps that hold them.
        self.work_ns = 0.0  # Of all buckets.

    def add(self, live: LiveRequest) -> None:
        """Counts a request that waits."""
        key = live.deadline_ns >> _BUCKET_BITS
        if key not in self._work_ns:
            insort(self._keys, key)
            self._work_ns[key] = 0.0
            self._outputs[key] = self._held[key] = 0
        self._work_ns[key] += live.demand_ns
        self.work_ns += live.demand_ns
        self._outputs[key] += live.max_output
        self._held[key] += live.max_output * live.kv_tokens_at_most

    def remove(self, live: LiveRequest) -> None:
        """Counts a request that waits no longer."""
        key = live.deadline_ns >> _BUCKET_BITS
        self._outputs[key] -= live.max_output
        self._held[key] -= live.max_output * live.kv_tokens_at_most
        if self._outputs[key]:
            self._work_ns[key] -= live.demand_ns
        else:  # Nobody is left: every request gives at least one token.
            del self._work_ns[key], self._outputs[key], self._held[key]
            self._keys.remove(key)
        # Sums of what is not whole drift: nothing is left of an empty queue.
        self.work_ns = self.work_ns - live.demand_ns if self._keys else 0.0

    def cumulative(self) -> list[Due]:
        """What is due up to the end of each bucket, in order."""
        keys = self._keys
        return list(
            map(
                Due,
                [key << _BUCKET_BITS for key in keys],
                accumulate(map(self._work_ns.__getitem__, keys)),
                accumulate(map(self._outputs.__getitem__, keys)),
                accumulate(map(self._held.__getitem__, keys)),
            )
        )


def bucket_start_ns(deadline_ns: int) -> int:
    """Start of a deadline's bucket."""
    return deadline_ns >> _BUCKET_BITS << _BUCKET_BITS
