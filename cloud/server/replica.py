"""One engine's life: start, step after step, loss, start again."""

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Iterable
from typing import Protocol

import structlog

from cloud.engine.api import Engine, EngineDescription, EngineLostError, EngineRequest
from cloud.scheduler.policy import Policy
from cloud.scheduler.types import Event, ReplicaSpec, StepPlan, StepResult
from cloud.server.ledger import StepTimes
from headway.clock import Clock, s_from_ns
from headway.cost_model import StepShape

__all__ = ["Host", "Replica"]

_log = structlog.get_logger()

# Where a policy has work but plans nothing, something that only time brings
# (the starvation lane's allowance, say) may change its mind.
_REPLAN_AFTER_S = 0.02
# An engine that answers without waiting would keep the loop from all else.
_MAX_UNYIELDED_NS = 1_000_000


class Host(Protocol):
    """What a replica needs of the dispatcher."""

    policy: Policy

    def tell(self, events: Iterable[Event]) -> None:
        """Brings events to their calls."""

    def open(self, request_id: str) -> EngineRequest:
        """What an engine is to know of a live request, now that it starts on it."""

    def wake_idle(self) -> None:
        """Wakes every replica that waits and may have something to do by now."""


class Replica:
    """Keeps one engine running and fed.

    Args:
        replica_id: its name.
        make_engine: a fresh engine for every start.
        make_spec: what the policy is told of a started engine.
        clock: of the policy.
        times: where step times are kept.
        step_timeout_ns: a step that takes longer means a lost engine, whatever
            was predicted.
        stall: (factor, least span in ns): so does one that takes longer than
            both the span and this many times what was predicted.
        backoff_ns: (first, longest) wait before a lost engine is started again.
        on_change: called after the replica went up or down.

    Attributes:
        is_up: its engine works.
        is_draining: it is given no new work.
        down_reason: why not, where it is not up.
        description: of the engine, once it was started.
        times: of the latest steps.
    """

    def __init__(
        self,
        replica_id: str,
        make_engine: Callable[[], Engine],
        make_spec: Callable[[str, EngineDescription], ReplicaSpec],
        clock: Clock,
        times: StepTimes,
        *,
        step_timeout_ns: int = 30_000_000_000,
        stall: tuple[float, int] = (20.0, 2_000_000_000),
        backoff_ns: tuple[int, int] = (500_000_000, 30_000_000_000),
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.replica_id = replica_id
        self.is_up = self.is_draining = False
        self.down_reason = "not started"
        self.description: EngineDescription | None = None
        self.times = times
        self.on_change = on_change
        self._make_engine = make_engine
        self._make_spec = make_spec
        self._clock = clock
        self._step_timeout_ns = step_timeout_ns
        self._stall = stall
        self._backoff_ns = backoff_ns
        self._next_backoff_ns = backoff_ns[0]
        self._restart_at_ns = 0
        self._engine: Engine | None = None
        self._opened: set[str] = set()
        self._unsent_closed: tuple[str, ...] = ()
        self._waking: asyncio.Future[None] | None = None  # While it waits for `wake`.
        self._sent_ns: int | None = None  # When the step that runs was sent.
        self._predicted_ns = 0  # What it was to take.

    @property
    def is_waiting(self) -> bool:
        """Its engine has nothing to do; `wake` has it plan again."""
        return self._waking is not None

    def wake(self) -> None:
        """Says that there may be something to plan."""
        waking, self._waking = self._waking, None
        if waking is not None and not waking.done():
            waking.set_result(None)

    def restart_hint_ns(self) -> int:
        """Earliest span after which this replica may be up."""
        return max(self._restart_at_ns - self._clock.now_ns(), self._backoff_ns[0])

    async def start(self, host: Host) -> None:
        """Starts the engine and tells the policy.

        Raises:
            EngineLostError: it did not become ready.
        """
        engine = self._make_engine()
        self._engine = engine
        description = await engine.start()
        self.description = description
        self._opened.clear()
        self._unsent_closed = ()
        spec = self._make_spec(self.replica_id, description)
        host.tell(host.policy.replica_up(spec, self._clock.now_ns()))
        if self.is_draining:
            host.policy.drain_replica(self.replica_id, self._clock.now_ns())
        self.is_up, self.down_reason = True, ""
        self.on_change()

    async def run(self, host: Host) -> None:
        """Feeds the started engine, and starts it again whenever it is lost. Never returns."""
        while True:
            try:
                if not self.is_up:
                    await self.start(host)
                    _log.info("engine_restarted", replica=self.replica_id)
                await self._feed_and_watch(host)
            except EngineLostError as lost:
                await self._lose(host, lost.reason)
            await asyncio.sleep(s_from_ns(max(0, self._restart_at_ns - self._clock.now_ns())))

    async def stop(self) -> None:
        """Ends the engine. May be called twice."""
        engine = self._engine
        if engine is not None:
            await engine.stop()
            # Not before: who is cancelled in between leaves the rest to the next one.
            if self._engine is engine:
                self._engine = None

    async def _lose(self, host: Host, reason: str) -> None:
        was_up, self.is_up = self.is_up, False
        self.down_reason = reason
        now_ns = self._clock.now_ns()
        self._restart_at_ns = now_ns + self._next_backoff_ns
        _log.error(
            "engine_lost",
            replica=self.replica_id,
            reason=reason,
            restart_in_s=s_from_ns(self._next_backoff_ns),
        )
        self._next_backoff_ns = min(2 * self._next_backoff_ns, self._backoff_ns[1])
        if was_up:
            host.tell(host.policy.replica_down(self.replica_id, now_ns))
            # What it had may be theirs now.
            host.wake_idle()
            self.on_change()
        await self.stop()

    async def _feed_and_watch(self, host: Host) -> None:
        """Feeds the engine until it is lost.

        Raises:
            EngineLostError: always, in the end.
        """
        # Looked at now and then: a timer for each step would cost as much as
        # the planning of a small one.
        look_after_s = s_from_ns(min(self._step_timeout_ns, self._stall[1])) / 2
        self._sent_ns = None
        feeding = asyncio.ensure_future(self._feed(host))
        try:
            while not feeding.done():
                await asyncio.wait({feeding}, timeout=look_after_s)
                sent_ns = self._sent_ns
                if sent_ns is None:
                    continue
                limit_ns = self._longest_step_ns()
                if self._clock.now_ns() - sent_ns > limit_ns:
                    raise EngineLostError(
                        f"a step took longer than {s_from_ns(limit_ns):g} s; "
                        f"{s_from_ns(self._predicted_ns):.3g} s was predicted"
                    )
            feeding.result()
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)

    def _longest_step_ns(self) -> int:
        """After which the step that runs counts as stalled."""
        factor, least_ns = self._stall
        return min(self._step_timeout_ns, max(least_ns, round(factor * self._predicted_ns)))

    async def _feed(self, host: Host) -> None:
        policy, clock, engine, replica_id = host.policy, self._clock, self._engine, self.replica_id
        if engine is None:
            raise EngineLostError("stopped")
        logs_steps = _log.is_enabled_for(logging.DEBUG)
        unyielded_ns = 0
        result_ns = clock.now_ns()
        while True:
            if not policy.has_work(replica_id):
                await self._wait(None)
                unyielded_ns, result_ns = 0, clock.now_ns()
            began_ns = clock.now_ns()
            plan = policy.plan(replica_id, began_ns)
            if plan.events:
                host.tell(plan.events)
            if plan.events or not plan.is_empty:
                host.wake_idle()
            if plan.is_empty:
                self._unsent_closed += plan.closed
                if policy.has_work(replica_id):
                    await self._wait(_REPLAN_AFTER_S)
                    unyielded_ns, result_ns = 0, clock.now_ns()
                continue
            plan, opened = self._ready(host, plan)
            sent_ns = clock.now_ns()
            self._sent_ns, self._predicted_ns = sent_ns, plan.predicted_ns
            result = await engine.execute(plan, opened)
            self._sent_ns = None
            planned_ns = sent_ns - result_ns
            result_ns = clock.now_ns()
            # What promises are made of is the time from plan to plan: planning, the
            # way there and back and a busy loop delay a token as much as the engine.
            spent = StepResult(result.step_id, result.outputs, result_ns - began_ns)
            host.tell(policy.commit(replica_id, spent, result_ns))
            host.wake_idle()
            if logs_steps:
                _log_step(plan, spent.elapsed_ns)
            waited_ns = result_ns - sent_ns
            added_ns = planned_ns + max(0, waited_ns - result.elapsed_ns)
            self.times.add(plan, result.elapsed_ns, added_ns, spent.elapsed_ns)
            self._next_backoff_ns = self._backoff_ns[0]
            unyielded_ns = (
                0 if waited_ns > _MAX_UNYIELDED_NS else unyielded_ns + waited_ns + planned_ns
            )
            if unyielded_ns > _MAX_UNYIELDED_NS:
                await asyncio.sleep(0)
                unyielded_ns = 0

    def _ready(self, host: Host, plan: StepPlan) -> tuple[StepPlan, list[EngineRequest]]:
        """The plan with everything that the engine was not told yet, and the new requests."""
        if self._unsent_closed:
            plan = dataclasses.replace(plan, closed=self._unsent_closed + plan.closed)
            self._unsent_closed = ()
        opened_ids = self._opened
        # An engine never hears of what ended before it was opened there.
        if plan.closed:
            known = tuple(name for name in plan.closed if name in opened_ids)
            opened_ids.difference_update(known)
            if len(known) < len(plan.closed):
                plan = dataclasses.replace(plan, closed=known)
        opened = []
        for item in plan.items:
            # A decode was preceded by its prefill, which opened it.
            if item.is_prefill and item.request_id not in opened_ids:
                opened_ids.add(item.request_id)
                opened.append(host.open(item.request_id))
        return plan, opened

    async def _wait(self, longest_s: float | None) -> None:
        """Waits until `wake`, or for so long."""
        loop = asyncio.get_running_loop()
        waking = self._waking = loop.create_future()
        timer = None if longest_s is None else loop.call_later(longest_s, self.wake)
        try:
            await waking
        finally:
            self._waking = None
            if timer is not None:
                timer.cancel()


def _log_step(plan: StepPlan, elapsed_ns: int) -> None:
    """A line that `headway cost fit` can read."""
    shape = StepShape.of(
        [(item.context_tokens, item.num_tokens) for item in plan.items if item.is_prefill],
        [item.context_tokens for item in plan.items if not item.is_prefill],
    )
    _log.debug(
        "step",
        replica=plan.replica_id,
        step_id=plan.step_id,
        elapsed_ns=elapsed_ns,
        predicted_ns=plan.predicted_ns,
        **dataclasses.asdict(shape),
    )
