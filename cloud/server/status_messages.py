"""What scheduler, ledger and replicas know, as messages of OperationsService."""

import math
from collections.abc import Iterable, Mapping

from cloud.scheduler.snapshot import ReplicaSnapshot, TenantSnapshot
from cloud.server.ledger import Ledger, quantile
from cloud.server.replica import Replica
from headway.config import TenantSettings
from headway.cost_model import CostModel
from headway.outcome import Reason
from headway.rpc.status import duration_from_ns
from headway.v1 import operations_pb2

__all__ = ["class_statuses", "replica_detail", "replica_status", "tenant_status"]

_NS_PER_S = 1e9


def class_statuses(
    known: Iterable[TenantSnapshot], ledger: Ledger, tenant: str | None
) -> list[operations_pb2.ClassStatus]:
    """What the scheduler counted, and what the ledger knows beside it.

    Args:
        known: the scheduler's counts.
        ledger: the server's.
        tenant: the only one that is told of; None: all.
    """
    found = {
        (one.request_class, one.tenant): _class_status(one, ledger)
        for one in known
        if tenant in (None, one.tenant)
    }
    for key, refused in ledger.refused.items():
        request_class, name = key
        if tenant not in (None, name):
            continue
        status = found.setdefault(
            key, operations_pb2.ClassStatus(request_class=request_class.label, tenant=name)
        )
        for one in status.rejected:
            one.count += refused.get(Reason(one.reason), 0)
        counted = {one.reason for one in status.rejected}
        for reason in sorted(refused.keys() - counted):
            status.rejected.add(reason=reason.value, count=refused[reason])
    return [found[key] for key in sorted(found)]


def _class_status(counts: TenantSnapshot, ledger: Ledger) -> operations_pb2.ClassStatus:
    key = (counts.request_class, counts.tenant)
    latencies_ns = ledger.latencies_ns.get(key, ())
    num_stopped = ledger.stopped.get(key, 0)
    return operations_pb2.ClassStatus(
        request_class=counts.request_class.label,
        tenant=counts.tenant,
        queued=counts.num_waiting,
        running=counts.num_running,
        admitted=counts.admitted,
        completed=counts.completed + num_stopped,
        missed=counts.missed,
        cancelled=counts.cancelled - num_stopped,
        failed=counts.failed,
        rejected=[
            operations_pb2.ReasonCount(reason=reason.value, count=count)
            for reason, count in counts.rejected
        ],
        prompt_tokens=counts.prompt_tokens,
        output_tokens=counts.output_tokens,
        preemptions=counts.preemptions,
        latency_p50=duration_from_ns(quantile(latencies_ns, 0.5)),
        latency_p99=duration_from_ns(quantile(latencies_ns, 0.99)),
        fairness_counter=counts.counter,
    )


def replica_status(
    replica: Replica, load: ReplicaSnapshot | None, *, is_whole: bool = True
) -> operations_pb2.ReplicaStatus:
    """One replica.

    Args:
        replica: the server's.
        load: what the scheduler knows of it; None while it is down.
        is_whole: otherwise only that it is there: the rest is everybody's work.
    """
    status = operations_pb2.ReplicaStatus(
        replica_id=replica.replica_id, up=replica.is_up, draining=replica.is_draining
    )
    if not is_whole:
        return status
    steps = replica.times.engine_ns
    status.steps = replica.times.count
    status.step_p50.CopyFrom(duration_from_ns(quantile(steps, 0.5)))
    status.step_p99.CopyFrom(duration_from_ns(quantile(steps, 0.99)))
    status.down_reason = replica.down_reason
    if load is not None:
        status.running = load.num_running
        status.kv_blocks_total = load.blocks_total
        # What the prefix cache keeps is given up when a request needs it.
        status.kv_blocks_free = load.blocks_free + load.blocks_cached
    return status


def replica_detail(replica: Replica, load: ReplicaSnapshot | None) -> operations_pb2.ReplicaDetail:
    """One replica, with what the scheduler thinks of it."""
    detail = operations_pb2.ReplicaDetail(status=replica_status(replica, load))
    if load is None:
        return detail
    if replica.description is not None:
        detail.block_tokens = replica.description.block_tokens
        detail.max_context_tokens = replica.description.max_context_tokens
    detail.queued = load.num_waiting
    detail.kv_blocks_held = load.blocks_held
    detail.kv_blocks_cached = load.blocks_cached
    detail.cost.CopyFrom(_step_cost(load.cost_model))
    detail.margin = load.margin
    detail.prediction_ratio = load.level
    detail.predicted_wait.CopyFrom(duration_from_ns(max(0, load.predicted_wait_ns)))
    detail.interactive_load = load.interactive_load
    added = replica.times.added_ns
    detail.overhead_p50.CopyFrom(duration_from_ns(quantile(added, 0.5)))
    detail.overhead_p99.CopyFrom(duration_from_ns(quantile(added, 0.99)))
    return detail


def _step_cost(model: CostModel) -> operations_pb2.StepCost:
    return operations_pb2.StepCost(
        step_s=model.t0_ns / _NS_PER_S,
        prefill_token_s=model.prefill_ns / _NS_PER_S,
        pair_s=model.pair_ns / _NS_PER_S,
        decode_s=model.decode_ns / _NS_PER_S,
        kv_token_s=model.kv_ns / _NS_PER_S,
    )


def tenant_status(
    tenant: TenantSettings,
    classes: Iterable[operations_pb2.ClassStatus],
    bucket_levels: Mapping[str, float],
) -> operations_pb2.TenantStatus:
    """One tenant: what is set, and what it was given."""
    status = operations_pb2.TenantStatus(
        name=tenant.name,
        weight=tenant.weight,
        allowed_classes=tenant.classes,
        is_operator=tenant.operator,
        tokens_per_s=tenant.tokens_per_s,
        burst_tokens=tenant.burst_tokens,
        degraded_max_tokens=tenant.degraded_max_tokens,
        classes=[one for one in classes if one.tenant == tenant.name],
    )
    if tenant.tokens_per_s > 0:
        # One that never asked has a full bucket.
        level = bucket_levels.get(tenant.name, tenant.burst_tokens)
        status.bucket_tokens = level if math.isfinite(level) else tenant.burst_tokens
    return status
