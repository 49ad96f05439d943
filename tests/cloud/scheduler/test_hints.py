"""Retry hints: who obeys them gets as much as who does not."""

import random
from collections import Counter

import pytest

from cloud.scheduler.config import SchedulerConfig
from cloud.scheduler.scheduler import Scheduler
from cloud.scheduler.simulated import Arrival
from cloud.scheduler.types import Rejected, ReplicaSpec, Request
from cloud.scheduler.virtual import VirtualDriver
from headway.outcome import Outcome, RequestClass
from tests.support.scheduling import COST, MS

_BUDGET_NS = 400 * MS
_HASTE_NS = 20 * MS
_SPAN_NS = 15_000 * MS


@pytest.mark.parametrize("seed", range(2))
def test_a_tenant_that_ignores_hints_gains_nothing(seed: int) -> None:
    """Each tenant's twenty robots want an action all the time, twice what there is in all. One
    tenant's ask again after the hint, the other's at once: of a fair half neither takes more.
    """
    driver = VirtualDriver(Scheduler(SchedulerConfig(fairness_bound_tokens=64)))
    driver.add_replica(ReplicaSpec("r", 4096, 16, 4096, COST))
    rng = random.Random(seed)
    asked: Counter[str] = Counter()
    robot_of: dict[str, tuple[str, int]] = {}

    def ask(tenant: str, robot: int) -> None:
        asked[tenant] += 1
        name = f"{tenant}-{robot}-{asked[tenant]}"
        request = Request(
            name,
            tenant,
            RequestClass.INTERACTIVE,
            prompt_tokens=200,
            max_output_tokens=4,
            deadline_ns=driver.now_ns + _BUDGET_NS,
            has_fixed_output=True,
        )
        robot_of[name] = (tenant, robot)
        driver.submit(Arrival(driver.now_ns, request))
        decision = driver.decisions[name]
        if isinstance(decision, Rejected):
            wait_ns = decision.retry_after_ns if tenant == "obeys" else _HASTE_NS
            assert wait_ns is not None
            driver.at(driver.now_ns + wait_ns, lambda: ask(tenant, robot))
        else:
            # The next one when this one is over, as a control loop has it.
            driver.at(driver.now_ns + _BUDGET_NS, lambda: ask(tenant, robot))

    for tenant in ("obeys", "ignores"):
        for robot in range(20):
            start_ns = rng.randrange(_BUDGET_NS)
            driver.at(start_ns, lambda t=tenant, r=robot: ask(t, r))  # type: ignore[misc]
    driver.run(until_ns=_SPAN_NS)
    done = Counter(
        robot_of[name][0] for name, end in driver.ended.items() if end.outcome is Outcome.COMPLETED
    )
    assert asked["ignores"] > 3 * asked["obeys"]
    assert done["obeys"] > 0
    assert done["ignores"] <= 1.05 * done["obeys"]
