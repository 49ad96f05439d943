"""`headway model`: make and check checkpoint folders."""

from pathlib import Path

import click

__all__ = ["model"]


@click.group()
def model() -> None:
    """Makes and checks model checkpoints."""


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


@model.command()
@click.argument("folder", type=click.Path(path_type=Path))
def check(folder: Path) -> None:
    """Checks that the engine can run the model in FOLDER."""
    from cloud.engine.checkpoint import check_weights
    from cloud.engine.tokenizer import action_token_ids, load_tokenizer

    config, num_parameters = check_weights(folder)
    tokenizer = load_tokenizer(folder)
    untrained = ", untrained (random weights)" if config.is_untrained else ""
    click.echo(
        f"{config.name}: {config.architecture}, {num_parameters / 1e6:,.1f} M parameters, "
        f"{config.layers} layers, context {config.max_context_tokens:,} tokens, "
        f"vocabulary {tokenizer.vocabulary_tokens:,}, "
        f"{len(action_token_ids(tokenizer))} action tokens{untrained}"
    )
