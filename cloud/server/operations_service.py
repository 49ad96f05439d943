"""OperationsService: the state of the server, for the people who run it."""

from collections.abc import Iterable
from typing import Protocol

import grpc

from cloud.scheduler.snapshot import ReplicaSnapshot, Snapshot, TenantSnapshot
from cloud.server.calls import CallGate, Context
from cloud.server.dispatcher import Dispatcher
from cloud.server.identity import Identity
from cloud.server.ledger import Ledger, quantile
from cloud.server.replica import Replica
from cloud.server.validation import parse
from headway import __version__
from headway.clock import Clock
from headway.outcome import Reason
from headway.rpc.status import duration_from_ns
from headway.v1 import operations_pb2

__all__ = ["OPERATIONS_SERVICE", "Observed", "OperationsService"]

OPERATIONS_SERVICE: str = operations_pb2.DESCRIPTOR.services_by_name["OperationsService"].full_name


class Observed(Protocol):
    """What can tell its state."""

    def snapshot(self, now_ns: int) -> Snapshot:
        """The state at this instant."""


class OperationsService:
    """Tells the state.

    Args:
        gate: the way in.
        dispatcher: runs the requests.
        scheduler: counts them.
        model: name of the model.
        clock: of both.
    """

    def __init__(
        self, gate: CallGate, dispatcher: Dispatcher, scheduler: Observed, model: str, clock: Clock
    ) -> None:
        self._gate = gate
        self._dispatcher = dispatcher
        self._scheduler = scheduler
        self._model = model
        self._clock = clock
        self._ready_ns = clock.now_ns()

    def handler(self) -> grpc.GenericRpcHandler:
        """For `add_generic_rpc_handlers`."""
        return grpc.method_handlers_generic_handler(
            OPERATIONS_SERVICE,
            {"GetStatus": grpc.unary_unary_rpc_method_handler(self._gate.unary(self._get_status))},
        )

    def status(self) -> operations_pb2.GetStatusResponse:
        """The state at this instant."""
        now_ns = self._clock.now_ns()
        snapshot = self._scheduler.snapshot(now_ns)
        by_replica = {one.replica_id: one for one in snapshot.replicas}
        return operations_pb2.GetStatusResponse(
            version=__version__,
            uptime=duration_from_ns(now_ns - self._ready_ns),
            model=self._model,
            draining=self._dispatcher.is_draining,
            classes=_classes(snapshot.tenants, self._dispatcher.ledger),
            replicas=[
                _replica_status(replica, by_replica.get(replica.replica_id))
                for replica in self._dispatcher.replicas
            ],
        )

    async def _get_status(self, data: bytes, identity: Identity, context: Context) -> bytes:
        del identity, context
        parse(operations_pb2.GetStatusRequest, data)
        return self.status().SerializeToString()


def _classes(known: Iterable[TenantSnapshot], ledger: Ledger) -> list[operations_pb2.ClassStatus]:
    """What the scheduler counted, and what the ledger knows beside it."""
    found = {(one.request_class, one.tenant): _class_status(one, ledger) for one in known}
    for key, refused in ledger.refused.items():
        request_class, tenant = key
        status = found.setdefault(
            key, operations_pb2.ClassStatus(request_class=request_class.label, tenant=tenant)
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
    )


def _replica_status(replica: Replica, load: ReplicaSnapshot | None) -> operations_pb2.ReplicaStatus:
    steps = replica.times.engine_ns
    status = operations_pb2.ReplicaStatus(
        replica_id=replica.replica_id,
        up=replica.is_up,
        steps=replica.times.count,
        step_p50=duration_from_ns(quantile(steps, 0.5)),
        step_p99=duration_from_ns(quantile(steps, 0.99)),
        down_reason=replica.down_reason,
    )
    if load is not None:
        status.running = load.num_running
        status.kv_blocks_total = load.blocks_total
        # What the prefix cache keeps is given up when a request needs it.
        status.kv_blocks_free = load.blocks_free + load.blocks_cached
    return status
