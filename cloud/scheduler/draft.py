"""A step while it is put together: what is in it and what it will cost."""

from collections.abc import Iterable

from cloud.scheduler.laxity import StepBound
from cloud.scheduler.replica import Chunk, Replica
from cloud.scheduler.request_state import LiveRequest
from headway.cost_model import StepShape, chunk_pairs

__all__ = ["StepDraft"]


class StepDraft:
    """Adds up a step by the replica's cost model."""

    __slots__ = (
        "_kv_tokens",
        "_min_chunk",
        "_own_ns",
        "_pairs",
        "_replica",
        "_tokens",
        "bound",
        "chunks",
        "decodes",
        "lane_ns",
    )

    def __init__(self, replica: Replica, min_chunk_tokens: int) -> None:
        self._min_chunk = min_chunk_tokens
        self._replica = replica
        self._own_ns = replica.cost.t0_ns
        self.bound = StepBound()  # By the promises in it.
        # Of that, what pieces of prefills leave to the starvation lane.
        self.lane_ns = 0.0
        self.decodes: list[LiveRequest] = []
        self.chunks: list[Chunk] = []
        self._tokens = self._pairs = self._kv_tokens = 0

    @property
    def spent_ns(self) -> float:
        """Predicted length of the step, copies of swapped KV included."""
        return self._own_ns + self._replica.host.copies_ns

    @property
    def is_empty(self) -> bool:
        """Whether nothing is in it."""
        return not (self.decodes or self.chunks)

    def has_given_way(self, live: LiveRequest) -> bool:
        """Whether a request was evicted for this step: then it is not back in it, unless
        nothing else is.
        """
        return live.gave_way == (self._replica, self._replica.step_id) and not self.is_empty

    def add_decodes(self, lives: Iterable[LiveRequest], num: int, kv_tokens: int) -> None:
        """Takes in `num` decodes that read `kv_tokens` in all."""
        self.decodes.extend(lives)
        self._kv_tokens += kv_tokens
        cost = self._replica.cost
        self._own_ns += cost.decode_ns * num + cost.kv_ns * kv_tokens

    def add_class_decodes(self, rank: int, limit_ns: float, stalled: list[LiveRequest]) -> None:
        """A class's decodes: all of them, or those that fit, who waited longest first."""
        replica = self._replica
        decoding = replica.decoding[rank]
        if not decoding:
            return
        cost = replica.cost
        if not stalled and self.spent_ns + replica.decode_cost_ns(rank) <= limit_ns:
            self.add_decodes(decoding, len(decoding), replica.decode_kv[rank])
            return
        spent_ns = self.spent_ns
        chosen: list[LiveRequest] = []
        for live in decoding:
            if live.computed == live.capacity:
                continue
            spent_ns += cost.decode_ns + cost.kv_ns * live.computed
            if spent_ns > limit_ns:
                break
            chosen.append(live)
        self.add_decodes(chosen, len(chosen), sum(live.computed for live in chosen))
        for live in chosen:  # To the end: next time it is the others' turn.
            del decoding[live]
            decoding[live] = None

    def fitting(
        self,
        live: LiveRequest,
        limit_ns: float,
        *,
        has_floor: bool = False,
    ) -> int:
        """Prompt tokens of a request that fit into a step of `limit_ns`.

        With a floor, the first prefill of a step gets the smallest chunk beyond
        that limit: decodes cannot starve it. Never so much that a promise breaks.
        """
        cost = self._replica.cost
        left = live.prefill_left
        if has_floor and not self.chunks:
            floor_ns = cost.chunk_ns(live.computed, min(self._min_chunk, left))
            limit_ns = max(limit_ns, self.spent_ns + floor_ns)
        own_ns = cost.chunk_ns(live.computed, left)
        whole_ns = min(limit_ns, self.bound.with_decode_ns(self._later_ns(live)))
        if self.spent_ns + own_ns <= whole_ns:
            return left
        spare_ns = min(limit_ns, self.bound.longest_ns - self.lane_ns) - self.spent_ns
        if spare_ns <= 0:
            return 0
        # Where it would be done, but nobody may decode more yet, a token is left.
        most = left - (own_ns <= spare_ns)
        fits = cost.prefill_budget(int(spare_ns + cost.t0_ns), context_tokens=live.computed)
        # A smaller piece is not worth its place in a step.
        return min(most, fits) if min(most, fits) >= min(left, self._min_chunk) else 0

    def _later_ns(self, live: LiveRequest) -> float:
        """What a request adds to each step once its prefill is done."""
        if live.max_output - live.num_output <= 1:
            return 0.0
        cost = self._replica.cost
        return cost.decode_ns + cost.kv_ns * live.total_tokens

    def end_prefill(self, live: LiveRequest) -> None:
        """Has the bound know that a request's prefill ends in this step."""
        deadline_ns = None if live.is_met else live.deadline_ns
        self.bound.end_prefill(self._later_ns(live), live.promised_output_left, deadline_ns)

    def add_chunk(self, live: LiveRequest, num_tokens: int) -> None:
        """Takes in a piece of a prefill, for which there is memory."""
        context = live.computed
        self._replica.grow(live, context + num_tokens)
        self._own_ns += self._replica.cost.chunk_ns(context, num_tokens)
        self._tokens += num_tokens
        self._pairs += chunk_pairs(context, num_tokens)
        self._kv_tokens += context
        self.chunks.append(Chunk(live, num_tokens, num_tokens == live.prefill_left))

    def shape(self) -> StepShape:
        """What the step computes."""
        return StepShape(self._tokens, self._pairs, len(self.decodes), self._kv_tokens)
