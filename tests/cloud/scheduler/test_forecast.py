"""The schedulability tests against what really happens next.

The oracle is the scheduler itself: the same state, the newcomer let in by force, and
steps executed exactly as predicted until everything is done, with no other arrival.
"""

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

import cloud.scheduler.admission as admission
from cloud.scheduler.admission import Late, Placement, SchedulabilityTest
from cloud.scheduler.config import SchedulerConfig
from cloud.scheduler.forecast import forecast
from cloud.scheduler.load import quick_finish_ns
from cloud.scheduler.scheduler import Scheduler
from cloud.scheduler.simulated import Arrival
from cloud.scheduler.types import Admitted, Request
from cloud.scheduler.virtual import VirtualDriver
from headway.outcome import Outcome
from tests.support.scheduling import MS, S, batch, interactive, replica, standard

Draw = Callable[[random.Random, str, int], Request]


class _Recording(SchedulabilityTest):
    """Notes its verdict on one request, and lets it in whatever that is."""

    def __init__(self, config: SchedulerConfig, forced: str) -> None:
        super().__init__(config)
        self._forced = forced
        self.verdict: Placement | Late | None = None

    def place(self, newcomer, replicas, now_ns, without=None):  # type: ignore[no-untyped-def]
        """As the class above, save for the one request."""
        verdict = super().place(newcomer, replicas, now_ns, without)
        if newcomer.request_id != self._forced:
            return verdict
        self.verdict = verdict
        return Placement(replicas[0], now_ns)


@dataclass
class _Case:
    says_yes: bool
    is_yes: bool
    error_ns: int | None  # Predicted less actual completion, where both are in time.


def _case(seed: int, draw: Draw, most: int) -> _Case:
    """A random state of up to `most` others, then one newcomer: what the test says,
    and what is so.
    """
    generator = random.Random(seed)
    config = SchedulerConfig(max_running=generator.choice([4, 16, 64]))
    scheduler = Scheduler(config)
    test = _Recording(config, "new")
    scheduler._intake._test = test
    driver = VirtualDriver(scheduler)
    driver.add_replica(replica(num_blocks=generator.choice([80, 1024])))
    for number in range(generator.randint(most // 5, most)):
        at_ns = generator.randint(0, 300) * MS
        request: Request
        if generator.random() < 0.7:
            request = draw(generator, f"r{number}", at_ns)
        else:
            request = batch(f"b{number}", prompt_tokens=generator.randint(10, 500))
        driver.add([Arrival(at_ns, request)])
    driver.run(310 * MS)
    driver.submit(Arrival(driver.now_ns, draw(generator, "new", driver.now_ns)))
    admitted = {
        name
        for name, one in driver.decisions.items()
        if isinstance(one, Admitted) and not name.startswith("b")
    }
    driver.run()
    kept = all(driver.ended[name].outcome is Outcome.COMPLETED for name in admitted)
    error_ns = None
    if kept and isinstance(test.verdict, Placement):
        error_ns = test.verdict.finish_ns - driver.ended["new"].at_ns
    return _Case(isinstance(test.verdict, Placement), kept, error_ns)


def _random_interactive(generator: random.Random, name: str, now_ns: int) -> Request:
    return interactive(
        name,
        now_ns + generator.randint(80, 700) * MS,
        prompt_tokens=generator.randint(10, 400),
        max_output_tokens=generator.randint(1, 12),
    )


def _random_standard(generator: random.Random, name: str, now_ns: int) -> Request:
    return standard(
        name,
        now_ns + generator.randint(80, 2000) * MS,
        prompt_tokens=generator.randint(10, 1200),
        max_output_tokens=generator.randint(1, 12),
    )


def _random_patient(generator: random.Random, name: str, now_ns: int) -> Request:
    return standard(
        name,
        now_ns + generator.randint(500, 5000) * MS,
        prompt_tokens=generator.randint(10, 600),
        max_output_tokens=generator.randint(1, 12),
    )


def _rates(num_cases: int, draw: Draw, most: int = 25) -> tuple[float, float]:
    """Shares of cases with a broken promise, and with a needless refusal."""
    cases = [_case(seed, draw, most) for seed in range(num_cases)]
    assert 0.2 < sum(case.is_yes for case in cases) / num_cases < 0.9
    broken = sum(case.says_yes and not case.is_yes for case in cases)
    needless = sum(case.is_yes and not case.says_yes for case in cases)
    sys.stdout.write(
        f"\n{num_cases} cases: {broken} promises broken, {needless} refusals needless\n"
    )
    return broken / num_cases, needless / num_cases


@pytest.mark.parametrize("draw", [_random_interactive, _random_standard])
def test_the_roll_forward_agrees_with_what_happens(draw: Draw) -> None:
    """Hardly a promise is broken, hardly a refusal needless, whatever is short: step
    time, slots or memory.
    """
    broken, needless = _rates(300, draw)
    assert broken <= 0.005
    assert needless <= 0.1  # Room for the largest output is kept in mind.


def test_the_fluid_test_breaks_few_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands in for the roll-forward where many first tokens are waited for. A case
    here is 60 to 300 requests: in at most one of 15 cases a promise breaks, and at
    most a quarter of the newcomers are refused needlessly.
    """
    monkeypatch.setattr(admission, "_FORECAST_LIMITS", (-1, -1))
    broken, needless = _rates(60, _random_patient, 300)
    assert broken <= 1 / 15
    assert needless <= 0.25


def test_a_long_queue_of_first_tokens_is_promised_well() -> None:
    """200 standard requests wait: nearly all the capacity is promised, and kept."""
    scheduler = Scheduler(SchedulerConfig(max_running=64))
    driver = VirtualDriver(scheduler)
    driver.add_replica(replica(num_blocks=4096))
    driver.add(
        Arrival(
            0, standard(f"s{number}", 5 * S, prompt_tokens=200, max_output_tokens=2, tenant="t")
        )
        for number in range(400)
    )
    driver.run()
    admitted = [name for name, one in driver.decisions.items() if isinstance(one, Admitted)]
    # 8,000 tokens a second less the decodes' part: 200 requests in 5 s at most.
    assert 170 <= len(admitted) <= 200
    assert {driver.ended[name].outcome for name in admitted} == {Outcome.COMPLETED}


@pytest.mark.parametrize("draw", [_random_interactive, _random_standard])
def test_the_quick_test_says_yes_only_where_the_roll_forward_does(
    draw: Draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a short cut: 300 random states, and what the roll-forward says of the same newcomer."""
    verdicts: list[bool] = []
    quick = quick_finish_ns

    def compare(replica, config, newcomer, now_ns, stretch):  # type: ignore[no-untyped-def]
        finish_ns = quick(replica, config, newcomer, now_ns, stretch)
        if finish_ns is not None:
            found = forecast(replica, config, newcomer, now_ns, stretch=stretch)
            verdicts.append(found.victim is None and found.finish_ns <= newcomer.deadline_ns)
        return finish_ns

    monkeypatch.setattr("cloud.scheduler.admission.quick_finish_ns", compare)
    for seed in range(300):
        _case(seed, draw, 12)
    assert len(verdicts) > 500
    assert all(verdicts)
