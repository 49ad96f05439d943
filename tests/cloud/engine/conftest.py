from pathlib import Path

import pytest

from cloud.engine.tiny import write_tiny_checkpoint


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint, written once."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_checkpoint(folder)
    return folder
