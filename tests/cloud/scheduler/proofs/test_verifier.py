"""The verifier finds each kind of broken rule in logs made by hand, and nothing in a clean one."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.verifier import read_log, verify

Log = list[dict[str, Any]]

# Step time in ns: 1,000 + 10 a prompt token + 100 a decode. Blocks of 4 tokens.
_COST = {
    "t0_ns": 1000.0,
    "prefill_ns": 10.0,
    "pair_ns": 0.0,
    "decode_ns": 100.0,
    "kv_ns": 0.0,
    "margin": 1.0,
}


def config(**changes: Any) -> dict[str, Any]:
    """The first record, with some settings changed."""
    own = {"tpot_target_ns": 5000, "patience_ns": 10**12}
    settings = {
        "interactive": own,
        "standard": own,
        "batch": {**own, "tpot_target_ns": None},
        "tenants": {},
        "default_tenant": {"weight": 1.0, "tokens_per_s": 0.0},
        "max_running": 4,
        "max_step_ns": 5000,
        "min_chunk_tokens": 2,
        "prompt_weight": 1.0,
        "output_weight": 2.0,
        "lane_share": 0.05,
        "lane_window_ns": 10**6,
        "long_context_tokens": None,
    }
    return {"kind": "config", "version": 1, "config": {**settings, **changes}}


def replica_up(name: str = "r", at: int = 0, **changes: Any) -> dict[str, Any]:
    """A replica of 16 blocks."""
    record = {
        "kind": "replica_up",
        "at": at,
        "replica": name,
        "blocks": 16,
        "block_tokens": 4,
        "max_context": 64,
        "swap_blocks": 0,
        "swap_block_ns": 0.0,
        "tenants": [],
        "is_long_context": False,
        "cost": _COST,
    }
    return {**record, **changes}


def submit(name: str, rank: int, at: int, prompt: int, output: int, **more: Any) -> dict[str, Any]:
    """A request that is let in."""
    record = {
        "kind": "submit",
        "at": at,
        "id": name,
        "tenant": "a",
        "class": rank,
        "prompt": prompt,
        "max_output": output,
        "deadline": None if rank == 2 else 10**6,
        "covers": "last_token",
        "supersedes": "",
        "decision": "ADMITTED",
        "replica": "" if rank == 2 else "r",
        "predicted_at": 9000,
    }
    return {**record, **more}


def refused(name: str, rank: int, at: int, reason: str, retry: int | None) -> dict[str, Any]:
    """A request that is not let in."""
    record = submit(name, rank, at, 4, 4, decision=reason, retry_after=retry, predicted=None)
    return {key: value for key, value in record.items() if key not in ("replica", "predicted_at")}


def prefill(
    name: str, context: int, num: int, blocks: list[int], *, last: bool = True, new: bool = True
) -> list[Any]:
    """A piece of a prompt."""
    return [name, context, num, True, last, blocks, new]


def decode(name: str, context: int, blocks: list[int] | None = None) -> list[Any]:
    """One more token."""
    return [name, context, 1, False, True, blocks or [], False]


def plan(step: int, at: int, *items: list[Any], replica: str = "r") -> dict[str, Any]:
    """A step, its time by the formula at the top."""
    tokens = sum(item[2] for item in items if item[3])
    decodes = sum(1 for item in items if not item[3])
    return {
        "kind": "plan",
        "at": at,
        "replica": replica,
        "step": step,
        "predicted": 1000 + 10 * tokens + 100 * decodes,
        "margin": 1.0,
        "items": list(items),
        "swap_out": [],
        "swap_in": [],
    }


def commit(step: int, at: int, *names: str, replica: str = "r") -> dict[str, Any]:
    """A step's result."""
    outputs = [[name, False] for name in names]
    return {
        "kind": "commit",
        "at": at,
        "replica": replica,
        "step": step,
        "elapsed": 1000,
        "outputs": outputs,
    }


def preempt(name: str, at: int) -> dict[str, Any]:
    """A request pushed back to its queue."""
    return {"kind": "preempt", "at": at, "id": name, "replica": "r", "swapped": False}


