"""The decision log: what was decided, complete enough to check every rule from it.

One flat dict a record, of strings, integers, floats, booleans and lists of them:
fit for JSON. The format is documented in docs/scheduler.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from cloud.scheduler.config import SchedulerConfig
from cloud.scheduler.request_state import NEVER_NS, LiveRequest
from cloud.scheduler.types import (
    Admitted,
    Ended,
    Rejected,
    ReplicaSpec,
    Request,
    StepPlan,
    StepResult,
)

__all__ = ["LOG_VERSION", "DecisionLog", "LogSink"]

LOG_VERSION = 1
LogSink = Callable[[dict[str, Any]], None]


class DecisionLog:
    """Turns decisions into records and hands each to the sink."""

    __slots__ = ("_sink",)

    def __init__(self, sink: LogSink, config: SchedulerConfig) -> None:
        self._sink = sink
        settings = asdict(config)
        settings["tenants"] = {name: asdict(one) for name, one in config.tenants.items()}
        sink({"kind": "config", "version": LOG_VERSION, "config": settings})

    def replica_up(self, spec: ReplicaSpec, now_ns: int) -> None:
        """A replica is there."""
        self._sink(
            {
                "kind": "replica_up",
                "at": now_ns,
                "replica": spec.replica_id,
                "blocks": spec.num_blocks,
                "block_tokens": spec.block_tokens,
                "max_context": spec.max_context_tokens,
                "swap_blocks": spec.num_swap_blocks,
                "swap_block_ns": spec.swap_block_ns,
                "tenants": sorted(spec.tenants),
                "is_long_context": spec.is_long_context,
                "cost": asdict(spec.cost_model),
            }
        )

    def replica_down(self, replica_id: str, now_ns: int) -> None:
        """A replica is lost."""
        self._sink({"kind": "replica_down", "at": now_ns, "replica": replica_id})

    def refit(self, replica_id: str, cost: Any, now_ns: int) -> None:
        """A replica has another cost model."""
        self._sink({"kind": "refit", "at": now_ns, "replica": replica_id, "cost": asdict(cost)})

    def drain(self, now_ns: int) -> None:
        """No new work from here on."""
        self._sink({"kind": "drain", "at": now_ns})

    def undrain(self, now_ns: int) -> None:
        """New work again."""
        self._sink({"kind": "undrain", "at": now_ns})

    def replica_drain(self, replica_id: str, now_ns: int, *, is_draining: bool) -> None:
        """No new work on a replica, or again some."""
        kind = "replica_drain" if is_draining else "replica_undrain"
        self._sink({"kind": kind, "at": now_ns, "replica": replica_id})

    def submitted(
        self, request: Request, deadline_ns: int | None, decision: Admitted | Rejected, now_ns: int
    ) -> None:
        """A request came, and what it was told."""
        record: dict[str, Any] = {
            "kind": "submit",
            "at": now_ns,
            "id": request.request_id,
            "tenant": request.tenant,
            "class": int(request.request_class),
            "prompt": request.prompt_tokens,
            "max_output": request.max_output_tokens,
            "deadline": deadline_ns if deadline_ns != NEVER_NS else None,
            "covers": request.deadline_covers.value,
            "supersedes": request.supersedes,
        }
        if isinstance(decision, Admitted):
            record["decision"] = "ADMITTED"
            record["replica"] = decision.replica_id
            record["predicted_at"] = decision.predicted_ns
            record["max_output"] = decision.max_output_tokens
        else:
            record["decision"] = decision.reason.value
            record["retry_after"] = decision.retry_after_ns
            record["predicted"] = decision.predicted_ns
        self._sink(record)

    def planned(self, plan: StepPlan, now_ns: int, margin: float) -> None:
        """A step was planned."""
        self._sink(
            {
                "kind": "plan",
                "at": now_ns,
                "replica": plan.replica_id,
                "step": plan.step_id,
                "predicted": plan.predicted_ns,
                "margin": margin,
                # id, context, tokens, prefill?, samples?, new blocks, resets?
                "items": [[*item[:5], list(item[5]), item[6]] for item in plan.items],
                "swap_out": [list(pair) for pair in plan.swap_out],
                "swap_in": [list(pair) for pair in plan.swap_in],
            }
        )

    def committed(self, replica_id: str, result: StepResult, now_ns: int) -> None:
        """A step's result was taken in."""
        self._sink(
            {
                "kind": "commit",
                "at": now_ns,
                "replica": replica_id,
                "step": result.step_id,
                "elapsed": result.elapsed_ns,
                "outputs": [[out.request_id, out.is_stop] for out in result.outputs],
            }
        )

    def preempted(self, live: LiveRequest, replica_id: str, now_ns: int, *, swapped: bool) -> None:
        """A running request was pushed back to its queue; its blocks are released."""
        self._sink(
            {
                "kind": "preempt",
                "at": now_ns,
                "id": live.request_id,
                "replica": replica_id,
                "swapped": swapped,
            }
        )

    def requeued(self, live: LiveRequest, now_ns: int) -> None:
        """A request of a lost or draining replica waits again, bound to another one or to none."""
        replica = live.replica.replica_id if live.replica is not None else ""
        self._sink({"kind": "requeue", "at": now_ns, "id": live.request_id, "replica": replica})

    def ended(self, ended: Ended) -> None:
        """A request's one end; its blocks are released."""
        self._sink(
            {
                "kind": "end",
                "at": ended.at_ns,
                "id": ended.request_id,
                "outcome": ended.outcome.value,
                "reason": ended.reason.value if ended.reason is not None else None,
                "output_tokens": ended.output_tokens,
                "cached_tokens": ended.cached_tokens,
            }
        )
