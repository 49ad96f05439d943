"""The admission tests against carrying everything out: how often they differ.

The oracle takes scheduler and engine as they are, and plans and commits to the end:
without the newcomer, and with it let in whatever the test says. Nothing else arrives,
steps take what the cost model predicts, and outputs are as long as they may be: that is
what the test has to assume. A yes is right if the newcomer is in time and nobody
becomes late by it.
"""

import random
import sys
from collections import Counter
from dataclasses import replace

import pytest

from cloud.scheduler import admission
from cloud.scheduler.scheduler import Scheduler
from cloud.scheduler.simulated import Arrival
from cloud.scheduler.types import Admitted, Rejected
from cloud.scheduler.virtual import VirtualDriver
from headway.outcome import Outcome, Reason, RequestClass
from tests.support.forced_admission import force_admissions
from tests.support.random_traffic import random_arrivals, random_config, random_replica

_MS = 1_000_000
_INSTANCES = 250


def _situation(seed: int) -> tuple[VirtualDriver, Arrival]:
    """A scheduler in mid-work, and an interactive newcomer."""
    rng = random.Random(seed)
    driver = VirtualDriver(Scheduler(random_config(rng)))
    driver.add_replica(random_replica(rng, "r0"))
    span_ns = rng.choice([200, 600]) * _MS
    driver.add(random_arrivals(rng, rng.choice([5, 15, 30]), span_ns, are_lengths_known=True))
    driver.run(until_ns=span_ns)
    classes = (RequestClass.INTERACTIVE,)
    newcomer = random_arrivals(rng, 1, 1, prefix="new", classes=classes, are_lengths_known=True)[0]
    deadline_ns = span_ns + rng.choice([20, 30, 40, 60, 80, 120, 200]) * _MS
    request = replace(newcomer.request, deadline_ns=deadline_ns)
    return driver, replace(newcomer, at_ns=span_ns, request=request)


def _late(driver: VirtualDriver) -> set[str]:
    return {
        name
        for name, ended in driver.ended.items()
        if ended.outcome in (Outcome.EXPIRED, Outcome.FAILED)
    }


def _compare(seed: int) -> str:
    """What the test said and whether the oracle agrees."""
    # The same seed gives the same situation, as often as it is wanted.
    without, forced, real = (_situation(seed)[0] for _ in range(3))
    newcomer = _situation(seed)[1]
    name = newcomer.request.request_id
    real.submit(newcomer)
    decision = real.decisions[name]
    if isinstance(decision, Rejected) and decision.reason is not Reason.LATE:
        return "other"
    interactive = _interactive(without)
    without.run()
    force_admissions(_scheduler(forced), {name})
    forced.submit(newcomer)
    forced.run()
    # Standard promises yield to interactive ones: only those of its own class count.
    hard = (_late(forced) - _late(without)) & {name, *interactive}
    said = "yes" if isinstance(decision, Admitted) else "no"
    return f"{said}, and {'late' if hard else 'in time'}"


def _scheduler(driver: VirtualDriver) -> Scheduler:
    assert isinstance(driver.policy, Scheduler)
    return driver.policy


def _interactive(driver: VirtualDriver) -> set[str]:
    """Live requests of the newcomer's class."""
    live = _scheduler(driver)._live.values()
    return {one.request_id for one in live if one.rank == RequestClass.INTERACTIVE}


def _rates(counts: Counter[str]) -> tuple[float, float]:
    """Shares of wrong among the admissions and among the refusals."""
    admitted = counts["yes, and in time"] + counts["yes, and late"]
    refused = counts["no, and in time"] + counts["no, and late"]
    return counts["yes, and late"] / admitted, counts["no, and in time"] / refused


@pytest.mark.parametrize(
    ("kind", "limits", "most_false_admits", "most_false_refusals"),
    [
        # The target for misses is 0.1 %: of 250 none may be late. Of the refusals at
        # least 90 % must be right.
        ("roll-forward", None, 0.0, 0.1),
        # In place of the roll-forward where many wait: here where anybody does, which is
        # harsher than where it is used: a few requests are no fluid.
        ("fluid", (0, 0), 0.01, 0.25),
    ],
)
@pytest.mark.timeout(600)  # A quarter of a minute of one core, which others may want too.
def test_the_admission_test_agrees_with_carrying_everything_out(
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    limits: tuple[int, int] | None,
    most_false_admits: float,
    most_false_refusals: float,
) -> None:
    """False admissions break promises, false refusals waste capacity; both rates are printed."""
    if limits is not None:
        monkeypatch.setattr(admission, "_FORECAST_LIMITS", limits)
    counts = Counter(_compare(seed) for seed in range(_INSTANCES))
    false_admits, false_refusals = _rates(counts)
    sys.stdout.write(
        f"\n{kind}: false admissions {false_admits:.2%}, false refusals {false_refusals:.2%} of "
        f"{dict(sorted(counts.items()))}\n"
    )
    assert counts["yes, and in time"] >= 100
    assert counts["no, and late"] >= 40
    assert false_admits <= most_false_admits
    assert false_refusals <= most_false_refusals
