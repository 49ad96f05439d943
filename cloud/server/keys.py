"""API keys: made once, kept as hashes, looked up for each call.

A key reads `hw_<id>_<secret>`. The id is public: it names the key in lists and
logs. The secret has 256 random bits, so one SHA-256 is all the hashing that it
needs: what slow hashes are for is guessable passwords.
"""

import hashlib
import hmac
import json
import secrets
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import filelock
import structlog
from pydantic import AwareDatetime, BaseModel, ConfigDict, ValidationError

from headway.clock import Clock
from headway.errors import ConfigError, HeadwayError
from headway.files import write_whole

__all__ = ["KeyFile", "KeyRecord", "KeyRing", "utc_now"]

_log = structlog.get_logger()
_PREFIX = "hw"
_ID_BYTES = 6
_SECRET_BYTES = 32
# A file that changed is noticed so soon; a look costs as much as a short call.
_LOOK_EVERY_NS = 1_000_000_000


def utc_now() -> datetime:
    """The wall clock: keys last for days, and are made on other machines."""
    return datetime.now(UTC)


class KeyRecord(BaseModel):
    """What is kept of a key; the key itself is not."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    tenant: str
    sha256: str  # Of the secret, in hex.
    created_at: AwareDatetime
    expires_at: AwareDatetime | None = None
    robots: tuple[str, ...] = ("*",)  # Ids that it may speak for; * stands for any text.

    def is_valid(self, at: datetime) -> bool:
        """Whether it may be used at that instant."""
        return self.expires_at is None or at < self.expires_at


class _Content(BaseModel):
    """The file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int = 1
    keys: tuple[KeyRecord, ...] = ()


