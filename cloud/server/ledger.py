"""What became of requests and steps: counts since the start, and the latest times."""

import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeAlias

import structlog

from cloud.scheduler.types import Admitted, DeadlineCovers, Ended, Rejected, StepPlan
from cloud.server.refused import CallRefused
from cloud.server.trail import Trail
from headway.clock import s_from_ns
from headway.outcome import Outcome, Reason, RequestClass
from headway.telemetry.request_span import RequestSpan
from headway.telemetry.step_metrics import Step

if TYPE_CHECKING:
    from cloud.server.call import Call
    from headway.telemetry.metrics import Metrics
    from headway.telemetry.tracing import Tracing

__all__ = ["Ledger", "StepTimes", "quantile"]

_log = structlog.get_logger()
_NUM_KEPT = 1000
_Key: TypeAlias = tuple[RequestClass, str]
# Plain texts for the log, looked up: an enum works its value out each time.
_LABELS = {one: one.label for one in RequestClass}
_OUTCOMES = {one: one.value for one in Outcome}
_REASONS: dict[Reason | None, str] = {None: "", **{one: one.value for one in Reason}}


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

    def add(self, plan: StepPlan, engine_ns: int, added_ns: int, spent_ns: int) -> None:
        """Takes in one step.

        Args:
            plan: of the step.
            engine_ns: time in the engine.
            added_ns: planning, transport and committing.
            spent_ns: from plan to plan.
        """
        self.count += 1
        self.engine_ns.append(engine_ns)
        self.added_ns.append(added_ns)
        if self._metrics is not None:
            self._metrics.step(
                self._replica_id,
                Step(
                    engine_ns,
                    added_ns,
                    spent_ns,
                    plan.predicted_ns,
                    _prefill_tokens(plan),
                    len(plan.items),
                ),
            )


def _prefill_tokens(plan: StepPlan) -> int:
    """Prompt tokens of a step. Prefills come last, and are few."""
    tokens = 0
    for item in reversed(plan.items):
        if not item.is_prefill:
            break
        tokens += item.num_tokens
    return tokens


