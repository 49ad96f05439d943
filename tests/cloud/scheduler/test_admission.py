"""Admission is a promise."""

import random

import pytest

from cloud.scheduler.admission import Placement
from cloud.scheduler.config import ClassConfig, SchedulerConfig, TenantConfig
from cloud.scheduler.scheduler import Scheduler
from cloud.scheduler.simulated import Arrival, SimulatedSteps
from cloud.scheduler.types import Admitted, Ended, Rejected, Request
from cloud.scheduler.virtual import VirtualDriver
from headway.cost_model import CostModel
from headway.outcome import Outcome, Reason, RequestClass
from tests.support.scheduling import (
    COST,
    MS,
    Bench,
    CheckedScheduler,
    S,
    batch,
    interactive,
    replica,
    standard,
)


def _refused(decision: Admitted | Rejected, reason: Reason) -> Rejected:
    assert isinstance(decision, Rejected)
    assert decision.reason is reason
    return decision


def test_60000_tokens_at_20000_a_second_are_no_place_for_a_2_s_target() -> None:
    """The design's worked number: 3 s of work ahead, so ask again after at least 1 s."""
    cost = CostModel(t0_ns=0, prefill_ns=50_000)
    bench = Bench(spec=replica(num_blocks=5_000, max_context_tokens=100_000, cost_model=cost))
    for number in range(60):
        bench.submit(interactive(f"r{number}", 4 * S, prompt_tokens=1000, max_output_tokens=1))
    late = _refused(
        bench.submit(standard("new", 2 * S, prompt_tokens=1000, max_output_tokens=1)), Reason.LATE
    )
    assert late.retry_after_ns is not None
    assert late.retry_after_ns >= 1 * S


def test_what_cannot_be_done_even_alone_is_refused_with_the_time_it_would_take() -> None:
    """20 ms a step, 64 tokens at 0.1 ms, three more steps of 20.2 ms: 87 ms."""
    bench = Bench()
    late = _refused(bench.submit(interactive("robot", 80 * MS)), Reason.LATE)
    assert late.predicted_ns == pytest.approx(87 * MS, abs=MS)
    assert late.retry_after_ns == pytest.approx(7 * MS, abs=MS)


def test_a_promise_counts_the_running_step() -> None:
    """What has begun is waited for: 96 ms of prefill are ahead of the newcomer."""
    bench = Bench()
    bench.submit(batch("b", prompt_tokens=5000))
    plan = bench.plan()
    decision = bench.submit(interactive("robot", 500 * MS, max_output_tokens=1))
    assert isinstance(decision, Admitted)
    assert decision.predicted_ns == pytest.approx(plan.predicted_ns + 26.4 * MS, abs=0.2 * MS)


def test_lower_work_does_not_count() -> None:
    """A night full of batch work costs a robot nothing but the running step."""
    alone, busy = Bench(), Bench()
    for number in range(500):
        busy.submit(batch(f"b{number}", prompt_tokens=1000))
    for number in range(20):
        busy.submit(standard(f"s{number}", 60 * S))
    request = interactive("robot", S)
    assert alone.submit(request) == busy.submit(request)


def test_a_newcomer_may_not_break_a_promise() -> None:
    """It is refused although it would itself be in time."""
    bench = Bench()
    bench.submit(interactive("tight", 95 * MS))
    late = _refused(
        bench.submit(interactive("early", 90 * MS, prompt_tokens=200, max_output_tokens=1)),
        Reason.LATE,
    )
    assert "another request" in late.message


def test_promises_hold_under_overload() -> None:
    """Without noise every admitted request is in time, whatever the load (10 s, 4x)."""
    generator = random.Random(7)
    driver = VirtualDriver(CheckedScheduler(SchedulerConfig(max_running=32)))
    driver.add_replica(replica())
    now_ns = 0
    arrivals = []
    for number in range(600):
        now_ns += int(generator.expovariate(60) * S)
        budget_ns = int(generator.uniform(0.15, 0.6) * S)
        request = interactive(
            f"r{number}",
            now_ns + budget_ns,
            prompt_tokens=generator.randint(30, 300),
            max_output_tokens=generator.randint(1, 10),
        )
        arrivals.append(Arrival(now_ns, request))
    driver.add(arrivals)
    driver.run()
    admitted = [name for name, one in driver.decisions.items() if isinstance(one, Admitted)]
    assert len(admitted) > 50
    assert len(admitted) < 400
    assert {driver.ended[name].outcome for name in admitted} == {Outcome.COMPLETED}


