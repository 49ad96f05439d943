"""A policy for tests of what is around the scheduler: first come, first served, one at a time."""

# ruff: noqa: D102 - `Policy` says what each method does.

import asyncio
from collections import deque

from cloud.scheduler.snapshot import RequestSnapshot, Snapshot
from cloud.scheduler.types import (
    Admitted,
    Ended,
    Event,
    FinishReason,
    Rejected,
    ReplicaSpec,
    Request,
    ScheduledItem,
    StepPlan,
    StepResult,
    TokenEmitted,
)
from headway.cost_model import CostModel
from headway.outcome import Outcome, Reason

__all__ = ["FifoPolicy"]


class FifoPolicy:
    """Decodes one request after the other, a token a step, on its only replica.

    Attributes:
        answers: refusals of the next submissions, in order.
        submitted: every request that was taken in, for a test to wait for.
    """

    def __init__(self) -> None:
        self.answers: deque[Rejected] = deque()
        self.submitted: asyncio.Queue[Request] = asyncio.Queue()
        self.is_draining = False
        self._spec: ReplicaSpec | None = None
        self._waiting: deque[Request] = deque()
        self._num_output: dict[str, int] = {}
        self._closed: list[str] = []
        self._num_steps = 0

    def submit(self, request: Request, now_ns: int) -> Admitted | Rejected:
        if self.answers:
            return self.answers.popleft()
        if self.is_draining:
            return Rejected(request.request_id, Reason.DRAINING, "draining", 1_000_000_000)
        if self._spec is None:
            return Rejected(request.request_id, Reason.NO_ENGINE, "no engine is up")
        events: tuple[Event, ...] = ()
        old = [one for one in self._waiting if one.request_id == request.supersedes]
        if old:
            self._waiting.remove(old[0])
            events = (Ended(old[0].request_id, Outcome.CANCELLED, Reason.SUPERSEDED, at_ns=now_ns),)
        self._waiting.append(request)
        self.submitted.put_nowait(request)
        self._num_output[request.request_id] = 0
        return Admitted(request.request_id, "", now_ns, request.max_output_tokens, events)

    def cancel(self, request_id: str, now_ns: int) -> tuple[Event, ...]:
        for request in self._waiting:
            if request.request_id == request_id:
                self._waiting.remove(request)
                return (self._end(request, Outcome.CANCELLED, Reason.CANCELLED, now_ns),)
        return ()

    def plan(self, replica_id: str, now_ns: int) -> StepPlan:
        closed = tuple(self._closed)
        self._closed.clear()
        if not self._waiting:
            return StepPlan(replica_id, self._num_steps, (), closed)
        request = self._waiting[0]
        done = self._num_output[request.request_id]
        # Only the first in line has KV, so that it may always have the first blocks.
        block_tokens = self._spec.block_tokens if self._spec is not None else 1
        num_blocks = -(-(request.prompt_tokens + request.max_output_tokens) // block_tokens)
        item = ScheduledItem(
            request.request_id,
            context_tokens=0 if done == 0 else request.prompt_tokens + done - 1,
            num_tokens=request.prompt_tokens if done == 0 else 1,
            is_prefill=done == 0,
            samples=True,
            new_blocks=tuple(range(num_blocks)) if done == 0 else (),
            resets_table=done == 0,
        )
        self._num_steps += 1
        return StepPlan(replica_id, self._num_steps, (item,), closed)

    def commit(self, replica_id: str, result: StepResult, now_ns: int) -> tuple[Event, ...]:
        events: list[Event] = []
        for output in result.outputs:
            request = next((r for r in self._waiting if r.request_id == output.request_id), None)
            if request is None:
                continue
            index = self._num_output[request.request_id]
            self._num_output[request.request_id] = index + 1
            events.append(TokenEmitted(request.request_id, output.token, index))
            if output.is_stop or index + 1 == request.max_output_tokens:
                self._waiting.remove(request)
                finish = FinishReason.STOP if output.is_stop else FinishReason.LENGTH
                events.append(self._end(request, Outcome.COMPLETED, None, now_ns, finish))
        return tuple(events)

    def replica_up(self, spec: ReplicaSpec, now_ns: int) -> tuple[Event, ...]:
        self._spec = spec
        return ()

    def replica_down(self, replica_id: str, now_ns: int) -> tuple[Event, ...]:
        self._spec = None
        lost, self._waiting = list(self._waiting), deque()
        return tuple(self._end(r, Outcome.FAILED, Reason.ENGINE_LOST, now_ns) for r in lost)

    def refit(self, replica_id: str, cost_model: CostModel, now_ns: int) -> None:
        pass

    def drain(self, now_ns: int) -> None:
        self.is_draining = True

    def undrain(self, now_ns: int) -> None:
        self.is_draining = False

    def drain_replica(self, replica_id: str, now_ns: int) -> None:
        self.is_draining = True

    def undrain_replica(self, replica_id: str, now_ns: int) -> None:
        self.is_draining = False

    def advance(self, now_ns: int) -> tuple[Event, ...]:
        late = [r for r in self._waiting if r.deadline_ns is not None and r.deadline_ns <= now_ns]
        for request in late:
            self._waiting.remove(request)
        return tuple(self._end(r, Outcome.EXPIRED, Reason.DEADLINE_MISSED, now_ns) for r in late)

    def next_expiry_ns(self) -> int | None:
        return min(
            (r.deadline_ns for r in self._waiting if r.deadline_ns is not None), default=None
        )

    def has_work(self, replica_id: str) -> bool:
        return bool(self._waiting)

    def snapshot(self, now_ns: int) -> Snapshot:
        """Nothing is counted here."""
        return Snapshot(now_ns, self.is_draining, (), ())

    def explain(self, request_id: str, now_ns: int) -> RequestSnapshot | None:
        """Nothing is known here."""

    def _end(
        self,
        request: Request,
        outcome: Outcome,
        reason: Reason | None,
        now_ns: int,
        finish: FinishReason | None = None,
    ) -> Ended:
        self._closed.append(request.request_id)
        return Ended(
            request.request_id,
            outcome,
            reason,
            finish,
            at_ns=now_ns,
            prompt_tokens=request.prompt_tokens,
            output_tokens=self._num_output.pop(request.request_id),
        )
