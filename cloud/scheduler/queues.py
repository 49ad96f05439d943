"""What waits. Promised work by deadline, one queue a replica and class; unpromised
work by tenant, one for all replicas.

| operation            | PromisedQueue          | FairQueue                 |
|----------------------|------------------------|---------------------------|
| push                 | O(log n) comparisons   | O(log n)                  |
| head                 | O(1)                   | O(tenants)                |
| remove               | O(log n) comparisons   | O(1), cleared up later    |
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush

from cloud.scheduler.demand import Demand
from cloud.scheduler.fairness import Account
from cloud.scheduler.request_state import LiveRequest, Stage

__all__ = ["FairQueue", "PromisedQueue"]


class PromisedQueue:
    """Requests in deadline order, ties by arrival.

    A sorted list: its moves are one memmove, which for the few thousand promises
    that can be kept at all costs less than the bookkeeping of a tree.
    """

    __slots__ = ("_entries", "demand", "kv_tokens", "most_kv", "most_steps")

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, LiveRequest]] = []
        self.demand = Demand()
        self.kv_tokens = 0  # KV that all of them need at most.
        # Since it was last empty: KV of the largest one at its end, and steps until the
        # promise that needs the most is kept, its prefill left out.
        self.most_kv = self.most_steps = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[LiveRequest]:
        return (live for _, _, live in self._entries)

    def push(self, live: LiveRequest) -> None:
        """Takes a request in, at its place."""
        insort(self._entries, (live.deadline_ns, live.seq, live))
        self.demand.add(live)
        self.kv_tokens += live.kv_tokens_at_most
        self.most_kv = max(self.most_kv, live.kv_tokens_at_most)
        self.most_steps = max(self.most_steps, live.promised_output_left)

    @property
    def first_due_ns(self) -> int:
        """The earliest deadline. Only where somebody waits."""
        return self._entries[0][0]

    @property
    def head(self) -> LiveRequest | None:
        """The first one."""
        return self._entries[0][2] if self._entries else None

    def at(self, place: int) -> LiveRequest | None:
        """The request at a place, 0 for the head; None behind the last."""
        return self._entries[place][2] if place < len(self._entries) else None

    def remove(self, live: LiveRequest) -> None:
        """Takes a request out, wherever it stands."""
        place = bisect_left(self._entries, (live.deadline_ns, live.seq))
        del self._entries[place]
        self.demand.remove(live)
        self.kv_tokens -= live.kv_tokens_at_most
        if not self._entries:
            self.most_kv = self.most_steps = 0

    def place_of(self, live: LiveRequest) -> int:
        """How many come before a request that waits here."""
        return bisect_left(self._entries, (live.deadline_ns, live.seq))

    def first_due_from(self, instant_ns: int) -> LiveRequest | None:
        """The first request whose deadline is not before an instant."""
        return self.at(bisect_left(self._entries, (instant_ns,)))


class _TenantQueue:
    """One tenant's requests by arrival, as a heap; those that left are dropped lazily."""

    __slots__ = ("_heap", "account", "num_waiting")

    def __init__(self, account: Account) -> None:
        self.account = account
        self.num_waiting = 0
        self._heap: list[tuple[int, int, LiveRequest]] = []

    def push(self, live: LiveRequest) -> None:
        # One that took another's place has its number, and the other may still
        # be in the heap: the serial makes the two differ.
        heappush(self._heap, (live.seq, live.serial, live))
        self.num_waiting += 1

    def head(self) -> LiveRequest:
        heap = self._heap
        while heap[0][2].stage is not Stage.WAITING:
            heappop(heap)
        return heap[0][2]

    def num_before(self, live: LiveRequest) -> int:
        """How many waiting requests came before another."""
        return sum(1 for seq, _, one in self._heap if seq < live.seq and one.stage is Stage.WAITING)

    def discard(self, live: LiveRequest) -> None:
        """Takes one out: the head at once, as it may come back; others have ended
        and are dropped when they get there, or when most entries are such.
        """
        self.num_waiting -= 1
        if self._heap[0][2] is live:
            heappop(self._heap)
        if len(self._heap) > 64 and self.num_waiting * 2 < len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].stage is Stage.WAITING]
            heapify(self._heap)


class FairQueue:
    """Unpromised requests: among tenants the smallest counter, then arrival."""

    __slots__ = ("_queues",)

    def __init__(self) -> None:
        # By tenant and pool (long contexts or not).
        self._queues: dict[tuple[str, bool], _TenantQueue] = {}

    def __len__(self) -> int:
        return sum(queue.num_waiting for queue in self._queues.values())

    def push(self, live: LiveRequest, *, is_long: bool) -> None:
        """Takes a request in, at its place."""
        name = (live.tenant, is_long)
        queue = self._queues.get(name)
        if queue is None:
            queue = self._queues[name] = _TenantQueue(live.account)
        queue.push(live)

    def remove(self, live: LiveRequest, *, is_long: bool) -> None:
        """Takes a request out, whose stage is no longer WAITING."""
        name = (live.tenant, is_long)
        queue = self._queues[name]
        queue.discard(live)
        if not queue.num_waiting:
            del self._queues[name]

    def place_of(self, live: LiveRequest) -> int:
        """How many of its tenant come before a request that waits here; O(n)."""
        return sum(
            queue.num_before(live) for name, queue in self._queues.items() if name[0] == live.tenant
        )

    def has_tenant(self, tenant: str) -> bool:
        """Whether something of the tenant waits."""
        return (tenant, False) in self._queues or (tenant, True) in self._queues

    def has_any(self, is_eligible: Callable[[str, bool], bool]) -> bool:
        """Whether something eligible waits."""
        return any(is_eligible(tenant, is_long) for tenant, is_long in self._queues)

    def heads(self, is_eligible: Callable[[str, bool], bool]) -> list[LiveRequest]:
        """The first request of each eligible (tenant, pool), by counter then arrival."""
        found = [
            queue.head() for name, queue in self._queues.items() if is_eligible(name[0], name[1])
        ]
        found.sort(key=lambda live: (live.account.counter, live.seq))
        return found
