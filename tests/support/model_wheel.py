"""A wheel with a model in it, and the catalogue entry that pins it."""

import hashlib
import zipfile
from pathlib import Path

from cloud.engine.catalog import CatalogModel, PinnedFile
from cloud.engine.manifest import PromptTest

__all__ = ["write_model_wheel"]

_MEMBER = "small_model/small.gguf"
_INFO = "small_model-1.0.dist-info"


def write_model_wheel(gguf: Path, folder: Path, *, prompt_test: PromptTest) -> CatalogModel:
    """Writes a wheel that pip accepts to `folder`.

    Returns:
        The entry of a catalogue that has it.
    """
    path = folder / "small_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.write(gguf, _MEMBER)
        wheel.writestr(
            f"{_INFO}/METADATA", "Metadata-Version: 2.1\nName: small-model\nVersion: 1.0\n"
        )
        wheel.writestr(
            f"{_INFO}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr(f"{_INFO}/RECORD", "")
    return CatalogModel(
        name="small",
        requirement="small-model==1.0",
        wheel=_pin(path.name, path.read_bytes()),
        member=_pin(_MEMBER, gguf.read_bytes()),
        converted_bytes=1_000_000,
        licence="Apache-2.0",
        prompt_test=prompt_test,
    )


def _pin(name: str, content: bytes) -> PinnedFile:
    return PinnedFile(name, len(content), hashlib.sha256(content).hexdigest())
