"""Drives an executor step by step, with blocks handed out in scrambled order."""

import random
from collections.abc import Sequence

from torch import Tensor

from cloud.engine.api import EngineRequest, Executor
from cloud.engine.torch_executor import TorchExecutor
from cloud.scheduler.types import ScheduledItem, StepPlan, StepResult

__all__ = ["ExecutorDriver"]


class ExecutorDriver:
    """The least of a scheduler: keeps contexts and blocks, decides nothing."""

    def __init__(self, executor: Executor, *, seed: int = 0) -> None:
        description = executor.describe()
        self.executor = executor
        self.block_tokens = description.block_tokens
        self.free_blocks = list(range(description.num_blocks))
        random.Random(seed).shuffle(self.free_blocks)
        self.step_id = 0
        self.outputs: dict[str, list[int]] = {}
        self.stopped: set[str] = set()
        self._requests: dict[str, EngineRequest] = {}
        self._opened: list[EngineRequest] = []
        self._closed: list[str] = []
        self._context: dict[str, int] = {}
        self._blocks: dict[str, list[int]] = {}
        self._to_reset: set[str] = set()
        self._free_host_blocks = list(range(description.num_swap_blocks))
        self._host_blocks: dict[str, list[int]] = {}
        self._swap_out: list[tuple[int, int]] = []
        self._swap_in: list[tuple[int, int]] = []

    def open(self, request: EngineRequest) -> None:
        """Makes `request` known with the next step."""
        self._requests[request.request_id] = request
        self._opened.append(request)
        self.outputs[request.request_id] = list(request.outputs)
        self._context[request.request_id] = 0
        self._blocks[request.request_id] = []

    def close(self, request_id: str) -> None:
        """Ends a request with the next step."""
        self._closed.append(request_id)
        self.free_blocks.extend(self._blocks.pop(request_id))

    def preempt(self, request_id: str) -> None:
        """Takes a request's KV away; it is recomputed from its first token."""
        self.free_blocks.extend(self._blocks[request_id])
        self._blocks[request_id] = []
        self._context[request_id] = 0
        self._to_reset.add(request_id)

    def swap_out(self, request_id: str) -> None:
        """Sends a request's KV to host memory with the next step; its blocks are free then."""
        blocks = self._blocks[request_id]
        host = [self._free_host_blocks.pop() for _ in blocks]
        self._swap_out.extend(zip(blocks, host, strict=True))
        self._host_blocks[request_id] = host
        self.free_blocks.extend(blocks)
        self._blocks[request_id] = []

    def swap_in(self, request_id: str) -> None:
        """Gets a request's KV back with the next step, into blocks that are free now."""
        host = self._host_blocks.pop(request_id)
        blocks = [self.free_blocks.pop() for _ in host]
        self._swap_in.extend(zip(host, blocks, strict=True))
        self.replace_blocks(request_id, blocks)

    def share_prefix(self, request_id: str, owner: str, num_blocks: int) -> None:
        """Lets an unstarted request begin behind the owner's first blocks, for good."""
        self._context[request_id] = num_blocks * self.block_tokens
        self.replace_blocks(request_id, self._blocks[owner][:num_blocks])

    def remaining(self, request_id: str) -> int:
        """Tokens whose KV is still to be computed."""
        known = len(self._requests[request_id].prompt) + len(self.outputs[request_id])
        return known - self._context[request_id]

    def blocks(self, request_id: str) -> list[int]:
        """The request's block table."""
        return self._blocks[request_id]

    def replace_blocks(self, request_id: str, blocks: Sequence[int]) -> None:
        """Gives a request another table of the same length with its next step."""
        self._blocks[request_id] = list(blocks)
        self._to_reset.add(request_id)

    def plan(self, shares: Sequence[tuple[str, int]], **changes: object) -> StepPlan:
        """The next step's plan: (request, tokens) each."""
        items = []
        for request_id, num_tokens in shares:
            context = self._context[request_id]
            remaining = self.remaining(request_id)
            table = self._blocks[request_id]
            resets = context == 0 or request_id in self._to_reset
            self._to_reset.discard(request_id)
            num_kept = 0 if resets else len(table)
            num_new = -(-(context + num_tokens) // self.block_tokens) - len(table)
            table.extend(self.free_blocks.pop() for _ in range(num_new))
            items.append(
                ScheduledItem(
                    request_id,
                    context_tokens=context,
                    num_tokens=num_tokens,
                    is_prefill=not (self.outputs[request_id] and num_tokens == 1),
                    samples=num_tokens == remaining,
                    new_blocks=tuple(table[num_kept:]),
                    resets_table=resets,
                )
            )
            self._context[request_id] = context + num_tokens
        self.step_id += 1
        closed, self._closed = tuple(self._closed), []
        swaps = {"swap_out": tuple(self._swap_out), "swap_in": tuple(self._swap_in)}
        # Free from the next step on: a step copies out before it copies in.
        self._free_host_blocks.extend(host for host, _ in self._swap_in)
        self._swap_out, self._swap_in = [], []
        return StepPlan("r0", self.step_id, tuple(items), closed, **swaps | changes)  # type: ignore[arg-type]

    def take_opened(self) -> list[EngineRequest]:
        """What is new in the next step."""
        opened, self._opened = self._opened, []
        return opened

    def step(self, *shares: tuple[str, int], **changes: object) -> StepResult:
        """Plans and executes one step, and keeps its outputs."""
        result = self.executor.execute(self.plan(shares, **changes), self.take_opened())
        for output in result.outputs:
            self.outputs[output.request_id].append(output.token)
            if output.is_stop:
                self.stopped.add(output.request_id)
        return result

    def step_logits(self, *shares: tuple[str, int], **changes: object) -> dict[str, Tensor]:
        """A step of a torch executor; the logits, float32 [vocabulary], by request."""
        executor = self.executor
        assert isinstance(executor, TorchExecutor)
        plan = self.plan(shares, **changes)
        logits = executor.step_logits(plan, self.take_opened())
        outputs = executor.choose(plan, logits)
        for output in outputs:
            self.outputs[output.request_id].append(output.token)
        return {output.request_id: row for output, row in zip(outputs, logits, strict=True)}

    def generate(self, request: EngineRequest, num_outputs: int) -> list[int]:
        """One request alone, its prompt in one chunk."""
        self.open(request)
        for _ in range(num_outputs):
            self.step((request.request_id, self.remaining(request.request_id)))
        self.close(request.request_id)
        return self.outputs[request.request_id]
