"""OperationsService: what the people who run a server ask and tell it.

A tenant sees what is its own; an operator sees everything, and alone may drain.
"""

import asyncio
from collections.abc import Sequence
from typing import NoReturn, Protocol

import grpc
import structlog

from cloud.scheduler.snapshot import RequestSnapshot, Snapshot
from cloud.server.calls import CallGate, Context, write_in_time
from cloud.server.dispatcher import Dispatcher
from cloud.server.identity import Identity
from cloud.server.refused import CallRefused
from cloud.server.request_report import request_report
from cloud.server.status_messages import (
    class_statuses,
    replica_detail,
    replica_status,
    tenant_status,
)
from cloud.server.validation import parse, span_ns
from headway import __version__
from headway.clock import Clock, s_from_ns
from headway.config import TenantSettings
from headway.outcome import Reason
from headway.rpc.status import duration_from_ns
from headway.v1 import operations_pb2

__all__ = ["OPERATIONS_SERVICE", "Observed", "OperationsService"]

OPERATIONS_SERVICE: str = operations_pb2.DESCRIPTOR.services_by_name["OperationsService"].full_name

_log = structlog.get_logger()
_WATCH_NS = 1_000_000_000
_LEAST_WATCH_NS, _MOST_WATCH_NS = 100_000_000, 60_000_000_000


class Observed(Protocol):
    """What can tell its state."""

    def snapshot(self, now_ns: int) -> Snapshot:
        """The state at this instant."""

    def explain(self, request_id: str, now_ns: int) -> RequestSnapshot | None:
        """Where a live request stands; None where there is none."""


