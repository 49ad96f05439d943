"""What a pulled model is and where it came from, kept beside its files."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import pydantic

from cloud.engine.errors import CheckpointError

__all__ = ["MANIFEST_NAME", "Manifest", "PromptTest", "StoredFile", "read_manifest", "sha256_of"]

MANIFEST_NAME = "headway.json"
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class PromptTest:
    """A prompt, and what has to stand in its greedy continuation."""

    prompt: str = "The capital of France is"
    expected: str = ""  # Empty: the model only has to run.
    num_tokens: int = 8


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file of a model."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """A pulled model, as it was when it was complete."""

    source: str
    num_parameters: int
    dtype: str  # Of most of its parameters: "bfloat16", "float32".
    files: dict[str, StoredFile]  # By name in the folder.
    prompt_test: PromptTest
    format: int = _FORMAT

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.num_bytes for file in self.files.values())

    @property
    def digest(self) -> str:
        """A sha256 over all files: equal where the models are equal, byte for byte."""
        lines = [f"{file.sha256}  {name}\n" for name, file in sorted(self.files.items())]
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def write(self, folder: Path) -> None:
        """Puts the manifest beside the files."""
        text = json.dumps(asdict(self), indent=2) + "\n"
        (folder / MANIFEST_NAME).write_text(text, encoding="utf-8")

    def verify(self, folder: Path) -> None:
        """Compares every file of `folder` with what it was.

        Raises:
            CheckpointError: a file is missing, or not the one that was pulled.
        """
        for name, expected in self.files.items():
            path = folder / name
            try:
                digest = sha256_of(path)
            except OSError as error:
                raise CheckpointError(
                    path, f"{error.strerror}; pull the model again with --force"
                ) from error
            if digest != expected.sha256:
                raise CheckpointError(
                    path,
                    f"has changed since it was pulled: its sha256 is {digest[:12]}…, expected "
                    f"{expected.sha256[:12]}…; pull the model again with --force",
                )


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest in `folder`; None where there is none.

    Raises:
        CheckpointError: it is damaged.
    """
    path = folder / MANIFEST_NAME
    try:
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CheckpointError(path, f"cannot be read ({error.strerror})") from error
    try:
        manifest = pydantic.TypeAdapter(Manifest).validate_json(text)
    except pydantic.ValidationError as error:
        raise CheckpointError(path, "damaged; pull the model again with --force") from error
    if manifest.format != _FORMAT or any(Path(name).name != name for name in manifest.files):
        raise CheckpointError(path, "of another version, or damaged; pull the model again")
    return manifest


def sha256_of(path: Path) -> str:
    """The sha256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