@pytest.mark.parametrize("load", [2, 8])
def test_what_is_done_does_not_fall_when_more_is_asked(load: int) -> None:
    """Short budgets, 25 ms a step and 2.5 ms a decode: at 50 ms a token there are at most ten
    at a time, which need 0.4 s for eight tokens each. That is 25 a second; at twice that
    and at eight times, four fifths of it are done.
    """
    generator = random.Random(1)
    cost = CostModel(t0_ns=25.0 * MS, prefill_ns=100_000.0, decode_ns=2.5 * MS, margin=1.06)
    config = SchedulerConfig(interactive=ClassConfig(tpot_target_ns=50 * MS))
    driver = VirtualDriver(Scheduler(config))
    driver.add_replica(
        replica(cost_model=cost), SimulatedSteps(cost, lambda *_: generator.lognormvariate(0, 0.02))
    )
    span_s = 15
    arrivals: list[Arrival] = []
    at_ns = 0.0
    while (at_ns := at_ns + generator.expovariate(25 * load) * S) < span_s * S:
        deadline_ns = int(at_ns) + 500 * MS
        request = interactive(
            f"r{len(arrivals)}", deadline_ns, prompt_tokens=40, max_output_tokens=8
        )
        arrivals.append(Arrival(int(at_ns), request))
    driver.add(arrivals)
    driver.run()
    outcomes = [one.outcome for one in driver.ended.values()]
    assert outcomes.count(Outcome.COMPLETED) >= 0.8 * 25 * span_s
    assert len(outcomes) - outcomes.count(Outcome.COMPLETED) <= len(outcomes) // 100


def test_refusals_are_necessary() -> None:
    """Forced in one at a time, a refused request misses or makes a promise miss."""
    cases = _refused_cases(seed=11)
    assert len(cases) >= 20
    needless = [name for name in cases[:20] if not _misses_when_forced(11, name)]
    assert len(needless) <= 2


def _arrivals(seed: int) -> list[Arrival]:
    generator = random.Random(seed)
    now_ns, arrivals = 0, []
    for number in range(120):
        now_ns += int(generator.expovariate(40) * S)
        request = interactive(
            f"r{number}",
            now_ns + int(generator.uniform(0.2, 0.5) * S),
            prompt_tokens=generator.randint(50, 300),
            max_output_tokens=generator.randint(1, 8),
        )
        arrivals.append(Arrival(now_ns, request))
    return arrivals


def _run(seed: int, forced: str = "") -> VirtualDriver:
    scheduler = Scheduler()
    if forced:
        test = scheduler._intake._test
        place = test.place

        class Forcing:
            def place(self, newcomer, replicas, now_ns, without=None):  # type: ignore[no-untyped-def]
                if newcomer.request_id == forced:
                    return Placement(replicas[0], now_ns)
                return place(newcomer, replicas, now_ns, without)

        scheduler._intake._test = Forcing()  # type: ignore[assignment]
    driver = VirtualDriver(scheduler)
    driver.add_replica(replica())
    driver.add(_arrivals(seed))
    driver.run()
    return driver


def _refused_cases(seed: int) -> list[str]:
    driver = _run(seed)
    return [name for name, one in driver.decisions.items() if isinstance(one, Rejected)]


def _misses_when_forced(seed: int, name: str) -> bool:
    driver = _run(seed, name)
    return any(ended.outcome is Outcome.EXPIRED for ended in driver.ended.values())


def test_queued_work_that_can_no_longer_make_it_is_never_executed() -> None:
    """It expires at its latest start, not at its deadline, and costs no step."""
    bench = Bench(engine_cost=CostModel(t0_ns=900 * MS))
    bench.submit(interactive("first", S, prompt_tokens=900, max_output_tokens=1))
    bench.submit(interactive("second", S, prompt_tokens=800, max_output_tokens=4))
    executed = [bench.step() for _ in range(4)]
    names = {item.request_id for plan in executed for item in plan.items}
    ended = {e.request_id: e for e in bench.events if isinstance(e, Ended)}
    assert ended["second"].outcome is Outcome.EXPIRED
    assert ended["second"].reason is Reason.DEADLINE_MISSED
    assert ended["second"].at_ns < S
    assert "second" not in names


def test_an_answer_after_its_deadline_is_none() -> None:
    """The engine was slower than predicted: no token, an expiry, one miss."""
    bench = Bench(engine_cost=CostModel(t0_ns=200 * MS))
    bench.submit(interactive("robot", 150 * MS, max_output_tokens=1))
    bench.step()
    (ended,) = bench.events
    assert isinstance(ended, Ended)
    assert (ended.outcome, ended.output_tokens) == (Outcome.EXPIRED, 0)
    (state,) = bench.scheduler.snapshot(bench.now_ns).tenants
    assert (state.missed, state.completed) == (1, 0)


def test_next_expiry_says_when_advance_has_something_to_end() -> None:
    """`advance` ends nothing before that instant, and the request at it."""
    bench = Bench()
    bench.submit(interactive("robot", 100 * MS))
    instant = bench.scheduler.next_expiry_ns()
    assert instant is not None
    assert 10 * MS < instant <= 100 * MS
    assert bench.scheduler.advance(instant - 1) == ()
    (ended,) = bench.scheduler.advance(instant)
    assert isinstance(ended, Ended)
    assert bench.scheduler.next_expiry_ns() is None


