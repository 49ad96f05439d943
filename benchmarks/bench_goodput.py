"""How much the scheduler gets done in time, in virtual time.

Against a baseline that knows every true output length and how long every step will
take, and decides at arrival under the same fairness: it lets a request in if carrying
everything out to the end shows that it and all others are in time, with steps stretched
by a factor. Of several factors the best counts: a batch that is packed until nobody has
any slack runs in many small steps, and completes less. Beside it what an offline choice
could at most complete.

Further: misses among the admitted, whether refusals as LATE were right, a flooder beside
a tenant under its share, and an engine that becomes three times slower.
"""

import copy
import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from cloud.scheduler.admission import Late, Placement, SchedulabilityTest
from cloud.scheduler.config import ClassConfig, SchedulerConfig
from cloud.scheduler.replica import Replica
from cloud.scheduler.request_state import LiveRequest
from cloud.scheduler.scheduler import Scheduler
from cloud.scheduler.simulated import Arrival
from cloud.scheduler.types import (
    Admitted,
    DeadlineCovers,
    Ended,
    Event,
    Rejected,
    ReplicaSpec,
    Request,
    StepOutput,
    StepResult,
)
from headway.cost_model import CostModel, StepShape
from headway.outcome import Outcome, Reason, RequestClass

__all__ = ["World", "offline_bound", "robot_arrivals", "wilson"]

_MS = 1_000_000
_S = 1_000_000_000
_COST = CostModel(t0_ns=8.0 * _MS, prefill_ns=40_000.0, decode_ns=150_000.0, kv_ns=30.0)
# What a fit reports on steps with lognormal noise of 5 %: their 0.999 quantile.
_FITTED = replace(_COST, margin=math.exp(3.09 * 0.05))
_SPEC = ReplicaSpec("r0", 4096, 16, 4096, _FITTED)
_MAX_STEP_NS = 60 * _MS
# Of all time, what tokens' own time can fill beside every step's t0 and deadlines of this
# kind: what the baseline below reaches.
_USABLE = 0.5
_Noise = Callable[[int], float]


# --- traffic ---


