"""Fairness between tenants, counted in weighted tokens."""

import random
from collections import Counter, defaultdict

import pytest

from cloud.scheduler.bucket import TokenBucket
from cloud.scheduler.config import ClassConfig, SchedulerConfig, TenantConfig
from cloud.scheduler.simulated import Arrival
from cloud.scheduler.types import Admitted, Ended, Event, Rejected
from cloud.scheduler.virtual import VirtualDriver
from headway.cost_model import CostModel
from headway.outcome import Outcome, Reason
from tests.support.scheduling import (
    MS,
    Bench,
    CheckedScheduler,
    S,
    batch,
    interactive,
    replica,
    standard,
)

# 20,000 tokens a second, whatever they are: 50 us each.
TOKEN_COST = CostModel(t0_ns=0, prefill_ns=50_000, decode_ns=50_000)


def test_weighted_max_min_follows_from_the_counters() -> None:
    """20,000 tokens/s, weights 1:3:1, demands 15,000/4,000/10,000 -> 8,000/4,000/8,000.

    Max-min by hand: the middle one asks for less than its 12,000 and gets it;
    the other two share the remaining 16,000 equally.
    """
    config = SchedulerConfig(
        max_running=8,
        prompt_weight=1.0,
        output_weight=1.0,
        tenants={"a": TenantConfig(), "b": TenantConfig(weight=3), "c": TenantConfig()},
    )
    driver = VirtualDriver(CheckedScheduler(config))
    driver.add_replica(replica(cost_model=TOKEN_COST))
    seconds = 10
    for tenant, rate in (("a", 15_000), ("b", 4_000), ("c", 10_000)):
        num = rate * seconds // 200  # Requests of 200 tokens.
        driver.add(
            Arrival(
                number * seconds * S // num,
                batch(f"{tenant}{number}", tenant=tenant, prompt_tokens=199, max_output_tokens=1),
            )
            for number in range(num)
        )
    driver.run(seconds * S)
    served = Counter(name[0] for name in driver.ended)
    rates = {tenant: served[tenant] * 200 / seconds for tenant in "abc"}
    assert rates["a"] == pytest.approx(8_000, rel=0.03)
    assert rates["b"] == pytest.approx(4_000, rel=0.03)
    assert rates["c"] == pytest.approx(8_000, rel=0.03)


def test_backlogged_tenants_drift_apart_by_a_bound_only() -> None:
    """VTC, theorem 4.8 (Sheng et al. 2024): |W_a - W_b| <= 2 max(w_p L_input, w_q M).

    With requests of at most 200 prompt tokens and a pool of 2,048 tokens the
    bound is 2 max(1·200, 2·2,048) = 8,192, at every instant.
    """
    generator = random.Random(5)
    served: dict[str, float] = defaultdict(float)
    worst = 0.0
    tenant_of: dict[str, str] = {}

    def on_event(event: Event, _: int) -> None:
        nonlocal worst
        tenant = tenant_of[event.request_id]
        if isinstance(event, Ended):
            served[tenant] += event.prompt_tokens
        else:
            served[tenant] += 2
        worst = max(worst, abs(served["a"] - served["b"]))

    driver = VirtualDriver(CheckedScheduler(SchedulerConfig(max_running=16)), on_event=on_event)
    driver.add_replica(replica(num_blocks=128, cost_model=TOKEN_COST))
    for number in range(600):
        # b's are few and long, a's many and short; both have enough to be busy.
        for tenant, prompt, output in (("a", (10, 60), (1, 10)), ("b", (100, 200), (40, 100))):
            if tenant == "b" and number >= 150:
                continue
            request = batch(
                f"{tenant}{number}",
                tenant=tenant,
                prompt_tokens=generator.randint(*prompt),
                max_output_tokens=generator.randint(*output),
            )
            tenant_of[request.request_id] = tenant
            driver.add([Arrival(0, request)])
    driver.run(1 * S)
    assert served["a"] > 5_000
    assert worst <= 8_192


def test_an_idle_tenant_banks_no_credit() -> None:
    """One that comes back after a long time takes turns; it does not catch up."""
    bench = Bench(SchedulerConfig(max_running=1))
    bench.submit(batch("back0", tenant="back", max_output_tokens=1))
    bench.step()
    for number in range(50):
        bench.submit(batch(f"busy{number}", tenant="busy", max_output_tokens=1))
    bench.steps(30)
    for number in range(1, 11):
        bench.submit(batch(f"back{number}", tenant="back", max_output_tokens=1))
    order = [plan.items[0].request_id[:4] for plan in bench.steps(10)]
    assert order.count("back") == 5


def test_a_returning_tenant_is_not_punished() -> None:
    """Where nobody was active it is lifted to the last one's counter, not above."""
    bench = Bench(SchedulerConfig(max_running=1))
    for number in range(10):
        bench.submit(batch(f"a{number}", tenant="a", max_output_tokens=1))
    bench.steps(10)
    bench.submit(batch("b0", tenant="b", max_output_tokens=1))
    bench.submit(batch("a10", tenant="a", max_output_tokens=1))
    counters = {t.tenant: t.counter for t in bench.scheduler.snapshot(0).tenants}
    assert counters == {"a": 660.0, "b": 660.0}


