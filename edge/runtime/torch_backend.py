"""The torch backend on a CPU: the default, and the reference of the others.

Needs torch.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from edge.runtime.backend import BackendError
from edge.runtime.shapes import ControlShape, SceneShape
from edge.runtime.torch_models import ControlNetwork, SceneDecoder, SceneWeights

__all__ = ["TorchBackend"]


class TorchBackend:
    """A scene decoder and a control network on one CPU thread.

    A rest shorter than its bucket is computed as it is: on a CPU padding only costs.

    Args:
        scene: weights of the decoder.
        control: the control network.
    """

    name = "torch-cpu"

    def __init__(self, scene: SceneWeights, control: ControlNetwork) -> None:
        self.model_digest = scene.digest
        self._decoder = SceneDecoder(scene)
        self._control = control
        self._observation = torch.zeros(control.shape.inputs)

    @classmethod
    def random(
        cls, scene: SceneShape, control: ControlShape | None = None, seed: int = 0
    ) -> "TorchBackend":
        """With untrained models, for demonstrations and measurements."""
        return cls(
            SceneWeights.random(scene, seed),
            ControlNetwork(control or ControlShape(), scene.width, seed + 1),
        )

    @torch.inference_mode()
    def prefill(
        self, tokens: Sequence[int], start: int, bucket: int, *, is_last: bool
    ) -> Tensor | None:
        """The scene's last hidden state, (width,) float32, where the scene ends here."""
        del bucket
        try:
            hidden = self._decoder.chunk(torch.tensor(tokens, dtype=torch.int64), start)
        except (RuntimeError, IndexError) as error:
            raise BackendError(f"a chunk of the scene was not computed: {error}") from error
        return hidden[-1].float().clone() if is_last else None

    @torch.inference_mode()
    def control(self, observation: Sequence[float], scene: Tensor | None) -> tuple[float, ...]:
        """One pass of the control network; what is missing of an observation is 0."""
        values = self._observation
        if len(observation) > len(values):
            raise BackendError(
                f"{len(observation)} values were observed; the control model takes {len(values)}"
            )
        values.zero_()
        values[: len(observation)] = torch.tensor(observation, dtype=torch.float32)
        return tuple(self._control.step(values, scene).tolist())

    def close(self) -> None:
        """Nothing to give back."""
