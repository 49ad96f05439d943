from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cloud.engine.tiny import write_tiny_checkpoint


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint, written once."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_checkpoint(folder)
    return folder


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the kernels are built, once."""
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Steps of tiny models are over before a second thread wakes up."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
