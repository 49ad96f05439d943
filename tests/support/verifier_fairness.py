"""The verifier's rule about unpromised service: a bounded gap between tenants that wait."""

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

from tests.support.verifier_state import BATCH, Item, LogState

__all__ = ["ServiceGaps"]


class ServiceGaps:
    """Counts what tenants are served and compares those that wait at the same time.

    While two tenants both have work that waits, the difference of their service
    over weight stays within the bound (VTC: Sheng et al., OSDI 2024, theorem 4.4):
    2·max(w_p·longest prompt, w_q·tokens of a full batch), here over the smaller
    weight.
    """

    def __init__(self, state: LogState, bound: float | None) -> None:
        self._state = state
        self._bound = bound
        self._served: dict[str, float] = {}
        self._most_prompt = 0
        self._charged: set[str] = set()
        # (tenant, tenant) -> smallest and largest difference since both wait.
        self._pairs: dict[tuple[str, str], tuple[float, float]] = {}
        self._has_reported: set[tuple[str, str]] = set()

    def observe(self, record: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Takes in a record that the state has taken in already."""
        kind = record["kind"]
        if kind == "submit" and record["class"] == BATCH and record["decision"] == "ADMITTED":
            self._most_prompt = max(self._most_prompt, record["prompt"])
            self._charged.discard(record["id"])
        elif kind == "plan":
            self._charge_prompts(record)
        elif kind == "commit":
            for request_id, _ in record["outputs"]:
                one = self._state.live.get(request_id)
                if one is not None and one.rank == BATCH:
                    self._serve(one.tenant, self._state.config["output_weight"])
        if kind in ("replica_up", "replica_down", "requeue"):
            self._pairs = {}  # What was served elsewhere is a new race.
        if kind in ("commit", "end", "plan"):
            yield from self._compare()

    def _charge_prompts(self, record: Mapping[str, Any]) -> None:
        for item in map(Item._make, record["items"]):
            one = self._state.live.get(item.request_id)
            if one is None or one.rank != BATCH or item.request_id in self._charged:
                continue
            self._charged.add(item.request_id)
            tokens = one.prompt - item.context
            self._serve(one.tenant, self._state.config["prompt_weight"] * tokens)

    def _serve(self, tenant: str, weighted_tokens: float) -> None:
        served = self._served.get(tenant, 0.0)
        self._served[tenant] = served + weighted_tokens / self._state.weight(tenant)

    def _compare(self) -> Iterator[tuple[str, str]]:
        replicas = list(self._state.replicas.values())
        if not replicas or any(one.tenants for one in replicas):
            return  # Reserved replicas give unequal shares on purpose.
        waiting = sorted(
            {
                one.tenant
                for one in self._state.live.values()
                if one.rank == BATCH
                and not one.is_running
                and not self._state.has_bucket(one.tenant)
                and all(self._state.may_run(one, replica) for replica in replicas)
            }
        )
        before, self._pairs = self._pairs, {}
        for pair in combinations(waiting, 2):
            gap = self._served.get(pair[0], 0.0) - self._served.get(pair[1], 0.0)
            low, high = before.get(pair, (gap, gap))
            low, high = min(low, gap), max(high, gap)
            self._pairs[pair] = (low, high)
            bound = self._bound_of(pair)
            if high - low > bound and pair not in self._has_reported:
                self._has_reported.add(pair)
                yield (
                    "fair",
                    f"service of '{pair[0]}' and '{pair[1]}' differs by {high - low:.0f} "
                    f"weighted tokens while both wait, the bound is {bound:.0f}",
                )

    def _bound_of(self, pair: tuple[str, str]) -> float:
        if self._bound is not None:
            return self._bound
        config = self._state.config
        room = sum(one.num_blocks * one.block_tokens for one in self._state.replicas.values())
        most = max(config["prompt_weight"] * self._most_prompt, config["output_weight"] * room)
        return 2 * float(most) / min(map(self._state.weight, pair))
