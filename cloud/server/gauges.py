"""Tells metrics how much there is of everything, now and then."""

import asyncio
from collections.abc import Sequence
from typing import NoReturn

from cloud.scheduler.snapshot import Snapshot
from cloud.server.operations_service import Observed
from cloud.server.replica import Replica
from headway.clock import Clock
from headway.outcome import RequestClass
from headway.telemetry.metrics import Metrics

__all__ = ["Gauges"]

_EVERY_S = 1.0


class Gauges:
    """Reads the scheduler's state for Prometheus, from the loop that changes it.

    Args:
        metrics: told what is found.
        scheduler: its state.
        replicas: whether each is up.
        clock: of the scheduler.
    """

    def __init__(
        self, metrics: Metrics, scheduler: Observed, replicas: Sequence[Replica], clock: Clock
    ) -> None:
        self._metrics = metrics
        self._scheduler = scheduler
        self._replicas = replicas
        self._clock = clock
        self._preempted = dict.fromkeys(RequestClass, 0)

    async def run(self) -> NoReturn:
        """Looks once a second, for ever.

        Not when Prometheus asks: that is on another thread.
        """
        while True:
            self.look()
            await asyncio.sleep(_EVERY_S)

    def look(self) -> None:
        """Tells the state at this instant."""
        snapshot = self._scheduler.snapshot(self._clock.now_ns())
        self._tell_classes(snapshot)
        loads = {one.replica_id: one for one in snapshot.replicas}
        for replica in self._replicas:
            load = loads.get(replica.replica_id)
            self._metrics.set_replica(
                replica.replica_id,
                is_up=replica.is_up,
                is_draining=replica.is_draining,
                held=load.blocks_held if load else 0,
                cached=load.blocks_cached if load else 0,
                free=load.blocks_free if load else 0,
                margin=load.margin if load else 0.0,
            )

    def _tell_classes(self, snapshot: Snapshot) -> None:
        for request_class in RequestClass:
            ours = [one for one in snapshot.tenants if one.request_class is request_class]
            self._metrics.set_load(
                request_class,
                running=sum(one.num_running for one in ours),
                waiting=sum(one.num_waiting for one in ours),
                waiting_tokens=snapshot.waiting_tokens[request_class],
            )
            for one in ours:
                self._metrics.set_fairness(request_class, one.tenant, one.counter)
            preempted = sum(one.preemptions for one in ours)
            self._metrics.preempted(request_class, preempted - self._preempted[request_class])
            self._preempted[request_class] = preempted
