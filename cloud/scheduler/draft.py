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
        "_pairs",
        "_replica",
        "_tokens",
        "chunks",
        "decodes",
        "spent_ns",
    )

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self.spent_ns = replica.cost.t0_ns
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

    def fitting(self, live: LiveRequest, limit_ns: float, floor_tokens: int = 0) -> int:
        """Prompt tokens of a request that fit into a step of `limit_ns`.

        At least `floor_tokens`, or what is left of the prompt.
        """
        cost = self._replica.cost
        left = live.prefill_left
        spare_ns = limit_ns - self.spent_ns
        if cost.chunk_ns(live.computed, left) <= spare_ns:
            return left
        fits = 0
        if spare_ns > 0:
            fits = cost.prefill_budget(int(spare_ns + cost.t0_ns), context_tokens=live.computed)
        return min(left, max(fits, floor_tokens))

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
