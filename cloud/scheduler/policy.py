"""The protocol that a driver needs of whatever decides.

The scheduler is one `Policy`; the simulator's baselines are others. Drivers
(the server's dispatcher, the virtual-time driver) know nothing else.
"""

from typing import Protocol

from cloud.scheduler.types import (
    Admitted,
    Event,
    Rejected,
    ReplicaSpec,
    Request,
    StepPlan,
    StepResult,
)
from headway.cost_model import CostModel

__all__ = ["Policy"]


class Policy(Protocol):
    """Decides. Never waits and never reads a clock: the caller passes now_ns.

    For each replica strictly plan -> execute -> commit. Every request that was
    submitted ends in exactly one `Ended` event, or in the `Rejected` that
    submit returned. Events are returned by the call that caused them.
    """

    def submit(self, request: Request, now_ns: int) -> Admitted | Rejected:
        """Takes a request in, or says no and keeps nothing of it.

        Raises:
            ValueError: the request is impossible by its own terms, or its id
                is that of a live one.
        """

    def cancel(self, request_id: str, now_ns: int) -> tuple[Event, ...]:
        """Ends a request. Unknown or ended ids are no error: a late cancel is normal."""

    def plan(self, replica_id: str, now_ns: int) -> StepPlan:
        """The replica's next step. Empty where there is nothing to do; an
        empty plan needs no commit.

        It may push unpromised work back into the queue, which another idle
        replica can take: ask those again (`has_work`).
        """

    def commit(self, replica_id: str, result: StepResult, now_ns: int) -> tuple[Event, ...]:
        """Takes in what the step of the last plan gave."""

    def replica_up(self, spec: ReplicaSpec, now_ns: int) -> tuple[Event, ...]:
        """A replica can be given work from now on."""

    def replica_down(self, replica_id: str, now_ns: int) -> tuple[Event, ...]:
        """A replica is lost, and its step with it."""

    def refit(self, replica_id: str, cost_model: CostModel, now_ns: int) -> None:
        """Predictions of the replica's steps come from `cost_model` from now on."""

    def drain(self, now_ns: int) -> None:
        """Refuses new work from now on; what was admitted is finished."""

    def undrain(self, now_ns: int) -> None:
        """Takes new work again."""

    def drain_replica(self, replica_id: str, now_ns: int) -> None:
        """Places no new work on a replica from now on; what runs there is finished.

        What waits there and was promised goes to another replica that can keep the
        promise, else it is finished there too. Without effect on a replica that is
        not up or drains already.
        """

    def undrain_replica(self, replica_id: str, now_ns: int) -> None:
        """Places work on a replica again."""

    def advance(self, now_ns: int) -> tuple[Event, ...]:
        """Ends what can no longer make its deadline."""

    def next_expiry_ns(self) -> int | None:
        """Earliest instant at which `advance` may end something, or a plan may be
        other than empty with nothing else having happened (a bucket has refilled).
        """

    def has_work(self, replica_id: str) -> bool:
        """Whether a plan for the replica now may be other than empty."""
