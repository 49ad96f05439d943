"""`headway tenant`: API keys for the tenants of a configuration."""

import difflib
from datetime import UTC, datetime, timedelta
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from cloud.server.keys import KeyFile, KeyRecord, utc_now
from headway.config import Settings, load_settings
from headway.errors import HeadwayError

__all__ = ["tenant"]

_LATEST = datetime.max.replace(tzinfo=UTC)

_config_option = click.option(
    "--config",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="Settings file of the server, which names its tenants and server.keys_file.",
)


@click.group()
def tenant() -> None:
    """Makes, lists and ends the API keys by which a server knows its callers.

    Who may do what stands in the settings file, under [[tenants]]. A running
    server takes changes of keys over within a second.
    """


@tenant.command()
@click.argument("name")
@_config_option
@click.option(
    "--robot",
    "robots",
    multiple=True,
    metavar="ID",
    help="Robot that the key may speak for; * stands for any text. May be given more than "
    "once.  [default: all of the tenant's]",
)
@click.option(
    "--days", type=click.FloatRange(min=0, min_open=True), help="Until it ends.  [default: never]"
)
def add(name: str, config: Path, robots: tuple[str, ...], days: float | None) -> None:
    """Makes an API key for the tenant NAME, and prints it, this once."""
    settings = load_settings(config)
    _require_tenant(settings, name, config)
    file = _key_file(settings, config)
    expires_at = None if days is None else _later(timedelta(days=1), days)
    key = file.issue(name, robots=robots or ("*",), expires_at=expires_at)
    _show(key, name, file)


@tenant.command(name="list")
@_config_option
def list_keys(config: Path) -> None:
    """Shows all keys: whose they are, and until when. The keys themselves are not kept."""
    settings = load_settings(config)
    keys = _key_file(settings, config).read()
    now = utc_now()
    table = Table(box=None, pad_edge=False)
    for column in ("tenant", "key", "state", "made", "ends", "robots"):
        table.add_column(column, no_wrap=True, overflow="fold")
    known = {one.name for one in settings.tenants}
    for one in sorted(keys, key=lambda one: (one.tenant, one.created_at)):
        table.add_row(
            one.tenant,
            one.id,
            _state(one, now, known),
            _day(one.created_at),
            "never" if one.expires_at is None else _day(one.expires_at),
            " ".join(one.robots),
        )
    Console(soft_wrap=True).print(table)


@tenant.command()
@click.argument("name")
@_config_option
@click.option(
    "--grace-hours",
    type=click.FloatRange(min=0),
    default=24.0,
    show_default=True,
    help="How long the tenant's other keys go on.",
)
def rotate(name: str, config: Path, grace_hours: float) -> None:
    """Makes a new key for the tenant NAME; its others end after a while."""
    settings = load_settings(config)
    _require_tenant(settings, name, config)
    file = _key_file(settings, config)
    key = file.rotate(name, old_expire_at=_later(timedelta(hours=1), grace_hours))
    _show(key, name, file)


@tenant.command()
@click.argument("key_id")
@_config_option
def revoke(key_id: str, config: Path) -> None:
    """Ends the key KEY_ID (see list) now, and the streams that were opened with it."""
    _key_file(load_settings(config), config).revoke(key_id)
    click.echo(f"The key {key_id} has ended; a running server knows within a second.", err=True)


def _show(key: str, name: str, file: KeyFile) -> None:
    # The key alone goes to standard output, so that it can go into a file.
    click.echo(
        f"A key for '{name}', kept as a hash in {file.path}. It is not shown again:", err=True
    )
    click.echo(key)


def _require_tenant(settings: Settings, name: str, config: Path) -> None:
    names = [one.name for one in settings.tenants]
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"it has {', '.join(names)}."
        raise HeadwayError(
            f"{config} has no tenant '{name}'; {hint} To add one, write there: "
            f'[[tenants]] and, below it, name = "{name}"'
        )


def _key_file(settings: Settings, config: Path) -> KeyFile:
    if not settings.server.keys_file:
        raise HeadwayError(
            f'{config}: server.keys_file is not set; name a file there, such as "keys.json"'
        )
    return KeyFile(Path(settings.server.keys_file))


def _later(unit: timedelta, count: float) -> datetime:
    """So many units from now; the end of time where there are too many."""
    try:
        return utc_now() + count * unit
    except OverflowError:
        return _LATEST


def _state(key: KeyRecord, now: datetime, tenants: set[str]) -> str:
    if not key.is_valid(now):
        return "ended"
    return "valid" if key.tenant in tenants else "no such tenant"


def _day(instant: datetime) -> str:
    return instant.astimezone(UTC).strftime("%Y-%m-%d %H:%MZ")
