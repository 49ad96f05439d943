"""The verifier's rules: each looks at one record, with what is known before it."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tests.support.verifier_fairness import ServiceGaps
from tests.support.verifier_order import OrderRules
from tests.support.verifier_state import (
    BATCH,
    INTERACTIVE,
    Item,
    LogReplica,
    LogRequest,
    LogState,
    blocks_for,
)
from tests.support.verifier_swap import SwapBook

__all__ = ["Rules"]

Record = Mapping[str, Any]
Finding = tuple[str, str]

_OUTCOMES = {"COMPLETED", "EXPIRED", "CANCELLED", "FAILED"}
_RETRIABLE = {"LATE", "FAIR_SHARE", "QUEUE_FULL", "QUOTA"}


class Rules:
    """Checks records one after the other, and takes each into the state."""

    def __init__(
        self, state: LogState, idle_tolerance_ns: int | None, service_bound: float | None
    ) -> None:
        self._state = state
        self._idle_tolerance_ns = idle_tolerance_ns
        self._order = OrderRules(state)
        self._swap = SwapBook(state)
        self._gaps = ServiceGaps(state, service_bound)
        # Evictions that no plan has accounted for yet: (replica, class, id).
        self._evicted: list[tuple[str, int, str]] = []
        self._checks: dict[str, Callable[[Record], Iterator[Finding]]] = {
            "submit": self._submit,
            "plan": self._plan,
            "commit": self._commit,
            "preempt": self._preempt,
            "requeue": self._requeue,
            "end": self._end,
        }

    def check(self, record: Record) -> list[Finding]:
        """What this record breaks."""
        kind = record["kind"]
        found: list[Finding] = []
        if record.get("at", self._state.now_ns) < self._state.now_ns:
            found.append(("step", f"time goes back to {record['at']} ns"))
        if kind not in ("requeue", "end"):
            found += self._orphans()
        if kind in self._checks:
            found += self._checks[kind](record)
        self._state.apply(record)
        found += self._gaps.observe(record)
        return found

    # --- requests ---

    def _submit(self, record: Record) -> Iterator[Finding]:
        request_id, decision = record["id"], record["decision"]
        if decision != "ADMITTED":
            is_never = decision == "QUOTA" and record["retry_after"] is None
            if decision in _RETRIABLE and not is_never and not (record["retry_after"] or 0) > 0:
                yield "admission", f"'{request_id}' is refused as {decision} without a hint"
            if decision == "LATE" and record["class"] == BATCH:
                yield "admission", f"'{request_id}' has no deadline and is refused as late"
            return
        if request_id in self._state.live:
            yield "outcome", f"'{request_id}' is admitted while it is live"
        if self._state.is_draining:
            yield "admission", f"'{request_id}' is admitted while draining"
        if record["deadline"] is not None:
            if record["predicted_at"] > record["deadline"]:
                yield "admission", f"'{request_id}' is promised what is predicted to be late"
            replica = self._state.replicas.get(record["replica"])
            if replica is None:
                yield "placement", f"'{request_id}' is promised on no replica that is up"
            elif replica.is_draining:
                yield "placement", f"'{request_id}' is promised on a replica that is drained"
            elif (
                blocks_for(record["prompt"] + record["max_output"] - 1, replica.block_tokens)
                > replica.num_blocks
                or record["prompt"] + record["max_output"] > replica.max_context
            ):
                yield (
                    "admission",
                    f"'{request_id}' does not fit replica '{record['replica']}' alone",
                )

    def _end(self, record: Record) -> Iterator[Finding]:
        self._swap.forget(record["id"])
        request_id, outcome = record["id"], record["outcome"]
        one = self._state.live.get(request_id)
        if one is None:
            yield "outcome", f"'{request_id}' ends as {outcome} and is not live"
            return
        if outcome not in _OUTCOMES:
            yield (
                "outcome",
                f"'{request_id}' ends as {outcome}, which is no outcome of an admitted one",
            )
        # A token that came too late is computed and not given.
        given = {one.outputs, one.outputs - 1} if outcome == "EXPIRED" else {one.outputs}
        if record["output_tokens"] not in given:
            yield (
                "outcome",
                f"'{request_id}' ends with {record['output_tokens']} tokens, {one.outputs} came",
            )
        if outcome == "COMPLETED":
            if not one.outputs:
                yield "outcome", f"'{request_id}' is completed without a token"
            if one.deadline_ns is not None:
                at_ns = record["at"] if one.covers_last else one.first_token_ns
                if at_ns is not None and at_ns > one.deadline_ns:
                    yield "expired", f"'{request_id}' is completed after its deadline"
        if outcome == "EXPIRED" and one.deadline_ns is None:
            yield "outcome", f"'{request_id}' expires and has no deadline"

    def _requeue(self, record: Record) -> Iterator[Finding]:
        one = self._state.live.get(record["id"])
        if one is None:
            yield "after-end", f"'{record['id']}' waits again after its end"
        elif one.outputs:
            yield "outcome", f"'{record['id']}' has streamed and is started anew elsewhere"
        elif one.rank != BATCH and record["replica"] not in self._state.replicas:
            yield "placement", f"'{record['id']}' is bound to no replica that is up"
        elif one.rank != BATCH and self._state.replicas[record["replica"]].is_draining:
            yield "placement", f"'{record['id']}' is bound to a replica that is drained"

    def _orphans(self) -> Iterator[Finding]:
        """After the loss of a replica everything on it is placed or ended at once."""
        for one in self._state.live.values():
            if one.replica and one.replica not in self._state.replicas:
                yield "placement", f"'{one.request_id}' is left on a lost replica"

    # --- steps ---

    def _plan(self, record: Record) -> Iterator[Finding]:
        replica = self._state.replicas.get(record["replica"])
        if replica is None:
            yield "placement", f"a step for replica '{record['replica']}', which is not up"
            return
        if replica.flight is not None:
            yield "step", f"step {record['step']} is planned before {replica.last_step} is over"
        if record["step"] != replica.last_step + 1:
            yield "step", f"step {record['step']} follows {replica.last_step}"
        items = list(map(Item._make, record["items"]))
        if len({item.request_id for item in items}) != len(items):
            yield "step", "a request is twice in a step"
        if not (items or record["swap_in"] or record["swap_out"]):
            yield "step", "a step with nothing in it is to be executed"
        for item in items:
            yield from self._item(replica, item, record)
        yield from self._swap.plan(replica, record)
        yield from self._swap.came_back(replica, items, record["swap_in"])
        yield from self._tables(replica, items)
        yield from self._times(replica, items, record)
        yield from self._evictions(replica, items)
        yield from self._order.check(replica, items, record)
        yield from self._idle(replica, record)

    def _item(self, replica: LogReplica, item: Item, record: Record) -> Iterator[Finding]:
        name = f"'{item.request_id}'"
        one = self._state.live.get(item.request_id)
        if one is None:
            yield "after-end", f"{name} is in a step and not live"
            return
        if (one.is_running or one.rank != BATCH) and one.replica != replica.replica_id:
            yield "placement", f"{name} is bound to '{one.replica}' and runs on another replica"
        if not self._state.may_run(one, replica):
            yield "placement", f"{name} may not run on '{replica.replica_id}'"
        yield from self._progress(one, item)
        if one.is_open_promise and one.deadline_ns is not None:
            own_ns = 0.0
            if not one.is_running:  # Alone, in one step.
                own_ns = replica.predict_ns([(item.context, one.prefill_at(item.context))], [])
            if record["at"] + own_ns > one.deadline_ns:
                yield "expired", f"{name} is executed and cannot make its deadline"

    @staticmethod
    def _progress(one: LogRequest, item: Item) -> Iterator[Finding]:
        """An item goes on where the request stands."""
        name = f"'{item.request_id}'"
        if item.resets_table == one.is_running:
            yield "step", f"{name} joins without, or runs with, a new block table"
        if one.is_running and not item.resets_table and item.context != one.computed:
            yield "step", f"{name} goes on at {item.context}, {one.computed} are computed"
        total = one.prompt + one.outputs
        if item.num < 1 or item.context + item.num > total:
            yield "step", f"{name} computes {item.num} tokens at {item.context} of {total}"
        if item.samples != (item.context + item.num == total):
            yield "step", f"{name} samples at {item.context + item.num} of {total}"
        if not item.is_prefill and (item.num != 1 or not one.outputs):
            yield "step", f"{name} decodes {item.num} tokens"
        if one.outputs >= one.max_output:
            yield "after-end", f"{name} has all its {one.max_output} tokens already"

    def _tables(self, replica: LogReplica, items: list[Item]) -> Iterator[Finding]:
        """Blocks after the plan: exist, suffice, and nobody else's.

        What comes back from host memory is one's own; other context of a table that
        starts anew is a shared prefix, of whole blocks.
        """
        size = replica.block_tokens
        holders = {
            block: one.request_id
            for one in self._state.running_on(replica.replica_id)
            for block in one.table
        }
        for item in items:
            one = self._state.live.get(item.request_id)
            if one is None:
                continue
            name = f"'{item.request_id}'"
            table = [*(() if item.resets_table else one.table), *item.new_blocks]
            if any(not 0 <= block < replica.num_blocks for block in table):
                yield "blocks", f"{name} has a block that does not exist"
            if len(set(table)) != len(table):
                yield "blocks", f"{name} has a block twice"
            if len(table) * size < item.context + item.num:
                yield "blocks", f"{name} has no block for what it computes"
            is_shared = item.resets_table and item.request_id not in self._swap.returned
            if is_shared and item.context % size:
                yield "shared", f"{name} shares part of a block"
            num_known = item.context // size if is_shared else 0
            for place, block in enumerate(item.new_blocks[:num_known]):
                if replica.content.get(block) != (one.tenant, place):
                    yield "shared", f"{name} takes block {block} as a known prefix"
            for block in item.new_blocks[num_known:]:
                if holders.get(block, item.request_id) != item.request_id:
                    yield "blocks", f"block {block} of '{holders[block]}' is given out again"
            holders.update(dict.fromkeys(table, item.request_id))

    def _times(self, replica: LogReplica, items: list[Item], record: Record) -> Iterator[Finding]:
        chunks = [(item.context, item.num) for item in items if item.is_prefill]
        decodes = [item.context for item in items if not item.is_prefill]
        own_ns = replica.predict_ns(chunks, decodes)
        num_copies = len(record["swap_in"]) + len(record["swap_out"])
        own_ns += num_copies * replica.swap_block_ns
        if abs(own_ns - record["predicted"]) > 1 + 1e-9 * own_ns:
            yield "time", f"{record['predicted']} ns are predicted, the formula says {own_ns:.0f}"
        live = self._state.live
        ranks = {
            live[item.request_id].rank
            for item in items
            if item.request_id in live and not item.is_prefill
        }
        targets = [self._state.tpot_ns(rank) for rank in ranks]
        target_ns = min(
            [self._state.config["max_step_ns"], *(one for one in targets if one is not None)]
        )
        if not chunks:
            return  # Decodes alone take what they take.
        smallest = min(self._state.config["min_chunk_tokens"], max(num for _, num in chunks))
        context = max(context for context, _ in chunks)
        floor_ns = replica.predict_ns([(context, smallest)], decodes)
        floor_ns += num_copies * replica.swap_block_ns
        if own_ns > max(target_ns, floor_ns) * (1 + 1e-9) + 1:
            yield "time", f"a step with prefills takes {own_ns:.0f} ns, {target_ns} is the target"
        num_running = len(self._state.running_on(replica.replica_id))
        num_joining = sum(
            1 for item in items if item.request_id in live and not live[item.request_id].is_running
        )
        if num_running + num_joining > self._state.config["max_running"]:
            yield "step", f"{num_running + num_joining} requests run, more than max_running"

    def _commit(self, record: Record) -> Iterator[Finding]:
        replica = self._state.replicas.get(record["replica"])
        if replica is None or replica.flight is None:
            yield "step", f"a result of replica '{record['replica']}', which runs no step"
            return
        if record["step"] != replica.flight["step"]:
            yield (
                "step",
                f"the result of step {record['step']}, {replica.flight['step']} is running",
            )
        sampling = {
            item.request_id for item in map(Item._make, replica.flight["items"]) if item.samples
        }
        for request_id, _ in record["outputs"]:
            if request_id not in sampling:
                yield "after-end", f"'{request_id}' gives a token that no step asked for"

    # --- evictions ---

    def _preempt(self, record: Record) -> Iterator[Finding]:
        one = self._state.live.get(record["id"])
        if one is None:
            yield "after-end", f"'{record['id']}' is evicted after its end"
            return
        if one.rank == INTERACTIVE and one.is_open_promise:
            yield "preempt", f"'{record['id']}' is evicted with an open interactive promise"
        yield from self._swap.preempt(record, one)
        replica = self._state.replicas.get(record["replica"])
        if replica is not None and replica.flight is not None:
            yield "preempt", f"'{record['id']}' is evicted while a step runs"
        is_full = replica is not None and one.computed == len(one.table) * replica.block_tokens
        if not is_full:  # A newest one that needs a block gives way itself.
            self._evicted.append((record["replica"], one.rank, record["id"]))

    def _evictions(self, replica: LogReplica, items: list[Item]) -> Iterator[Finding]:
        """Somebody of a higher class got room for it, or unpromised work could grow."""
        gains = [
            self._state.live[item.request_id].rank
            for item in items
            if item.new_blocks and item.request_id in self._state.live
        ]
        mine = [entry for entry in self._evicted if entry[0] == replica.replica_id]
        self._evicted = [entry for entry in self._evicted if entry[0] != replica.replica_id]
        in_step = {item.request_id for item in items}
        for _, rank, request_id in mine:
            if request_id in in_step and self._state.live[request_id].rank != BATCH:
                yield "preempt", f"'{request_id}' is evicted and back in the same step"
            if not any(gain < rank or (gain == rank and rank != INTERACTIVE) for gain in gains):
                yield "preempt", f"'{request_id}' is evicted for nobody"

    # --- work is conserved ---

    def _idle(self, replica: LogReplica, record: Record) -> Iterator[Finding]:
        tolerance_ns = self._idle_tolerance_ns
        if tolerance_ns is None or replica.flight is not None:
            return
        bound = list(self._state.on(replica.replica_id))
        pulled = [
            one
            for one in self._state.waiting_batch(replica)
            if not self._state.has_bucket(one.tenant)
        ]
        since = [one.served_ns for one in bound + pulled]
        if not since:
            return
        idle_ns = record["at"] - max(replica.idle_since_ns, min(since))
        if idle_ns > tolerance_ns:
            yield "conserved", f"'{replica.replica_id}' lay idle for {idle_ns} ns beside work"
