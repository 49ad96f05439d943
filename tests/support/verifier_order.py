"""The verifier's rules about order: classes, deadlines, decodes that are left out."""

from collections.abc import Iterator, Mapping
from typing import Any

from tests.support.verifier_state import (
    BATCH,
    Item,
    LogReplica,
    LogRequest,
    LogState,
    blocks_for,
)

__all__ = ["OrderRules"]


class OrderRules:
    """Looks at a plan: who got something, and who was left behind."""

    def __init__(self, state: LogState) -> None:
        self._state = state

    def check(
        self, replica: LogReplica, items: list[Item], record: Mapping[str, Any]
    ) -> Iterator[tuple[str, str]]:
        """What a plan breaks."""
        given = {item.request_id: item for item in items if item.request_id in self._state.live}
        mine = list(self._state.on(replica.replica_id))
        self._earn_lane(replica, record["at"])
        lower_ns = self._batch_ns(replica, given)
        is_lane_charged = False
        for rank in range(BATCH):
            peers = sorted((one for one in mine if one.rank == rank), key=lambda one: one.key)
            behind = [one for one in peers if self._is_left_behind(one, given)]
            for first in behind[:1]:
                yield from self._deadline_order(replica, first, peers, given)
            is_blocked = False
            for one in behind:
                # Nobody overtakes the first that waits for room.
                is_blocked |= not self._could_run(replica, one, given)
                if is_blocked and not one.is_running:
                    continue
                lower = [
                    name
                    for name in given
                    if self._state.live[name].rank > rank and self._state.live[name].rank != BATCH
                ]
                for name in lower[:1]:
                    yield "class", f"'{one.request_id}' waits behind '{name}' of a lower class"
                if lower_ns and not is_lane_charged:
                    is_lane_charged = True
                    if not self._lane_covers(replica, lower_ns):
                        yield "class", f"'{one.request_id}' waits behind batch work"
                break
        yield from self._skipped_decodes(replica, mine, given, record)

    @staticmethod
    def _is_left_behind(one: LogRequest, given: dict[str, Item]) -> bool:
        """Whether it has a prefill that this step does not complete."""
        if one.is_running and one.is_decoding:
            return False
        item = given.get(one.request_id)
        if item is None:
            return True
        return item.context + item.num < one.prompt + one.outputs

    def _could_run(self, replica: LogReplica, one: LogRequest, given: dict[str, Item]) -> bool:
        """Whether slots and blocks could be had for it by taking them from lower work.

        What its own class and those above may ever need is taken as theirs, also the room
        that one of a class above waits for.
        """
        if one.is_running or one.request_id in given:
            return True
        size = replica.block_tokens
        if any(
            other.rank < one.rank and not other.is_running and other.request_id not in given
            for other in self._state.on(replica.replica_id)
        ):
            return False
        others = [
            other
            for other in self._state.on(replica.replica_id)
            if other.rank <= one.rank
            and other is not one
            and (other.is_running or other.request_id in given)
        ]
        wanted = sum(blocks_for(other.most_tokens, size) for other in [*others, one])
        return wanted <= replica.num_blocks and len(others) < self._state.config["max_running"]

    def _deadline_order(
        self,
        replica: LogReplica,
        first: LogRequest,
        peers: list[LogRequest],
        given: dict[str, Item],
    ) -> Iterator[tuple[str, str]]:
        for later in peers:
            item = given.get(later.request_id)
            if later.key <= first.key or item is None or not item.is_prefill:
                continue
            has_joined = not later.is_running
            if has_joined and not first.is_running:
                yield (
                    "deadline",
                    f"'{later.request_id}' overtakes '{first.request_id}', which is due earlier",
                )
                return
            if first.is_running or self._could_run(replica, first, given):
                yield (
                    "deadline",
                    f"'{later.request_id}' is served before '{first.request_id}' is",
                )
                return

    # --- the starvation lane ---

    def _earn_lane(self, replica: LogReplica, now_ns: int) -> None:
        """The most that the lane can have: as if somebody had starved all the time."""
        share, window_ns = self._state.config["lane_share"], self._state.config["lane_window_ns"]
        earned = replica.lane_ns + share * (now_ns - replica.lane_at_ns)
        replica.lane_ns, replica.lane_at_ns = min(share * window_ns, earned), now_ns

    def _lane_covers(self, replica: LogReplica, span_ns: float) -> bool:
        """Whether the lane pays for it; below zero by one step at most."""
        patience_ns = self._state.config["batch"]["patience_ns"]
        starves = any(
            one.rank == BATCH and self._state.now_ns - one.arrival_ns > patience_ns
            for one in self._state.live.values()
        )
        covered = starves and replica.lane_ns > 0
        if covered:
            replica.lane_ns -= span_ns
        return covered

    def _batch_ns(self, replica: LogReplica, given: dict[str, Item]) -> float:
        """Step time of the unpromised work in a plan."""
        mine = [item for name, item in given.items() if self._state.live[name].rank == BATCH]
        chunks = [(item.context, item.num) for item in mine if item.is_prefill]
        decodes = [item.context for item in mine if not item.is_prefill]
        return replica.predict_ns(chunks, decodes) - replica.cost["t0_ns"]

    # --- decodes ---

    def _skipped_decodes(
        self,
        replica: LogReplica,
        mine: list[LogRequest],
        given: dict[str, Item],
        record: Mapping[str, Any],
    ) -> Iterator[tuple[str, str]]:
        """Where nothing is promised, a decode is left out only for want of time or a block."""
        if any(one.rank != BATCH for one in mine):
            return
        for one in mine:
            if not (one.is_running and one.is_decoding) or one.request_id in given:
                continue
            if one.computed == len(one.table) * replica.block_tokens:
                continue
            own_ns = replica.predict_ns([], [one.computed]) - replica.cost["t0_ns"]
            if record["predicted"] + own_ns <= self._state.config["max_step_ns"]:
                yield "conserved", f"'{one.request_id}' could decode in this step and does not"