class OperationsService:
    """Tells the state, and drains.

    Args:
        gate: the way in.
        dispatcher: runs the requests.
        scheduler: counts them.
        tenants: that are configured.
        model: name of the model.
        clock: of dispatcher and scheduler.
        write_timeout_s: a reader that takes nothing for so long is dropped.
    """

    def __init__(
        self,
        gate: CallGate,
        dispatcher: Dispatcher,
        scheduler: Observed,
        tenants: Sequence[TenantSettings],
        model: str,
        clock: Clock,
        write_timeout_s: float,
    ) -> None:
        self._gate = gate
        self._dispatcher = dispatcher
        self._scheduler = scheduler
        self._tenants = {one.name: one for one in tenants}
        self._model = model
        self._clock = clock
        self._write_timeout_s = write_timeout_s
        self._ready_ns = clock.now_ns()
        self._closing = asyncio.Event()

    def handler(self) -> grpc.GenericRpcHandler:
        """For `add_generic_rpc_handlers`."""
        unary = {
            "GetStatus": self._get_status,
            "Drain": self._drain,
            "Undrain": self._undrain,
            "ListTenants": self._list_tenants,
            "ListReplicas": self._list_replicas,
            "ExplainRequest": self._explain_request,
        }
        handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            name: grpc.unary_unary_rpc_method_handler(self._gate.unary(work))
            for name, work in unary.items()
        }
        handlers["WatchStatus"] = grpc.unary_stream_rpc_method_handler(
            self._gate.streaming(self._watch_status)
        )
        return grpc.method_handlers_generic_handler(OPERATIONS_SERVICE, handlers)

    def close(self) -> None:
        """Ends every stream: the server goes."""
        self._closing.set()

    # --- the state ---

    def _status(self, identity: Identity) -> operations_pb2.GetStatusResponse:
        now_ns = self._clock.now_ns()
        snapshot = self._scheduler.snapshot(now_ns)
        by_replica = {one.replica_id: one for one in snapshot.replicas}
        return operations_pb2.GetStatusResponse(
            version=__version__,
            uptime=duration_from_ns(now_ns - self._ready_ns),
            model=self._model,
            draining=self._dispatcher.is_draining,
            classes=class_statuses(snapshot.tenants, self._dispatcher.ledger, _only(identity)),
            replicas=[
                replica_status(one, by_replica.get(one.replica_id), is_whole=identity.is_operator)
                for one in self._dispatcher.replicas
            ],
        )

    async def _get_status(self, data: bytes, identity: Identity, context: Context) -> bytes:
        del context
        parse(operations_pb2.GetStatusRequest, data)
        return self._status(identity).SerializeToString()

    async def _watch_status(self, data: bytes, identity: Identity, context: Context) -> NoReturn:
        interval_s = s_from_ns(_interval_ns(parse(operations_pb2.WatchStatusRequest, data)))
        while True:
            message = operations_pb2.WatchStatusResponse(status=self._status(identity))
            await write_in_time(context, message.SerializeToString(), self._write_timeout_s)
            try:
                async with asyncio.timeout(interval_s):
                    await self._closing.wait()
            except TimeoutError:
                identity.require_current()
                continue
            raise CallRefused.stream_ended(Reason.DRAINING, "the server is being shut down")

    async def _list_tenants(self, data: bytes, identity: Identity, context: Context) -> bytes:
        del context
        parse(operations_pb2.ListTenantsRequest, data)
        snapshot = self._scheduler.snapshot(self._clock.now_ns())
        classes = class_statuses(snapshot.tenants, self._dispatcher.ledger, _only(identity))
        levels = dict(snapshot.bucket_levels)
        return operations_pb2.ListTenantsResponse(
            tenants=[
                tenant_status(self._tenants[name], classes, levels)
                for name in sorted(self._visible(identity))
            ]
        ).SerializeToString()

    async def _list_replicas(self, data: bytes, identity: Identity, context: Context) -> bytes:
        del context
        identity.require_operator()
        parse(operations_pb2.ListReplicasRequest, data)
        snapshot = self._scheduler.snapshot(self._clock.now_ns())
        by_replica = {one.replica_id: one for one in snapshot.replicas}
        return operations_pb2.ListReplicasResponse(
            replicas=[
                replica_detail(one, by_replica.get(one.replica_id))
                for one in self._dispatcher.replicas
            ]
        ).SerializeToString()

    async def _explain_request(self, data: bytes, identity: Identity, context: Context) -> bytes:
        del context
        name = parse(operations_pb2.ExplainRequestRequest, data).request_id
        if not name:
            raise CallRefused.invalid(
                "request_id", "is empty; expected an id of the server's log, or robot/observation"
            )
        trace = self._dispatcher.ledger.trail.find(name, self._visible(identity))
        if trace is None:
            # The same for another tenant's: nobody learns that there is one.
            raise CallRefused(
                Reason.NOT_FOUND,
                f"no live or recent request {name[:64]!r}; of those that are over, the latest "
                "thousands are remembered",
                field="request_id",
            )
        now_ns = self._clock.now_ns()
        live = self._scheduler.explain(trace.request_id, now_ns)
        return request_report(
            trace, live, now_ns, shows_replica=identity.is_operator
        ).SerializeToString()

    def _visible(self, identity: Identity) -> tuple[str, ...]:
        """Tenants whose work the caller may see."""
        return tuple(self._tenants) if identity.is_operator else (identity.tenant,)

    # --- draining ---

    async def _drain(self, data: bytes, identity: Identity, context: Context) -> bytes:
        del context
        identity.require_operator()
        replica_id = parse(operations_pb2.DrainRequest, data).replica_id
        if replica_id:
            self._dispatcher.drain_replica(replica_id)
        else:
            self._dispatcher.drain()
        _log.info("drained", replica=replica_id, tenant=identity.tenant)
        return self._left(replica_id).SerializeToString()

    async def _undrain(self, data: bytes, identity: Identity, context: Context) -> bytes:
        del context
        identity.require_operator()
        replica_id = parse(operations_pb2.UndrainRequest, data).replica_id
        if replica_id:
            self._dispatcher.undrain_replica(replica_id)
        else:
            self._dispatcher.undrain()
        _log.info("undrained", replica=replica_id, tenant=identity.tenant)
        return operations_pb2.UndrainResponse().SerializeToString()

    def _left(self, replica_id: str) -> operations_pb2.DrainResponse:
        """What is to be finished on a replica, or by the server."""
        snapshot = self._scheduler.snapshot(self._clock.now_ns())
        if not replica_id:
            return operations_pb2.DrainResponse(
                running=sum(one.num_running for one in snapshot.tenants),
                queued=sum(one.num_waiting for one in snapshot.tenants),
            )
        mine = [one for one in snapshot.replicas if one.replica_id == replica_id]
        return operations_pb2.DrainResponse(
            running=sum(one.num_running for one in mine),
            queued=sum(one.num_waiting for one in mine),
        )


def _only(identity: Identity) -> str | None:
    """The only tenant that the caller may see; None: all."""
    return None if identity.is_operator else identity.tenant


def _interval_ns(request: operations_pb2.WatchStatusRequest) -> int:
    """Between two states.

    Raises:
        CallRefused: INVALID, out of range.
    """
    if not request.HasField("interval"):
        return _WATCH_NS
    interval_ns = span_ns("interval", request.interval)
    if not _LEAST_WATCH_NS <= interval_ns <= _MOST_WATCH_NS:
        raise CallRefused.invalid(
            "interval", f"must be 0.1 s to 60 s, got {s_from_ns(interval_ns):g} s"
        )
    return interval_ns
