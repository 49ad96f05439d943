"""Which checkpoint is served: a pulled model, a folder, or "tiny", which is made on the spot."""

import shutil
import tempfile
from pathlib import Path

from cloud.engine.store import resolve_model
from cloud.engine.tiny import write_tiny_checkpoint
from headway.cache import default_cache_dir
from headway.errors import HeadwayError

__all__ = ["TINY", "model_folder"]

TINY = "tiny"
# In the folder's name: another way of making it makes another folder.
_TINY_VERSION = 1


def model_folder(model: str) -> Path:
    """The checkpoint folder that `engine.model` means; "tiny" is made where it is missing.

    Raises:
        HeadwayError: there is no such model, or the tiny one cannot be written.
    """
    if model != TINY:
        return resolve_model(model, default_cache_dir())
    folder = default_cache_dir() / f"tiny-{_TINY_VERSION}" / TINY
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Under another name first: a folder that is there is a whole one, also
        # when two servers start at once.
        unfinished = Path(tempfile.mkdtemp(dir=folder.parent))
        try:
            write_tiny_checkpoint(unfinished)
            unfinished.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        raise HeadwayError(
            f"cannot write the tiny model to {folder}: {error.strerror or error}. "
            "Set HEADWAY_CACHE_DIR to a folder that can be written"
        ) from error
    return folder
