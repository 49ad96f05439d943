"""Any order of calls keeps every rule: Hypothesis looks for one that does not."""

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.support.scheduler_machine import SchedulerMachine

_COMMON = settings(
    deadline=None, database=None, suppress_health_check=list(HealthCheck), print_blob=True
)


@pytest.mark.timeout(600)  # Half a minute of one core, which others may want too.
def test_every_rule_holds_in_any_order_of_calls() -> None:
    """2,000 runs of up to 30 calls each (fewer for mutants); the same ones every time."""
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(
            _COMMON,
            max_examples=int(os.environ.get("HEADWAY_EXAMPLES", "2000")),
            stateful_step_count=30,
            derandomize=True,
        ),
    )


@pytest.mark.soak
def test_every_rule_holds_in_long_runs() -> None:
    """Other runs each time, longer and more of them."""
    run_state_machine_as_test(
        SchedulerMachine, settings=settings(_COMMON, max_examples=20_000, stateful_step_count=80)
    )
