"""Breaks one rule of the scheduler at a time and shows that a test notices.

    python tests/cloud/scheduler/mutants.py [name ...]

Each mutant is one change of the source, made in a copy; the scheduler's tests and a
short run of the state machine go over it until the first failure. A mutant that no test
kills is a rule without a proof. Exit code 1 if one survives, 2 if one cannot be made.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

__all__ = ["MUTANTS", "Mutant", "is_killed"]

ROOT = Path(__file__).parents[3]
_COPIED = ("cloud", "headway", "tests/support", "tests/cloud/scheduler", "pyproject.toml")
_TIMEOUT_S = 600
_EXAMPLES = "300"  # Of the state machine.


@dataclass(frozen=True, slots=True)
class Mutant:
    """A rule, and the change that drops it."""

    name: str
    file: str  # In cloud/scheduler.
    old: str
    new: str


MUTANTS = (
    Mutant("equals give way", "preemption.py", "if live.rank > rank)", "if live.rank >= rank)"),
    Mutant(
        "an open promise gives way before a kept one",
        "preemption.py",
        "return (-live.rank, not live.is_met, is_spared, -live.seq)",
        "return (-live.rank, False, is_spared, -live.seq)",
    ),
    Mutant(
        "eviction that is not enough",
        "preemption.py",
        "            return False\n",
        "",
    ),
    Mutant(
        "batch runs beside a blocked promise",
        "step.py",
        "-1.0 if is_blocked else ceiling_ns, lane_ns, now_ns",
        "ceiling_ns, lane_ns, now_ns",
    ),
    Mutant(
        "interactive work does not bound lower work",
        "step.py",
        "        if least_ns == math.inf:\n            return least_ns\n",
        "        return math.inf\n",
    ),
    Mutant("no TPOT target", "unpromised.py", "target_ns = min(target_ns, own_ns)", "pass"),
    Mutant(
        "one more than max_running",
        "unpromised.py",
        "while replica.num_running + kept_slots < self._config.max_running:",
        "while replica.num_running + kept_slots <= self._config.max_running:",
    ),
    Mutant(
        "the lane costs nothing",
        "unpromised.py",
        "replica.lane.spend(min(used_ns, max(lane_ns, draft.spent_ns - limit_ns)))",
        "pass",
    ),
    Mutant(
        "no lift of who comes back",
        "fairness.py",
        "account.counter = max(account.counter, smallest)",
        "pass",
    ),
    Mutant(
        "no lift where nobody is active",
        "fairness.py",
        "default=self._idle_counter[account.rank]",
        "default=0.0",
    ),
    Mutant("no fairness bound", "intake.py", "if over_ns <= 0:", "if over_ns <= 1e18:"),
    Mutant(
        "a newcomer may be late",
        "admission.py",
        "        if found.finish_ns > newcomer.deadline_ns:\n            return",
        "        if found.finish_ns > newcomer.deadline_ns << 9:\n            return",
    ),
    Mutant(
        "a newcomer may break a promise",
        "admission.py",
        "        if found.victim is not None:\n            return",
        "        if found.victim is newcomer:\n            return",
    ),
    Mutant("no refund", "intake.py", "give_back(live.reserved_tokens - used)", "give_back(0.0)"),
    Mutant(
        "blocks are not released",
        "replica.py",
        "self.pool.release(live.blocks)",
        "self.pool.release(live.blocks[1:])",
    ),
    Mutant(
        "a shared block has one holder",
        "kv.py",
        "self._holders[block] += 1",
        "self._holders[block] = 1",
    ),
    Mutant(
        "the whole prompt from the cache",
        "kv.py",
        "most = (prompt_tokens - 1) // self.block_tokens",
        "most = prompt_tokens // self.block_tokens",
    ),
    Mutant(
        "a victim resumes with what it has",
        "request_state.py",
        "if is_promise or self.num_preemptions:",
        "if is_promise:",
    ),
    Mutant(
        "promises reserve no memory",
        "request_state.py",
        "if is_promise or self.num_preemptions:",
        "if self.num_preemptions:",
    ),
    Mutant(
        "prefills in order of arrival", "replica.py", "return live.key\n", "return 0, 0, live.seq\n"
    ),
    Mutant(
        "later arrivals first",
        "scheduler.py",
        "seq = self._serial if older is None else older.seq",
        "seq = -self._serial if older is None else older.seq",
    ),
    Mutant(
        "a successor has a new place",
        "scheduler.py",
        "seq = self._serial if older is None else older.seq",
        "seq = self._serial",
    ),
    Mutant(
        "hopeless work is executed",
        "expiry.py",
        "return live.deadline_ns - int(needed_ns * trust) + 1",
        "return live.deadline_ns + 1",
    ),
    Mutant(
        "what was superseded lives on",
        "scheduler.py",
        "events = (self._end(older, Outcome.CANCELLED, Reason.SUPERSEDED, now_ns),)",
        "events = ()",
    ),
    Mutant(
        "another tenant's request is superseded",
        "scheduler.py",
        "older is not None and older.tenant == request.tenant",
        "older is not None",
    ),
    Mutant(
        "a late answer counts",
        "scheduler.py",
        "        if not live.is_met and now_ns > live.deadline_ns:\n            self._expire",
        "        if not live.is_met and now_ns > live.deadline_ns << 9:\n            self._expire",
    ),
    Mutant(
        "recomputation is charged",
        "scheduler.py",
        "        if not live.is_prompt_charged:\n",
        "        if live.prompt_tokens:\n",
    ),
    Mutant(
        "output is not charged",
        "scheduler.py",
        "            account.counter += live.output_charge\n",
        "",
    ),
    Mutant(
        "what has streamed starts anew elsewhere",
        "scheduler.py",
        "if live.num_output == 0 and (",
        "if live.num_output >= 0 and (",
    ),
    Mutant("decodes to come do not count", "laxity.py", "self._later_ns += decode_ns", "pass"),
    Mutant(
        "the short cut knows no deadline",
        "load.py",
        "if start_ns + total_ns * (1 + 4 * GUARD) > due_ns:",
        "if False:",
    ),
    Mutant(
        "host memory is given out before it is read",
        "swap.py",
        "self._read += live.host_blocks",
        "self._free += live.host_blocks",
    ),
    Mutant(
        "swapped KV counts at every replica",
        "scheduler.py",
        "if live.host is not None and live.host is not replica.host:",
        "if False:",
    ),
    Mutant("a stall is the rule", "margin.py", "_OUTLIERS = 2.0", "_OUTLIERS = 0.0"),
    Mutant(
        "a victim is back in its step",
        "draft.py",
        "return live.gave_way == (self._replica, self._replica.step_id) and not self.is_empty",
        "return False",
    ),
    Mutant(
        "the lane takes what a promise waits for",
        "unpromised.py",
        "kept = replica.waiting_room()",
        "pass",
    ),
    Mutant(
        "a drained replica is given new work",
        "replica.py",
        "return not self.is_draining and self.is_meant_for(tenant)",
        "return self.is_meant_for(tenant)",
    ),
    Mutant(
        "promises stay where a replica is drained",
        "scheduler.py",
        "            self._move_away(live, now_ns)\n",
        "            pass\n",
    ),
    Mutant(
        "what is too large is told to wait for a drain",
        "intake.py",
        "            and replica.fits_alone(live.prompt_tokens, live.max_output)\n"
        "            for replica in self._replicas.values()\n",
        "            for replica in self._replicas.values()\n",
    ),
)


def is_killed(mutant: Mutant | None) -> bool:
    """Whether a test fails over a copy of the source with the mutant; None is no change.

    Raises:
        ValueError: the source does not have the mutant's place.
    """
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder)
        for name in _COPIED:
            source, target = ROOT / name, copy / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, target)
        if mutant is not None:
            path = copy / "cloud" / "scheduler" / mutant.file
            text = path.read_text(encoding="utf-8")
            if mutant.old not in text:
                raise ValueError(
                    f"{mutant.file} has no {mutant.old!r}; bring the mutant up to date"
                )
            path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
        tests = copy / "tests" / "cloud" / "scheduler"
        done = subprocess.run(
            [
                sys.executable,
                *("-m", "pytest", "-x", "-q", "-p", "no:cov", "-o", "filterwarnings=default"),
                # What finds most in the least time comes first.
                str(tests / "proofs" / "test_state_machine.py"),
                str(tests / "proofs" / "test_known_cases.py"),
                *map(str, sorted(tests.glob("test_*.py"))),
                str(tests / "proofs"),
            ],
            cwd=copy,
            env={
                **os.environ,
                "HEADWAY_EXAMPLES": _EXAMPLES,
                # The copy, not the checkout that is installed.
                "PYTHONPATH": str(copy),
                "PYTHONDONTWRITEBYTECODE": "1",
            },
            timeout=_TIMEOUT_S,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode not in (0, 1):
            raise ValueError(f"the tests could not run: {done.stdout[-500:]}{done.stderr[-500:]}")
        return done.returncode == 1


def main() -> int:
    """Prints the table of mutants."""
    console = Console(width=100)
    chosen = [one for one in MUTANTS if not sys.argv[1:] or one.name in sys.argv[1:]]
    if not chosen:
        names = ", ".join(f"'{one.name}'" for one in MUTANTS)
        console.print(f"no such mutant; there are {names}")
        return 2
    try:
        if not sys.argv[1:] and is_killed(None):
            console.print("the tests fail without any mutant: make them pass first")
            return 2
        table = Table("rule that is dropped", "file", "", "s")
        survivors = 0
        for mutant in chosen:
            started_s = time.monotonic()
            killed = is_killed(mutant)
            survivors += not killed
            verdict = "[green]killed[/]" if killed else "[red]survived[/]"
            table.add_row(mutant.name, mutant.file, verdict, f"{time.monotonic() - started_s:.0f}")
            console.print(f"{mutant.name}: {verdict}")
    except ValueError as error:
        console.print(str(error))
        return 2
    except subprocess.TimeoutExpired:
        # A test that hangs has a time-out of its own: this is a machine that is too slow.
        console.print(f"{mutant.name}: no verdict within {_TIMEOUT_S} s; run it alone")
        return 2
    console.print(table)
    console.print(f"{len(chosen) - survivors} of {len(chosen)} killed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