def robot_arrivals(
    rng: random.Random,
    load: float,
    span_ns: int,
    *,
    tenants: Sequence[str] = ("a", "b", "c"),
    action_share: float = 0.75,
    ends_early: bool = True,
    ms_per_token: Sequence[int] = (15, 25, 40),
) -> list[Arrival]:
    """Actions with a deadline for the last token, and questions for the first.

    A load of 1 is about what can be done: tokens' own time fills `_USABLE` of all time.
    Where outputs may end early, only their bound is known; else they are chunks of
    known length.
    """
    arrivals: list[Arrival] = []
    room = load * _USABLE
    at_ns = 0.0
    while True:
        is_action = rng.random() < action_share
        prompt, most = rng.randrange(60, 500), rng.choice([8, 16, 32])
        length = rng.randrange(most // 2, most + 1) if ends_early else most
        own_ns = _COST.chunk_ns(0, prompt) + length * (_COST.decode_ns + _COST.kv_ns * prompt)
        at_ns += rng.expovariate(1.0) * own_ns / room
        if at_ns >= span_ns:
            return arrivals
        # Long enough for a server that is not busy: 8 to 9 ms a token and a step to wait.
        budget_ms = most * rng.choice(ms_per_token) + 60 if is_action else rng.choice([500, 2000])
        request = Request(
            f"q{len(arrivals)}",
            rng.choice(tenants),
            RequestClass.INTERACTIVE if is_action else RequestClass.STANDARD,
            prompt,
            most,
            int(at_ns) + budget_ms * _MS,
            DeadlineCovers.LAST_TOKEN if is_action else DeadlineCovers.FIRST_TOKEN,
            has_fixed_output=not ends_early,
        )
        arrivals.append(Arrival(int(at_ns), request, length))


def _own_ns(arrival: Arrival) -> float:
    """Time of a request's own tokens up to its deadline's, every step's t0 left out."""
    request, length = arrival.request, arrival.output_tokens or arrival.request.max_output_tokens
    is_last = request.deadline_covers is DeadlineCovers.LAST_TOKEN
    decodes = length - 1 if is_last else 0
    return _COST.chunk_ns(0, request.prompt_tokens) + decodes * _COST.decode_ns


def offline_bound(arrivals: Iterable[Arrival]) -> int:
    """Most requests that any choice could complete in time.

    By Moore's and Hodgson's rule (Moore 1968): by deadline, and where one is late the
    longest goes. Optimal where all is there from the start; with arrivals spread,
    and every step's t0 free, a bound from above.
    """
    chosen: list[float] = []
    total_ns = 0.0
    for arrival in sorted(arrivals, key=lambda one: one.request.deadline_ns or 0):
        own_ns = _own_ns(arrival)
        chosen.append(own_ns)
        total_ns += own_ns
        if total_ns > (arrival.request.deadline_ns or 0):
            longest = max(chosen)
            chosen.remove(longest)
            total_ns -= longest
    return len(chosen)


def lognormal_noise(seed: int, sigma: float = 0.05) -> _Noise:
    """A factor on a step's time that depends on nothing but its start: so it can be known."""
    return lambda at_ns: random.Random(seed * 1_000_003 + at_ns).lognormvariate(0, sigma)


# --- a world that can be forked ---


class World:
    """One replica, its scheduler and its traffic, in virtual time."""

    def __init__(self, scheduler: Scheduler, arrivals: Sequence[Arrival], noise: _Noise) -> None:
        self.scheduler = scheduler
        self.now_ns = 0
        self.decisions: dict[str, Admitted | Rejected] = {}
        self.ended: dict[str, Ended] = {}
        self.times: dict[str, int] = {}  # When each was decided about.
        self._arrivals = arrivals
        self._next = 0
        self.noise = noise
        self.given: dict[str, int] = {}
        self._lengths = {one.request.request_id: one.output_tokens for one in arrivals}
        self._flight: tuple[int, StepResult] | None = None
        scheduler.replica_up(_SPEC, 0)

    def fork(self) -> "World":
        """The same world, which goes its own way from here on."""
        twin = copy.copy(self)
        twin.scheduler = copy.deepcopy(self.scheduler)
        twin.decisions, twin.ended = dict(self.decisions), dict(self.ended)
        twin.times, twin.given = dict(self.times), dict(self.given)
        return twin

    def hold_arrivals(self) -> None:
        """Nobody else comes."""
        self._next = len(self._arrivals)

    def submit(self, arrival: Arrival) -> Admitted | Rejected:
        """A request comes now."""
        decision = self.scheduler.submit(arrival.request, self.now_ns)
        self.decisions[arrival.request.request_id] = decision
        self.times[arrival.request.request_id] = self.now_ns
        if isinstance(decision, Admitted):
            self._take(decision.events)
        return decision

    def run(
        self,
        until_ns: int | None = None,
        ask: Callable[["World", Arrival], object] = lambda world, arrival: world.submit(arrival),
    ) -> None:
        """Carries everything out, up to an instant or to the end."""
        while True:
            self._begin()
            next_ns = self._next_ns()
            if next_ns is None or (until_ns is not None and next_ns > until_ns):
                return
            self.now_ns = next_ns
            if self._flight is not None and self._flight[0] == next_ns:
                result, self._flight = self._flight[1], None
                self._take(self.scheduler.commit("r0", result, next_ns))
            while self._next < len(self._arrivals) and self._arrivals[self._next].at_ns <= next_ns:
                self._next += 1
                ask(self, self._arrivals[self._next - 1])
            self._take(self.scheduler.advance(next_ns))

    def _next_ns(self) -> int | None:
        instants = [] if self._flight is None else [self._flight[0]]
        if self._next < len(self._arrivals):
            instants.append(self._arrivals[self._next].at_ns)
        expiry_ns = self.scheduler.next_expiry_ns()
        if expiry_ns is not None:
            instants.append(max(expiry_ns, self.now_ns))
        return min(instants, default=None)

    def _begin(self) -> None:
        if self._flight is not None or not self.scheduler.has_work("r0"):
            return
        plan = self.scheduler.plan("r0", self.now_ns)
        self._take(plan.events)
        if plan.is_empty:
            return
        outputs = []
        for item in plan.items:
            if item.samples:
                index = self.given[item.request_id] = self.given.get(item.request_id, 0) + 1
                is_stop = index >= (self._lengths.get(item.request_id) or index + 1)
                outputs.append(StepOutput(item.request_id, index, is_stop))
        shape = StepShape.of(
            [(item.context_tokens, item.num_tokens) for item in plan.items if item.is_prefill],
            [item.context_tokens for item in plan.items if not item.is_prefill],
        )
        elapsed_ns = max(1, round(_COST.predict_ns(shape) * self.noise(self.now_ns)))
        result = StepResult(plan.step_id, tuple(outputs), elapsed_ns)
        self._flight = (self.now_ns + elapsed_ns, result)

    def _take(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, Ended):
                self.ended[event.request_id] = event

    # --- what came of it ---

    def admitted(self) -> list[str]:
        """Who was let in."""
        return [name for name, one in self.decisions.items() if isinstance(one, Admitted)]

    def in_time(self) -> int:
        """How many were completed by their deadline."""
        return sum(1 for one in self.ended.values() if one.outcome is Outcome.COMPLETED)

    def not_served(self, names: Iterable[str]) -> set[str]:
        """Of these, who was refused or let in and missed."""
        return {
            name for name in names if isinstance(self.decisions.get(name), Rejected)
        } | self.missed().intersection(names)

    def missed(self) -> set[str]:
        """Who was let in and not completed in time."""
        return {
            name
            for name, one in self.ended.items()
            if one.outcome in (Outcome.EXPIRED, Outcome.FAILED)
        }


class _Yes(SchedulabilityTest):
    """Lets everybody in, or only some."""

    def __init__(self, config: SchedulerConfig, names: frozenset[str] | None = None) -> None:
        super().__init__(config)
        self._names = names

    def place(
        self,
        newcomer: LiveRequest,
        replicas: Iterable[Replica],
        now_ns: int,
        without: LiveRequest | None = None,
    ) -> Placement | Late:
        """Yes, at the deadline; the real answer for the others."""
        replicas = list(replicas)
        if self._names is None or newcomer.request_id in self._names:
            super().place(newcomer, replicas, now_ns, without)  # For what it notes down.
            return Placement(replicas[0], newcomer.deadline_ns)
        return super().place(newcomer, replicas, now_ns, without)


def _let_in(scheduler: Scheduler, names: frozenset[str] | None) -> None:
    intake = scheduler._intake  # noqa: SLF001
    intake._test = _Yes(intake._config, names)  # noqa: SLF001


def _scheduler(**changes: object) -> Scheduler:
    settings = {
        "interactive": ClassConfig(tpot_target_ns=None),
        "standard": ClassConfig(default_budget_ns=2 * _S, tpot_target_ns=None),
        "max_step_ns": _MAX_STEP_NS,
        **changes,
    }
    return Scheduler(SchedulerConfig(**settings))  # type: ignore[arg-type]


def run_ours(arrivals: Sequence[Arrival], noise: _Noise) -> World:
    """The scheduler as it is."""
    world = World(_scheduler(), arrivals, noise)
    world.run()
    return world


def run_baseline(arrivals: Sequence[Arrival], noise: _Noise, stretch: float) -> World:
    """Knows lengths and noise; lets in what carrying everything out shows to be in time,
    and nobody else late by it.

    Args:
        arrivals: who comes.
        noise: of the steps.
        stretch: slack that it leaves: steps are taken to be longer by this factor.
    """
    world = World(_scheduler(), arrivals, noise)
    _let_in(world.scheduler, None)

    def ask(world: World, arrival: Arrival) -> None:
        trial = world.fork()
        trial.hold_arrivals()
        trial.noise = lambda at_ns: noise(at_ns) * stretch
        before = trial.missed()
        if isinstance(trial.submit(arrival), Rejected):
            world.submit(arrival)  # Over its share: the same rule.
            return
        trial.run()
        if trial.missed() <= before:
            world.submit(arrival)

    world.run(ask=ask)
    return world


# --- the tables ---


def wilson(hits: int, count: int) -> tuple[float, float]:
    """95 % confidence interval of a share (Wilson 1927)."""
    if not count:
        return 0.0, 1.0
    z = 1.959964
    share, square = hits / count, z * z / count
    middle = (share + square / 2) / (1 + square)
    half = z * math.sqrt(share * (1 - share) / count + square / (4 * count)) / (1 + square)
    return max(0.0, middle - half), min(1.0, middle + half)


@dataclass(frozen=True, slots=True)
class _Row:
    """A line of a table: what was measured, against what goal."""

    name: str
    found: str
    goal: str
    is_met: bool


def _show(console: Console, title: str, rows: Sequence[_Row]) -> bool:
    table = Table(title=title)
    for heading in ("", "found", "goal", ""):
        table.add_column(heading)
    for row in rows:
        mark = "[green]met[/]" if row.is_met else "[red]missed[/]"
        if row.goal.startswith("none"):
            mark = ""  # A figure to know, no goal.
        table.add_row(row.name, row.found, row.goal, mark)
    console.print(table)
    return all(row.is_met for row in rows)


def _goodput(
    console: Console, span_s: int, what: str, action_share: float, *, ends_early: bool
) -> bool:
    """One class at a time: between classes it is strictness that decides, not the test."""
    table = Table(title=f"{what} completed in time, {span_s} s of virtual time, 5 % noise")
    for heading in ("load", "asked", "ours", "baseline", "ratio", "goal", "", "offline bound"):
        table.add_column(heading, justify="right")
    all_met = True
    noise = lognormal_noise(7)
    for load in (0.5, 1.0, 2.0, 4.0):
        arrivals = robot_arrivals(
            random.Random(round(load * 10)),
            load,
            span_s * _S,
            action_share=action_share,
            ends_early=ends_early,
        )
        ours = run_ours(arrivals, noise).in_time()
        baseline = max(
            run_baseline(arrivals, noise, stretch).in_time() for stretch in (1.0, 1.3, 1.6)
        )
        is_met = ours >= 0.95 * baseline
        all_met &= is_met
        table.add_row(
            f"{load:g}x",
            f"{len(arrivals)}",
            f"{ours}",
            f"{baseline}",
            f"{ours / baseline:.1%}",
            ">= 95 %",
            "[green]met[/]" if is_met else "[red]missed[/]",
            f"{offline_bound(arrivals)}",
        )
    console.print(table)
    return all_met


def _misses(console: Console, span_s: int) -> bool:
    """Interactive promises are hard; standard ones yield to them and are counted apart."""
    admitted = dict.fromkeys(RequestClass, 0)
    missed = dict.fromkeys(RequestClass, 0)
    for load in (0.5, 1.0, 2.0, 4.0):
        arrivals = robot_arrivals(random.Random(100 + round(load * 10)), load, span_s * _S)
        world = run_ours(arrivals, lognormal_noise(11))
        late, let_in = world.missed(), set(world.admitted())
        for arrival in arrivals:
            name, request_class = arrival.request.request_id, arrival.request.request_class
            admitted[request_class] += name in let_in
            missed[request_class] += name in late
    rows = []
    for request_class, goal in ((RequestClass.INTERACTIVE, 0.001), (RequestClass.STANDARD, 1.0)):
        count, hits = admitted[request_class], missed[request_class]
        low, high = wilson(hits, count)
        is_short = count < 10_000
        rows.append(
            _Row(
                request_class.label,
                f"{hits} of {count:,}: {hits / count:.3%} (95 %: {low:.3%} to {high:.3%})",
                ("<= 0.1 %" + (", within the interval" if is_short else ""))
                if goal < 1
                else "none: yields to interactive work",
                (low if is_short else hits / count) <= goal,
            )
        )
    return _show(console, "misses among the admitted, loads 0.5 to 4", rows)


def _honesty(console: Console, span_s: int, samples: int) -> bool:
    """Forces single refusals in, in the same seed, and looks whether a promise breaks."""
    arrivals = robot_arrivals(random.Random(5), 2.0, span_s * _S)
    noise = lognormal_noise(13)
    base = run_ours(arrivals, noise)
    refused = [
        one
        for one in arrivals
        if isinstance(answer := base.decisions[one.request.request_id], Rejected)
        and answer.reason is Reason.LATE
    ]
    sample = {
        one.request.request_id
        for one in random.Random(1).sample(refused, min(samples, len(refused)))
    }
    strict = at_a_cost = 0
    world = World(_scheduler(), arrivals, noise)

    def ask(world: World, arrival: Arrival) -> None:
        nonlocal strict, at_a_cost
        name = arrival.request.request_id
        if name in sample:
            twin = world.fork()
            _let_in(twin.scheduler, frozenset({name}))
            twin.submit(arrival)
            twin.run(until_ns=twin.now_ns + 3 * _S)
            has_broken = bool(twin.missed() - base.missed())
            strict += has_broken
            served = len(base.not_served(twin.decisions)) - len(twin.not_served(twin.decisions))
            at_a_cost += has_broken or served <= 0
        world.submit(arrival)

    world.run(ask=ask)
    count = len(sample)
    rows = [
        _Row(
            f"{count} of {len(refused)} LATE refusals let in, one at a time: late, or a promise is",
            f"{strict / count:.1%}",
            ">= 90 %",
            strict >= 0.9 * count,
        ),
        _Row(
            "that, or somebody else is refused instead within 3 s",
            f"{at_a_cost / count:.1%}",
            "none: for comparison",
            True,
        ),
    ]
    return _show(console, "refusals are honest, load 2", rows)


def _flooder(console: Console, span_s: int) -> bool:
    """Two tenants of equal weight; one sends ten times as much; twice the capacity in all.

    Deadlines leave room for the step that runs, so that a refusal is the flooder's doing.
    """
    tenants = ("flood",) * 10 + ("quiet",)
    arrivals = robot_arrivals(
        random.Random(3), 2.0, span_s * _S, tenants=tenants, action_share=1.0, ms_per_token=(40,)
    )
    config = SchedulerConfig()
    world = run_ours(arrivals, lognormal_noise(17))
    quiet = [one for one in arrivals if one.request.tenant == "quiet"]
    refused = [one for one in quiet if one.request.request_id not in set(world.admitted())]
    answers = (world.decisions[one.request.request_id] for one in refused)
    reasons = dict(Counter(str(one.reason) for one in answers if isinstance(one, Rejected)))
    windows = []
    for start_s in range(span_s - 10 + 1):
        asked = given = flood = 0.0
        for one in arrivals:
            if not start_s * _S <= one.at_ns < (start_s + 10) * _S:
                continue
            ended = world.ended.get(one.request.request_id)
            is_done = ended is not None and ended.outcome is Outcome.COMPLETED
            tokens = one.request.prompt_tokens + config.output_weight * (one.output_tokens or 0)
            if one.request.tenant == "quiet":
                asked += tokens
                given += tokens * is_done
            else:
                flood += tokens * is_done
        windows.append((min(asked, max(asked, flood)) - given, asked, given, flood))
    worst = max(window[0] for window in windows)
    _, asked, given, flood = max(windows)
    rows = [
        _Row(
            "weighted tokens that the quiet one lacks, worst of all windows of 10 s",
            f"{worst:.0f} (asked {asked:.0f}, got {given:.0f}; the flooder got {flood:.0f})",
            f"<= {config.fairness_bound_tokens}",
            worst <= config.fairness_bound_tokens,
        ),
        _Row(
            "of the quiet one refused",
            f"{len(refused)} of {len(quiet)} ({len(refused) / len(quiet):.2%}): {reasons}",
            "<= 0.1 %",
            len(refused) <= 0.001 * len(quiet),
        ),
    ]
    return _show(console, "one of two equal tenants sends ten times as much, load 2", rows)


def _slowdown(console: Console, span_s: int) -> bool:
    """The engine takes three times as long from a third of the run on."""
    slow_ns = span_s * _S // 3
    usual = lognormal_noise(19)
    arrivals = robot_arrivals(random.Random(9), 1.0, span_s * _S)
    world = run_ours(arrivals, lambda at_ns: usual(at_ns) * (3.0 if at_ns >= slow_ns else 1.0))
    by_second = [[0, 0] for _ in range(span_s)]
    hard = {
        one.request.request_id
        for one in arrivals
        if one.request.request_class is RequestClass.INTERACTIVE
    }
    for name in hard.intersection(world.admitted()):
        second = by_second[min(span_s - 1, world.times[name] // _S)]
        second[0] += 1
        second[1] += name in world.missed()
    start = slow_ns // _S
    late = [admitted_missed[1] for admitted_missed in by_second]
    console.print(
        f"interactive misses by the second of admission, slower from {start} s on: {late}"
    )
    admitted = sum(one[0] for one in by_second[start + 10 :])
    missed = sum(late[start + 10 :])
    low, high = wilson(missed, admitted)
    row = _Row(
        "admitted 10 s or more after the change",
        f"{missed} of {admitted} missed ({low:.2%} to {high:.2%})",
        "<= 0.1 %, or the interval reaches it",
        admitted > 0 and low <= 0.001,
    )
    return _show(console, "the engine is three times slower in mid-run, load 1, interactive", [row])


def main() -> None:
    """Prints the tables; `--quick` takes shorter runs."""
    is_quick = "--quick" in sys.argv[1:]
    console = Console(width=140)
    span_s = 6 if is_quick else 20
    all_met = _goodput(console, span_s, "chunks of known length", 1.0, ends_early=False)
    all_met &= _goodput(console, span_s, "actions that may end early", 1.0, ends_early=True)
    all_met &= _goodput(console, span_s, "questions", 0.0, ends_early=True)
    all_met &= _misses(console, 15 if is_quick else 150)
    all_met &= _honesty(console, 15 if is_quick else 60, 40 if is_quick else 200)
    all_met &= _flooder(console, 30 if is_quick else 120)
    all_met &= _slowdown(console, 45 if is_quick else 90)
    console.print("every goal is met" if all_met else "[red]a goal is missed[/]")


if __name__ == "__main__":
    main()