class Ledger:
    """Tells metrics and log what became of requests, and keeps the latest latencies.

    The scheduler itself counts; see its snapshot. Here is what it cannot know.

    Args:
        metrics: where to count. None: nobody asked for metrics.
        now_ns: the clock of the dispatcher.
        tracing: told of each request that the scheduler was asked about. None: nobody
            asked for spans.

    Attributes:
        trail: finds what became of one request.
        latencies_ns: arrival to answer of the latest completed requests, by class
            and tenant.
        refused: requests that were refused before the scheduler was asked.
        stopped: texts that a stop string ended; the scheduler, which knows no text,
            takes them for cancelled.
    """

    def __init__(
        self,
        metrics: "Metrics | None",
        now_ns: Callable[[], int],
        tracing: "Tracing | None" = None,
    ) -> None:
        self.trail = Trail()
        self._now_ns = now_ns
        self.latencies_ns: dict[_Key, deque[int]] = {}
        self.refused: dict[_Key, dict[Reason, int]] = {}
        self.stopped: dict[_Key, int] = {}
        self._metrics = metrics
        self._tracing = tracing

    def admitted(self, call: "Call", answer: Admitted) -> None:
        """The scheduler took a request in."""
        request = call.request
        call.predicted_ns = answer.predicted_ns
        self.trail.admitted(call, answer)
        if self._metrics is not None:
            self._metrics.admitted(request.request_class, request.tenant)

    def rejected(self, call: "Call", answer: Rejected) -> None:
        """The scheduler said no."""
        request = call.request
        self.trail.rejected(call, answer)
        if self._metrics is not None:
            self._metrics.rejected(request.request_class, request.tenant, answer.reason)
        _log_refused(
            request.request_class,
            request.tenant,
            call.label,
            answer.reason,
            answer.message,
            self._trace_of(call, lambda: _span_of_refused(call, answer, self._now_ns())),
        )

    def refuse(self, request_class: RequestClass, tenant: str, refused: CallRefused) -> None:
        """A request ended before the scheduler was asked; without effect where it did not."""
        if refused.is_counted:
            return
        refused.is_counted = True
        counts = self.refused.setdefault((request_class, tenant), {})
        counts[refused.reason] = counts.get(refused.reason, 0) + 1
        self.trail.refused(request_class, tenant, refused, self._now_ns())
        if self._metrics is not None:
            self._metrics.rejected(request_class, tenant, refused.reason)
        trace_id = refused.trace.trace_id if refused.trace is not None else ""
        _log_refused(
            request_class, tenant, refused.label, refused.reason, refused.message, trace_id
        )

    def ended(self, call: "Call", ended: Ended) -> None:
        """An admitted request came to its end."""
        request = call.request
        key = (request.request_class, request.tenant)
        self.trail.ended(call, ended)
        total_ns = ended.at_ns - call.arrived_ns
        if ended.outcome is Outcome.COMPLETED:
            kept = self.latencies_ns.get(key)
            if kept is None:
                kept = self.latencies_ns[key] = deque(maxlen=_NUM_KEPT)
            kept.append(total_ns)
            if call.is_stopped:
                self.stopped[key] = self.stopped.get(key, 0) + 1
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
                prediction_ratio=_prediction_ratio(call, ended),
            )
        _log.info(
            "request_finished",
            request_id=request.request_id,
            label=call.label,
            request_class=_LABELS[request.request_class],
            tenant=request.tenant,
            outcome=_OUTCOMES[ended.outcome],
            reason=_REASONS[ended.reason],
            prompt_tokens=ended.prompt_tokens,
            output_tokens=ended.output_tokens,
            queue_s=s_from_ns(ended.queue_ns),
            prefill_s=s_from_ns(ended.prefill_ns),
            decode_s=s_from_ns(ended.decode_ns),
            total_s=s_from_ns(total_ns),
            **_trace_fact(self._trace_of(call, lambda: _span_of(call, ended))),
        )

    def _trace_of(self, call: "Call", make_span: "Callable[[], RequestSpan]") -> str:
        """Id of a request's trace, which is told its span; empty where there is none."""
        if self._tracing is not None:
            return self._tracing.ended(make_span(), call.trace)
        return call.trace.trace_id if call.trace is not None else ""


def _span_of(call: "Call", ended: Ended) -> RequestSpan:
    request = call.request
    return RequestSpan(
        request.request_id,
        call.label,
        _LABELS[request.request_class],
        request.tenant,
        ended.outcome,
        ended.reason,
        ended.at_ns - call.arrived_ns,
        ended.queue_ns,
        ended.prefill_ns,
        ended.decode_ns,
        ended.prompt_tokens,
        ended.cached_tokens,
        ended.output_tokens,
    )


def _span_of_refused(call: "Call", answer: Rejected, now_ns: int) -> RequestSpan:
    request = call.request
    return RequestSpan(
        request.request_id,
        call.label,
        _LABELS[request.request_class],
        request.tenant,
        Outcome.REJECTED,
        answer.reason,
        max(0, now_ns - call.arrived_ns),
        prompt_tokens=request.prompt_tokens,
    )


def _trace_fact(trace_id: str) -> dict[str, str]:
    return {"trace_id": trace_id} if trace_id else {}


def _prediction_ratio(call: "Call", ended: Ended) -> float | None:
    """Arrival to the promised token over what admission predicted; None without a promise."""
    request = call.request
    predicted_ns = call.predicted_ns - call.arrived_ns
    if not request.request_class.is_promised or predicted_ns <= 0:
        return None
    answered_ns = ended.at_ns
    if request.deadline_covers is DeadlineCovers.FIRST_TOKEN:
        answered_ns -= ended.decode_ns
    return (answered_ns - call.arrived_ns) / predicted_ns


def _log_refused(
    request_class: RequestClass,
    tenant: str,
    label: str,
    reason: Reason,
    message: str,
    trace_id: str,
) -> None:
    _log.info(
        "request_refused",
        label=label,
        request_class=_LABELS[request_class],
        tenant=tenant,
        reason=_REASONS[reason],
        message=message,
        **_trace_fact(trace_id),
    )
