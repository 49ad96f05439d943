"""An engine that computes nothing and remembers everything: what stands in which block.

It carries out step plans on block tables, as an engine with paged KV does, and checks
at each step that a request finds in its blocks exactly its own tokens: so a block that
is shared, reused, swapped or forgotten wrongly shows at once.
"""

from collections.abc import Callable

from cloud.scheduler.types import ScheduledItem, StepOutput, StepPlan

__all__ = ["PagedEngine", "PagedEngineError"]


class PagedEngineError(AssertionError):
    """A plan that an engine could not carry out rightly."""


class PagedEngine:
    """Block tables and the token that stands at each of their places.

    Args:
        num_blocks: of device memory.
        num_host_blocks: of host memory, for swapped KV.
        block_tokens: tokens a block.
        content: what token a request has at a place; equal where it may be shared.
        length: after how many output tokens a request stops by itself.
        given: how many output tokens a request has when it is opened here.
    """

    def __init__(
        self,
        num_blocks: int,
        num_host_blocks: int,
        block_tokens: int,
        content: Callable[[str, int], str],
        length: Callable[[str], int],
        given: Callable[[str], int],
    ) -> None:
        self._device: list[dict[int, str]] = [{} for _ in range(num_blocks)]
        self._host: list[dict[int, str]] = [{} for _ in range(num_host_blocks)]
        self._block_tokens = block_tokens
        self._content = content
        self._length = length
        self._given_before = given
        self._given: dict[str, int] = {}
        self.tables: dict[str, list[int]] = {}

    def execute(self, plan: StepPlan) -> tuple[StepOutput, ...]:
        """Carries a plan out; token i of a request is i.

        Raises:
            PagedEngineError: a request's KV is not what it should be.
        """
        for request_id in plan.closed:
            self.tables.pop(request_id, None)
            self._given.pop(request_id, None)
        for device, host in plan.swap_out:
            self._host[host] = dict(self._device[device])
        for host, device in plan.swap_in:
            self._device[device] = dict(self._host[host])
        outputs = []
        for item in plan.items:
            self._compute(item)
            if item.samples:
                index = self._given[item.request_id]
                self._given[item.request_id] = index + 1
                is_stop = index + 1 >= self._length(item.request_id)
                outputs.append(StepOutput(item.request_id, index, is_stop))
        for item in plan.items:
            self._check(item, item.context_tokens + item.num_tokens, "after the step")
        return tuple(outputs)

    def _compute(self, item: ScheduledItem) -> None:
        name, size = item.request_id, self._block_tokens
        if item.resets_table:
            self.tables[name] = []
            self._given.setdefault(name, self._given_before(name))
        elif name not in self.tables:
            raise PagedEngineError(f"'{name}' goes on and was never opened")
        table = self.tables[name]
        table.extend(item.new_blocks)
        self._check(item, item.context_tokens, "before the step")
        for place in range(item.context_tokens, item.context_tokens + item.num_tokens):
            if place // size >= len(table):
                raise PagedEngineError(f"'{name}' has no block for token {place}")
            self._device[table[place // size]][place % size] = self._content(name, place)

    def _check(self, item: ScheduledItem, num_tokens: int, when: str) -> None:
        name, size = item.request_id, self._block_tokens
        table = self.tables[name]
        for place in range(num_tokens):
            found = self._device[table[place // size]].get(place % size)
            if found != self._content(name, place):
                raise PagedEngineError(f"'{name}' finds {found} at token {place} {when}")
