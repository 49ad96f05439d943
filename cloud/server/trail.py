"""Where the trail of a request leads: the live ones, and the latest that ended or were refused."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from cloud.scheduler.types import Admitted, Ended, Rejected
from cloud.server.call import Call
from cloud.server.refused import CallRefused
from headway.outcome import Reason, RequestClass

__all__ = ["Refusal", "Trace", "Trail"]

_MOST_OVER = 4096


@dataclass(frozen=True, slots=True)
class Refusal:
    """The "no" that a request was told."""

    reason: Reason
    message: str
    retry_after_ns: int | None = None


@dataclass(slots=True)
class Trace:
    """One request, by what it may be asked for later.

    Attributes:
        request_id: of the log; empty where it was refused before it got one.
        label: what its client knows it by, or empty.
        predicted_ns: span from arrival to the answer, as predicted at admission.
        ended: None while it lives, and where it was refused.
        refusal: None where it was admitted.
    """

    request_id: str
    label: str
    tenant: str
    request_class: RequestClass
    arrived_ns: int
    prompt_tokens: int = 0
    max_output_tokens: int = 0
    predicted_ns: int | None = None
    ended: Ended | None = None
    refusal: Refusal | None = None


class Trail:
    """Finds requests by id or label, of one tenant or of several.

    Costs a request some dictionary entries; live ones are always found, of the others
    the latest.

    Args:
        most_over: so many of those that ended or were refused.
    """

    def __init__(self, most_over: int = _MOST_OVER) -> None:
        self._most_over = most_over
        # By (tenant, id or label): a tenant can name nothing of another one.
        self._by_name: dict[tuple[str, str], Trace] = {}
        self._over: deque[Trace] = deque()

    def admitted(self, call: Call, answer: Admitted) -> None:
        """A request was taken in."""
        trace = _trace_of(call)
        trace.max_output_tokens = answer.max_output_tokens
        if call.request.request_class.is_promised:
            trace.predicted_ns = answer.predicted_ns - call.arrived_ns
        self._name(trace)

    def rejected(self, call: Call, answer: Rejected) -> None:
        """The scheduler said no."""
        trace = _trace_of(call)
        trace.predicted_ns = answer.predicted_ns
        trace.refusal = Refusal(answer.reason, answer.message, answer.retry_after_ns)
        self._name(trace)
        self._is_over(trace)

    def refused(
        self, request_class: RequestClass, tenant: str, refused: CallRefused, now_ns: int
    ) -> None:
        """A request was refused before the scheduler was asked; without a label nobody asks."""
        if refused.label:
            trace = Trace("", refused.label, tenant, request_class, now_ns)
            trace.refusal = Refusal(refused.reason, refused.message, refused.retry_after_ns)
            self._name(trace)
            self._is_over(trace)

    def ended(self, call: Call, ended: Ended) -> None:
        """An admitted request came to its end."""
        trace = self._by_name.get((call.request.tenant, call.request.request_id))
        if trace is not None:
            trace.ended = ended
            self._is_over(trace)

    def find(self, name: str, tenants: Iterable[str]) -> Trace | None:
        """The newest request of `tenants` that has this id or label."""
        found = [self._by_name.get((tenant, name)) for tenant in tenants] if name else []
        return max(
            (trace for trace in found if trace is not None),
            key=lambda trace: trace.arrived_ns,
            default=None,
        )

    def _name(self, trace: Trace) -> None:
        for name in (trace.request_id, trace.label):
            if name:
                self._by_name[trace.tenant, name] = trace

    def _is_over(self, trace: Trace) -> None:
        self._over.append(trace)
        if len(self._over) > self._most_over:
            self._forget(self._over.popleft())

    def _forget(self, trace: Trace) -> None:
        for name in (trace.request_id, trace.label):
            # A newer one may have the name by now.
            if self._by_name.get((trace.tenant, name)) is trace:
                del self._by_name[trace.tenant, name]


def _trace_of(call: Call) -> Trace:
    request = call.request
    return Trace(
        request.request_id,
        call.label,
        request.tenant,
        request.request_class,
        call.arrived_ns,
        request.prompt_tokens,
        request.max_output_tokens,
    )
