"""Host time of the scheduler: plan + commit, submit, cancel. CPU time of its thread.

Steps are steady: everybody who runs decodes, a quarter of them interactive, a quarter
standard, half batch; what waits is batch work of 20 tenants. Beside it vLLM's own
scheduler, in the same run: `--vllm-python PATH` names an interpreter that has vLLM.
"""

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from cloud.scheduler.config import ClassConfig, SchedulerConfig
from cloud.scheduler.scheduler import Scheduler
from cloud.scheduler.types import (
    Admitted,
    DeadlineCovers,
    Rejected,
    ReplicaSpec,
    Request,
    StepOutput,
    StepPlan,
    StepResult,
)
from headway.cost_model import CostModel
from headway.outcome import RequestClass

__all__ = ["Times", "bench_asking", "bench_steps", "busy_scheduler"]

_S = 1_000_000_000
_MS = 1_000_000
_RUNNING = (32, 128, 256, 1024)
_WAITING = (0, 1_000, 10_000, 100_000)
# vLLM 0.32 on a machine with 2 cores, plan and commit, ms: for orientation.
_VLLM_MS = {32: 0.32, 128: 1.2, 256: 2.4, 1024: 10.5}
_STEP_GOALS_MS = {256: 0.6, 1024: 2.4}
_COST = CostModel(t0_ns=5.0 * _MS, prefill_ns=10_000.0, decode_ns=10_000.0, kv_ns=1.0)


@dataclass(frozen=True, slots=True)
class Times:
    """Measured host times in ns."""

    samples_ns: tuple[int, ...]

    @property
    def p50_ns(self) -> float:
        """The median."""
        return statistics.median(self.samples_ns)

    @property
    def p99_ns(self) -> float:
        """The 99th percentile."""
        return statistics.quantiles(self.samples_ns, n=100)[98]


def _request(name: str, request_class: RequestClass, tenant: str, now_ns: int) -> Request:
    is_batch = request_class is RequestClass.BATCH
    return Request(
        name,
        tenant,
        request_class,
        prompt_tokens=16,
        max_output_tokens=4000,
        deadline_ns=None if is_batch else now_ns + 3600 * _S,
        deadline_covers=DeadlineCovers.FIRST_TOKEN,
    )


