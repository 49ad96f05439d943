"""API keys: kept as hashes, ended in time, and changed under a running server."""

import hashlib
import json
import stat
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from cloud.server.keys import KeyFile, KeyRing
from headway.clock import VirtualClock
from headway.errors import ConfigError, HeadwayError

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)


class WallClock:
    """A wall clock that a test sets."""

    def __init__(self) -> None:
        self.now = NOON

    def __call__(self) -> datetime:
        """What it shows."""
        return self.now


@pytest.fixture
def wall() -> WallClock:
    """At noon."""
    return WallClock()


@pytest.fixture
def file(tmp_path: Path, wall: WallClock) -> KeyFile:
    """Not there yet."""
    return KeyFile(tmp_path / "keys" / "keys.json", wall)


def test_a_key_is_kept_as_its_hash_for_its_owner_alone(file: KeyFile) -> None:
    """Whoever reads the file has no key."""
    key = file.issue("acme")
    _, key_id, secret = key.split("_", 2)
    text = file.path.read_text()
    assert secret not in text
    (kept,) = json.loads(text)["keys"]
    assert kept["id"] == key_id
    assert kept["sha256"] == hashlib.sha256(secret.encode()).hexdigest()
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600


def test_only_the_whole_key_is_found(file: KeyFile, wall: WallClock) -> None:
    """A changed character, a missing part or another's secret is no key."""
    key, other = file.issue("acme"), file.issue("bolt")
    ring = KeyRing(file, VirtualClock(), wall)
    found = ring.find(key)
    assert found is not None
    assert found.tenant == "acme"
    _, key_id, secret = key.split("_", 2)
    changed = secret[:-1] + ("A" if secret[-1] != "A" else "B")
    for wrong in (
        "",
        "_",
        secret,
        key_id,
        f"hw_{key_id}_",
        f"hw_{key_id}_{changed}",
        f"xx_{key_id}_{secret}",
        f"hw_{other.split('_')[1]}_{secret}",
        key + "\x00",
        "ü" * 100,
    ):
        assert ring.find(wrong) is None, wrong


def test_a_key_ends_at_its_time(file: KeyFile, wall: WallClock) -> None:
    """Valid before, not at, its end; to the second."""
    key = file.issue("acme", expires_at=NOON + timedelta(days=1))
    ring = KeyRing(file, VirtualClock(), wall)
    found = ring.find(key)
    assert found is not None
    wall.now = NOON + timedelta(days=1) - timedelta(seconds=1)
    assert ring.holds(found.id)
    wall.now = NOON + timedelta(days=1)
    assert not ring.holds(found.id)
    assert ring.find(key) is None


def test_rotation_lets_the_old_key_go_on_for_a_while(file: KeyFile, wall: WallClock) -> None:
    """The new one speaks for the same robots; other tenants' keys are left alone."""
    old, others = file.issue("acme", robots=("arm-*",)), file.issue("bolt")
    new = file.rotate("acme", old_expire_at=NOON + timedelta(hours=2))
    ring = KeyRing(file, VirtualClock(), wall)
    found = ring.find(new)
    assert found is not None
    assert found.robots == ("arm-*",)
    wall.now = NOON + timedelta(hours=1)
    assert [ring.find(key) is not None for key in (old, new, others)] == [True, True, True]
    wall.now = NOON + timedelta(hours=3)
    assert [ring.find(key) is not None for key in (old, new, others)] == [False, True, True]


def test_rotation_never_lengthens_a_key(file: KeyFile, wall: WallClock) -> None:
    """One that ends sooner anyway still does."""
    old = file.issue("acme", expires_at=NOON + timedelta(minutes=1))
    file.rotate("acme", old_expire_at=NOON + timedelta(hours=2))
    wall.now = NOON + timedelta(minutes=2)
    assert KeyRing(file, VirtualClock(), wall).find(old) is None


def test_who_has_no_key_cannot_rotate(file: KeyFile) -> None:
    """A misspelt name would make a key for nobody."""
    file.issue("acme")
    with pytest.raises(HeadwayError, match="tenant 'acne' has no valid key"):
        file.rotate("acne", old_expire_at=NOON)


def test_a_running_server_follows_the_file(file: KeyFile, wall: WallClock) -> None:
    """New keys are known, revoked ones are not, a second later."""
    first = file.issue("acme")
    clock = VirtualClock()
    ring = KeyRing(file, clock, wall)
    second = file.issue("acme")
    assert ring.find(second) is None
    clock.advance(1_000_000_000)
    assert ring.find(second) is not None
    file.revoke(first.split("_")[1])
    clock.advance(1_000_000_000)
    assert ring.find(first) is None
    assert ring.find(second) is not None


@pytest.mark.parametrize("damage", ["", "{", '{"version": 1, "keys": [{}]}'])
def test_a_file_that_breaks_leaves_the_keys_as_they_were(
    file: KeyFile, wall: WallClock, damage: str
) -> None:
    """A half-written file locks nobody out, and one at the start is one line."""
    key = file.issue("acme")
    clock = VirtualClock()
    ring = KeyRing(file, clock, wall)
    file.path.write_text(damage)
    clock.advance(1_000_000_000)
    assert ring.find(key) is not None
    with pytest.raises(ConfigError, match="no key file") as caught:
        KeyRing(file, clock, wall)
    assert "\n" not in caught.value.message


def test_without_a_file_the_advice_is_to_make_a_key(file: KeyFile) -> None:
    """Not an empty server that knows nobody."""
    with pytest.raises(ConfigError, match="headway tenant add"):
        KeyRing(file, VirtualClock())


def test_many_at_once_lose_no_key(file: KeyFile) -> None:
    """Commands that change the file wait for each other."""
    with ThreadPoolExecutor(8) as pool:
        keys = list(pool.map(lambda _: file.issue("acme"), range(24)))
    assert len(set(keys)) == len(file.read()) == 24
    assert [one.name for one in file.path.parent.iterdir() if one.name.startswith(".")] == []


def test_what_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    """A folder in the file's place."""
    (tmp_path / "keys.json").mkdir()
    with pytest.raises(HeadwayError) as caught:
        KeyFile(tmp_path / "keys.json").issue("acme")
    assert "keys.json" in caught.value.message
    assert "\n" not in caught.value.message
