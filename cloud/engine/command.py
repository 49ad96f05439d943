"""`headway model`: get, make and check models."""

from pathlib import Path

import click

from cloud.engine.pull_command import check, list_models, pull

__all__ = ["model"]


@click.group()
def model() -> None:
    """Gets, makes and checks models."""


@model.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option("--seed", default=0, show_default=True, help="Seed of the random weights.")
def tiny(folder: Path, seed: int) -> None:
    """Writes a tiny untrained model to FOLDER, to try the system with."""
    from cloud.engine.errors import EngineError
    from cloud.engine.tiny import write_tiny_checkpoint

    if folder.exists() and any(folder.iterdir()):
        raise EngineError(f"{folder}: not empty; name a new folder")
    try:
        write_tiny_checkpoint(folder, seed=seed)
    except OSError as error:
        raise EngineError(f"{folder}: cannot be written ({error.strerror})") from error
    click.echo(f"Wrote an untrained model to {folder}")


model.add_command(pull)
model.add_command(list_models)
model.add_command(check)
