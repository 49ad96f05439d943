"""The `headway` command."""

from headway.cli.main import main

__all__ = ["main"]
