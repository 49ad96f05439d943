"""The folder of pulled models: complete ones only, by name.

CACHE/models/NAME/                a checkpoint folder
CACHE/models/NAME/headway.json    its manifest: source, size, sha256 of each file
CACHE/models/.staging-*/          a pull under way; an interrupted one's is removed by the next
"""

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path

import filelock

from cloud.engine.errors import EngineError
from cloud.engine.manifest import MANIFEST_NAME, Manifest, read_manifest

__all__ = ["ModelStore", "StoreError", "is_model_name", "resolve_model"]

# One word, or two with a slash between them as on the Hugging Face hub.
_WORD = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_NAME = re.compile(rf"{_WORD}(/{_WORD})?")
# Stands for the slash in the name of a folder.
_SLASH = "--"
_STAGING = ".staging-"
# Names that the server gives a meaning of its own.
_RESERVED = frozenset({"tiny"})


class StoreError(EngineError):
    """A model is not there, or cannot be put there."""


def is_model_name(text: str) -> bool:
    """Whether a model can have this name: letters, digits, `.`, `_`, `-`, one slash."""
    return len(text) <= 200 and _SLASH not in text and _NAME.fullmatch(text) is not None


def resolve_model(name_or_path: str, cache_dir: Path) -> Path:
    """The checkpoint folder of a pulled model, or the folder itself.

    A name goes before a folder of the same name; write `./name` for that one.

    Raises:
        StoreError: neither a pulled model nor a folder.
    """
    store = ModelStore(cache_dir)
    if is_model_name(name_or_path) and store.manifest(name_or_path) is not None:
        return store.folder(name_or_path)
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return path
    raise store.not_found(name_or_path)


class ModelStore:
    """The pulled models under one cache folder. Creates nothing until something is added."""

    def __init__(self, cache_dir: Path) -> None:
        self._models = cache_dir / "models"

    def folder(self, name: str) -> Path:
        """Where the model `name` is, or would be.

        Raises:
            StoreError: no model can have that name.
        """
        if not is_model_name(name):
            raise StoreError(
                f"{name!r} cannot be the name of a model: "
                "use letters, digits, '.', '_', '-' and at most one '/'"
            )
        return self._models / name.replace("/", _SLASH)

    def manifest(self, name: str) -> Manifest | None:
        """What is known of the model `name`; None where it was not pulled.

        Raises:
            StoreError: no model can have that name.
            CheckpointError: its manifest is damaged.
        """
        return read_manifest(self.folder(name))

    def names(self) -> list[str]:
        """The pulled models, in alphabetical order."""
        if not self._models.is_dir():
            return []
        names = [path.parent.name.replace(_SLASH, "/") for path in self._manifests()]
        return sorted(filter(is_model_name, names))

    def not_found(self, name: str) -> StoreError:
        """What to tell somebody who asked for a model that is not there."""
        names = self.names()
        near = get_close_matches(name, names, n=1)
        if near:
            hint = f"did you mean {near[0]!r}?"
        else:
            hint = f"pulled are: {', '.join(names) or 'none yet'} (see headway model pull --help)"
        return StoreError(f"no model {name!r}: neither a pulled model nor a folder; {hint}")

    @contextmanager
    def adding(self, name: str) -> Iterator["Staging"]:
        """A place to put a model together. It is kept if `Staging.keep` was called,
        and is gone without trace otherwise. One at a time for each cache folder;
        a second one waits.

        Raises:
            StoreError: no model can have that name, or the cache cannot be written.
        """
        target = self.folder(name)
        if name in _RESERVED:
            raise StoreError(f"{name!r} is the built-in untrained model; choose another name")
        try:
            self._models.mkdir(parents=True, exist_ok=True)
            with filelock.FileLock(self._models / ".lock"):
                self._remove_stale()
                root = Path(tempfile.mkdtemp(prefix=_STAGING, dir=self._models))
                try:
                    yield Staging(root, target)
                finally:
                    shutil.rmtree(root, ignore_errors=True)
        except OSError as error:
            raise StoreError(
                f"{error.filename or self._models}: {error.strerror or error}; nothing was kept"
            ) from error

    def _manifests(self) -> Iterator[Path]:
        for path in self._models.glob(f"*/{MANIFEST_NAME}"):
            if not path.parent.name.startswith("."):
                yield path

    def _remove_stale(self) -> None:
        """What a pull left that was killed; whoever holds the lock is the only one."""
        for path in self._models.glob(f"{_STAGING}*"):
            shutil.rmtree(path, ignore_errors=True)


class Staging:
    """A model that is being put together.

    Attributes:
        folder: for the model's files alone.
        scratch: for whatever else is needed on the way.
    """

    def __init__(self, root: Path, target: Path) -> None:
        self._root = root
        self._target = target
        self.folder = root / "model"
        self.scratch = root / "scratch"
        self.folder.mkdir()
        self.scratch.mkdir()

    def require_space(self, needed_bytes: int) -> None:
        """Checks for room before anything is fetched.

        Raises:
            StoreError: the disk has less than `needed_bytes` left.
        """
        free_bytes = shutil.disk_usage(self._root).free
        if free_bytes < needed_bytes:
            raise StoreError(
                f"{self._root.parent}: {free_bytes / 1e6:,.0f} MB are free and "
                f"{needed_bytes / 1e6:,.0f} MB are needed; make room, or set HEADWAY_CACHE_DIR"
            )

    def keep(self, manifest: Manifest) -> None:
        """Makes the folder a model of the store, in place of an older one, at once."""
        manifest.write(self.folder)
        for path in (*self.folder.iterdir(), self.folder):
            _sync(path)
        # There is no moment at which the name leads to half a model.
        if self._target.exists():
            self._target.rename(self._root / "replaced")
        self.folder.rename(self._target)
        _sync(self._target.parent)


def _sync(path: Path) -> None:
    """Waits until `path` would survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
