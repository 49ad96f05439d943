"""An independent verifier of decision logs: imports nothing from `cloud`.

Reads what a scheduler wrote down about its decisions and says where they broke a
rule. It knows the rules from the design alone, has its own cost formula and its own
books, and where a rule leaves room it errs towards silence: what it reports is wrong.

    violations = verify(records)            # or verify(read_log(path))

Rules, by name:
- `outcome`: every admitted request ends in exactly one outcome, a refused one in none.
- `blocks`: block numbers exist, tables hold what is computed, none is given out twice.
- `shared`: a block is in two requests only as the same computed prefix of one tenant.
- `class`: nothing promised waits behind lower work in the room that it needs.
- `deadline`: inside a class promised work runs in deadline order, ties by arrival.
- `fair`: unpromised service of two tenants that both wait differs by a bound at most.
- `after-end`: no work and no token for a request that has ended, or before it began.
- `expired`: what cannot make its deadline any more is not executed.
- `step`: strictly plan, execute, commit; items continue where the last step ended.
- `time`: the prediction is the cost formula's, and within the step's targets.
- `preempt`: only lower work gives way, for somebody, and never an open hard promise.
- `placement`: work runs where it is bound and may run.
- `admission`: promises are predicted in time, refusals say when to come again.
- `conserved`: no replica is idle, and no decode left out, while there is work and room.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.verifier_rules import Rules
from tests.support.verifier_state import LogState

__all__ = ["Violation", "read_log", "verify"]


@dataclass(frozen=True, slots=True)
class Violation:
    """A rule that a decision broke."""

    record: int  # Place in the log, from 0.
    rule: str
    message: str

    def __str__(self) -> str:
        return f"record {self.record}: {self.rule}: {self.message}"


def read_log(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a log kept as one JSON object a line."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def verify(
    records: Iterable[Mapping[str, Any]],
    *,
    is_complete: bool = True,
    idle_tolerance_ns: int | None = None,
    service_bound: float | None = None,
) -> list[Violation]:
    """What a log breaks, in order.

    Args:
        records: the log, beginning with its config record.
        is_complete: whether everything is over at its end, so that all must have ended.
        idle_tolerance_ns: longest that a replica may lie idle while it has work; None
            leaves it unchecked. 0 in virtual time.
        service_bound: largest gap of weighted tokens over weight between two tenants
            that both wait; None takes the bound of the VTC paper.
    """
    state = LogState()
    rules = Rules(state, idle_tolerance_ns, service_bound)
    found: list[Violation] = []
    count = 0
    for count, record in enumerate(records, start=1):
        found += [Violation(count - 1, rule, text) for rule, text in rules.check(record)]
    if is_complete:
        found += [
            Violation(count, "outcome", f"'{request_id}' was admitted and never ended")
            for request_id in state.live
        ]
    return found
