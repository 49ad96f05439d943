"""A Hypothesis state machine over everything that can be asked of a scheduler.

After every operation the scheduler's own books are checked and the events against a
model of what a caller may see; engines are `PagedEngine`s, so KV is checked by content.
At the end everything is drained, and the decision log goes through the verifier.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cloud.scheduler.config import ClassConfig, SchedulerConfig, TenantConfig
from cloud.scheduler.scheduler import Scheduler
from cloud.scheduler.types import (
    Admitted,
    DeadlineCovers,
    Ended,
    Event,
    Rejected,
    ReplicaSpec,
    Request,
    StepPlan,
    StepResult,
)
from headway.cost_model import CostModel
from headway.outcome import Outcome, RequestClass
from tests.support.paged_engine import PagedEngine
from tests.support.verifier import verify

__all__ = ["SchedulerMachine"]

_MS = 1_000_000
_BLOCK_TOKENS = 4
_TENANTS = ("a", "b", "c")
_MOST_STEPS = 5_000  # Until everything must be drained.


@dataclass(slots=True)
class _Sent:
    """A request as its caller knows it."""

    request: Request
    length: int  # After how many tokens it stops; only the engine knows.
    shared_tokens: int  # So many of its prompt are those of its family.
    family: str
    num_tokens: int = 0
    first_token_ns: int | None = None


@dataclass(slots=True)
class _Engine:
    """A replica's engine and the step that it executes."""

    spec: ReplicaSpec
    paged: PagedEngine
    plan: StepPlan | None = None
    result: StepResult | None = None
    ends_ns: int = 0
    known: set[str] = field(default_factory=set)


def _costs() -> st.SearchStrategy[CostModel]:
    return st.builds(
        CostModel,
        t0_ns=st.sampled_from([0.1 * _MS, 1.0 * _MS, 5.0 * _MS]),
        prefill_ns=st.sampled_from([0.0, 0.01 * _MS, 0.2 * _MS]),
        pair_ns=st.sampled_from([0.0, 500.0]),
        decode_ns=st.sampled_from([0.0, 0.1 * _MS, 1.0 * _MS]),
        kv_ns=st.sampled_from([0.0, 1_000.0]),
        margin=st.sampled_from([1.0, 1.2]),
    )


def _specs() -> st.SearchStrategy[ReplicaSpec]:
    return st.builds(
        ReplicaSpec,
        replica_id=st.just(""),
        num_blocks=st.sampled_from([4, 8, 12, 40]),
        block_tokens=st.just(_BLOCK_TOKENS),
        max_context_tokens=st.sampled_from([32, 128]),
        cost_model=_costs(),
        num_swap_blocks=st.sampled_from([0, 0, 6, 40]),
        swap_block_ns=st.sampled_from([0.0, 1_000.0, 0.2 * _MS]),
        tenants=st.sampled_from([frozenset(), frozenset(), frozenset({"a"})]),
        is_long_context=st.sampled_from([False, False, False, True]),
    )


def _configs() -> st.SearchStrategy[SchedulerConfig]:
    return st.builds(
        SchedulerConfig,
        interactive=st.builds(
            ClassConfig, tpot_target_ns=st.sampled_from([8 * _MS, 50 * _MS, None])
        ),
        standard=st.builds(
            ClassConfig,
            default_budget_ns=st.just(300 * _MS),
            tpot_target_ns=st.sampled_from([20 * _MS, 100 * _MS]),
            max_queued_requests=st.sampled_from([3, 1000]),
        ),
        batch=st.builds(
            ClassConfig,
            tpot_target_ns=st.sampled_from([None, 30 * _MS]),
            patience_ns=st.sampled_from([20 * _MS, 10_000 * _MS]),
            max_queued_tokens=st.sampled_from([200, 1 << 20]),
        ),
        tenants=st.just(
            {
                "b": TenantConfig(weight=3.0, degraded_max_tokens=2),
                "c": TenantConfig(tokens_per_s=2000.0, burst_tokens=120),
            }
        ),
        max_running=st.sampled_from([1, 2, 4, 16]),
        max_step_ns=st.sampled_from([10 * _MS, 40 * _MS]),
        min_chunk_tokens=st.sampled_from([1, 4, 16]),
        long_prefill_share=st.sampled_from([0.25, 0.5]),
        fairness_bound_tokens=st.sampled_from([0, 50, 8192]),
        lane_share=st.sampled_from([0.0, 0.05, 0.3]),
        long_context_tokens=st.sampled_from([None, None, 24]),
        use_prefix_cache=st.booleans(),
        margin_span_ns=st.just(20 * _MS),
    )