class _Driver:
    """Executes plans at once: every sampling item gives a token."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.now_ns = 0

    def step(self) -> tuple[int, int]:
        """One step; host time of it and the number of its items."""
        started = time.thread_time_ns()
        plan = self.scheduler.plan("r0", self.now_ns)
        planned_ns = time.thread_time_ns() - started
        result = _result(plan)
        self.now_ns += max(1, result.elapsed_ns)
        started = time.thread_time_ns()
        self.scheduler.commit("r0", result, self.now_ns)
        return planned_ns + time.thread_time_ns() - started, len(plan.items)


def _result(plan: StepPlan) -> StepResult:
    outputs = tuple(StepOutput(item.request_id, 7) for item in plan.items if item.samples)
    return StepResult(plan.step_id, outputs, plan.predicted_ns)


def busy_scheduler(num_running: int, num_waiting: int) -> _Driver:
    """A scheduler with a full batch in steady decode, and batch work that waits."""
    config = SchedulerConfig(
        interactive=ClassConfig(tpot_target_ns=None),
        standard=ClassConfig(default_budget_ns=2 * _S, tpot_target_ns=None),
        max_running=num_running,
        fairness_bound_tokens=1 << 30,
    )
    driver = _Driver(Scheduler(config))
    blocks = 260 * num_running
    driver.scheduler.replica_up(ReplicaSpec("r0", blocks, 16, 8192, _COST), 0)
    classes = (
        RequestClass.INTERACTIVE,
        RequestClass.STANDARD,
        RequestClass.BATCH,
        RequestClass.BATCH,
    )
    for number in range(num_running):
        request = _request(f"run{number}", classes[number % 4], f"t{number % 20}", 0)
        answer = driver.scheduler.submit(request, 0)
        if isinstance(answer, Rejected):
            raise RuntimeError(f"the batch does not fill up: {answer.message}")
    while driver.step()[1] < num_running or not _all_decode(driver):
        pass
    for number in range(num_waiting):
        name, tenant = f"wait{number}", f"t{number % 20}"
        driver.scheduler.submit(_request(name, RequestClass.BATCH, tenant, 0), driver.now_ns)
    return driver


def _all_decode(driver: _Driver) -> bool:
    replica = driver.scheduler.snapshot(driver.now_ns).replicas[0]
    return replica.num_running == driver.step()[1]


def bench_steps(num_running: int, num_waiting: int, *, count: int = 300) -> Times:
    """Host time of plan + commit of full decode steps."""
    driver = busy_scheduler(num_running, num_waiting)
    samples = []
    for _ in range(count):
        elapsed_ns, num_items = driver.step()
        if num_items != num_running:
            raise RuntimeError(f"a step of {num_items}, {num_running} were to run")
        samples.append(elapsed_ns)
    return Times(tuple(samples))


def bench_asking(num_waiting: int, *, count: int = 1000) -> dict[str, Times]:
    """Host time of submit, by class, and of cancel, beside what waits and 256 that run."""
    driver = busy_scheduler(256, num_waiting)
    found: dict[str, Times] = {}
    names: list[str] = []
    for request_class in RequestClass:
        # What is let in waits: the batch is full.
        requests = [
            _request(f"{request_class.label}{number}", request_class, "t1", driver.now_ns)
            for number in range(count)
        ]
        found[f"submit {request_class.label}"] = Times(
            tuple(_timed(lambda one=one: _admit(driver, one)) for one in requests)  # type: ignore[misc]
        )
        names += [one.request_id for one in requests[::2]]
    names += [f"wait{number}" for number in range(0, num_waiting, max(1, num_waiting // count))]
    found["cancel"] = Times(
        tuple(
            _timed(lambda one=one: driver.scheduler.cancel(one, driver.now_ns))  # type: ignore[misc]
            for one in names
        )
    )
    return found


def _admit(driver: _Driver, request: Request) -> None:
    answer = driver.scheduler.submit(request, driver.now_ns)
    if not isinstance(answer, Admitted):
        raise RuntimeError(f"a request was refused: {answer.message}")


def _timed(action: Callable[[], object]) -> int:
    started = time.thread_time_ns()
    action()
    return time.thread_time_ns() - started


def _mark(is_met: bool) -> str:
    return "[green]met[/]" if is_met else "[red]missed[/]"


def vllm_times(python: str, running: tuple[int, ...]) -> dict[int, Times]:
    """Host time of vLLM's schedule + update, as many requests decoding.

    Raises:
        subprocess.CalledProcessError: it does not run there; what it said is on the screen.
    """
    from cloud.engine.tiny import write_tiny_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        write_tiny_checkpoint(Path(folder))
        worker = Path(__file__).with_name("vllm_scheduler.py")
        command = [python, str(worker), folder, *map(str, running)]
        lines = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    samples = map(json.loads, lines.splitlines())
    return {count: Times(tuple(times)) for count, times in zip(running, samples, strict=True)}


def _step_table(
    console: Console,
    running: tuple[int, ...],
    waiting: tuple[int, ...],
    theirs: dict[int, Times],
) -> bool:
    table = Table(title="plan + commit, ms of host time (p50 / p99)")
    for heading in ("running", *(f"{count:,} wait" for count in waiting), "goal", "flat", "vLLM"):
        table.add_column(heading, justify="right")
    all_met = True
    for num_running in running:
        times = [bench_steps(num_running, num_waiting) for num_waiting in waiting]
        goal_ms = _STEP_GOALS_MS.get(num_running)
        slowest_ms = max(one.p50_ns for one in times) / _MS
        # Flat: the same within what a shared machine adds.
        is_flat = slowest_ms <= 1.5 * times[0].p50_ns / _MS
        is_met = goal_ms is None or slowest_ms <= goal_ms
        all_met = all_met and is_flat and is_met
        table.add_row(
            f"{num_running:,}",
            *(f"{one.p50_ns / _MS:.3f} / {one.p99_ns / _MS:.3f}" for one in times),
            "" if goal_ms is None else f"{goal_ms} {_mark(is_met)}",
            _mark(is_flat),
            f"{theirs[num_running].p50_ns / _MS:.3f} / {theirs[num_running].p99_ns / _MS:.3f}"
            if theirs
            else f"{_VLLM_MS[num_running]}*",
        )
    console.print(table)
    if not theirs:
        console.print(
            "* version 0.32, measured once on a machine with 2 cores; not in this run. "
            "--vllm-python PATH measures it here"
        )
    return all_met


def _asking_table(console: Console, num_waiting: int) -> bool:
    table = Table(title=f"asking, 256 running, {num_waiting:,} waiting, µs of host time")
    for heading in ("operation", "p50", "p99", "goal (p50)", ""):
        table.add_column(heading, justify="right")
    all_met = True
    for name, times in bench_asking(num_waiting).items():
        goal_us = 20 if name == "cancel" else 50
        is_met = times.p50_ns <= goal_us * 1000
        all_met &= is_met
        table.add_row(
            name,
            f"{times.p50_ns / 1000:.1f}",
            f"{times.p99_ns / 1000:.1f}",
            f"{goal_us}",
            _mark(is_met),
        )
    console.print(table)
    return all_met


def main() -> None:
    """Prints host times of the scheduler's calls."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--quick", action="store_true", help="leave out the largest counts")
    parser.add_argument("--vllm-python", default="", help="an interpreter that has vLLM")
    given = parser.parse_args()
    is_quick = given.quick
    console = Console(width=130)
    running = _RUNNING[:3] if is_quick else _RUNNING
    waiting = _WAITING[:3] if is_quick else _WAITING
    python = given.vllm_python or (sys.executable if importlib.util.find_spec("vllm") else "")
    theirs = vllm_times(python, running) if python else {}
    all_met = _step_table(console, running, waiting, theirs)
    all_met &= _asking_table(console, 10_000)
    console.print("every goal is met" if all_met else "[red]a goal is missed[/]")


if __name__ == "__main__":
    main()