def end(name: str, at: int, tokens: int, outcome: str = "COMPLETED") -> dict[str, Any]:
    """A request's end."""
    reason = {"COMPLETED": None, "EXPIRED": "DEADLINE_MISSED", "FAILED": "ENGINE_LOST"}
    return {
        "kind": "end",
        "at": at,
        "id": name,
        "outcome": outcome,
        "reason": reason.get(outcome, "CANCELLED"),
        "output_tokens": tokens,
        "cached_tokens": 0,
    }


def clean() -> Log:
    """Batch work runs; an interactive request comes, evicts it, is done; batch ends."""
    return [
        config(max_running=1),
        replica_up(),
        submit("b", 2, 0, 6, 3),
        plan(1, 0, prefill("b", 0, 6, [0, 1])),
        submit("i", 0, 500, 5, 2),
        commit(1, 1060, "b"),
        preempt("b", 1060),
        plan(2, 1060, prefill("i", 0, 5, [1, 0])),
        commit(2, 2110, "i"),
        plan(3, 2110, decode("i", 5)),
        refused("late", 0, 2500, "LATE", 700),
        commit(3, 3210, "i"),
        end("i", 3210, 2),
        plan(4, 3210, prefill("b", 0, 7, [3, 2])),
        commit(4, 4280, "b"),
        plan(5, 4280, decode("b", 7)),
        commit(5, 5380, "b"),
        end("b", 5380, 3),
    ]


def test_a_clean_log_passes(tmp_path: Path) -> None:
    """Nothing is reported where nothing is wrong, from memory and from a file."""
    assert verify(clean(), idle_tolerance_ns=0) == []
    path = tmp_path / "decisions.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in clean()), encoding="utf-8")
    assert verify(read_log(path), idle_tolerance_ns=0) == []


def _set(place: int, **changes: Any) -> Callable[[Log], None]:
    def change(log: Log) -> None:
        log[place].update(changes)

    return change


def _put(place: int, *records: dict[str, Any]) -> Callable[[Log], None]:
    def change(log: Log) -> None:
        log[place:place] = records

    return change


def _drop(place: int) -> Callable[[Log], None]:
    def change(log: Log) -> None:
        del log[place]

    return change


# What is done to the clean log, and the rule that it breaks.
_BREAKS: dict[str, tuple[str, Callable[[Log], None]]] = {
    "never ends": ("outcome", _drop(17)),
    "ends twice": ("outcome", _put(18, end("b", 5380, 3))),
    "a refused one ends": ("outcome", _put(12, end("late", 3210, 0, "CANCELLED"))),
    "admitted twice": ("outcome", _put(5, submit("i", 0, 500, 5, 2))),
    "ends with tokens that it never got": ("outcome", _set(17, output_tokens=4)),
    "batch work expires": ("outcome", _set(17, outcome="EXPIRED")),
    "a block that does not exist": ("blocks", _set(3, items=[prefill("b", 0, 6, [0, 16])])),
    "a block twice in a table": ("blocks", _set(3, items=[prefill("b", 0, 6, [0, 0])])),
    "a block too few": ("blocks", _set(3, items=[prefill("b", 0, 6, [0])])),
    "a token after the end": ("after-end", _set(14, outputs=[["b", False], ["i", False]])),
    "work after the end": ("after-end", _set(15, items=[decode("b", 7), decode("i", 6)])),
    "more than the largest output": ("after-end", _set(4, max_output=1)),
    "a step too many": ("step", _set(13, step=5)),
    "two steps at once": ("step", _drop(8)),
    "the result of another step": ("step", _set(8, step=1)),
    "a step that skips tokens": ("step", _set(15, items=[decode("b", 8)])),
    "a prompt that samples too early": (
        "step",
        _set(3, items=[prefill("b", 0, 5, [0, 1])], predicted=1050),
    ),
    "an empty step is executed": ("step", _put(18, plan(6, 5380))),
    "time that goes back": ("step", _set(10, at=1000)),
    "a wrong prediction": ("time", _set(3, predicted=1090)),
    "an interactive promise gives way": ("preempt", _put(9, preempt("i", 2110))),
    "evicted for nobody": ("preempt", _put(15, preempt("b", 4280))),
    "evicted in mid-step": ("preempt", _put(4, preempt("b", 300))),
    "late by its own prediction": ("admission", _set(4, predicted_at=10**6 + 1)),
    "refused without a hint": ("admission", _set(10, retry_after=None)),
    "batch work refused as late": ("admission", _put(4, refused("x", 2, 400, "LATE", 1))),
    "admitted while draining": ("admission", _put(4, {"kind": "drain", "at": 400})),
    "promised on a drained replica": (
        "placement",
        _put(4, {"kind": "replica_drain", "at": 400, "replica": "r"}),
    ),
    "too large for its replica": ("admission", _set(4, max_output=80)),
    "an idle replica": ("conserved", _set(13, at=3300)),
    "executed though hopeless": ("expired", _set(4, deadline=2000, predicted_at=1900)),
    "completed too late": ("expired", _set(4, deadline=3000, predicted_at=2900)),
}


