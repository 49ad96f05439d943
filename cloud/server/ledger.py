"""What became of requests and steps: counts since the start, and the latest times."""

import math
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

import structlog

from cloud.scheduler.types import Ended, Rejected, Request
from headway.clock import s_from_ns
from headway.outcome import Outcome, RequestClass

if TYPE_CHECKING:
    from cloud.server.dispatcher import Call
    from headway.telemetry.metrics import Metrics

__all__ = ["Ledger", "StepTimes", "quantile"]

_log = structlog.get_logger()
_NUM_KEPT = 1000


def quantile(values: Iterable[int], share: float) -> int:
    """The smallest of `values` that at least `share` of them do not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0


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
    """Tells metrics and log what became of requests, and keeps the latest latencies.

    The scheduler itself counts; see its snapshot.

    Args:
        metrics: where to count. None: nobody asked for metrics.

    Attributes:
        latencies_ns: arrival to answer of the latest completed requests, by class
            and tenant.
    """

    def __init__(self, metrics: "Metrics | None" = None) -> None:
        self.latencies_ns: dict[tuple[RequestClass, str], deque[int]] = {}
        self._metrics = metrics

    def admitted(self, request: Request) -> None:
        """The scheduler took `request` in."""
        if self._metrics is not None:
            self._metrics.admitted(request.request_class, request.tenant)

    def rejected(self, request: Request, answer: Rejected) -> None:
        """The scheduler said no."""
        if self._metrics is not None:
            self._metrics.rejected(request.request_class, request.tenant, answer.reason)

    def ended(self, call: "Call", ended: Ended) -> None:
        """An admitted request came to its end."""
        request = call.request
        total_ns = ended.at_ns - call.arrived_ns
        if ended.outcome is Outcome.COMPLETED:
            self._latencies(request).append(total_ns)
        if self._metrics is not None:
            self._metrics.finished(
                request.request_class,
                request.tenant,
                ended.outcome,
                ended.reason,
                missed=request.deadline_ns is not None
                and ended.outcome in (Outcome.EXPIRED, Outcome.FAILED),
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
            outcome=ended.outcome.value,
            reason=ended.reason.value if ended.reason is not None else "",
            prompt_tokens=ended.prompt_tokens,
            output_tokens=ended.output_tokens,
            queue_s=s_from_ns(ended.queue_ns),
            prefill_s=s_from_ns(ended.prefill_ns),
            decode_s=s_from_ns(ended.decode_ns),
            total_s=s_from_ns(total_ns),
        )

    def _latencies(self, request: Request) -> deque[int]:
        key = (request.request_class, request.tenant)
        kept = self.latencies_ns.get(key)
        if kept is None:
            kept = self.latencies_ns[key] = deque(maxlen=_NUM_KEPT)
        return kept
