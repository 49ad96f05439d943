"""What a person is told of one request: where it stands, and why."""

from cloud.scheduler.explain import Hold
from cloud.scheduler.snapshot import RequestSnapshot
from cloud.scheduler.types import Ended
from cloud.server.refused import CallRefused
from cloud.server.trail import Refusal, Trace
from headway.clock import s_from_ns
from headway.outcome import Outcome
from headway.rpc.status import duration_from_ns
from headway.v1 import operations_pb2

__all__ = ["request_report"]

_HOLDS = {
    Hold.NO_ENGINE: (operations_pb2.REQUEST_HOLD_NO_ENGINE, "no engine that could take it is up"),
    Hold.DRAINING: (
        operations_pb2.REQUEST_HOLD_DRAINING,
        "every engine that could take it is drained",
    ),
    Hold.QUOTA: (
        operations_pb2.REQUEST_HOLD_QUOTA,
        "the token bucket of its tenant is empty and has to fill",
    ),
    Hold.SHARE: (
        operations_pb2.REQUEST_HOLD_SHARE,
        "tenants that were served less for their weight come first",
    ),
    Hold.SLOTS: (
        operations_pb2.REQUEST_HOLD_SLOTS,
        "as many requests run as may (scheduler.max_running)",
    ),
    Hold.KV: (operations_pb2.REQUEST_HOLD_KV, "there is not enough KV memory free"),
    Hold.STEP: (operations_pb2.REQUEST_HOLD_STEP, "the step that runs has to end first"),
    Hold.TIME: (
        operations_pb2.REQUEST_HOLD_TIME,
        "the next step has no time for it beside what comes first",
    ),
}


def request_report(
    trace: Trace, live: RequestSnapshot | None, now_ns: int, *, shows_replica: bool
) -> operations_pb2.ExplainRequestResponse:
    """The report.

    Args:
        trace: of the request.
        live: where it stands; None where it does not live.
        now_ns: the time.
        shows_replica: whether the replica is named.
    """
    report = operations_pb2.ExplainRequestResponse(
        request_id=trace.request_id,
        label=trace.label,
        tenant=trace.tenant,
        request_class=trace.request_class.label,
        age=duration_from_ns(max(0, now_ns - trace.arrived_ns)),
        prompt_tokens=trace.prompt_tokens,
        max_output_tokens=trace.max_output_tokens,
    )
    if trace.predicted_ns is not None:
        report.predicted.CopyFrom(duration_from_ns(max(0, trace.predicted_ns)))
    if trace.refusal is not None:
        _fill_refused(report, trace.refusal)
    elif trace.ended is not None:
        _fill_ended(report, trace, trace.ended)
    elif live is not None:
        _fill_live(report, live)
        if shows_replica:
            report.replica_id = live.replica_id
    return report


def _fill_refused(report: operations_pb2.ExplainRequestResponse, refusal: Refusal) -> None:
    report.state = operations_pb2.REQUEST_STATE_REFUSED
    report.reason = refusal.reason.value
    report.explanation = f"refused: {refusal.message}"
    if refusal.retry_after_ns is not None:
        report.retry_after.CopyFrom(duration_from_ns(refusal.retry_after_ns))


def _fill_ended(report: operations_pb2.ExplainRequestResponse, trace: Trace, ended: Ended) -> None:
    total_ns = max(0, ended.at_ns - trace.arrived_ns)
    report.state = operations_pb2.REQUEST_STATE_ENDED
    report.outcome = ended.outcome.value
    report.age.CopyFrom(duration_from_ns(total_ns))
    report.output_tokens = ended.output_tokens
    report.queue.CopyFrom(duration_from_ns(ended.queue_ns))
    report.prefill.CopyFrom(duration_from_ns(ended.prefill_ns))
    report.decode.CopyFrom(duration_from_ns(ended.decode_ns))
    after = f"{s_from_ns(total_ns):.3f} s after its arrival"
    if ended.outcome is Outcome.COMPLETED:
        report.explanation = f"completed {after}"
    else:
        report.reason = ended.reason.value if ended.reason else ""
        report.explanation = f"{CallRefused.of_ended(ended).message}; ended {after}"


def _fill_live(report: operations_pb2.ExplainRequestResponse, live: RequestSnapshot) -> None:
    report.prefill_tokens_left = live.prefill_tokens_left
    report.output_tokens = live.output_tokens
    report.kv_blocks = live.kv_blocks
    report.preemptions = live.preemptions
    if live.slack_ns is not None:
        report.slack.FromNanoseconds(live.slack_ns)
    if live.hold is Hold.NOTHING:
        report.state = operations_pb2.REQUEST_STATE_RUNNING
        report.explanation = _running(live, report.max_output_tokens)
        return
    report.state = operations_pb2.REQUEST_STATE_WAITING
    report.num_ahead = live.num_ahead
    if live.hold is Hold.QUEUE:
        report.hold = operations_pb2.REQUEST_HOLD_QUEUE
        come = "request of its queue comes" if live.num_ahead == 1 else "requests of its queue come"
        report.explanation = f"waits: {live.num_ahead:,} {come} first"
    else:
        report.hold, why = _HOLDS[live.hold]
        report.explanation = f"waits: {why}"


def _running(live: RequestSnapshot, max_output_tokens: int) -> str:
    if live.prefill_tokens_left > 1:
        return f"runs: {live.prefill_tokens_left:,} tokens are read before its next one"
    return f"runs: {live.output_tokens:,} of at most {max_output_tokens:,} tokens are given"
