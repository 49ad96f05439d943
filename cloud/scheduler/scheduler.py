"""The scheduler: takes requests in or refuses them, plans steps, takes in results.

This file composes; each rule has its own: `intake` (who gets in), `admission` (who
gets a promise), `step` (what a step does), `preemption` (who gives way), `fairness`,
`kv`, `lane`. docs/scheduler.md tells a request's way through them.
"""

from __future__ import annotations

import math
from heapq import heappop, heappush

from cloud.scheduler.books import check_books
from cloud.scheduler.bucket import TokenBucket
from cloud.scheduler.config import SchedulerConfig
from cloud.scheduler.decision_log import DecisionLog, LogSink
from cloud.scheduler.draft import StepDraft
from cloud.scheduler.expiry import hopeless_from_ns
from cloud.scheduler.explain import hold_of
from cloud.scheduler.fairness import Account, Accounts
from cloud.scheduler.intake import Intake, Refusal
from cloud.scheduler.policy import Policy
from cloud.scheduler.preemption import Preemption
from cloud.scheduler.queues import FairQueue
from cloud.scheduler.replica import Flight, Replica
from cloud.scheduler.request_state import NEVER_NS, LiveRequest, Stage
from cloud.scheduler.snapshot import RequestSnapshot, Snapshot, describe_request, take_snapshot
from cloud.scheduler.step import StepComposer
from cloud.scheduler.types import (
    Admitted,
    Ended,
    Event,
    FinishReason,
    Rejected,
    ReplicaSpec,
    Request,
    ScheduledItem,
    StepOutput,
    StepPlan,
    StepResult,
    TokenEmitted,
)
from headway.cost_model import CostModel
from headway.outcome import Outcome, Reason, RequestClass

__all__ = ["Scheduler", "StepProtocolError"]

_BATCH = int(RequestClass.BATCH)
_new = tuple.__new__  # Named tuples of a known shape, made without their own checks.


class StepProtocolError(ValueError):
    """A replica's plan or result came out of turn: strictly plan, execute, commit."""


