"""`headway tenant`: keys for the tenants of a settings file."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from headway.cli.commands import run


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Names two tenants, and a file of keys that is not there yet."""
    path = tmp_path / "headway.toml"
    path.write_text(
        f'[server]\nkeys_file = "{tmp_path / "keys.json"}"\n'
        '[[tenants]]\nname = "acme"\n[[tenants]]\nname = "bolt"\n'
    )
    return path


@pytest.fixture
def tenant(config: Path, capsys: pytest.CaptureFixture[str]) -> "Tenant":
    """Runs the command."""
    return Tenant(config, capsys)


class Tenant:
    """Runs `headway tenant …` on the settings file."""

    def __init__(self, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._config = config
        self._capsys = capsys

    def __call__(self, *arguments: str, status: int = 0) -> tuple[str, str]:
        """Standard output and standard error."""
        assert run(["tenant", *arguments, "--config", str(self._config)]) == status
        return self._capsys.readouterr()


def kept(config: Path) -> Sequence[dict[str, object]]:
    """The keys of the file."""
    keys = json.loads((config.parent / "keys.json").read_text())["keys"]
    assert isinstance(keys, list)
    return keys


def test_a_key_alone_goes_to_standard_output(tenant: Tenant, config: Path) -> None:
    """So that it can be sent into a file; the words for a person go elsewhere."""
    out, err = tenant("add", "acme")
    prefix, key_id, _ = out.strip().split("_", 2)
    assert (prefix, out.count("\n")) == ("hw", 1)
    assert "not shown again" in err
    assert out.strip() not in err
    (key,) = kept(config)
    assert (key["id"], key["tenant"], key["expires_at"]) == (key_id, "acme", None)


def test_a_key_can_be_for_some_robots_and_for_a_time(tenant: Tenant, config: Path) -> None:
    """As the options say."""
    tenant("add", "acme", "--robot", "arm-1", "--robot", "cart-*", "--days", "1.5")
    (key,) = kept(config)
    assert key["robots"] == ["arm-1", "cart-*"]
    ends = datetime.fromisoformat(str(key["expires_at"]))
    made = datetime.fromisoformat(str(key["created_at"]))
    assert abs(ends - made - timedelta(days=1.5)) < timedelta(minutes=1)


def test_rotate_revoke_and_list_tell_what_holds(tenant: Tenant, config: Path) -> None:
    """The old key ends at once without grace; a revoked one is gone."""
    old = tenant("add", "acme")[0].split("_")[1]
    new = tenant("rotate", "acme", "--grace-hours", "0")[0].split("_")[1]
    other = tenant("add", "bolt")[0].split("_")[1]
    tenant("revoke", other)
    lines = tenant("list")[0].splitlines()
    states = {line.split()[1]: line.split()[2] for line in lines[1:]}
    assert states == {old: "ended", new: "valid"}
    assert str(datetime.now(UTC).year) in lines[1]


def test_a_tenant_that_left_the_settings_is_shown_so(tenant: Tenant, config: Path) -> None:
    """Its key lets nobody in."""
    tenant("add", "bolt")
    config.write_text(config.read_text().replace('"bolt"', '"dash"'))
    assert "no such tenant" in tenant("list")[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("add", "acne"), "did you mean 'acme'?"),
        (("add", "zzz"), 'name = "zzz"'),
        (("list",), "headway tenant add"),
        (("rotate", "acme"), "not there"),
        (("revoke", "123"), "not there"),
    ],
)
def test_what_is_wrong_is_one_line(tenant: Tenant, arguments: Sequence[str], words: str) -> None:
    """With what to do."""
    out, err = tenant(*arguments, status=2)
    assert out == ""
    assert words in err
    assert err.count("\n") == 1


def test_without_a_keys_file_the_settings_lack_one(tenant: Tenant, config: Path) -> None:
    """Named by its key."""
    config.write_text('[[tenants]]\nname = "acme"\n')
    assert "server.keys_file is not set" in tenant("add", "acme", status=2)[1]
