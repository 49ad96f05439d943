"""What a device can do, whatever it is: the seam between the runtime and the kernels."""

from collections.abc import Sequence
from typing import Any, Protocol

from headway.errors import HeadwayError

__all__ = ["Backend", "BackendError"]


class BackendError(HeadwayError):
    """The device did not do what it was told; what it was to compute is not there."""


class Backend(Protocol):
    """A scene model and a control model on one device. Used from one thread.

    Every call returns when the device has finished: the runtime's bounds are made of
    that. The scene's KV cache is preallocated; positions from `start` on are written
    over, so a chunk that failed can be computed again.

    Attributes:
        name: such as "torch-cpu".
        model_digest: of the weights; calibrations and engines are kept by it.
    """

    name: str
    model_digest: str

    def prefill(self, tokens: Sequence[int], start: int, bucket: int, *, is_last: bool) -> Any:
        """Computes a chunk of the scene.

        Args:
            tokens: of the chunk, at most `bucket`.
            start: tokens of the scene before it, all computed.
            bucket: size to compute; the rest is padding that changes nothing.
            is_last: whether the scene ends with it.

        Returns:
            What control needs to know of the scene, where it is the last one.

        Raises:
            BackendError: it was not computed.
        """

    def control(self, observation: Sequence[float], scene: Any) -> tuple[float, ...]:
        """One control step.

        Args:
            observation: what was measured, float32, in the order that the model knows.
            scene: what `prefill` gave at the end of the newest scene; None: none yet.

        Returns:
            Values to command.

        Raises:
            BackendError: it was not computed.
        """

    def close(self) -> None:
        """Gives the device back. May be called twice."""