class Scheduler(Policy):
    """Decides who runs when, on all replicas. See `Policy` for the methods' contract.

    Args:
        config: the settings.
        log: takes each record of the decision log. None: nothing is recorded.
    """

    __slots__ = (
        "_accounts",
        "_buckets",
        "_composer",
        "_config",
        "_expiries",
        "_fair",
        "_given_up",
        "_intake",
        "_live",
        "_log",
        "_num_watched",
        "_replicas",
        "_serial",
        "is_draining",
    )

    def __init__(
        self, config: SchedulerConfig | None = None, *, log: LogSink | None = None
    ) -> None:
        self._config = config = config or SchedulerConfig()
        self._log = DecisionLog(log, config) if log is not None else None
        self._accounts = Accounts(config)
        self._buckets: dict[str, TokenBucket] = {}
        self._fair = FairQueue()
        self._live: dict[str, LiveRequest] = {}
        self._replicas: dict[str, Replica] = {}
        self._num_watched = 0
        # (instant, number of the entry, request): when `advance` looks at a request again.
        self._expiries: list[tuple[int, int, LiveRequest]] = []
        self._serial = 0
        self.is_draining = False
        self._given_up: list[Ended] = []  # Ended while a step was put together.
        preemption = Preemption(config, self._evict)
        self._composer = StepComposer(
            config, self._fair, self._buckets, preemption, self._join, self._give_up
        )
        self._intake = Intake(config, self._accounts, self._buckets, self._replicas)

    # --- requests ---

    def submit(self, request: Request, now_ns: int) -> Admitted | Rejected:
        """Takes a request in, or says no and keeps nothing of it. See `Policy.submit`."""
        if request.request_id in self._live:
            raise ValueError(f"request '{request.request_id}' is live already; ids are used once")
        older = self._superseded_by(request)
        self._serial += 1
        seq = self._serial if older is None else older.seq
        live = self._intake.to_live(request, seq=seq, serial=self._serial, now_ns=now_ns)
        refusal = (
            Refusal(Reason.DRAINING, "the server takes no new work; ask another one")
            if self.is_draining
            else self._intake.admit(live, older, now_ns)
        )
        decision: Admitted | Rejected
        if isinstance(refusal, Refusal):
            rejected = live.account.rejected
            rejected[refusal.reason] = rejected.get(refusal.reason, 0) + 1
            decision = Rejected(
                request.request_id,
                refusal.reason,
                refusal.message,
                refusal.retry_after_ns,
                refusal.predicted_ns,
            )
        else:
            events: tuple[Event, ...] = ()
            predicted_ns = refusal
            if older is not None:
                events = (self._end(older, Outcome.CANCELLED, Reason.SUPERSEDED, now_ns),)
            self._take_in(live)
            bound_to = live.replica.replica_id if live.replica is not None else ""
            decision = Admitted(request.request_id, bound_to, predicted_ns, live.max_output, events)
        if self._log is not None:
            self._log.submitted(request, live.deadline_ns, decision, now_ns)
        return decision

    def cancel(self, request_id: str, now_ns: int) -> tuple[Event, ...]:
        """Ends a request. See `Policy.cancel`."""
        live = self._live.get(request_id)
        if live is None:
            return ()
        return (self._end(live, Outcome.CANCELLED, Reason.CANCELLED, now_ns),)

    def _superseded_by(self, request: Request) -> LiveRequest | None:
        """The live request whose place this one takes; only ever of the same tenant."""
        older = self._live.get(request.supersedes) if request.supersedes else None
        return older if older is not None and older.tenant == request.tenant else None

    def _take_in(self, live: LiveRequest) -> None:
        """Starts a request's life: all books say so from here on."""
        account = live.account
        if not account.num_live:
            self._accounts.activate(account)
        account.admitted += 1
        account.num_waiting += 1
        account.promised_ns += live.promised_ns
        self._live[live.request_id] = live
        self._intake.queued(live)
        self._enqueue(live)
        self._watch(live)

    def _enqueue(self, live: LiveRequest) -> None:
        if live.rank == _BATCH:
            live.replica = None
            self._fair.push(live, is_long=self._intake.is_long(live))
        else:
            live.demand_ns = live.home.cost.chunk_ns(0, live.total_tokens)
            live.home.waiting[live.rank].push(live)

    def _dequeue(self, live: LiveRequest) -> None:
        """Takes a request out of its queue; its stage is no longer WAITING."""
        if live.rank == _BATCH:
            self._fair.remove(live, is_long=self._intake.is_long(live))
        elif live.replica is not None:
            live.replica.waiting[live.rank].remove(live)

    # --- replicas ---

    def replica_up(self, spec: ReplicaSpec, now_ns: int) -> tuple[Event, ...]:
        """A replica can be given work from now on. See `Policy.replica_up`."""
        if spec.replica_id in self._replicas:
            raise ValueError(f"replica '{spec.replica_id}' is up already")
        self._replicas[spec.replica_id] = Replica(spec, self._config, now_ns)
        self._intake.assign_pools()
        if self._log is not None:
            self._log.replica_up(spec, now_ns)
        return ()

    def replica_down(self, replica_id: str, now_ns: int) -> tuple[Event, ...]:
        """A replica is lost, and its step with it. See `Policy.replica_down`."""
        replica = self._replicas.pop(replica_id, None)
        if replica is None:
            return ()
        self._intake.assign_pools()
        if self._log is not None:
            self._log.replica_down(replica_id, now_ns)
        replica.flight = None
        for live in self._live.values():
            if live.host is replica.host:
                replica.host.drop(live)
        running = list(replica.running)
        for live in running:
            replica.leave(live)
            live.stage = Stage.WAITING
            live.account.num_running -= 1
            live.account.num_waiting += 1
            self._intake.queued(live)
        waiting = [live for queue in replica.waiting for live in queue]
        for live in (*running, *waiting):
            live.replica = live.opened_at = None
            live.computed = 0
        events: list[Event] = []
        for live in sorted((*running, *waiting), key=lambda one: one.key):
            events.extend(self._rehome(live, now_ns))
        return tuple(events)

    def _rehome(self, live: LiveRequest, now_ns: int) -> tuple[Event, ...]:
        """Another place for a request of a lost replica, or its end: at once, and once."""
        if live.num_output == 0 and (
            live.rank == _BATCH or self._intake.bind(live, None, now_ns) is not None
        ):
            self._enqueue(live)
            self._watch(live)
            if self._log is not None:
                self._log.requeued(live, now_ns)
            return ()
        live.replica = None
        return (self._end(live, Outcome.FAILED, Reason.ENGINE_LOST, now_ns, is_queued=False),)

    def refit(self, replica_id: str, cost_model: CostModel, now_ns: int) -> None:
        """Predictions come from `cost_model` from now on. See `Policy.refit`."""
        replica = self._replica(replica_id)
        replica.cost = cost_model
        # What takes longer than it was thought to may be hopeless earlier.
        for queue in replica.waiting:
            for live in queue:
                self._watch(live)
        for live in replica.running:
            self._watch(live)
        if self._log is not None:
            self._log.refit(replica_id, cost_model, now_ns)

    def drain(self, now_ns: int) -> None:
        """Refuses new work from now on. See `Policy.drain`."""
        self.is_draining = True
        if self._log is not None:
            self._log.drain(now_ns)

    def undrain(self, now_ns: int) -> None:
        """Takes new work again. See `Policy.undrain`."""
        self.is_draining = False
        if self._log is not None:
            self._log.undrain(now_ns)

    def drain_replica(self, replica_id: str, now_ns: int) -> None:
        """Places no new work on a replica. See `Policy.drain_replica`."""
        replica = self._replicas.get(replica_id)
        if replica is None or replica.is_draining:
            return
        replica.is_draining = True
        if self._log is not None:
            self._log.replica_drain(replica_id, now_ns, is_draining=True)
        for live in [live for queue in replica.waiting for live in queue]:
            self._move_away(live, now_ns)

    def _move_away(self, live: LiveRequest, now_ns: int) -> None:
        """Moves waiting promised work that has not begun to where its promise is kept too."""
        if live.num_output or live.host is not None:
            return
        self._dequeue(live)
        is_moved = self._intake.bind(live, None, now_ns) is not None
        self._enqueue(live)  # At its place here, where no other replica can keep the promise.
        if is_moved:
            self._watch(live)
            if self._log is not None:
                self._log.requeued(live, now_ns)

    def undrain_replica(self, replica_id: str, now_ns: int) -> None:
        """Places work on a replica again. See `Policy.undrain_replica`."""
        replica = self._replicas.get(replica_id)
        if replica is None or not replica.is_draining:
            return
        replica.is_draining = False
        if self._log is not None:
            self._log.replica_drain(replica_id, now_ns, is_draining=False)

    def _replica(self, replica_id: str) -> Replica:
        replica = self._replicas.get(replica_id)
        if replica is None:
            raise ValueError(f"no replica '{replica_id}' is up")
        return replica

    # --- time ---

    def advance(self, now_ns: int) -> tuple[Event, ...]:
        """Ends what can no longer make its deadline. See `Policy.advance`."""
        for bucket in self._buckets.values():
            bucket.level(now_ns)
        events: list[Event] = []
        expiries = self._expiries
        while expiries and expiries[0][0] <= now_ns:
            at_ns, _, live = heappop(expiries)
            if live.expiry_ns != at_ns or live.stage is Stage.ENDED or live.is_met:
                continue
            live.expiry_ns = NEVER_NS
            self._watch(live)
            if live.expiry_ns <= now_ns:
                events.append(self._end(live, Outcome.EXPIRED, Reason.DEADLINE_MISSED, now_ns))
        return tuple(events)

    def _watch(self, live: LiveRequest) -> None:
        """Notes when a request that makes no progress will be hopeless."""
        if live.is_met:
            return
        at_ns = hopeless_from_ns(live, self._config)
        if at_ns != live.expiry_ns:
            live.expiry_ns = at_ns
            self._num_watched += 1
            heappush(self._expiries, (at_ns, self._num_watched, live))

    def next_expiry_ns(self) -> int | None:
        """Earliest instant at which `advance` or `plan` may find more to do."""
        expiries = self._expiries
        while expiries and (
            expiries[0][2].expiry_ns != expiries[0][0]
            or expiries[0][2].stage is Stage.ENDED
            or expiries[0][2].is_met
        ):
            heappop(expiries)
        instants = [expiries[0][0]] if expiries else []
        for tenant, bucket in self._buckets.items():
            if self._fair.has_tenant(tenant):
                refilled_ns = bucket.positive_from_ns()
                if refilled_ns is not None:
                    instants.append(refilled_ns)
        return min(instants, default=None)

    # --- steps ---

    def has_work(self, replica_id: str) -> bool:
        """Whether a plan for the replica now may be other than empty."""
        replica = self._replica(replica_id)
        return bool(
            replica.running
            or replica.waiting[0]
            or replica.waiting[1]
            or self._fair.has_any(replica.takes)
        )

    def plan(self, replica_id: str, now_ns: int) -> StepPlan:
        """The replica's next step. See `Policy.plan`."""
        replica = self._replica(replica_id)
        if replica.flight is not None:
            raise StepProtocolError(
                f"step {replica.flight.step_id} of replica '{replica_id}' is not committed yet"
            )
        events = self.advance(now_ns)
        draft = self._composer.compose(replica, now_ns)
        events += tuple(self._given_up)
        self._given_up.clear()
        if draft.is_empty:
            return StepPlan(replica_id, replica.step_id, (), events=events)
        replica.step_id += 1
        shape = draft.shape()
        predicted_ns = replica.cost.predict_ns(shape) + math.ceil(replica.host.copies_ns)
        swap_out, swap_in = replica.host.take_copies()
        plan = StepPlan(
            replica_id,
            replica.step_id,
            self._items(replica, draft, now_ns),
            closed=tuple(replica.closed),
            swap_out=swap_out,
            swap_in=swap_in,
            predicted_ns=predicted_ns,
            events=events,
        )
        replica.closed.clear()
        replica.flight = Flight(
            replica.step_id, now_ns, predicted_ns, shape, draft.decodes, draft.chunks
        )
        if self._log is not None:
            self._log.planned(plan, now_ns, replica.margin.value)
        return plan

    def _items(self, replica: Replica, draft: StepDraft, now_ns: int) -> tuple[ScheduledItem, ...]:
        """The step's items: decodes, then prefills."""
        item = ScheduledItem
        items = [
            _new(item, (one.request_id, one.computed, 1, False, True, one.fresh_blocks, False))
            for one in draft.decodes
        ]
        for live in draft.decodes:
            if live.fresh_blocks:
                live.fresh_blocks = ()
        for chunk in draft.chunks:
            live = chunk.live
            items.append(
                item(
                    live.request_id,
                    live.computed,
                    chunk.num_tokens,
                    True,
                    chunk.samples,
                    live.fresh_blocks,
                    live.resets_table,
                )
            )
            live.fresh_blocks = ()
            live.resets_table = False
            live.opened_at = replica
            if live.first_step_ns < 0:
                live.first_step_ns = now_ns
        return tuple(items)

    def commit(self, replica_id: str, result: StepResult, now_ns: int) -> tuple[Event, ...]:
        """Takes in what the step of the last plan gave. See `Policy.commit`."""
        replica = self._replica(replica_id)
        flight = replica.flight
        if flight is None or flight.step_id != result.step_id:
            waits_for = f"step {flight.step_id}" if flight is not None else "no step"
            raise StepProtocolError(
                f"replica '{replica_id}' gave step {result.step_id}, {waits_for} is expected"
            )
        outputs = {output.request_id: output for output in result.outputs}
        self._check_outputs(flight, outputs)
        replica.flight = None
        replica.num_steps += 1
        replica.observe(flight, result.elapsed_ns, now_ns)
        if self._log is not None:
            self._log.committed(replica_id, result, now_ns)
        events: list[Event] = []
        self._commit_decodes(replica, flight.decodes, outputs, events, now_ns)
        for chunk in flight.chunks:
            live = chunk.live
            if live.stage is Stage.ENDED:
                continue
            replica.computed(live, chunk.num_tokens)
            live.account.prompt_tokens += chunk.num_tokens
            if chunk.samples:
                replica.start_decoding(live)
                self._emit_first(live, outputs[live.request_id], events, now_ns)
        return tuple(events)

    @staticmethod
    def _check_outputs(flight: Flight, outputs: dict[str, StepOutput]) -> None:
        """A result must answer its plan: checked before anything changes."""
        sampling = [chunk.live for chunk in flight.chunks if chunk.samples]
        expected = len(flight.decodes) + len(sampling)
        for live in (*flight.decodes, *sampling):
            if live.request_id not in outputs and live.stage is not Stage.ENDED:
                raise StepProtocolError(
                    f"step {flight.step_id} has no token for request '{live.request_id}'"
                )
        if len(outputs) > expected:
            raise StepProtocolError(
                f"step {flight.step_id} has {len(outputs)} tokens, {expected} were asked for"
            )

    def _commit_decodes(
        self,
        replica: Replica,
        decodes: list[LiveRequest],
        outputs: dict[str, StepOutput],
        events: list[Event],
        now_ns: int,
    ) -> None:
        emit, emitted, decode_kv = events.append, TokenEmitted, replica.decode_kv
        ended = Stage.ENDED
        for live in decodes:
            if live.stage is ended:
                continue
            request_id = live.request_id
            _, token, is_stop = outputs[request_id]
            index = live.num_output
            live.computed += 1
            live.num_output = index + 1
            decode_kv[live.rank] += 1
            account = live.account
            account.counter += live.output_charge
            account.output_tokens += 1
            if live.bucket is not None:
                live.bucket.draw(self._config.output_weight, now_ns)
            if is_stop or index + 1 >= live.max_output:
                self._emit_last(live, token, is_stop, events, now_ns)
            else:
                emit(_new(emitted, (request_id, token, index)))

    def _emit_first(
        self, live: LiveRequest, output: StepOutput, events: list[Event], now_ns: int
    ) -> None:
        """The token that a complete prefill gives: the first, or the next after a preemption."""
        live.num_output += 1
        live.account.counter += live.output_charge
        live.account.output_tokens += 1
        if live.bucket is not None:
            live.bucket.draw(self._config.output_weight, now_ns)
        if live.first_token_ns < 0:
            live.first_token_ns = now_ns
        if not live.covers_last and not live.is_met:
            if now_ns > live.deadline_ns:
                self._expire(live, events, now_ns)
                return
            self._keep_promise(live)
        if output.is_stop or live.num_output >= live.max_output:
            self._emit_last(live, output.token, output.is_stop, events, now_ns)
        else:
            events.append(TokenEmitted(live.request_id, output.token, live.num_output - 1))

    def _emit_last(
        self, live: LiveRequest, token: int, is_stop: bool, events: list[Event], now_ns: int
    ) -> None:
        if not live.is_met and now_ns > live.deadline_ns:
            self._expire(live, events, now_ns)
            return
        events.append(TokenEmitted(live.request_id, token, live.num_output - 1))
        finish = FinishReason.STOP if is_stop else FinishReason.LENGTH
        events.append(self._end(live, Outcome.COMPLETED, None, now_ns, finish=finish))

    def _expire(self, live: LiveRequest, events: list[Event], now_ns: int) -> None:
        """An answer that is there too late is none: it is as bad as never."""
        live.num_output -= 1  # This token is not given.
        events.append(self._end(live, Outcome.EXPIRED, Reason.DEADLINE_MISSED, now_ns))

    def _keep_promise(self, live: LiveRequest) -> None:
        """Nothing more is promised: the room kept for it is free again."""
        live.is_met = True
        live.account.promised_ns -= live.promised_ns
        live.promised_ns = 0.0
        if live.rank and live.replica is not None:
            live.replica.release_reserve(live)

    # --- what the parts ask for ---

    def _join(
        self, replica: Replica, live: LiveRequest, cached: list[int], reserve: int, now_ns: int
    ) -> None:
        """Moves a waiting request into a replica's batch."""
        live.stage = Stage.RUNNING
        self._dequeue(live)
        self._intake.dequeued(live)
        live.account.num_waiting -= 1
        live.account.num_running += 1
        if live.opened_at is not None and live.opened_at is not replica:
            live.opened_at.closed.append(live.request_id)
        if live.host is not None and live.host is not replica.host:
            live.host.drop(live)
        replica.enter(live, cached, reserve)
        if not live.is_prompt_charged:
            live.is_prompt_charged = True
            live.cached_tokens = live.computed
            charge = self._config.prompt_weight * (live.prompt_tokens - live.computed)
            live.account.charge(charge)
            if live.bucket is not None:
                live.bucket.draw(charge, now_ns)

    def _give_up(self, live: LiveRequest, now_ns: int) -> bool:
        """Ends a waiting request that can no longer make it, looked at anew."""
        live.expiry_ns = NEVER_NS
        self._watch(live)
        if live.expiry_ns > now_ns:
            return False
        self._given_up.append(self._end(live, Outcome.EXPIRED, Reason.DEADLINE_MISSED, now_ns))
        return True

    def _evict(self, live: LiveRequest, now_ns: int) -> None:
        """Pushes a running request back to its place in the queue; its room is free."""
        replica = live.home
        is_swapped = replica.host.save(live, self._recompute_ns(live))
        replica.leave(live)
        live.stage = Stage.WAITING
        if not is_swapped:
            live.computed = 0
        live.num_preemptions += 1
        replica.evictions.draw(1, now_ns)
        live.gave_way = (replica, replica.step_id)
        live.account.preemptions += 1
        live.account.num_running -= 1
        live.account.num_waiting += 1
        self._intake.queued(live)
        self._enqueue(live)
        self._watch(live)  # What it lost has to be done again: it may be hopeless now.
        if self._log is not None:
            self._log.preempted(live, replica.replica_id, now_ns, swapped=is_swapped)

    def _recompute_ns(self, live: LiveRequest) -> float:
        """Predicted time to compute a running request's KV again, less what stays cached."""
        replica, context = live.home, 0
        if live.request.prefix_hashes and self._config.use_prefix_cache:
            found = replica.pool.match(live.request.prefix_hashes, live.prompt_tokens)
            context = min(len(found) * replica.spec.block_tokens, live.computed)
        return replica.cost.chunk_ns(context, live.computed - context)

    def _end(
        self,
        live: LiveRequest,
        outcome: Outcome,
        reason: Reason | None,
        now_ns: int,
        *,
        finish: FinishReason | None = None,
        is_queued: bool = True,
    ) -> Ended:
        """The one way out: takes everything back that the request held."""
        account = live.account
        was_waiting = live.stage is Stage.WAITING
        live.stage = Stage.ENDED
        if was_waiting:
            if is_queued:
                self._dequeue(live)
            self._intake.dequeued(live)
            account.num_waiting -= 1
        else:
            live.home.leave(live)
            account.num_running -= 1
        if live.host is not None:
            live.host.drop(live)
        if live.opened_at is not None:
            live.opened_at.closed.append(live.request_id)
        account.promised_ns -= live.promised_ns
        self._intake.settle(live)
        del self._live[live.request_id]
        _count(account, live, outcome, now_ns)
        if not account.num_live:
            self._accounts.deactivate(account)
        ended = _ended(live, outcome, reason, now_ns, finish)
        if self._log is not None:
            self._log.ended(ended)
        return ended

    # --- for operators ---

    def snapshot(self, now_ns: int) -> Snapshot:
        """The state at this instant: per class and tenant, and per replica."""
        return take_snapshot(
            now_ns,
            self._accounts,
            self._replicas.values(),
            self._buckets,
            waiting_tokens=self._intake.queued_tokens,
            is_draining=self.is_draining,
        )

    def explain(self, request_id: str, now_ns: int) -> RequestSnapshot | None:
        """Where a live request stands in its queue or batch; None where there is none.

        What was decided about it before is in the decision log.
        """
        live = self._live.get(request_id)
        if live is None:
            return None
        num_ahead = 0
        if live.stage is Stage.WAITING:
            queue = self._fair if live.rank == _BATCH else live.home.waiting[live.rank]
            num_ahead = queue.place_of(live)
        hold = hold_of(
            live,
            num_ahead,
            self._replicas.values(),
            self._fair,
            self._buckets,
            self._config,
            is_long=self._intake.is_long(live),
            now_ns=now_ns,
        )
        return describe_request(live, num_ahead, hold, now_ns)

    def check_invariants(self) -> None:
        """Compares all books with each other; O(everything), for tests.

        Raises:
            KvInvariantError: two of them differ.
        """
        check_books(self._live, self._replicas.values(), self._accounts)


