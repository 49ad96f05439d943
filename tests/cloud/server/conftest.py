"""Shared by the server's tests: where the tiny checkpoint is made."""

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def _cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The tiny model is made once for all tests, and nowhere else."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("HEADWAY_CACHE_DIR", str(folder))
        yield folder
