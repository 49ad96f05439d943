"""The one cost model: predict a step's time, and invert it to a chunk size.

    step_ns = t0 + c_p·P + c_a·Σ chunk·(context + (chunk + 1)/2) + c_d·D + c_kv·K

The same class predicts a cloud step, an on-robot chunk (D = 0) and a simulated
step. Standard library only.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

__all__ = ["UNBOUNDED", "CostModel", "MeasuredStep", "StepShape", "chunk_pairs"]

# More than any step holds: the answer where nothing sets a bound.
UNBOUNDED = 2**62


def chunk_pairs(context_tokens: int, chunk_tokens: int) -> int:
    """Query-key pairs of a causal chunk: chunk·(context + (chunk + 1)/2).

    Always whole, and the sum over a prompt is the same however it is cut.
    """
    return chunk_tokens * (2 * context_tokens + chunk_tokens + 1) // 2


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step computes, as far as its time depends on it."""

    prefill_tokens: int = 0  # P: prompt tokens computed.
    prefill_pairs: int = 0  # Sum of chunk_pairs over the step's chunks.
    decodes: int = 0  # D: requests that decode one token.
    kv_tokens: int = 0  # K: tokens of KV read, by decodes and as chunk context.

    @classmethod
    def of(cls, chunks: Iterable[tuple[int, int]], decode_contexts: Iterable[int]) -> "StepShape":
        """The shape of a step.

        Args:
            chunks: (context tokens, chunk tokens) of each prefill chunk.
            decode_contexts: tokens of KV that each decoding request reads.
        """
        prefill_tokens = prefill_pairs = kv_tokens = decodes = 0
        for context, chunk in chunks:
            prefill_tokens += chunk
            prefill_pairs += chunk_pairs(context, chunk)
            kv_tokens += context
        for context in decode_contexts:
            decodes += 1
            kv_tokens += context
        return cls(prefill_tokens, prefill_pairs, decodes, kv_tokens)


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step that ran, and the time it took."""

    shape: StepShape
    elapsed_ns: int


@dataclass(frozen=True, slots=True)
class CostModel:
    """Step time as a function of its shape; see the module for the formula.

    Coefficients are in nanoseconds and not negative. `margin` (≥ 1) is what a
    prediction is multiplied with before somebody relies on it; `predict_ns`
    leaves it out.

    Raises:
        ValueError: a coefficient is negative or not finite, or margin < 1.
    """

    t0_ns: float  # Per step, host overhead included.
    prefill_ns: float = 0.0  # c_p, per prompt token.
    pair_ns: float = 0.0  # c_a, per query-key pair of a chunk.
    decode_ns: float = 0.0  # c_d, per decoding request.
    kv_ns: float = 0.0  # c_kv, per token of KV read.
    margin: float = 1.0

    def __post_init__(self) -> None:
        """Refuses what could not be a time."""
        for name in ("t0_ns", "prefill_ns", "pair_ns", "decode_ns", "kv_ns"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be a finite number of at least 0, got {value}")
        if not (math.isfinite(self.margin) and self.margin >= 1):
            raise ValueError(f"margin must be a finite number of at least 1, got {self.margin}")

    def predict_ns(self, shape: StepShape) -> int:
        """Time of a step of `shape`, rounded up to whole nanoseconds."""
        return math.ceil(
            self.t0_ns
            + self.prefill_ns * shape.prefill_tokens
            + self.pair_ns * shape.prefill_pairs
            + self.decode_ns * shape.decodes
            + self.kv_ns * shape.kv_tokens
        )

    def chunk_ns(self, context_tokens: int, chunk_tokens: int) -> float:
        """What a chunk adds to a step that runs anyway, t0 left out."""
        return (
            self.prefill_ns * chunk_tokens
            + self.pair_ns * chunk_pairs(context_tokens, chunk_tokens)
            + self.kv_ns * context_tokens
        )

    def prefill_budget(
        self, target_ns: int, *, decodes: int = 0, kv_tokens: int = 0, context_tokens: int = 0
    ) -> int:
        """Largest chunk for which the step stays within `target_ns`.

        Args:
            target_ns: longest permitted step, margin already taken off.
            decodes: requests that decode beside the chunk.
            kv_tokens: tokens of KV that those decodes read.
            context_tokens: tokens of the chunk's own prompt before it.

        Returns:
            Tokens; 0 where not even one fits, UNBOUNDED where neither a token
            nor a pair costs anything.
        """
        spare = target_ns - (
            self.t0_ns + self.decode_ns * decodes + self.kv_ns * (kv_tokens + context_tokens)
        )
        if spare < 0:
            return 0
        linear = self.prefill_ns + self.pair_ns * (context_tokens + 0.5)
        if linear == 0:
            return UNBOUNDED

        def fits(chunk: int) -> bool:
            pairs = chunk_pairs(context_tokens, chunk)
            shape = StepShape(chunk, pairs, decodes, kv_tokens + context_tokens)
            return self.predict_ns(shape) <= target_ns

        # Root of pair_ns/2·n² + linear·n = spare, in the form without cancellation.
        root = math.sqrt(linear * linear + 2 * self.pair_ns * spare)
        return _largest(2 * spare / (linear + root), fits)

    def decode_cap(self, target_ns: int, *, kv_tokens_each: int = 0) -> int:
        """Most requests that can decode in a step of `target_ns` without prefill.

        Args:
            target_ns: longest permitted step.
            kv_tokens_each: tokens of KV that each of them reads.

        Returns:
            Requests; UNBOUNDED where a decode costs nothing.
        """
        spare = target_ns - self.t0_ns
        each = self.decode_ns + self.kv_ns * kv_tokens_each
        if spare < 0:
            return 0
        if each == 0:
            return UNBOUNDED

        def fits(decodes: int) -> bool:
            shape = StepShape(decodes=decodes, kv_tokens=decodes * kv_tokens_each)
            return self.predict_ns(shape) <= target_ns

        return _largest(spare / each, fits)


def _largest(guess: float, fits: Callable[[int], bool]) -> int:
    """The largest count up to UNBOUNDED that fits, 0 where none does.

    `fits` never turns true again once it is false. The guess is a float and
    nearly always right; the promise is in whole nanoseconds, so it is checked,
    and where it is wrong the answer is searched for in doubling strides.
    """
    low = 0 if not guess > 0 else UNBOUNDED if guess >= UNBOUNDED else int(guess)
    stride = 1
    while low > 0 and not fits(low):
        low = max(0, low - stride)
        stride *= 2
    stride = 1
    while low < UNBOUNDED and fits(min(low + stride, UNBOUNDED)):
        low = min(low + stride, UNBOUNDED)
        stride *= 2
    high = min(low + stride, UNBOUNDED)  # Does not fit, or is low itself.
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
