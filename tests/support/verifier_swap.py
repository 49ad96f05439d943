"""The verifier's book of host memory: what is copied out, and that it comes back."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tests.support.verifier_state import Item, LogReplica, LogRequest, LogState

__all__ = ["SwapBook"]

Finding = tuple[str, str]
# One block of a request's table: whose, and at which place.
Content = tuple[str, int]


class SwapBook:
    """Follows blocks from the device to the host and back."""

    def __init__(self, state: LogState) -> None:
        self._state = state
        # Tables of victims whose copies out have not been planned yet.
        # Several of a block that victims shared as a prefix.
        self._evicted: dict[tuple[str, int], list[Content]] = {}
        self._host: dict[tuple[str, int], Content] = {}
        self._loaded: dict[tuple[str, int], Content] = {}
        self.returned: set[str] = set()  # Whose tables of the last plan hold what came back.

    def preempt(self, record: Mapping[str, Any], one: LogRequest) -> Iterator[Finding]:
        """Notes what a victim leaves behind."""
        back = self.forget(record["id"])
        if not record["swapped"]:
            return
        replica = self._state.replicas.get(record["replica"])
        if replica is None or not replica.num_swap_blocks:
            yield "swap", f"'{record['id']}' is swapped where there is no host memory"
        for place, block in enumerate(one.table):
            back[record["replica"], block] = (one.request_id, place)
        for key, content in back.items():
            self._evicted.setdefault(key, []).append(content)

    def forget(self, request_id: str) -> dict[tuple[str, int], Content]:
        """Takes out what came back for a request that no step has worked for since."""
        back = {key: one for key, one in self._loaded.items() if one[0] == request_id}
        for key in back:
            del self._loaded[key]
        return back

    def plan(self, replica: LogReplica, record: Mapping[str, Any]) -> Iterator[Finding]:
        """Carries out a plan's copies out."""
        name = replica.replica_id
        for device, host in record["swap_out"]:
            if not 0 <= host < replica.num_swap_blocks:
                yield "swap", f"host block {host} of '{name}' does not exist"
            contents = self._evicted.get((name, device))
            if not contents:
                yield "swap", f"block {device} of '{name}' is copied out and of no victim"
            else:
                self._host[name, host] = contents.pop(0)
        for key in [key for key in self._evicted if key[0] == name]:
            del self._evicted[key]

    def came_back(
        self, replica: LogReplica, items: Iterable[Item], copies: Iterable[tuple[int, int]]
    ) -> Iterator[Finding]:
        """A plan's copies in: each to the place in its request's table that it came from.

        The table may follow with a later plan, where there was no time for a token of it.
        """
        name = replica.replica_id
        for host, device in copies:
            content = self._host.get((name, host))
            if content is None:
                yield "swap", f"host block {host} of '{name}' is copied in and holds nothing"
            else:
                self._loaded[name, device] = content
        self.returned.clear()
        for item in items:
            for place, block in enumerate(item.new_blocks if item.resets_table else ()):
                content = self._loaded.pop((name, block), None)
                if content is not None:
                    self.returned.add(item.request_id)
                    if content != (item.request_id, place):
                        yield "swap", f"block {content[1]} of '{content[0]}' is not at its place"
