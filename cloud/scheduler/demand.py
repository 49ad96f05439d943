"""What a queue of promised work asks for, by deadline.

Kept in buckets of deadlines, so that a test costs the same however many wait.
"""

from __future__ import annotations

from bisect import insort
from itertools import accumulate

from cloud.scheduler.request_state import LiveRequest

__all__ = ["Demand", "bucket_start_ns"]

# Deadlines are told apart by 134 ms.
_BUCKET_BITS = 27


class Demand:
    """Work of waiting requests by deadline: O(1) a change, save for a new bucket."""

    __slots__ = ("_keys", "_outputs", "_work_ns")

    def __init__(self) -> None:
        self._keys: list[int] = []
        self._work_ns: dict[int, float] = {}
        self._outputs: dict[int, int] = {}

    def add(self, live: LiveRequest) -> None:
        """Counts a request that waits."""
        key = live.deadline_ns >> _BUCKET_BITS
        if key not in self._work_ns:
            insort(self._keys, key)
            self._work_ns[key] = 0.0
            self._outputs[key] = 0
        self._work_ns[key] += live.demand_ns
        self._outputs[key] += live.max_output

    def remove(self, live: LiveRequest) -> None:
        """Counts a request that waits no longer."""
        key = live.deadline_ns >> _BUCKET_BITS
        self._outputs[key] -= live.max_output
        if self._outputs[key]:
            self._work_ns[key] -= live.demand_ns
        else:  # Nobody is left: every request gives at least one token.
            del self._work_ns[key], self._outputs[key]
            self._keys.remove(key)

    def cumulative(self) -> tuple[list[int], list[float], list[int]]:
        """Starts of the buckets in ns, and the work and output tokens due up to each."""
        keys = self._keys
        return (
            [key << _BUCKET_BITS for key in keys],
            list(accumulate(self._work_ns[key] for key in keys)),
            list(accumulate(self._outputs[key] for key in keys)),
        )


def bucket_start_ns(deadline_ns: int) -> int:
    """Start of a deadline's bucket."""
    return deadline_ns >> _BUCKET_BITS << _BUCKET_BITS