@pytest.mark.parametrize(("rule", "change"), _BREAKS.values(), ids=_BREAKS.keys())
def test_each_break_of_the_clean_log_is_found(rule: str, change: Callable[[Log], None]) -> None:
    """One change, and the rule that it breaks is among what is reported."""
    log = copy.deepcopy(clean())
    change(log)
    assert rule in {found.rule for found in verify(log, idle_tolerance_ns=0)}


def _rules(log: Log, **options: Any) -> set[str]:
    return {found.rule for found in verify(log, is_complete=False, **options)}


def test_a_block_of_another_running_request_is_not_given_out() -> None:
    """Two requests hold the same block, and neither calls it a known prefix."""
    log = [config(), replica_up(), submit("b", 2, 0, 4, 3), submit("c", 2, 0, 4, 3)]
    good = plan(1, 0, prefill("b", 0, 4, [0]), prefill("c", 0, 4, [1]))
    assert _rules([*log, good]) == set()
    bad = plan(1, 0, prefill("b", 0, 4, [0]), prefill("c", 0, 4, [0]))
    assert _rules([*log, bad]) == {"blocks"}


@pytest.mark.parametrize(
    ("tenant", "block", "is_fine"), [("a", 0, True), ("x", 0, False), ("a", 1, False)]
)
def test_a_prefix_is_shared_only_where_its_content_is_known(
    tenant: str, block: int, is_fine: bool
) -> None:
    """Block 0 has the first 4 tokens of a prompt of tenant a; nothing else is known."""
    log = [
        config(),
        replica_up(),
        submit("b", 2, 0, 4, 3),
        plan(1, 0, prefill("b", 0, 4, [0])),
        commit(1, 1040, "b"),
        submit("c", 2, 1040, 6, 3, tenant=tenant),
        plan(2, 1040, decode("b", 4, [5]), prefill("c", 4, 2, [block, 3])),
    ]
    assert ("shared" in _rules(log)) is not is_fine


def test_promised_work_does_not_wait_behind_lower_work() -> None:
    """A free slot and blocks, and a batch prefill goes first."""
    log = [config(), replica_up(), submit("s", 1, 0, 8, 3), submit("b", 2, 0, 8, 3)]
    good = plan(1, 0, prefill("s", 0, 8, [0, 1]), prefill("b", 0, 8, [2, 3]))
    assert _rules([*log, good]) == set()
    assert _rules([*log, plan(1, 0, prefill("b", 0, 8, [2, 3]))]) == {"class"}


def test_a_promised_prefill_is_complete_before_lower_work_gets_time() -> None:
    """Half of a standard prompt, and a batch prefill in the same step."""
    log = [config(), replica_up(), submit("s", 1, 0, 8, 3), submit("b", 2, 0, 8, 3)]
    bad = plan(1, 0, prefill("s", 0, 4, [0], last=False), prefill("b", 0, 8, [2, 3]))
    assert _rules([*log, bad]) == {"class"}


def test_standard_work_does_not_run_before_interactive_work_of_the_same_replica() -> None:
    """Both are promised; the class rules."""
    log = [config(), replica_up(), submit("i", 0, 0, 8, 3), submit("s", 1, 0, 8, 3)]
    assert _rules([*log, plan(1, 0, prefill("s", 0, 8, [0, 1]))]) == {"class"}