def test_queues_are_bounded() -> None:
    """Requests and tokens, by class; what is refused leaves no trace."""
    bench = Bench(SchedulerConfig(batch=ClassConfig(tpot_target_ns=None, max_queued_requests=2)))
    assert isinstance(bench.submit(batch("a")), Admitted)
    assert isinstance(bench.submit(batch("b")), Admitted)
    _refused(bench.submit(batch("c")), Reason.QUEUE_FULL)
    bench.step()
    assert isinstance(bench.submit(batch("d")), Admitted)
    tokens = Bench(SchedulerConfig(batch=ClassConfig(tpot_target_ns=None, max_queued_tokens=100)))
    assert isinstance(tokens.submit(batch("a")), Admitted)
    _refused(tokens.submit(batch("b")), Reason.QUEUE_FULL)


def test_draining_refuses_and_finishes_what_was_admitted() -> None:
    """New work is sent away; old work ends as it would have."""
    bench = Bench()
    bench.submit(interactive("old", S))
    bench.scheduler.drain(0)
    _refused(bench.submit(interactive("new", S)), Reason.DRAINING)
    bench.steps(4)
    (ended,) = [event for event in bench.events if isinstance(event, Ended)]
    assert ended.outcome is Outcome.COMPLETED


def test_without_a_replica_there_is_no_engine() -> None:
    """A refusal with a hint, not a queue for nobody."""
    decision = CheckedScheduler().submit(batch("b"), 0)
    assert _refused(decision, Reason.NO_ENGINE).retry_after_ns is not None


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (batch("b", prompt_tokens=0), "at least one prompt token"),
        (batch("b", max_output_tokens=0), "one output token"),
        (Request("b", "t", RequestClass.BATCH, 1, 1, 5), "no deadline"),
        (Request("b", "t", RequestClass.INTERACTIVE, 1, 1), "needs a deadline"),
    ],
)
def test_an_impossible_request_is_an_error(request_: Request, message: str) -> None:
    """What a request can never mean is the caller's mistake, said in one line."""
    with pytest.raises(ValueError, match=message):
        Bench().submit(request_)


def test_an_id_is_used_once_while_it_lives() -> None:
    """A second request of the same name is the caller's mistake."""
    bench = Bench()
    bench.submit(batch("b"))
    with pytest.raises(ValueError, match="live already"):
        bench.submit(batch("b"))


def test_a_tenant_is_degraded_before_it_is_refused() -> None:
    """100 output tokens cannot be done in 300 ms, 5 can."""
    config = SchedulerConfig(tenants={"fleet": TenantConfig(degraded_max_tokens=5)})
    bench = Bench(config)
    decision = bench.submit(
        interactive("robot", 300 * MS, max_output_tokens=100, has_fixed_output=False)
    )
    assert isinstance(decision, Admitted)
    assert decision.max_output_tokens == 5
    fixed = bench.submit(interactive("chunk", 300 * MS, max_output_tokens=100))
    _refused(fixed, Reason.LATE)


def test_a_standard_deadline_is_the_first_tokens() -> None:
    """1,000 output tokens take long; the first one is in time."""
    bench = Bench()
    decision = bench.submit(standard("talk", 100 * MS, max_output_tokens=1000))
    assert isinstance(decision, Admitted)
    bench.steps(40)
    assert not any(isinstance(event, Ended) for event in bench.events)


def test_the_output_of_a_text_request_is_never_known_before() -> None:
    """The same requests with other true lengths get the same decisions up to their ends."""
    decisions = []
    for length in (1, 7):
        bench = Bench()
        told = [bench.submit(standard(f"s{n}", 2 * S), output_tokens=length) for n in range(20)]
        decisions.append((told, bench.plan()))
    assert decisions[0] == decisions[1]


def test_a_slower_engine_is_met_with_fewer_promises() -> None:
    """Three times slower from 10 s on: 10 s later new promises are kept again."""
    generator = random.Random(3)

    def noise(now_ns: int, _: object) -> float:
        return generator.uniform(0.97, 1.0) * (3.0 if now_ns > 10 * S else 1.0)

    driver = VirtualDriver(CheckedScheduler())
    driver.add_replica(replica(), SimulatedSteps(COST, noise))
    arrivals = []
    for number in range(1600):
        at_ns = number * 25 * MS
        arrivals.append(
            Arrival(at_ns, interactive(f"r{number}", at_ns + 400 * MS, max_output_tokens=3))
        )
    driver.add(arrivals)
    driver.run()
    late = [a for a in arrivals if a.at_ns > 20 * S]
    admitted = [a for a in late if isinstance(driver.decisions[a.request.request_id], Admitted)]
    missed = [
        a for a in admitted if driver.ended[a.request.request_id].outcome is not Outcome.COMPLETED
    ]
    assert len(admitted) > 100
    assert len(missed) <= len(admitted) // 1000


def test_a_refit_that_makes_a_promise_hopeless_ends_it_unexecuted() -> None:
    """64 tokens at 1 ms each do not fit into 80 ms any more."""
    bench = Bench()
    bench.submit(interactive("robot", 80 * MS, max_output_tokens=1))
    bench.scheduler.refit("r0", CostModel(t0_ns=20 * MS, prefill_ns=1 * MS), 0)
    assert bench.plan().is_empty
    (ended,) = bench.events
    assert isinstance(ended, Ended)
    assert ended.outcome is Outcome.EXPIRED
