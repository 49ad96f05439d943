"""OperationsService: the state of the server, for the people who run it."""

import grpc

from cloud.server.calls import CallGate, Context
from cloud.server.dispatcher import Dispatcher
from cloud.server.identity import Identity
from cloud.server.ledger import ClassCounts, quantile
from cloud.server.replica import Replica
from cloud.server.validation import parse
from headway import __version__
from headway.clock import Clock
from headway.outcome import RequestClass
from headway.rpc.status import duration_from_ns
from headway.v1 import operations_pb2

__all__ = ["OPERATIONS_SERVICE", "OperationsService"]

OPERATIONS_SERVICE: str = operations_pb2.DESCRIPTOR.services_by_name["OperationsService"].full_name


class OperationsService:
    """Tells the state.

    Args:
        gate: the way in.
        dispatcher: whose state.
        model: name of the model.
        clock: of the dispatcher.
    """

    def __init__(self, gate: CallGate, dispatcher: Dispatcher, model: str, clock: Clock) -> None:
        self._gate = gate
        self._dispatcher = dispatcher
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
        return operations_pb2.GetStatusResponse(
            version=__version__,
            uptime=duration_from_ns(now_ns - self._ready_ns),
            model=self._model,
            draining=self._dispatcher.is_draining,
            classes=[
                _class_status(request_class, tenant, counts)
                for (request_class, tenant), counts in sorted(
                    self._dispatcher.ledger.classes.items(), key=lambda item: item[0]
                )
            ],
            replicas=[_replica_status(replica) for replica in self._dispatcher.replicas],
        )

    async def _get_status(self, data: bytes, identity: Identity, context: Context) -> bytes:
        del identity, context
        parse(operations_pb2.GetStatusRequest, data)
        return self.status().SerializeToString()


def _class_status(
    request_class: RequestClass, tenant: str, counts: ClassCounts
) -> operations_pb2.ClassStatus:
    return operations_pb2.ClassStatus(
        request_class=request_class.label,
        tenant=tenant,
        admitted=counts.admitted,
        completed=counts.completed,
        missed=counts.missed,
        cancelled=counts.cancelled,
        failed=counts.failed,
        rejected=[
            operations_pb2.ReasonCount(reason=reason.value, count=count)
            for reason, count in sorted(counts.rejected.items())
        ],
        prompt_tokens=counts.prompt_tokens,
        output_tokens=counts.output_tokens,
        latency_p50=duration_from_ns(quantile(counts.latencies_ns, 0.5)),
        latency_p99=duration_from_ns(quantile(counts.latencies_ns, 0.99)),
    )


def _replica_status(replica: Replica) -> operations_pb2.ReplicaStatus:
    steps = replica.times.engine_ns
    return operations_pb2.ReplicaStatus(
        replica_id=replica.replica_id,
        up=replica.is_up,
        steps=replica.times.count,
        step_p50=duration_from_ns(quantile(steps, 0.5)),
        step_p99=duration_from_ns(quantile(steps, 0.99)),
        down_reason=replica.down_reason,
    )
