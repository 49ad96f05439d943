"""What became of requests and steps: counts since the start, and the latest times."""

import math
from collections import Counter, deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

import structlog

from cloud.scheduler.types import Ended, Rejected, Request
from headway.clock import s_from_ns
from headway.outcome import Outcome, Reason, RequestClass

if TYPE_CHECKING:
    from cloud.server.dispatcher import Call
    from headway.telemetry.metrics import Metrics

__all__ = ["ClassCounts", "Ledger", "StepTimes", "quantile"]

_log = structlog.get_logger()
_NUM_KEPT = 1000


def quantile(values: Iterable[int], share: float) -> int:
    """The smallest of `values` that at least `share` of them do not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0


class ClassCounts:
    """One tenant's work in one class since the start."""

    __slots__ = (
        "admitted",
        "cancelled",
        "completed",
        "failed",
        "latencies_ns",
        "missed",
        "output_tokens",
        "prompt_tokens",
        "rejected",
    )

    def __init__(self) -> None:
        self.admitted = self.completed = self.missed = self.cancelled = self.failed = 0
        self.prompt_tokens = self.output_tokens = 0
        self.rejected: Counter[Reason] = Counter()
        # Arrival to answer of the latest completed ones.
        self.latencies_ns: deque[int] = deque(maxlen=_NUM_KEPT)


class StepTimes:
    """The latest steps of one replica: time in the engine, and added outside of it."""

    def __init__(self, replica_id: str, metrics: "Metrics | None" = None) -> None:
        self.count = 0
        self.engine_ns: deque[int] = deque(maxlen=_NUM_KEPT)
        self.added_ns: deque[int] = deque(maxlen=_NUM_KEPT)
        self._replica_id = replica_id
        self._metrics = metrics

    def add(self, engine_ns: int, added_ns: int) -> None:
        """Takes in one step; `added_ns` is planning, transport and committing."""
        self.count += 1
        self.engine_ns.append(engine_ns)
        self.added_ns.append(added_ns)
        if self._metrics is not None:
            self._metrics.step(self._replica_id, engine_ns, added_ns)


class Ledger:
    """Counts every request once, and writes a line when it ends.

    Args:
        metrics: told the same. None: nobody asked for metrics.
    """

    def __init__(self, metrics: "Metrics | None" = None) -> None:
        self.classes: dict[tuple[RequestClass, str], ClassCounts] = {}
        self._metrics = metrics

    def admitted(self, request: Request) -> None:
        """The scheduler took `request` in."""
        self._counts(request.request_class, request.tenant).admitted += 1
        if self._metrics is not None:
            self._metrics.admitted(request.request_class, request.tenant)

    def rejected(self, request: Request, answer: Rejected) -> None:
        """The scheduler said no."""
        self.refused(request.request_class, request.tenant, answer.reason)

    def refused(self, request_class: RequestClass, tenant: str, reason: Reason) -> None:
        """A call was refused, by the scheduler or before it came that far."""
        self._counts(request_class, tenant).rejected[reason] += 1
        if self._metrics is not None:
            self._metrics.rejected(request_class, tenant, reason)

    def ended(self, call: "Call", ended: Ended) -> None:
        """An admitted request came to its end."""
        request = call.request
        counts = self._counts(request.request_class, request.tenant)
        outcome = ended.outcome
        if outcome is Outcome.COMPLETED:
            counts.completed += 1
            counts.latencies_ns.append(ended.at_ns - call.arrived_ns)
        elif outcome is Outcome.CANCELLED:
            counts.cancelled += 1
        elif outcome is Outcome.FAILED:
            counts.failed += 1
        is_missed = request.deadline_ns is not None and outcome in (
            Outcome.EXPIRED,
            Outcome.FAILED,
        )
        counts.missed += is_missed
        counts.prompt_tokens += ended.prompt_tokens - ended.cached_tokens
        counts.output_tokens += ended.output_tokens
        if self._metrics is not None:
            self._metrics.finished(
                request.request_class,
                request.tenant,
                outcome,
                ended.reason,
                missed=is_missed,
                prompt_tokens=ended.prompt_tokens,
                cached_tokens=ended.cached_tokens,
                output_tokens=ended.output_tokens,
                queue_ns=ended.queue_ns,
                prefill_ns=ended.prefill_ns,
                decode_ns=ended.decode_ns,
            )
        _log.info(
            "request_finished",
            request_id=request.request_id,
            label=call.label,
            request_class=request.request_class.label,
            tenant=request.tenant,
            outcome=outcome.value,
            reason=ended.reason.value if ended.reason is not None else "",
            prompt_tokens=ended.prompt_tokens,
            output_tokens=ended.output_tokens,
            queue_s=s_from_ns(ended.queue_ns),
            prefill_s=s_from_ns(ended.prefill_ns),
            decode_s=s_from_ns(ended.decode_ns),
            total_s=s_from_ns(ended.at_ns - call.arrived_ns),
        )

    def _counts(self, request_class: RequestClass, tenant: str) -> ClassCounts:
        key = (request_class, tenant)
        counts = self.classes.get(key)
        if counts is None:
            counts = self.classes[key] = ClassCounts()
        return counts
