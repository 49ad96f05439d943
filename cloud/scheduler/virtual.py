"""Drives a policy in virtual time: arrivals and replicas as events on one heap.

The whole of it: `VirtualDriver.at` puts an action at an instant, `run` carries them
out in order. Steps take as long as the simulated engine says; nothing sleeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heappop, heappush

from cloud.scheduler.policy import Policy
from cloud.scheduler.simulated import Arrival, SimulatedSteps
from cloud.scheduler.types import (
    Admitted,
    Ended,
    Event,
    Rejected,
    ReplicaSpec,
    StepResult,
    TokenEmitted,
)

__all__ = ["VirtualDriver"]


class VirtualDriver:
    """Carries out a policy's plans and tells it what came of them.

    `decisions` and `ended` fill up as the run goes on; `on_event` sees every event
    with its instant.
    """

    def __init__(
        self, policy: Policy, *, on_event: Callable[[Event, int], None] | None = None
    ) -> None:
        self.policy = policy
        self.now_ns = 0
        self.decisions: dict[str, Admitted | Rejected] = {}
        self.ended: dict[str, Ended] = {}
        self.tokens: dict[str, list[int]] = {}
        self._on_event = on_event
        self._engines: dict[str, SimulatedSteps] = {}
        self._busy: dict[str, int] = {}  # Replica -> number of its step in progress.
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, instant_ns: int, action: Callable[[], None]) -> None:
        """Has `action` carried out at an instant, after all that was put there before."""
        self._count += 1
        heappush(self._heap, (max(instant_ns, self.now_ns), self._count, action))

    def add_replica(self, spec: ReplicaSpec, engine: SimulatedSteps | None = None) -> None:
        """Brings a replica up now."""
        self._engines[spec.replica_id] = engine or SimulatedSteps(spec.cost_model)
        self.take(self.policy.replica_up(spec, self.now_ns))

    def lose_replica(self, replica_id: str) -> None:
        """Loses a replica now, and its step with it."""
        del self._engines[replica_id]
        self._busy.pop(replica_id, None)
        self.take(self.policy.replica_down(replica_id, self.now_ns))

    def add(self, arrivals: Iterable[Arrival]) -> None:
        """Has requests submitted at their instants."""
        for arrival in arrivals:
            self.at(arrival.at_ns, lambda one=arrival: self.submit(one))  # type: ignore[misc]

    def submit(self, arrival: Arrival) -> None:
        """Submits a request now."""
        request = arrival.request
        decision = self.policy.submit(request, self.now_ns)
        self.decisions[request.request_id] = decision
        if isinstance(decision, Admitted):
            self.take(decision.events)
            if arrival.output_tokens is not None:
                for engine in self._engines.values():
                    engine.open(request.request_id, arrival.output_tokens)

    def cancel(self, request_id: str) -> None:
        """Cancels a request now."""
        self.take(self.policy.cancel(request_id, self.now_ns))

    def take(self, events: Iterable[Event]) -> None:
        """Notes events."""
        for event in events:
            if isinstance(event, TokenEmitted):
                self.tokens.setdefault(event.request_id, []).append(event.token)
            else:
                self.ended[event.request_id] = event
            if self._on_event is not None:
                self._on_event(event, self.now_ns)

    def run(self, until_ns: int | None = None) -> None:
        """Carries out everything up to an instant, or until nothing is left to do."""
        while True:
            self._start_steps()
            next_ns = self._next_ns()
            if next_ns is None or (until_ns is not None and next_ns > until_ns):
                break
            self.now_ns = next_ns
            while self._heap and self._heap[0][0] == next_ns:
                heappop(self._heap)[2]()
            self.take(self.policy.advance(next_ns))
        if until_ns is not None:
            self.now_ns = until_ns

    def _next_ns(self) -> int | None:
        instants = [self._heap[0][0]] if self._heap else []
        expiry_ns = self.policy.next_expiry_ns()
        if expiry_ns is not None:
            instants.append(max(expiry_ns, self.now_ns))
        return min(instants, default=None)

    def _start_steps(self) -> None:
        # A plan may push work back that an idle replica before it can take.
        while self._start_idle():
            pass

    def _start_idle(self) -> bool:
        """Starts a step on each replica that has work; returns whether one began."""
        num_busy = len(self._busy)
        for replica_id, engine in list(self._engines.items()):
            if replica_id in self._busy or not self.policy.has_work(replica_id):
                continue
            plan = self.policy.plan(replica_id, self.now_ns)
            self.take(plan.events)
            if plan.is_empty:
                continue
            result = engine.execute(plan, self.now_ns)
            self._count += 1
            step = self._busy[replica_id] = self._count
            self.at(
                self.now_ns + result.elapsed_ns,
                lambda r=replica_id, s=step, got=result: self._finish(r, s, got),  # type: ignore[misc]
            )
        return len(self._busy) > num_busy

    def _finish(self, replica_id: str, step: int, result: StepResult) -> None:
        if self._busy.get(replica_id) == step:
            del self._busy[replica_id]
            self.take(self.policy.commit(replica_id, result, self.now_ns))