class SchedulerMachine(RuleBasedStateMachine):
    """What callers, engines and time may do to a scheduler, in any order."""

    @initialize(config=_configs(), specs=st.lists(_specs(), min_size=1, max_size=3))
    def start(self, config: SchedulerConfig, specs: list[ReplicaSpec]) -> None:
        """A scheduler with some replicas."""
        self.log: list[dict[str, Any]] = []
        self.scheduler = Scheduler(config, log=self.log.append)
        self.now_ns = 0
        self.sent: dict[str, _Sent] = {}  # Live ones.
        self.everyone: dict[str, _Sent] = {}
        self.ended: dict[str, Ended] = {}
        self.engines: dict[str, _Engine] = {}
        self.num_replicas = 0
        for spec in specs:
            self._raise_replica(spec)

    # --- callers ---

    @rule(
        request_class=st.sampled_from(RequestClass),
        tenant=st.sampled_from(_TENANTS),
        prompt=st.integers(1, 40),
        most=st.integers(1, 12),
        length=st.integers(1, 14),
        budget_ms=st.sampled_from([1, 5, 20, 60, 200, 1000, 1000, 5000]),
        covers=st.sampled_from(DeadlineCovers),
        is_fixed=st.booleans(),
        family=st.sampled_from(["", "", "x", "y"]),
        shared=st.integers(0, 30),
        older=st.integers(-12, 5),
    )
    def submit(
        self,
        request_class: RequestClass,
        tenant: str,
        prompt: int,
        most: int,
        length: int,
        budget_ms: int,
        covers: DeadlineCovers,
        is_fixed: bool,
        family: str,
        shared: int,
        older: int,
    ) -> None:
        """A request comes; now and then it takes another's place."""
        request_id = f"q{len(self.everyone)}"
        own = [name for name, one in self.sent.items() if one.request.tenant == tenant]
        shared = min(shared, prompt) if family else 0
        is_batch = request_class is RequestClass.BATCH
        request = Request(
            request_id,
            tenant,
            request_class,
            prompt,
            most,
            None if is_batch else self.now_ns + budget_ms * _MS,
            covers,
            is_fixed,
            self._hashes(request_id, tenant, family, prompt, shared),
            supersedes=own[older % len(own)] if older >= 0 and own and not is_batch else "",
        )
        one = _Sent(request, most if is_fixed else length, shared, family)
        decision = self.scheduler.submit(request, self.now_ns)
        self.everyone[request_id] = one
        if isinstance(decision, Rejected):
            assert decision.retry_after_ns is None or decision.retry_after_ns > 0
            assert request.supersedes == "" or request.supersedes in self.sent
            return
        self._admitted(one, decision)

    def _admitted(self, one: _Sent, decision: Admitted) -> None:
        request = one.request
        assert decision.max_output_tokens <= request.max_output_tokens
        if request.deadline_ns is not None:
            assert decision.predicted_ns <= request.deadline_ns
            assert decision.replica_id in self.engines
        self.sent[request.request_id] = one
        self._take(decision.events)
        if request.supersedes:
            assert request.supersedes not in self.sent

    @staticmethod
    def _hashes(
        request_id: str, tenant: str, family: str, prompt: int, shared: int
    ) -> tuple[bytes, ...]:
        """One hash a full block; equal where tenant and content are."""
        num_shared = shared // _BLOCK_TOKENS
        return tuple(
            f"{tenant}/{family if place < num_shared else request_id}/{place}".encode()
            for place in range(prompt // _BLOCK_TOKENS)
        )

    @precondition(lambda self: self.sent)
    @rule(which=st.integers(0, 1000))
    def cancel(self, which: int) -> None:
        """A caller gives up, at whatever stage."""
        names = list(self.sent)
        name = names[which % len(names)]
        self._take(self.scheduler.cancel(name, self.now_ns))
        assert self.ended[name].outcome is Outcome.CANCELLED

    @rule(which=st.integers(0, 1000))
    def cancel_what_is_not_live(self, which: int) -> None:
        """A late cancel, and one that only begins like a live one: nothing happens."""
        gone = [name for name in self.everyone if name not in self.sent]
        for name in ("q", *gone[which % (len(gone) + 1) :][:1]):
            assert self.scheduler.cancel(name, self.now_ns) == ()

    # --- engines ---

    def _raise_replica(self, spec: ReplicaSpec) -> None:
        spec = replace(spec, replica_id=f"r{self.num_replicas}")
        self.num_replicas += 1
        paged = PagedEngine(
            spec.num_blocks,
            spec.num_swap_blocks,
            spec.block_tokens,
            self._content,
            lambda name: self.everyone[name].length,
            lambda name: self.everyone[name].num_tokens,
        )
        self.engines[spec.replica_id] = _Engine(spec, paged)
        self._take(self.scheduler.replica_up(spec, self.now_ns))

    def _content(self, name: str, place: int) -> str:
        one = self.everyone[name]
        if place < one.shared_tokens:
            return f"{one.request.tenant}/{one.family}/{place}"
        return f"{name}/{place}"

    @precondition(lambda self: len(self.engines) < 3)
    @rule(spec=_specs())
    def replica_up(self, spec: ReplicaSpec) -> None:
        """One more replica."""
        self._raise_replica(spec)

    @precondition(lambda self: self.engines)
    @rule(which=st.integers(0, 2), luck=st.integers(0, 3))
    def replica_down(self, which: int, luck: int) -> None:
        """A replica is lost: what has streamed ends at once, everything ends once."""
        if luck:
            return  # Losses are rare.
        name = list(self.engines)[which % len(self.engines)]
        del self.engines[name]
        self._take(self.scheduler.replica_down(name, self.now_ns))

    @precondition(lambda self: self.engines)
    @rule(which=st.integers(0, 2), luck=st.integers(0, 2))
    def drain_replica(self, which: int, luck: int) -> None:
        """A replica is drained or, more often, taken into service again."""
        name = list(self.engines)[which % len(self.engines)]
        if luck:
            self.scheduler.undrain_replica(name, self.now_ns)
        else:
            self.scheduler.drain_replica(name, self.now_ns)

    @precondition(lambda self: self.engines)
    @rule(which=st.integers(0, 2), cost=_costs())
    def refit(self, which: int, cost: CostModel) -> None:
        """Predictions change, in mid-step too."""
        name = list(self.engines)[which % len(self.engines)]
        self.scheduler.refit(name, cost, self.now_ns)

    @precondition(lambda self: any(one.plan is None for one in self.engines.values()))
    @rule(which=st.integers(0, 2), noise=st.sampled_from([0.5, 1.0, 1.0, 1.0, 3.0]))
    def plan(self, which: int, noise: float) -> None:
        """A replica that is free begins a step."""
        names = [name for name, one in self.engines.items() if one.plan is None]
        self._begin(names[which % len(names)], noise)

    def _begin(self, name: str, noise: float) -> bool:
        engine = self.engines[name]
        had_work = self.scheduler.has_work(name)
        plan = self.scheduler.plan(name, self.now_ns)
        self._take(plan.events)
        if plan.is_empty:
            return False
        assert had_work, "a step is planned where there was no work"
        for item in plan.items:
            assert item.request_id in self.sent, "a request in a step is live"
        engine.plan = plan
        outputs = engine.paged.execute(plan)
        elapsed_ns = max(1, round(plan.predicted_ns * noise))
        engine.ends_ns = self.now_ns + elapsed_ns
        engine.result = StepResult(plan.step_id, outputs, elapsed_ns)
        return True

    @precondition(lambda self: any(one.plan for one in self.engines.values()))
    @rule(which=st.integers(0, 2))
    def commit(self, which: int) -> None:
        """A running step ends."""
        names = [name for name, one in self.engines.items() if one.plan]
        self._finish(names[which % len(names)])

    def _finish(self, name: str) -> None:
        engine = self.engines[name]
        assert engine.result is not None
        result, engine.plan, engine.result = engine.result, None, None
        self.now_ns = max(self.now_ns, engine.ends_ns)
        self._take(self.scheduler.commit(name, result, self.now_ns))

    @rule(count=st.integers(1, 8))
    def work(self, count: int) -> None:
        """Steps on all replicas, as a driver would take them."""
        for _ in range(count):
            if not self._step_all():
                break

    def _step_all(self) -> bool:
        """Begins where it can and ends the earliest step; whether one ran."""
        for name, engine in self.engines.items():
            if engine.plan is None:
                self._begin(name, 1.0)
        running = [name for name, one in self.engines.items() if one.plan]
        if running:
            self._finish(min(running, key=lambda name: self.engines[name].ends_ns))
        return bool(running)

    # --- time ---

    @rule(span_ns=st.sampled_from([1, _MS, 10 * _MS, 100 * _MS, 2000 * _MS]))
    def advance(self, span_ns: int) -> None:
        """Time goes by."""
        self.now_ns += span_ns
        self._take(self.scheduler.advance(self.now_ns))
        self._nothing_is_overdue()

    @rule()
    def advance_to_expiry(self) -> None:
        """Exactly to the instant at which something may end."""
        expiry_ns = self.scheduler.next_expiry_ns()
        if expiry_ns is not None:
            self.now_ns = max(self.now_ns, expiry_ns)
            self._take(self.scheduler.advance(self.now_ns))
            self._nothing_is_overdue()

    def _nothing_is_overdue(self) -> None:
        expiry_ns = self.scheduler.next_expiry_ns()
        assert expiry_ns is None or expiry_ns > self.now_ns
        for one in self.sent.values():
            request = one.request
            is_open = request.deadline_covers is DeadlineCovers.LAST_TOKEN or not one.num_tokens
            if request.deadline_ns is not None and is_open:
                assert self.now_ns <= request.deadline_ns, f"{request.request_id} is overdue"

    # --- what a caller sees ---

    def _take(self, events: tuple[Event, ...]) -> None:
        for event in events:
            assert event.request_id not in self.ended, "an event after the end"
            one = self.sent[event.request_id]
            if isinstance(event, Ended):
                self._end(one, event)
                continue
            assert event.index == one.num_tokens, "tokens come in order, none twice"
            assert event.token == event.index, "the token is the engine's"
            one.num_tokens += 1
            if one.first_token_ns is None:
                one.first_token_ns = self.now_ns

    def _end(self, one: _Sent, event: Ended) -> None:
        request = one.request
        self.ended[request.request_id] = event
        del self.sent[request.request_id]
        assert event.outcome is not Outcome.REJECTED
        assert event.output_tokens == one.num_tokens
        assert (event.reason is None) == (event.outcome is Outcome.COMPLETED)
        assert min(event.queue_ns, event.prefill_ns, event.decode_ns) >= 0
        if event.outcome is not Outcome.COMPLETED:
            return
        assert one.num_tokens >= 1
        if request.deadline_ns is not None:
            assert one.first_token_ns is not None
            is_last = request.deadline_covers is DeadlineCovers.LAST_TOKEN
            assert (self.now_ns if is_last else one.first_token_ns) <= request.deadline_ns

    @invariant()
    def books_balance(self) -> None:
        """The scheduler's own check, and its counts of what is live."""
        self.scheduler.check_invariants()
        counts = self.scheduler.snapshot(self.now_ns)
        live = sum(one.num_waiting + one.num_running for one in counts.tenants)
        assert live == len(self.sent)
        for one in counts.replicas:
            assert one.blocks_free + one.blocks_cached + one.blocks_held == one.blocks_total

    def teardown(self) -> None:
        """Everything ends, every block comes back, and the log breaks no rule."""
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.drain(self.now_ns)
        for name in self.engines:
            self.scheduler.undrain_replica(name, self.now_ns)
        if not self.engines:
            self._raise_replica(ReplicaSpec("", 40, _BLOCK_TOKENS, 128, CostModel(1.0 * _MS)))
        for _ in range(_MOST_STEPS):
            if self._step_all():
                continue
            if not self.sent:
                break
            stuck = [one for one in self.sent.values() if not self._can_run(one)]
            for one in stuck:
                self._take(self.scheduler.cancel(one.request.request_id, self.now_ns))
            # What is left waits for its tenant's bucket to fill.
            self.now_ns += 100 * _MS
            self._take(self.scheduler.advance(self.now_ns))
        assert not self.sent, f"never ended: {list(self.sent)}"
        self.books_balance()
        assert not any(one.blocks_held for one in self.scheduler.snapshot(self.now_ns).replicas)
        assert self.scheduler.next_expiry_ns() is None
        broken = verify(self.log)
        assert not broken, "; ".join(map(str, broken[:5]))

    def _can_run(self, one: _Sent) -> bool:
        """Whether a replica that it fits is left after the losses."""
        request = one.request
        most = request.prompt_tokens + request.max_output_tokens
        return any(
            most <= engine.spec.max_context_tokens
            and -(-(most - 1) // _BLOCK_TOKENS) <= engine.spec.num_blocks
            and (not engine.spec.tenants or request.tenant in engine.spec.tenants)
            for engine in self.engines.values()
        )
