"""A step while it is put together: what is in it and what it will cost."""

from collections.abc import Iterable

from cloud.scheduler.replica import Chunk, Replica
from cloud.scheduler.request_state import LiveRequest
from headway.cost_model import StepShape, chunk_pairs

__all__ = ["StepDraft"]


class StepDraft:
    """Adds up a step by the replica's cost model."""

    __slots__ = (
        "_kv_tokens",
        "_min_chunk",
        "_pairs",
        "_replica",
        "_tokens",
        "chunks",
        "decodes",
        "hard_ns",
        "spent_ns",
    )

    def __init__(self, replica: Replica, min_chunk_tokens: int) -> None:
        self._min_chunk = min_chunk_tokens
        self._replica = replica
        self.spent_ns = replica.cost.t0_ns
        # Longest step with which the promises in it are kept.
        self.hard_ns = float("inf")
        self.decodes: list[LiveRequest] = []
        self.chunks: list[Chunk] = []
        self._tokens = self._pairs = self._kv_tokens = 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing is in it."""
        return not (self.decodes or self.chunks)

    def add_decodes(self, lives: Iterable[LiveRequest], num: int, kv_tokens: int) -> None:
        """Takes in `num` decodes that read `kv_tokens` in all."""
        self.decodes.extend(lives)
        self._kv_tokens += kv_tokens
        cost = self._replica.cost
        self.spent_ns += cost.decode_ns * num + cost.kv_ns * kv_tokens

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
        limit_ns = min(limit_ns, self.hard_ns)
        spare_ns = limit_ns - self.spent_ns
        if cost.chunk_ns(live.computed, left) <= spare_ns:
            return left
        fits = 0
        if spare_ns > 0:
            fits = cost.prefill_budget(int(spare_ns + cost.t0_ns), context_tokens=live.computed)
        # A smaller piece is not worth its place in a step.
        return min(left, fits) if fits >= min(left, self._min_chunk) else 0

    def add_chunk(self, live: LiveRequest, num_tokens: int) -> None:
        """Takes in a piece of a prefill."""
        context = live.computed
        self.spent_ns += self._replica.cost.chunk_ns(context, num_tokens)
        self._tokens += num_tokens
        self._pairs += chunk_pairs(context, num_tokens)
        self._kv_tokens += context
        self.chunks.append(Chunk(live, num_tokens, num_tokens == live.prefill_left))

    def shape(self) -> StepShape:
        """What the step computes."""
        return StepShape(self._tokens, self._pairs, len(self.decodes), self._kv_tokens)