def test_the_lane_may_serve_starving_batch_work_and_pays_for_it() -> None:
    """Batch work older than its patience goes beside a waiting promise while credit lasts."""
    starving = config(
        batch={"tpot_target_ns": None, "patience_ns": 100}, lane_share=0.5, lane_window_ns=10**5
    )
    log = [starving, replica_up(), submit("b", 2, 0, 8, 3), submit("s", 1, 4000, 8, 3)]
    # 2,000 ns were earned in 4,000, and the 8 tokens cost 80.
    log.append(plan(1, 4000, prefill("b", 0, 8, [2, 3])))
    assert _rules(log) == set()
    patient = [config(lane_share=0.5, lane_window_ns=10**5), *log[1:]]
    assert _rules(patient) == {"class"}
    closed = copy.deepcopy(log)
    closed[0]["config"]["lane_share"] = 0.0
    assert _rules(closed) == {"class"}


def test_an_earlier_deadline_is_served_first() -> None:
    """The later deadline joins, the earlier one waits."""
    log = [
        config(),
        replica_up(),
        submit("late", 0, 0, 8, 3, deadline=90_000),
        submit("early", 0, 0, 8, 3, deadline=80_000),
    ]
    assert _rules([*log, plan(1, 0, prefill("early", 0, 8, [0, 1]))]) == set()
    assert "deadline" in _rules([*log, plan(1, 0, prefill("late", 0, 8, [0, 1]))])


def test_equal_deadlines_go_by_arrival_and_a_successor_has_its_predecessors_place() -> None:
    """The third request takes the place of the first, before the second."""
    log = [
        config(),
        replica_up(),
        submit("first", 0, 0, 8, 3),
        submit("second", 0, 10, 8, 3),
        {**end("first", 20, 0, "CANCELLED"), "reason": "SUPERSEDED"},
        submit("third", 0, 20, 8, 3, supersedes="first"),
    ]
    assert _rules([*log, plan(1, 20, prefill("third", 0, 8, [0, 1]))]) == set()
    assert "deadline" in _rules([*log, plan(1, 20, prefill("second", 0, 8, [0, 1]))])


def test_a_step_beyond_its_target_is_found() -> None:
    """5,000 ns are the target: 400 prompt tokens, not 401."""
    log = [config(), replica_up(blocks=200, max_context=800), submit("b", 2, 0, 500, 3)]
    blocks = list(range(101))
    good = plan(1, 0, prefill("b", 0, 400, blocks[:100], last=False))
    bad = plan(1, 0, prefill("b", 0, 401, blocks, last=False))
    assert _rules([*log, good]) == set()
    assert _rules([*log, bad]) == {"time"}


def test_more_than_max_running_is_found() -> None:
    """Two run where one may."""
    log = [config(max_running=1), replica_up(), submit("b", 2, 0, 4, 3), submit("c", 2, 0, 4, 3)]
    assert _rules([*log, plan(1, 0, prefill("b", 0, 4, [0]), prefill("c", 0, 4, [1]))]) == {"step"}


def test_work_stays_where_it_is_bound_and_may_run() -> None:
    """Bound to r, run on q; and a reserved replica that serves somebody else."""
    log = [config(), replica_up(), replica_up("q"), submit("s", 1, 0, 8, 3)]
    assert _rules([*log, plan(1, 0, prefill("s", 0, 8, [0, 1]), replica="q")]) == {"placement"}
    log = [config(), replica_up(tenants=["x"]), submit("b", 2, 0, 8, 3)]
    assert _rules([*log, plan(1, 0, prefill("b", 0, 8, [0, 1]))]) == {"placement"}


def test_after_a_loss_everything_is_placed_or_ended_at_once() -> None:
    """A promise left on a lost replica is found; one that streamed does not start anew."""
    start = [
        config(),
        replica_up(),
        submit("s", 1, 0, 8, 3),
        plan(1, 0, prefill("s", 0, 8, [0, 1])),
    ]
    down = {"kind": "replica_down", "at": 500, "replica": "r"}
    requeue = {"kind": "requeue", "at": 500, "id": "s", "replica": "q"}
    later = refused("x", 0, 600, "NO_ENGINE", 1)
    assert _rules([*start, down, end("s", 500, 0, "FAILED"), later]) == set()
    assert _rules([*start, replica_up("q"), down, requeue, later]) == set()
    assert _rules([*start, down, later]) == {"placement"}
    streamed = [*start, commit(1, 1080, "s"), replica_up("q", at=1080), {**down, "at": 1080}]
    assert _rules([*streamed, {**requeue, "at": 1080}, {**later, "at": 1090}]) == {"outcome"}


