"""The options by which a command says who it is to a server."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click

from headway.errors import HeadwayError
from headway.rpc.credentials import Credentials

__all__ = ["API_KEY_VARIABLE", "credential_options", "credentials_given"]

API_KEY_VARIABLE = "HEADWAY_API_KEY"

_F = TypeVar("_F", bound=Callable[..., object])


def credential_options(command: _F) -> _F:
    """Adds `api_key_file`, `tls`, `ca`, `certificate` and `private_key` to a command.

    No option takes the key itself: arguments can be read by everybody on a machine.
    """
    for option in (
        click.option(
            "--private-key", default="", metavar="FILE", help="Key of --certificate, in PEM form."
        ),
        click.option(
            "--certificate", default="", metavar="FILE", help="Client certificate, for mutual TLS."
        ),
        click.option(
            "--ca", default="", metavar="FILE", help="Who may vouch for the server; implies --tls."
        ),
        click.option("--tls", is_flag=True, help="Encrypt, by the system's authorities."),
        click.option(
            "--api-key-file",
            default="",
            metavar="FILE",
            help=f"File with the API key.  [default: the variable {API_KEY_VARIABLE}]",
        ),
    ):
        command = option(command)
    return command


def credentials_given(
    *, api_key_file: str, tls: bool, ca: str, certificate: str, private_key: str
) -> Credentials:
    """What the options of `credential_options` mean.

    Raises:
        HeadwayError: a file cannot be read, or an option lacks another one.
    """
    return Credentials(
        api_key=_api_key(api_key_file),
        uses_tls=tls,
        authorities=ca,
        certificate=certificate,
        private_key=private_key,
    )


def _api_key(file: str) -> str:
    """The key in `file`, else in the environment, else none."""
    if not file:
        return os.environ.get(API_KEY_VARIABLE, "").strip()
    try:
        key = Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "no text"
        raise HeadwayError(
            f"{file}: cannot be read ({why}); expected a file with an API key"
        ) from None
    if not key:
        raise HeadwayError(f"{file}: empty; expected the line that 'headway tenant add' printed")
    return key
