"""Images as soft tokens, with a random patch projection in place of a vision encoder."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from cloud.engine.api import EngineRequest, PromptImage
from cloud.engine.checkpoint import load_weights
from cloud.engine.errors import PlanError
from cloud.engine.model import Model
from cloud.engine.model_config import load_model_config
from cloud.engine.torch_executor import TorchExecutor
from cloud.engine.wire import StepEncoder
from cloud.scheduler.types import StepPlan
from tests.support.executor_driver import ExecutorDriver

_PATCH, _HIDDEN = 8, 192


class _RandomPatches:
    """A fixed random projection of each 8 × 8 patch, row by row."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self._weight = torch.randn(_PATCH * _PATCH * 3, _HIDDEN, generator=generator) / 100

    def encode(self, image: PromptImage) -> Tensor:
        """[patches, hidden]."""
        pixels = torch.tensor(list(image.rgb)).view(image.height, image.width, 3).float() / 255
        patches = [
            pixels[y : y + _PATCH, x : x + _PATCH].reshape(-1)
            for y in range(0, image.height, _PATCH)
            for x in range(0, image.width, _PATCH)
        ]
        return torch.stack(patches) @ self._weight


def _image(seed: int, position: int) -> PromptImage:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (16 * 24 * 3,), generator=generator)
    return PromptImage(position, 6, bytes(pixels.tolist()), 16, 24)


# Text, six soft tokens, text, six soft tokens, text: 25 in all.
_REQUEST = EngineRequest(
    "a",
    (5, 6, 7, 8, *[0] * 6, 9, 10, 11, *[0] * 6, 12, 13, 14, 15, 16, 17),
    images=(_image(1, 4), _image(2, 13)),
)


@pytest.fixture
def executor(tiny_folder: Path) -> TorchExecutor:
    """The tiny model, made to see."""
    config = load_model_config(tiny_folder)
    weights = load_weights(tiny_folder, config, torch.float32, torch.device("cpu"))
    model = Model(config, weights, 64)
    return TorchExecutor(model, block_tokens=8, num_blocks=32, vision=_RandomPatches())


def _expected(folder: Path) -> Tensor:
    """Transformers' logits, its embeddings replaced where the images stand."""
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        embeddings = reference.get_input_embeddings()(torch.tensor([_REQUEST.prompt]))
        for image in _REQUEST.images:
            span = slice(image.position, image.position + image.num_tokens)
            embeddings[0, span] = _RandomPatches().encode(image)
        logits: Tensor = reference(inputs_embeds=embeddings).logits[0, -1]
    return logits


def test_images_are_prefilled_where_they_stand(tiny_folder: Path, executor: TorchExecutor) -> None:
    """Whole and cut anywhere, within an image too, beside a text request: to 1e-4."""
    expected = _expected(tiny_folder)
    driver = ExecutorDriver(executor)
    for cut in range(25):
        driver.open(_REQUEST)
        driver.open(EngineRequest("text", (1, 2, 3)))
        if cut:
            driver.step(("text", 3), ("a", cut))
        found = driver.step_logits(("a", 25 - cut))["a"]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
        driver.close("a")
        driver.close("text")


def test_a_preempted_image_is_seen_again(tiny_folder: Path, executor: TorchExecutor) -> None:
    """Recomputation has the soft tokens too."""
    driver = ExecutorDriver(executor)
    driver.open(_REQUEST)
    driver.step(("a", 20))
    driver.preempt("a")
    driver.step(("a", 7))
    found = driver.step_logits(("a", 18))["a"]
    torch.testing.assert_close(found, _expected(tiny_folder), atol=1e-4, rtol=0)


def test_a_step_counts_soft_tokens_as_tokens(executor: TorchExecutor) -> None:
    """The prompt's length, which the scheduler plans by, includes them: 25 are left, not 13."""
    driver = ExecutorDriver(executor)
    driver.open(_REQUEST)
    assert driver.remaining("a") == 25
    with pytest.raises(PlanError, match="to compute 26 tokens after 0; it has 25"):
        driver.step(("a", 26))


def test_a_model_that_cannot_see_refuses_images(tiny_folder: Path) -> None:
    """They are never silently left out, neither here nor on the way to an engine process."""
    driver = ExecutorDriver(TorchExecutor.load(tiny_folder, num_blocks=8))
    driver.open(_REQUEST)
    with pytest.raises(PlanError, match="request a has images; the model cannot see"):
        driver.step(("a", 25))
    with pytest.raises(ValueError, match="has images, which do not travel yet"):
        StepEncoder("x").encode(StepPlan("r0", 1, ()), [_REQUEST], 1)


def test_an_image_of_another_size_than_its_place_is_refused(executor: TorchExecutor) -> None:
    """Six patches do not fit where five tokens are."""
    image = PromptImage(0, 5, _image(1, 0).rgb, 16, 24)
    driver = ExecutorDriver(executor)
    driver.open(EngineRequest("a", (0,) * 9, images=(image,)))
    with pytest.raises(PlanError, match=r"gives \[6, 192\] at 0 of 9 tokens; expected \[5, 192\]"):
        driver.step(("a", 9))