def test_a_decode_is_not_left_out_where_there_is_time() -> None:
    """Two batch requests could decode; one does."""
    log = [
        config(),
        replica_up(),
        submit("b", 2, 0, 3, 3),
        submit("c", 2, 0, 3, 3),
        plan(1, 0, prefill("b", 0, 3, [0]), prefill("c", 0, 3, [1])),
        commit(1, 1060, "b", "c"),
    ]
    assert _rules([*log, plan(2, 1060, decode("b", 3), decode("c", 3))]) == set()
    assert _rules([*log, plan(2, 1060, decode("b", 3))]) == {"conserved"}


def _race(weights: dict[str, float], served: list[str]) -> Log:
    """Tenants a and b always have work waiting; each one served gets 10 prompt tokens."""
    tenants = {name: {"weight": weight, "tokens_per_s": 0.0} for name, weight in weights.items()}
    log: Log = [config(tenants=tenants), replica_up()]
    for tenant in ("a", "b"):
        for number in range(21):
            log.append(submit(f"{tenant}{number}", 2, 0, 10, 1, tenant=tenant))
    turns = {"a": 0, "b": 0}
    for step, tenant in enumerate(served, start=1):
        name = f"{tenant}{turns[tenant]}"
        turns[tenant] += 1
        log.append(plan(step, step * 2000, prefill(name, 0, 10, [0, 1, 2])))
        log.append(commit(step, step * 2000 + 1100, name))
        log.append(end(name, step * 2000 + 1100, 1))
    return log


def test_the_gap_of_service_between_waiting_tenants_is_bounded() -> None:
    """12 weighted tokens each: in turn the gap is 12; a run of 10 is 120, over a bound of 100."""
    assert _rules(_race({}, ["a", "b"] * 10), service_bound=100.0) == set()
    assert _rules(_race({}, ["a"] * 10), service_bound=100.0) == {"fair"}
    assert _rules(_race({}, ["a"] * 8), service_bound=100.0) == set()


def test_the_gap_counts_weights() -> None:
    """A weight of 3: three for one is fair, one for one is not (10 x 12 x 2/3 = 80)."""
    weights = {"a": 3.0, "b": 1.0}
    assert _rules(_race(weights, ["a", "a", "a", "b"] * 5), service_bound=30.0) == set()
    assert _rules(_race(weights, ["a", "b"] * 10), service_bound=30.0) == {"fair"}


def test_the_bound_of_the_paper_is_taken_where_none_is_given() -> None:
    """2 x max(1 x 10, 2 x 64 tokens of KV) = 256 weighted tokens: 21 x 12 is within, 22 is not."""
    assert _rules(_race({}, ["a"] * 20)) == set()
    small = _race({}, ["a"] * 20)
    small[1]["blocks"] = 14  # 2 x 2 x 56 = 224 < 240.
    assert _rules(small) == {"fair"}


@pytest.mark.parametrize(
    ("copies", "is_fine"),
    [
        ([[5, 2], [6, 3]], True),
        ([[5, 3], [6, 2]], False),  # To each other's place.
        ([[5, 2], [7, 3]], False),  # From a block that holds nothing.
    ],
)
def test_what_was_swapped_out_comes_back_to_its_place(
    copies: list[list[int]], is_fine: bool
) -> None:
    """Blocks 0 and 1 of a victim go to the host's 5 and 6, and from there into 2 and 3."""
    out = plan(2, 1060, prefill("i", 0, 5, [0, 1])) | {"swap_out": [[0, 5], [1, 6]]}
    back = plan(3, 2110, prefill("b", 6, 1, [2, 3])) | {"swap_in": copies}
    log = [
        config(),
        replica_up(swap_blocks=8),
        submit("b", 2, 0, 6, 3),
        plan(1, 0, prefill("b", 0, 6, [0, 1])),
        submit("i", 0, 500, 5, 1),
        commit(1, 1060, "b"),
        preempt("b", 1060) | {"swapped": True},
        out,
        commit(2, 2110, "i"),
        end("i", 2110, 1),
        back,
    ]
    assert ("swap" not in _rules(log)) is is_fine
