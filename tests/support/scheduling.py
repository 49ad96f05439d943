"""Requests, replicas and a checked scheduler for tests of the scheduler."""

from typing import Any

from cloud.scheduler.config import SchedulerConfig
from cloud.scheduler.scheduler import Scheduler
from cloud.scheduler.simulated import SimulatedSteps
from cloud.scheduler.types import (
    Admitted,
    DeadlineCovers,
    Event,
    Rejected,
    ReplicaSpec,
    Request,
    StepPlan,
    StepResult,
)
from headway.cost_model import CostModel
from headway.outcome import RequestClass

MS = 1_000_000
S = 1_000_000_000

# The worked numbers of the design: 20 ms a step, 0.1 ms a prompt token, 0.2 ms a decode.
COST = CostModel(t0_ns=20 * MS, prefill_ns=0.1 * MS, decode_ns=0.2 * MS)


class CheckedScheduler(Scheduler):
    """Compares its books after every operation, and keeps its decision log."""

    def __init__(self, config: SchedulerConfig | None = None) -> None:
        self.records: list[dict[str, Any]] = []
        super().__init__(config, log=self.records.append)

    def submit(self, request: Request, now_ns: int) -> Admitted | Rejected:
        """As the scheduler's."""
        result = super().submit(request, now_ns)
        self.check_invariants()
        return result

    def cancel(self, request_id: str, now_ns: int) -> tuple[Event, ...]:
        """As the scheduler's."""
        result = super().cancel(request_id, now_ns)
        self.check_invariants()
        return result

    def plan(self, replica_id: str, now_ns: int) -> StepPlan:
        """As the scheduler's."""
        result = super().plan(replica_id, now_ns)
        self.check_invariants()
        return result

    def commit(self, replica_id: str, result: StepResult, now_ns: int) -> tuple[Event, ...]:
        """As the scheduler's."""
        events = super().commit(replica_id, result, now_ns)
        self.check_invariants()
        return events

    def replica_down(self, replica_id: str, now_ns: int) -> tuple[Event, ...]:
        """As the scheduler's."""
        events = super().replica_down(replica_id, now_ns)
        self.check_invariants()
        return events

    def drain_replica(self, replica_id: str, now_ns: int) -> None:
        """As the scheduler's."""
        super().drain_replica(replica_id, now_ns)
        self.check_invariants()

    def advance(self, now_ns: int) -> tuple[Event, ...]:
        """As the scheduler's."""
        events = super().advance(now_ns)
        self.check_invariants()
        return events


class Bench:
    """A scheduler with one replica, stepped by hand: the clock moves with the steps."""

    def __init__(
        self,
        config: SchedulerConfig | None = None,
        spec: ReplicaSpec | None = None,
        *,
        engine_cost: CostModel | None = None,
    ) -> None:
        self.scheduler = CheckedScheduler(config)
        self.spec = spec or replica()
        self.engine = SimulatedSteps(engine_cost or self.spec.cost_model)
        self.now_ns = 0
        self.events: list[Event] = []
        self.scheduler.replica_up(self.spec, 0)

    def submit(self, request: Request, output_tokens: int | None = None) -> Admitted | Rejected:
        """Submits now; the engine stops after `output_tokens`."""
        if output_tokens is not None:
            self.engine.open(request.request_id, output_tokens)
        return self.scheduler.submit(request, self.now_ns)

    def plan(self) -> StepPlan:
        """Plans a step, which `finish` then executes."""
        plan = self.scheduler.plan(self.spec.replica_id, self.now_ns)
        self.events.extend(plan.events)
        return plan

    def step(self) -> StepPlan:
        """Plans, executes and commits one step."""
        plan = self.plan()
        if not plan.is_empty:
            self.finish(plan)
        return plan

    def finish(self, plan: StepPlan) -> tuple[Event, ...]:
        """Executes and commits a plan."""
        result = self.engine.execute(plan, self.now_ns)
        self.now_ns += result.elapsed_ns
        events = self.scheduler.commit(self.spec.replica_id, result, self.now_ns)
        self.events.extend(events)
        return events

    def steps(self, count: int) -> list[StepPlan]:
        """Several steps."""
        return [self.step() for _ in range(count)]


def replica(name: str = "r0", **changes: Any) -> ReplicaSpec:
    """A replica of 1,024 blocks of 16 tokens."""
    values: dict[str, Any] = {
        "num_blocks": 1024,
        "block_tokens": 16,
        "max_context_tokens": 16_384,
        "cost_model": COST,
    }
    return ReplicaSpec(name, **{**values, **changes})


def interactive(name: str, deadline_ns: int, **changes: Any) -> Request:
    """A robot's request of 64 prompt tokens and 4 output tokens."""
    values: dict[str, Any] = {
        "tenant": "fleet",
        "prompt_tokens": 64,
        "max_output_tokens": 4,
        "has_fixed_output": True,
    }
    return Request(
        request_id=name,
        request_class=RequestClass.INTERACTIVE,
        deadline_ns=deadline_ns,
        **{**values, **changes},
    )


def standard(name: str, deadline_ns: int | None = None, **changes: Any) -> Request:
    """A person's request: its deadline is the first token's."""
    values: dict[str, Any] = {
        "tenant": "office",
        "prompt_tokens": 64,
        "max_output_tokens": 8,
        "deadline_covers": DeadlineCovers.FIRST_TOKEN,
    }
    return Request(
        request_id=name,
        request_class=RequestClass.STANDARD,
        deadline_ns=deadline_ns,
        **{**values, **changes},
    )


def batch(name: str, **changes: Any) -> Request:
    """A request without a deadline."""
    values: dict[str, Any] = {"tenant": "night", "prompt_tokens": 64, "max_output_tokens": 8}
    return Request(request_id=name, request_class=RequestClass.BATCH, **{**values, **changes})


def ids(plan: StepPlan, *, prefill: bool | None = None) -> list[str]:
    """Who is in a plan, in order."""
    return [item.request_id for item in plan.items if prefill is None or item.is_prefill is prefill]
