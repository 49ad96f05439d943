"""What a model on an accelerator should cost, before anything is measured.

Counts bytes and floating-point operations and divides by the accelerator's
rates. Good for sizing a machine and for the first seconds of a server; replaced
by a fit as soon as there are measured steps.
"""

from dataclasses import dataclass

from headway.cost_model.model import CostModel

__all__ = ["Accelerator", "ModelShape", "first_estimate"]

_NS_PER_S = 1e9


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder-only transformer, as far as its cost depends on it.

    Raises:
        ValueError: a size is not positive, or `heads` is no multiple of `kv_heads`.
    """

    parameters: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    weight_bytes: float = 2.0  # Per parameter; 2 is bfloat16, 0.5 is 4 bits.
    kv_bytes: float = 2.0  # Per key or value number.

    def __post_init__(self) -> None:
        """Refuses what is no model."""
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be more than 0, got {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})"
            )

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV of one token: a key and a value in each layer and KV head."""
        return round(2 * self.layers * self.kv_heads * self.head_dim * self.kv_bytes)

    @property
    def total_weight_bytes(self) -> int:
        """Bytes of all weights."""
        return round(self.parameters * self.weight_bytes)

    @property
    def token_flops(self) -> float:
        """FLOPs of a token in the matrix multiplies: a multiplication and an
        addition per parameter.
        """
        return 2.0 * self.parameters

    @property
    def pair_flops(self) -> float:
        """FLOPs of a query-key pair in all layers: 2·d for its score and 2·d for
        its share of the value, d = heads·head_dim.
        """
        return 4.0 * self.layers * self.heads * self.head_dim

    def prefill_flops(self, tokens: int) -> tuple[float, float]:
        """FLOPs of a prompt: in matrix multiplies, 2·N·T, and in causal
        attention, 2·L·d·T² (half the pairs of a square).
        """
        return self.token_flops * tokens, self.pair_flops * tokens * tokens / 2

    def tokens_that_fit(self, free_bytes: int) -> int:
        """Tokens whose KV fits in `free_bytes` of memory."""
        return free_bytes // self.kv_bytes_per_token

    def requests_that_fit(self, free_bytes: int, tokens_each: int) -> int:
        """Requests of `tokens_each` tokens whose KV fits in `free_bytes` of memory."""
        return self.tokens_that_fit(free_bytes) // tokens_each


@dataclass(frozen=True, slots=True)
class Accelerator:
    """What a device can do, from its data sheet, and the share of it to expect.

    The default shares are assumptions that are usual for well-written kernels,
    no measurement of yours.

    Raises:
        ValueError: a rate is not positive, or a share not in (0, 1].
    """

    bandwidth_bytes_per_s: float
    flops_per_s: float
    memory_bytes: int
    bandwidth_share: float = 0.7
    flops_share: float = 0.5
    host_overhead_ns: float = 1e6  # Of each step, outside the device.

    def __post_init__(self) -> None:
        """Refuses what is no device."""
        for name in ("bandwidth_bytes_per_s", "flops_per_s", "memory_bytes"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be more than 0, got {getattr(self, name)}")
        for name in ("bandwidth_share", "flops_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be above 0 and at most 1, got {getattr(self, name)}")
        if not self.host_overhead_ns >= 0:
            raise ValueError(f"host_overhead_ns must be at least 0, got {self.host_overhead_ns}")

    @property
    def ns_per_byte(self) -> float:
        """Time to read a byte of device memory."""
        return _NS_PER_S / (self.bandwidth_bytes_per_s * self.bandwidth_share)

    @property
    def ns_per_flop(self) -> float:
        """Time of a floating-point operation."""
        return _NS_PER_S / (self.flops_per_s * self.flops_share)

    def weight_read_s(self, shape: ModelShape) -> float:
        """Time to read all weights once: the least that a step takes."""
        return shape.total_weight_bytes * self.ns_per_byte / _NS_PER_S

    def kv_tokens(self, shape: ModelShape, reserve_share: float = 0.1) -> int:
        """Tokens of KV that fit beside the weights, 0 where the weights do not fit.

        Args:
            shape: the model.
            reserve_share: share of the memory left for activations and the runtime.
        """
        free = int(self.memory_bytes * (1 - reserve_share)) - shape.total_weight_bytes
        return max(0, shape.tokens_that_fit(free))


def first_estimate(
    shape: ModelShape, accelerator: Accelerator, *, margin: float = 1.5
) -> CostModel:
    """A cost model from sizes and rates alone.

    - t0: host overhead, and reading every weight once.
    - c_p and c_d: a token's FLOPs. A decode's matrix multiplies hide behind the
      reading of the weights until a batch is large; adding them errs towards
      too long, by at most a factor of 2 (a roofline is a maximum, and a maximum
      is at least half of a sum).
    - c_a: a pair's FLOPs.
    - c_kv: reading a token's KV.

    Args:
        shape: the model.
        accelerator: the device.
        margin: what predictions are multiplied with before somebody relies on them.
    """
    token_ns = shape.token_flops * accelerator.ns_per_flop
    return CostModel(
        t0_ns=accelerator.host_overhead_ns + shape.total_weight_bytes * accelerator.ns_per_byte,
        prefill_ns=token_ns,
        pair_ns=shape.pair_flops * accelerator.ns_per_flop,
        decode_ns=token_ns,
        kv_ns=shape.kv_bytes_per_token * accelerator.ns_per_byte,
        margin=margin,
    )
