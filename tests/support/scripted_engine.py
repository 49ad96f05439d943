"""An engine without a model, for tests of what drives engines."""

import asyncio
from collections.abc import Sequence
from typing import Any

from cloud.engine.api import EngineDescription, EngineLostError, EngineRequest
from cloud.scheduler.types import StepOutput, StepPlan, StepResult

__all__ = ["ScriptedEngine"]


class ScriptedEngine:
    """Gives its allowed tokens in turn (or letters), at once, or when it is let.

    Attributes:
        is_open: steps wait while it is not set.
        executed: request ids of every executed item, in order.
        is_stopped: whether `stop` was called.
    """

    def __init__(self, *, vocabulary: int = 514, max_context_tokens: int = 4096) -> None:
        self.is_open = asyncio.Event()
        self.is_open.set()
        self.executed: list[str] = []
        self.closed: list[str] = []
        # What to say instead of the alphabet, a byte a token.
        self.spoken = bytes(range(ord("a"), ord("z") + 1))
        # Where set, each step takes one permit.
        self.pace: asyncio.Semaphore | None = None
        self.is_stopped = False
        self.num_steps = 0
        self.is_executing = asyncio.Event()
        self._lost: asyncio.Future[Any] | None = None
        self._known: dict[str, EngineRequest] = {}
        self._given: dict[str, int] = {}
        self._vocabulary = vocabulary
        self._max_context_tokens = max_context_tokens

    def lose(self, reason: str) -> None:
        """Fails the running step, or else the next one."""
        if self._lost is not None and not self._lost.done():
            self._lost.set_exception(EngineLostError(reason))

    async def start(self) -> EngineDescription:
        """At once."""
        self._lost = asyncio.get_running_loop().create_future()
        return EngineDescription(
            kind="simulated",
            model="scripted",
            incarnation="1",
            max_context_tokens=self._max_context_tokens,
            block_tokens=16,
            num_blocks=1024,
            vocabulary_tokens=self._vocabulary,
            kv_bytes_per_token=0,
        )

    async def execute(self, plan: StepPlan, opened: Sequence[EngineRequest]) -> StepResult:
        """Gives a token for each item that samples; refuses what it was never told of."""
        self.num_steps += 1
        for name in plan.closed:
            self.closed.append(name)
            del self._known[name]
        for request in opened:
            self._known[request.request_id] = request
            self._given[request.request_id] = len(request.outputs)
        self.executed += [item.request_id for item in plan.items]
        self.is_executing.set()
        await self._let()
        if self.pace is not None:
            await self.pace.acquire()
        return StepResult(
            plan.step_id,
            tuple(self._output(item.request_id) for item in plan.items if item.samples),
            elapsed_ns=0,
        )

    async def stop(self) -> None:
        """At once."""
        self.is_stopped = True
        if self._lost is not None and not self._lost.done():
            self._lost.cancel()

    async def _let(self) -> None:
        lost = self._lost
        if lost is None or lost.cancelled():
            raise EngineLostError("stopped")
        if self.is_open.is_set() and not lost.done():
            return
        opening: asyncio.Future[Any] = asyncio.ensure_future(self.is_open.wait())
        try:
            await asyncio.wait({opening, lost}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            opening.cancel()
        if lost.done():
            lost.result()

    def _output(self, request_id: str) -> StepOutput:
        index = self._given[request_id]
        self._given[request_id] = index + 1
        allowed = self._known[request_id].sampling.allowed_tokens
        words = allowed or self.spoken
        token = words[index % len(words)]
        return StepOutput(request_id, token)