def test_a_flooder_takes_nothing_from_a_tenant_under_its_share() -> None:
    """Two equal tenants, one asks ten times as much, twice the capacity in all (30 s).

    The modest one loses at most 0.1 %: with some 240 requests, none, save in
    the first second, in which nobody knows of it yet.
    """
    generator = random.Random(2)
    driver = VirtualDriver(CheckedScheduler())
    driver.add_replica(replica())
    arrivals = []
    for tenant, rate in (("modest", 8.0), ("flooder", 80.0)):
        now_ns, number = 0, 0
        while now_ns < 30 * S:
            now_ns += int(generator.expovariate(rate) * S)
            number += 1
            request = interactive(
                f"{tenant}{number}",
                now_ns + 400 * MS,
                tenant=tenant,
                prompt_tokens=120,
                max_output_tokens=4,
            )
            arrivals.append(Arrival(now_ns, request))
    driver.add(arrivals)
    driver.run()
    arrived_ns = {one.request.request_id: one.at_ns for one in arrivals}
    refused = Counter(
        (name.rstrip("0123456789"), one.reason)
        for name, one in driver.decisions.items()
        if isinstance(one, Rejected) and arrived_ns[name] > S
    )
    assert refused["flooder", Reason.FAIR_SHARE] > 100
    assert sum(count for (tenant, _), count in refused.items() if tenant == "modest") == 0
    assert all(
        driver.ended[name].outcome is Outcome.COMPLETED
        for name, one in driver.decisions.items()
        if isinstance(one, Admitted)
    )


def test_a_tenant_alone_may_take_everything() -> None:
    """The cap holds only while somebody else wants service."""
    bench = Bench()
    told = [bench.submit(interactive(f"r{number}", 2 * S)) for number in range(60)]
    reasons = {one.reason for one in told if isinstance(one, Rejected)}
    assert reasons <= {Reason.LATE}


def test_a_bucket_reserves_all_or_nothing_and_gives_back_what_is_not_used() -> None:
    """100 prompt + 2·50 output reserved of 220; 2·40 come back at an early stop."""
    config = SchedulerConfig(
        tenants={"office": TenantConfig(tokens_per_s=1e-6, burst_tokens=220)},
        standard=ClassConfig(default_budget_ns=60 * S),
    )
    bench = Bench(config)
    first = standard("first", prompt_tokens=100, max_output_tokens=50)
    assert isinstance(bench.submit(first, output_tokens=10), Admitted)
    second = bench.submit(standard("second", prompt_tokens=60, max_output_tokens=10))
    assert isinstance(second, Rejected)
    assert second.reason is Reason.QUOTA
    while bench.scheduler.has_work("r0"):
        bench.step()
    third = standard("third", prompt_tokens=80, max_output_tokens=10)
    assert isinstance(bench.submit(third), Admitted)


def test_a_refused_request_costs_no_quota() -> None:
    """A hundred refusals later the bucket is as full as before."""
    config = SchedulerConfig(tenants={"fleet": TenantConfig(tokens_per_s=1e-6, burst_tokens=100)})
    bench = Bench(config)
    for number in range(100):
        late = bench.submit(interactive(f"late{number}", 30 * MS))
        assert isinstance(late, Rejected)
        assert late.reason is Reason.LATE
    assert isinstance(bench.submit(interactive("ok", S)), Admitted)


def test_submits_together_cannot_exceed_a_bucket() -> None:
    """Each needs 72 of 150 weighted tokens: two pass, the third does not."""
    config = SchedulerConfig(tenants={"fleet": TenantConfig(tokens_per_s=1e-6, burst_tokens=150)})
    bench = Bench(config)
    told = [bench.submit(interactive(f"r{number}", S)) for number in range(3)]
    assert [isinstance(one, Admitted) for one in told] == [True, True, False]


def test_batch_draws_as_it_runs() -> None:
    """It is queued at once and waits for its bucket, not for a refusal."""
    config = SchedulerConfig(
        max_running=1, tenants={"night": TenantConfig(tokens_per_s=100, burst_tokens=60)}
    )
    driver = VirtualDriver(CheckedScheduler(config))
    driver.add_replica(replica())
    driver.add(Arrival(0, batch(f"b{n}", prompt_tokens=50, max_output_tokens=5)) for n in range(10))
    driver.run(10 * S)
    # 60 + 100/s · 10 s at 60 weighted tokens each: about 17, so all ten are done.
    assert len(driver.ended) == 10
    assert driver.ended["b9"].at_ns > 4 * S


def test_a_bucket_refills_at_its_rate() -> None:
    """10 tokens a second: 25 more are there after 2.5 s, and never above the burst."""
    bucket = TokenBucket(10, 100, 0)
    bucket.draw(100, 0)
    assert bucket.wait_ns(25, 0) == 2_500_000_000
    assert bucket.wait_ns(25, 2_500_000_000) == 0
    assert bucket.level(100 * S) == 100
    assert bucket.wait_ns(101, 100 * S) is None
