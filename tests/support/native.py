"""The built operations, for tests that compare them with something."""

from pathlib import Path

import pytest
import torch

from cloud.engine.errors import EngineError
from cloud.engine.native.build import find_compiler
from cloud.engine.native.library import NativeOps

__all__ = ["native_ops"]


def native_ops(dtype: torch.dtype, folder: Path) -> NativeOps:
    """Operations whose library is built in `folder`; skips where there is no compiler."""
    try:
        find_compiler()
    except EngineError as error:
        pytest.skip(error.message)
    return NativeOps(dtype, folder)