def _count(account: Account, live: LiveRequest, outcome: Outcome, now_ns: int) -> None:
    """Counts an end. A promise is missed unless it was kept or the client cancelled."""
    has_deadline = live.deadline_ns != NEVER_NS
    if outcome is Outcome.COMPLETED:
        account.completed += 1
    elif outcome is Outcome.CANCELLED:
        account.cancelled += 1
    elif outcome is Outcome.EXPIRED:
        account.expired += 1
    else:
        account.failed += 1
    if has_deadline and outcome in (Outcome.EXPIRED, Outcome.FAILED):
        account.missed += 1
        if live.rank and live.replica is not None and live.replica.interactive_load > 0:
            account.yielded += 1


def _ended(
    live: LiveRequest,
    outcome: Outcome,
    reason: Reason | None,
    now_ns: int,
    finish: FinishReason | None,
) -> Ended:
    started_ns = live.first_step_ns if live.first_step_ns >= 0 else now_ns
    first_ns = live.first_token_ns if live.first_token_ns >= 0 else now_ns
    return Ended(
        live.request_id,
        outcome,
        reason,
        finish,
        now_ns,
        prompt_tokens=live.prompt_tokens,
        cached_tokens=live.cached_tokens,
        output_tokens=live.num_output,
        queue_ns=started_ns - live.arrival_ns,
        prefill_ns=first_ns - started_ns,
        decode_ns=now_ns - first_ns,
    )
