"""`headway config`: explains and checks settings."""

from pathlib import Path

import click

from headway.config import load_settings
from headway.config.example import example_toml, reference_markdown

__all__ = ["config"]


@click.command()
@click.option("--example", is_flag=True, help="Print a file with every key, explained.")
@click.option(
    "--check", type=click.Path(path_type=Path), metavar="FILE", help="Say whether FILE is right."
)
@click.option("--markdown", is_flag=True, help="Print the reference as Markdown tables.")
def config(*, example: bool, check: Path | None, markdown: bool) -> None:
    """Explain or check settings.

    To begin: headway config --example > headway.toml
    """
    if sum((example, check is not None, markdown)) != 1:
        raise click.UsageError("give one of --example, --check FILE, --markdown")
    if check is not None:
        load_settings(check)
        click.echo(f"{check}: good")
    else:
        click.echo(example_toml() if example else reference_markdown(), nl=False)
