"""Images in a prompt: the place where a model with eyes would fit in.

No model that is served yet has a vision encoder, and the server refuses images
for such a model. A vision encoder turns an image into soft tokens: embeddings
that stand in the prompt where `EngineRequest.images` says. They are prefilled,
cached, counted and recomputed like any other token.
"""

from typing import Protocol

from torch import Tensor

from cloud.engine.api import PromptImage

__all__ = ["VisionEncoder"]


class VisionEncoder(Protocol):
    """Makes soft tokens of images."""

    def encode(self, image: PromptImage) -> Tensor:
        """Embeddings [image.num_tokens, hidden], in the model's dtype, on its device."""
