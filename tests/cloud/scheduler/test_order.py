"""Who runs when."""

import pytest

from cloud.scheduler.config import SchedulerConfig, TenantConfig
from cloud.scheduler.scheduler import StepProtocolError
from cloud.scheduler.types import Admitted, Ended, StepResult
from headway.outcome import Outcome
from tests.support.scheduling import MS, Bench, S, batch, ids, interactive, replica, standard


def test_a_step_serves_classes_strictly() -> None:
    """Interactive before standard before batch, whoever came first."""
    bench = Bench()
    bench.submit(batch("night"))
    bench.submit(standard("office"))
    bench.submit(interactive("robot", S))
    assert ids(bench.plan()) == ["robot", "office", "night"]


def test_promised_work_runs_by_deadline_and_ties_by_arrival() -> None:
    """Earliest deadline first inside a class (Liu and Layland 1973)."""
    bench = Bench()
    for name, deadline_ns in (("c", 3 * S), ("a", S), ("b1", 2 * S), ("b2", 2 * S)):
        bench.submit(interactive(name, deadline_ns))
    assert ids(bench.plan()) == ["a", "b1", "b2", "c"]


def test_a_late_comer_with_an_earlier_deadline_prefills_first() -> None:
    """A long prefill under way gives its step time to an earlier deadline."""
    bench = Bench()
    bench.submit(standard("long", 60 * S, prompt_tokens=4000))
    bench.step()
    bench.submit(standard("urgent", bench.now_ns + 2 * S))
    assert ids(bench.plan()) == ["urgent", "long"]


def test_slots_full_of_batch_do_not_hold_an_interactive_request() -> None:
    """It runs in the next step, in the place of the newest batch request."""
    bench = Bench(SchedulerConfig(max_running=4))
    for number in range(8):
        bench.submit(batch(f"b{number}", max_output_tokens=100))
    bench.steps(2)
    bench.submit(interactive("robot", bench.now_ns + S))
    plan = bench.plan()
    assert ids(plan, prefill=True) == ["robot"]
    assert ids(plan, prefill=False) == ["b0", "b1", "b2"]


def test_a_preempted_request_keeps_its_place() -> None:
    """The victim runs again before those that came after it."""
    bench = Bench(SchedulerConfig(max_running=1))
    bench.submit(batch("first", max_output_tokens=10))
    bench.submit(batch("second"))
    bench.step()
    bench.submit(interactive("robot", bench.now_ns + S, max_output_tokens=1))
    assert ids(bench.step()) == ["robot"]
    assert ids(bench.step()) == ["first"]


def test_batch_is_picked_by_the_smallest_counter() -> None:
    """Equal tenants take turns however many requests one of them has (VTC)."""
    bench = Bench(SchedulerConfig(max_running=1))
    for number in range(6):
        bench.submit(batch(f"many{number}", tenant="many", max_output_tokens=1))
    for number in range(2):
        bench.submit(batch(f"few{number}", tenant="few", max_output_tokens=1))
    order = [ids(bench.step())[0] for _ in range(8)]
    assert order[:4] == ["many0", "few0", "many1", "few1"]


def test_weights_divide_batch_service() -> None:
    """Weight 3 is served three times as much as weight 1."""
    config = SchedulerConfig(
        max_running=1, tenants={"big": TenantConfig(weight=3), "small": TenantConfig()}
    )
    bench = Bench(config)
    for number in range(40):
        bench.submit(batch(f"big{number}", tenant="big", max_output_tokens=1))
        bench.submit(batch(f"small{number}", tenant="small", max_output_tokens=1))
    served = [ids(bench.step())[0].rstrip("0123456789") for _ in range(40)]
    assert served.count("big") == 30


def test_decodes_come_first_in_a_step() -> None:
    """Requests that decode are in every step beside a prefill."""
    bench = Bench()
    bench.submit(standard("early"))
    bench.step()
    bench.submit(standard("late", prompt_tokens=5000))
    plan = bench.plan()
    assert ids(plan, prefill=False) == ["early"]
    assert ids(plan, prefill=True) == ["late"]


