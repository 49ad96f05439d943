"""Lets single requests in past the schedulability test, to see what would have come of them."""

from collections.abc import Collection, Iterable

from cloud.scheduler.admission import Late, Placement, SchedulabilityTest
from cloud.scheduler.config import SchedulerConfig
from cloud.scheduler.replica import Replica
from cloud.scheduler.request_state import LiveRequest
from cloud.scheduler.scheduler import Scheduler

__all__ = ["force_admissions"]


class _Forced(SchedulabilityTest):
    """Says yes to chosen requests, at the instant of their deadline."""

    def __init__(self, config: SchedulerConfig, forced: Collection[str]) -> None:
        super().__init__(config)
        self._forced = forced

    def place(
        self,
        newcomer: LiveRequest,
        replicas: Iterable[Replica],
        now_ns: int,
        without: LiveRequest | None = None,
    ) -> Placement | Late:
        """The real test's answer, save for chosen requests that it would refuse."""
        replicas = list(replicas)
        verdict = super().place(newcomer, replicas, now_ns, without)
        if isinstance(verdict, Late) and newcomer.request_id in self._forced:
            return Placement(replicas[0], newcomer.deadline_ns)
        return verdict


def force_admissions(scheduler: Scheduler, request_ids: Collection[str]) -> None:
    """From now on no request of these is refused as LATE."""
    intake = scheduler._intake
    intake._test = _Forced(intake._config, frozenset(request_ids))
