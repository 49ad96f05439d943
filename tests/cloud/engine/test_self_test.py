"""A model that computes nonsense never becomes ready."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cloud.engine import attention
from cloud.engine.errors import EngineError
from cloud.engine.self_test import (
    REFERENCE_FILE,
    check_reference,
    self_test,
    write_reference,
)
from cloud.engine.tiny import write_tiny_checkpoint
from cloud.engine.torch_executor import TorchExecutor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sound_model_passes_and_leaves_no_request(tiny_folder: Path, dtype: torch.dtype) -> None:
    """Twice in a row, in either precision."""
    executor = TorchExecutor.load(tiny_folder, dtype=dtype, num_blocks=8)
    self_test(executor)
    self_test(executor)


def test_weights_that_are_not_numbers_are_found(tmp_path: Path) -> None:
    """A NaN in one norm is in every logit."""
    write_tiny_checkpoint(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        EngineError, match=r"self-test: the model \S+ gives logits that are not finite"
    ):
        self_test(TorchExecutor.load(tmp_path, num_blocks=8))


def test_an_upper_left_mask_is_found(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The classic mistake with chunks: the diagonal starts in the wrong corner."""

    def upper_left(num: int, length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.full((num, length), float("-inf"), dtype=dtype, device=device).triu_(1)

    assert attention.lower_right_mask(2, 3, torch.float32, torch.device("cpu")) is not None
    monkeypatch.setattr("cloud.engine.step_batch.lower_right_mask", upper_left)
    with pytest.raises(EngineError, match="self-test: a prompt in chunks differs"):
        self_test(TorchExecutor.load(tiny_folder, num_blocks=8))


@pytest.fixture
def folder_with_reference(tmp_path: Path) -> Path:
    """A sound model beside what it said when it was sound."""
    write_tiny_checkpoint(tmp_path)
    write_reference(TorchExecutor.load(tmp_path, num_blocks=8), tmp_path)
    return tmp_path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_says_what_it_said_passes(
    folder_with_reference: Path, dtype: torch.dtype
) -> None:
    """In either precision, and so does one without a reference."""
    executor = TorchExecutor.load(folder_with_reference, dtype=dtype, num_blocks=8)
    check_reference(executor, folder_with_reference)
    check_reference(executor, folder_with_reference / "elsewhere")


def test_a_model_that_says_something_else_is_found(folder_with_reference: Path) -> None:
    """Whole and in chunks it agrees with itself; only the reference knows better."""
    path = folder_with_reference / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.down_proj.weight"] *= 1.5
    save_file(tensors, path)
    executor = TorchExecutor.load(folder_with_reference, num_blocks=8)
    self_test(executor)
    with pytest.raises(EngineError, match="self-test: the model differs from its reference"):
        check_reference(executor, folder_with_reference)


def test_a_damaged_reference_is_refused(folder_with_reference: Path) -> None:
    """In one line that names the file."""
    path = folder_with_reference / REFERENCE_FILE
    path.write_bytes(path.read_bytes()[:-60])
    executor = TorchExecutor.load(folder_with_reference, num_blocks=8)
    with pytest.raises(EngineError, match=r"headway-reference\.npz: is damaged") as caught:
        check_reference(executor, folder_with_reference)
    assert "\n" not in str(caught.value)