def test_the_prefill_budget_is_what_the_target_leaves() -> None:
    """20 ms a step, 0.1 ms a token, 0.2 ms a decode, 32 decodes, 100 ms: 736 tokens."""
    bench = Bench(spec=replica(num_blocks=4096))
    for number in range(32):
        bench.submit(standard(f"s{number}", 60 * S, prompt_tokens=16, max_output_tokens=100))
    while len(ids(bench.step(), prefill=False)) < 32:
        pass
    bench.submit(standard("long", 60 * S + bench.now_ns, prompt_tokens=8000))
    plan = bench.plan()
    assert [item.num_tokens for item in plan.items if item.is_prefill] == [736]


def test_short_requests_pass_a_long_batch_prefill() -> None:
    """Their first token comes within a few steps, and the long one ends."""
    spec = replica(num_blocks=60_000, max_context_tokens=700_000)
    bench = Bench(spec=spec)
    bench.submit(batch("long", prompt_tokens=60_000, max_output_tokens=1))
    bench.step()
    for number in range(3):
        bench.submit(batch(f"short{number}", prompt_tokens=101, max_output_tokens=1))
    plans = bench.steps(3)
    served = {name for plan in plans for name in ids(plan)}
    assert {"short0", "short1", "short2"} <= served
    assert all("long" in ids(plan) for plan in plans)


def test_a_batch_step_keeps_within_max_step() -> None:
    """So long, at most, an arriving interactive request waits for it."""
    bench = Bench(SchedulerConfig(max_step_ns=50 * MS))
    for number in range(50):
        bench.submit(batch(f"b{number}", prompt_tokens=300, max_output_tokens=50))
    for plan in bench.steps(40):
        assert 0 < plan.predicted_ns <= 50 * MS


def test_an_empty_step_is_legal() -> None:
    """With nothing to do the plan is empty and asks for no commit."""
    bench = Bench()
    assert bench.plan().is_empty
    assert bench.plan().is_empty
    assert not bench.scheduler.has_work("r0")


def test_steps_are_strictly_plan_execute_commit() -> None:
    """A second plan, and a result out of turn, are refused and change nothing."""
    bench = Bench()
    bench.submit(batch("b"))
    plan = bench.plan()
    with pytest.raises(StepProtocolError, match="not committed"):
        bench.plan()
    with pytest.raises(StepProtocolError, match="step 7"):
        bench.scheduler.commit("r0", StepResult(7, (), 1), 1)
    with pytest.raises(StepProtocolError, match="no token for request 'b'"):
        bench.scheduler.commit("r0", StepResult(plan.step_id, (), 1), 1)
    bench.finish(plan)


def test_a_newer_observation_takes_the_place_of_an_older_one() -> None:
    """The older one ends as superseded in the same call."""
    bench = Bench()
    bench.submit(interactive("old", S))
    decision = bench.submit(interactive("new", S, supersedes="old"))
    assert isinstance(decision, Admitted)
    (event,) = decision.events
    assert isinstance(event, Ended)
    assert (event.request_id, event.outcome) == ("old", Outcome.CANCELLED)
    assert ids(bench.plan()) == ["new"]


def test_a_refused_newer_observation_leaves_the_older_one() -> None:
    """A no costs the robot nothing that it had."""
    bench = Bench()
    bench.submit(interactive("old", S))
    bench.submit(interactive("new", 5 * MS, supersedes="old"))
    assert ids(bench.plan()) == ["old"]


def test_nobody_supersedes_another_tenants_request() -> None:
    """A name alone gives no right over somebody else's work."""
    bench = Bench()
    bench.submit(interactive("mine", S))
    bench.submit(interactive("other", S, tenant="else", supersedes="mine"))
    assert ids(bench.plan()) == ["mine", "other"]
