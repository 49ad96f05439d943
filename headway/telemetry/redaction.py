"""Keeps credentials out of logs."""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from structlog.typing import EventDict

__all__ = ["REDACTED", "is_secret", "may_hold_credential", "redact"]

REDACTED = "[redacted]"

_NAMES = frozenset(
    {
        "auth", "authorization", "proxy_authorization", "bearer", "cookie", "set_cookie",
        "credential", "credentials", "passphrase", "password", "passwd", "pwd", "secret",
        "secrets", "api_key", "apikey", "private_key", "signing_key", "session_key",
    }
)  # fmt: skip
_ENDINGS = tuple(
    f"_{name}" for name in ("api_key", "apikey", "password", "private_key", "secret", "credential")
)
# "token" and "tokens" alone are a model's, and stay; these are credentials.
_TOKENS = frozenset(
    f"{kind}_token"
    for kind in ("access", "api", "auth", "bearer", "id", "jwt", "refresh", "secret", "session")
)
# A credential that stands inside a text, such as a header that was quoted.
_SCHEME = re.compile(r"\b(bearer|basic)\s+[\w.~+/=-]{6,}", re.IGNORECASE)
_MAX_DEPTH = 6


@lru_cache(maxsize=1024)
def is_secret(name: str) -> bool:
    """Whether a fact of this name is a credential, whatever its value."""
    plain = name.lower().replace("-", "_").replace(" ", "_")
    return plain in _NAMES or plain in _TOKENS or plain.endswith(_ENDINGS)


def may_hold_credential(text: str) -> bool:
    """The cheap look, for nearly every text is clean: whether a credential may stand in it."""
    lower = text.lower()
    return "bearer" in lower or "basic" in lower


def redact(logger: object, method: str, event: EventDict) -> EventDict:
    """A structlog processor: replaces the values of secret keys, also inside
    mappings and lists of pairs (gRPC metadata), and `Bearer ...` inside texts.
    """
    for key, value in event.items():
        kind = type(value)
        if kind is int or kind is float or kind is bool or value is None:
            if is_secret(key):
                event[key] = REDACTED
        else:
            event[key] = _clean(key, value, 0)
    return event


def _clean(key: str, value: Any, depth: int) -> Any:
    if is_secret(key):
        return REDACTED
    if isinstance(value, str):
        return _SCHEME.sub(rf"\1 {REDACTED}", value) if may_hold_credential(value) else value
    if depth >= _MAX_DEPTH:
        return REDACTED
    if isinstance(value, Mapping):
        return {name: _clean(str(name), inner, depth + 1) for name, inner in value.items()}
    if isinstance(value, tuple | list):
        if len(value) == 2 and isinstance(value[0], str):
            return [value[0], _clean(value[0], value[1], depth + 1)]
        return [_clean("", inner, depth + 1) for inner in value]
    return value
