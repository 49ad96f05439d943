"""An engine that runs no model: steps take what a cost model says.

Part of the package, so that a server, a simulation or a test can use the whole
of everything else without a model.
"""

import asyncio
import time
import uuid
from collections.abc import Sequence

from cloud.engine.api import EngineDescription, EngineLostError, EngineRequest
from cloud.engine.live_requests import LiveRequest, LiveRequests
from cloud.engine.seeded import uniform
from cloud.scheduler.types import StepOutput, StepPlan, StepResult
from headway.clock import s_from_ns
from headway.cost_model import CostModel, StepShape

__all__ = ["SimulatedEngine", "SimulatedExecutor"]


class SimulatedExecutor:
    """Says how long each step takes, and does not wait: for virtual time.

    A request's output token i is `allowed_tokens[i % n]`, or where all are
    allowed the letter i % 26 of the alphabet, as bytes count them.

    Args:
        cost_model: of the steps' times; its margin is left out.
        num_blocks: blocks of KV memory to pretend.
        block_tokens: tokens in each of them.
        max_context_tokens: longest prompt plus output; None: what the blocks hold.
        vocabulary_tokens: that of the tiny checkpoint by default.
        num_swap_blocks: blocks of host memory to pretend.
        noise: largest deviation of a step's time, as a share of it, below 1.
        seed: of the noise. The same seed and step id give the same deviation.
        incarnation: name of this start; None: a fresh one.
    """

    def __init__(
        self,
        cost_model: CostModel,
        *,
        num_blocks: int = 1024,
        block_tokens: int = 16,
        max_context_tokens: int | None = None,
        vocabulary_tokens: int = 514,
        num_swap_blocks: int = 0,
        noise: float = 0.0,
        seed: int = 0,
        incarnation: str | None = None,
    ) -> None:
        if not 0 <= noise < 1:
            raise ValueError(f"noise must be at least 0 and below 1, got {noise}")
        self._cost_model = cost_model
        self._noise = noise
        self._seed = seed
        self._description = EngineDescription(
            kind="simulated",
            model="simulated",
            incarnation=incarnation or uuid.uuid4().hex,
            max_context_tokens=max_context_tokens or num_blocks * block_tokens,
            block_tokens=block_tokens,
            num_blocks=num_blocks,
            vocabulary_tokens=vocabulary_tokens,
            kv_bytes_per_token=0,
            num_swap_blocks=num_swap_blocks,
        )
        self._requests = LiveRequests(self._description)

    def describe(self) -> EngineDescription:
        """What the engine is."""
        return self._description

    def execute(self, plan: StepPlan, opened: Sequence[EngineRequest]) -> StepResult:
        """Gives a step's tokens and the time that it would take.

        Raises:
            PlanError: the plan contradicts what the executor knows.
        """
        for request_id in plan.closed:
            self._requests.close(request_id)
        for request in opened:
            self._requests.open(request)
        chunks: list[tuple[int, int]] = []
        decode_contexts: list[int] = []
        outputs = []
        for item in plan.items:
            live = self._requests.extend(item)
            if item.is_prefill:
                chunks.append((item.context_tokens, item.num_tokens))
            else:
                decode_contexts.append(item.context_tokens)
            if item.samples:
                outputs.append(self._output(live))
        if plan.is_empty:
            return StepResult(plan.step_id, (), 0)
        elapsed_ns = self._cost_model.predict_ns(StepShape.of(chunks, decode_contexts))
        if self._noise:
            deviation = self._noise * (2 * uniform(self._seed, plan.step_id) - 1)
            elapsed_ns = round(elapsed_ns * (1 + deviation))
        return StepResult(plan.step_id, tuple(outputs), elapsed_ns)

    def _output(self, live: LiveRequest) -> StepOutput:
        sampling, index = live.request.sampling, live.num_outputs
        allowed = sampling.allowed_tokens
        token = allowed[index % len(allowed)] if allowed else ord("a") + index % 26
        live.tokens.append(token)
        return StepOutput(live.request.request_id, token, token in sampling.stop_tokens)


class SimulatedEngine:
    """A simulated executor in real time; implements `cloud.engine.api.Engine`.

    A step returns when its time is over, at once where it costs nothing. A
    timer that wakes late (by up to a millisecond) shortens the next step, so
    that steps take what they should on average.

    Args:
        executor: fresh for every engine.
    """

    def __init__(self, executor: SimulatedExecutor) -> None:
        self._executor = executor
        self._pending: asyncio.Future[None] | None = None
        self._lost_reason = ""
        self._late_ns = 0

    async def start(self) -> EngineDescription:
        """Is ready at once."""
        return self._executor.describe()

    async def execute(self, plan: StepPlan, opened: Sequence[EngineRequest]) -> StepResult:
        """Executes one step.

        Raises:
            EngineLostError: the engine was stopped or failed.
        """
        if self._lost_reason:
            raise EngineLostError(self._lost_reason)
        due_ns = time.monotonic_ns() - self._late_ns
        result = self._executor.execute(plan, opened)
        due_ns += result.elapsed_ns
        wait_ns = due_ns - time.monotonic_ns()
        if wait_ns > 0:
            loop = asyncio.get_running_loop()
            self._pending = loop.create_future()
            timer = loop.call_later(s_from_ns(wait_ns), _set_done, self._pending)
            try:
                await self._pending
            finally:
                timer.cancel()
                self._pending = None
        # Bounded: a loop that was held up by others owes nobody a faster engine.
        late_ns = time.monotonic_ns() - due_ns
        self._late_ns = min(late_ns, 1_000_000) if result.elapsed_ns else 0
        return result

    async def stop(self) -> None:
        """Ends the engine. May be called twice."""
        self.fail("the engine was stopped")

    def fail(self, reason: str) -> None:
        """Loses the engine: what is pending and what comes raises EngineLostError."""
        self._lost_reason = self._lost_reason or reason
        if self._pending is not None and not self._pending.done():
            self._pending.set_exception(EngineLostError(reason))


def _set_done(pending: asyncio.Future[None]) -> None:
    if not pending.done():
        pending.set_result(None)
