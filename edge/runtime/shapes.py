"""The two models' shapes: what every backend builds the same network from."""

from dataclasses import dataclass

__all__ = ["ControlShape", "SceneShape"]


@dataclass(frozen=True, slots=True)
class SceneShape:
    """A decoder that reads a scene: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

    Raises:
        ValueError: the numbers do not fit together.
    """

    vocabulary: int = 1024
    width: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    hidden: int = 704
    max_tokens: int = 4096
    rope_theta: float = 10_000.0
    epsilon: float = 1e-5

    def __post_init__(self) -> None:
        """Checks that heads divide what they share."""
        if self.width % self.heads or self.heads % self.kv_heads or self.head_width % 2:
            raise ValueError(
                f"width {self.width}, heads {self.heads} and kv_heads {self.kv_heads} do not fit: "
                "each must divide the one before, and a head's width must be even"
            )

    @property
    def head_width(self) -> int:
        """Of a query, key or value."""
        return self.width // self.heads


@dataclass(frozen=True, slots=True)
class ControlShape:
    """A small network from what was measured, and what the scene is, to commands: tanh layers."""

    inputs: int = 16
    hidden: int = 256
    layers: int = 3
    outputs: int = 8