class KeyFile:
    """The file of keys. Several commands may change it at once; a server reads it.

    Args:
        path: of the file; made by the first `issue`.
        now: the wall clock.
    """

    def __init__(self, path: Path, now: Callable[[], datetime] = utc_now) -> None:
        self.path = path
        self._now = now

    def read(self) -> tuple[KeyRecord, ...]:
        """All keys, in the order in which they were made.

        Raises:
            ConfigError: the file is not there, cannot be read, or is no key file.
        """
        try:
            content = _Content.model_validate_json(self.path.read_bytes())
        except FileNotFoundError:
            raise ConfigError(
                "not there; make the first key with 'headway tenant add'", source=str(self.path)
            ) from None
        except OSError as error:
            raise ConfigError(
                f"cannot be read: {error.strerror or error}", source=str(self.path)
            ) from error
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise ConfigError(
                f"no key file: {first['msg']}; restore it, or make new keys in another file",
                source=str(self.path),
                key=where,
            ) from None
        return content.keys

    def issue(
        self, tenant: str, *, robots: Sequence[str] = ("*",), expires_at: datetime | None = None
    ) -> str:
        """A new key, which is told this once.

        Raises:
            HeadwayError: the file cannot be changed.
        """
        return self._change(lambda keys: keys, (tenant, tuple(robots), expires_at))

    def rotate(self, tenant: str, *, old_expire_at: datetime) -> str:
        """A new key in the place of the tenant's others, which go on until `old_expire_at`.

        It speaks for the same robots as the tenant's newest key, and never expires.

        Raises:
            HeadwayError: the tenant has no valid key, or the file cannot be changed.
        """
        now = self._now()
        old = [one for one in self.read() if one.tenant == tenant and one.is_valid(now)]
        if not old:
            raise HeadwayError(
                f"tenant '{tenant}' has no valid key to rotate; see 'headway tenant list', or "
                "make one with 'headway tenant add'"
            )

        def retire(one: KeyRecord) -> KeyRecord:
            if one.tenant != tenant or not one.is_valid(old_expire_at):
                return one
            return one.model_copy(update={"expires_at": old_expire_at})

        return self._change(
            lambda keys: tuple(retire(one) for one in keys), (tenant, old[-1].robots, None)
        )

    def revoke(self, key_id: str) -> None:
        """Ends a key now.

        Raises:
            HeadwayError: there is no such key, or the file cannot be changed.
        """
        if key_id not in {one.id for one in self.read()}:
            raise HeadwayError(f"no key '{key_id}' in {self.path}; see 'headway tenant list'")
        self._change(lambda keys: tuple(one for one in keys if one.id != key_id), None)

    def _change(
        self,
        change: Callable[[tuple[KeyRecord, ...]], tuple[KeyRecord, ...]],
        new: tuple[str, tuple[str, ...], datetime | None] | None,
    ) -> str:
        """Changes the keys and adds a new one, of (tenant, robots, end), in one go."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with filelock.FileLock(f"{self.path}.lock", timeout=10, mode=0o600):
                keys = change(self.read() if self.path.exists() else ())
                text = ""
                if new is not None:
                    record, text = _new_key(*new, self._now())
                    keys = (*keys, record)
                content = _Content(keys=keys).model_dump(mode="json")
                write_whole(self.path, json.dumps(content, indent=2) + "\n")
        except filelock.Timeout:
            raise HeadwayError(
                f"{self.path}: another command has been changing it for 10 s; try again, or "
                f"remove {self.path}.lock if there is none"
            ) from None
        except OSError as error:
            raise HeadwayError(
                f"{self.path}: cannot be written ({error.strerror or error})"
            ) from error
        return text


class KeyRing:
    """The keys of a file, as a server knows them; follows the file.

    Args:
        file: where they are.
        clock: by which the file is looked at again.
        now: the wall clock, by which keys expire.

    Raises:
        ConfigError: the file is not there, or is no key file.
    """

    def __init__(self, file: KeyFile, clock: Clock, now: Callable[[], datetime] = utc_now) -> None:
        self._file = file
        self._clock = clock
        self._now = now
        self._looked_ns = clock.now_ns()
        self._stamp = _stamp(file.path)
        self._keys = {one.id: one for one in file.read()}

    def find(self, text: str) -> KeyRecord | None:
        """The valid key that `text` is, or None."""
        prefix, _, rest = text.partition("_")
        key_id, _, secret = rest.partition("_")
        self._follow()
        record = self._keys.get(key_id)
        # Always hashed and compared, and in constant time: how long a "no" takes
        # tells nothing of the secret, nor whether there is such a key.
        expected = record.sha256 if record is not None else _NO_HASH
        is_same = hmac.compare_digest(_hash(secret), expected)
        if record is None or prefix != _PREFIX or not is_same:
            return None
        return record if record.is_valid(self._now()) else None

    def holds(self, key_id: str) -> bool:
        """Whether the key can still be used."""
        self._follow()
        record = self._keys.get(key_id)
        return record is not None and record.is_valid(self._now())

    def _follow(self) -> None:
        """Reads the file again where it has changed; a broken one leaves things as they are."""
        now_ns = self._clock.now_ns()
        if now_ns - self._looked_ns < _LOOK_EVERY_NS:
            return
        self._looked_ns = now_ns
        stamp = _stamp(self._file.path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._keys = {one.id: one for one in self._file.read()}
        except ConfigError as error:
            _log.error("keys_not_read", problem=error.message)
        else:
            _log.info("keys_read", count=len(self._keys))


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


_NO_HASH = "0" * 64


def _new_key(
    tenant: str, robots: tuple[str, ...], expires_at: datetime | None, now: datetime
) -> tuple[KeyRecord, str]:
    key_id = secrets.token_hex(_ID_BYTES)
    secret = secrets.token_urlsafe(_SECRET_BYTES)
    record = KeyRecord(
        id=key_id,
        tenant=tenant,
        sha256=_hash(secret),
        created_at=now,
        expires_at=expires_at,
        robots=robots,
    )
    return record, f"{_PREFIX}_{key_id}_{secret}"


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Changes whenever the file does."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
