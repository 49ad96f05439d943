"""Who calls. Never a field of the request: only what the connection proves."""

import ipaddress
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import translate
from typing import TYPE_CHECKING, Protocol

from cloud.server.keys import KeyRecord, KeyRing
from cloud.server.refused import CallRefused
from headway.config import ServerSettings, TenantSettings
from headway.errors import ConfigError
from headway.outcome import Reason, RequestClass
from headway.rpc.metadata import AUTHORIZATION

if TYPE_CHECKING:
    import grpc

__all__ = ["Authenticator", "CredentialAuthenticator", "Identity", "require_guarded"]

_SCHEME = "bearer "
# Matches no text.
_NOTHING = r"(?!)"
_SUBJECT_NAMES = "x509_subject_alternative_name"


def _always() -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Identity:
    """The tenant that a caller belongs to, and what it may do.

    Attributes:
        tenant: its name.
        classes: that it may use.
        adapters: names; "*" is all.
        models: names; "*" is all.
        robots: patterns; a robot's id must match one of each.
        is_operator: it may see all tenants, and drain the server.
        is_current: whether the credential still holds; a stream asks again and again.
    """

    tenant: str
    classes: frozenset[RequestClass]
    adapters: frozenset[str] = frozenset("*")
    models: frozenset[str] = frozenset("*")
    robots: tuple[re.Pattern[str], ...] = ()
    is_operator: bool = False
    is_current: Callable[[], bool] = _always

    def require_class(self, request_class: RequestClass) -> None:
        """Lets the classes of the tenant pass.

        Raises:
            CallRefused: PERMISSION_DENIED.
        """
        if request_class not in self.classes:
            raise self._denied(f"use the class {request_class.label}")

    def require_adapter(self, adapter: str) -> None:
        """Lets the adapters of the tenant pass, and the model itself.

        Raises:
            CallRefused: PERMISSION_DENIED.
        """
        if adapter and not self.adapters & {adapter, "*"}:
            raise self._denied(f"use the adapter '{adapter}'")

    def require_model(self, model: str) -> None:
        """Lets the models of the tenant pass.

        Raises:
            CallRefused: PERMISSION_DENIED.
        """
        if not self.models & {model, "*"}:
            raise self._denied(f"use the model '{model}'")

    def require_robot(self, robot_id: str) -> None:
        """Lets the robots pass that both the tenant and the credential speak for.

        Raises:
            CallRefused: PERMISSION_DENIED.
        """
        for pattern in self.robots:
            if pattern.match(robot_id) is None:
                raise self._denied(f"speak for the robot '{robot_id}' with this credential")

    def require_operator(self) -> None:
        """Lets operators pass.

        Raises:
            CallRefused: PERMISSION_DENIED.
        """
        if not self.is_operator:
            raise self._denied("do what only operators may")

    def require_current(self) -> None:
        """Lets a credential pass that has not ended since it was shown.

        Raises:
            CallRefused: UNAUTHENTICATED.
        """
        if not self.is_current():
            raise CallRefused.stream_ended(
                Reason.UNAUTHENTICATED,
                "the credential has expired or was revoked; connect again with a new one",
            )

    def _denied(self, what: str) -> CallRefused:
        return CallRefused(
            Reason.PERMISSION_DENIED,
            f"tenant '{self.tenant}' may not {what}; the server's configuration says what it may",
        )


class Authenticator(Protocol):
    """Finds out who calls."""

    def identify(self, context: "grpc.aio.ServicerContext[bytes, bytes]") -> Identity:
        """The caller.

        Raises:
            CallRefused: UNAUTHENTICATED.
        """


class CredentialAuthenticator:
    """Knows callers by API key, else by client certificate, else not at all.

    Args:
        tenants: of the configuration.
        keys: None: there are no API keys.
        trusts_certificates: client certificates were checked by the connection.
        development: a caller without any credential is the tenant called
            "default", or else the first one.
    """

    def __init__(
        self,
        tenants: Sequence[TenantSettings],
        *,
        keys: KeyRing | None = None,
        trusts_certificates: bool = False,
        development: bool = False,
    ) -> None:
        self._keys = keys
        self._identities = {tenant.name: _identity(tenant) for tenant in tenants}
        self._subjects = [
            (_pattern(name), tenant.name) for tenant in tenants for name in tenant.subject_names
        ]
        self._trusts_certificates = trusts_certificates
        self._anyone: Identity | None = None
        if development:
            name = "default" if "default" in self._identities else tenants[0].name
            # Who runs a server for development is its operator too.
            self._anyone = replace(self._identities[name], is_operator=True)
        self._by_key: dict[KeyRecord, Identity] = {}

    def identify(self, context: "grpc.aio.ServicerContext[bytes, bytes]") -> Identity:
        """The caller.

        Raises:
            CallRefused: UNAUTHENTICATED.
        """
        found: Identity | None = None
        if self._keys is not None:
            shown = _authorization(context)
            if shown is not None:
                return self._of_key(shown, self._keys)
        if self._trusts_certificates:
            found = self._of_certificate(context)
        found = found or self._anyone
        if found is None:
            raise CallRefused(
                Reason.UNAUTHENTICATED,
                "no credential; expected the metadata 'authorization: Bearer <API key>', or a "
                "client certificate that the server knows",
            )
        return found

    def _of_key(self, shown: str, keys: KeyRing) -> Identity:
        is_bearer = shown[: len(_SCHEME)].lower() == _SCHEME
        record = keys.find(shown[len(_SCHEME) :].strip()) if is_bearer else None
        tenant = self._identities.get(record.tenant) if record is not None else None
        if record is None or tenant is None:
            # The same words for all causes: a stranger learns nothing.
            raise CallRefused(
                Reason.UNAUTHENTICATED,
                "the API key is not known, has expired, or is not sent as 'Bearer <API key>'",
            )
        known = self._by_key.get(record)
        if known is None:
            key_id = record.id
            known = self._by_key[record] = replace(
                tenant,
                robots=(*tenant.robots, *_patterns(record.robots)),
                is_current=lambda: keys.holds(key_id),
            )
        return known

    def _of_certificate(self, context: "grpc.aio.ServicerContext[bytes, bytes]") -> Identity | None:
        names = context.auth_context().get(_SUBJECT_NAMES, ())
        texts = [name.decode("utf-8", "replace") for name in names]
        for pattern, tenant in self._subjects:
            if any(pattern.match(text) for text in texts):
                return self._identities[tenant]
        return None


def require_guarded(settings: ServerSettings) -> None:
    """Lets a server pass that only those who may can reach.

    Raises:
        ConfigError: others could, or nobody.
    """
    is_loopback = _is_loopback(settings.host)
    has_credentials = bool(settings.keys_file or settings.tls.client_authorities)
    if settings.development and not is_loopback:
        raise _exposed(
            settings.host,
            "can be reached by others, and development lets anyone in",
            "expected a loopback address (127.0.0.1, ::1, localhost), or development = false",
        )
    if not has_credentials and not settings.development:
        raise ConfigError(
            "callers have no way to say who they are; set keys_file ('headway tenant add' makes "
            "one) or tls.client_authorities, or serve anyone on this machine with --dev",
            source="settings",
            key="server",
        )
    if not is_loopback and not settings.tls.certificate:
        raise _exposed(
            settings.host,
            "can be reached by others, who could read keys and data on the way",
            "set server.tls.certificate and private_key, or listen on a loopback address "
            "behind a proxy that speaks TLS",
        )


def _exposed(host: str, problem: str, advice: str) -> ConfigError:
    return ConfigError(f"'{host}' {problem}; {advice}", source="settings", key="server.host")


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _authorization(context: "grpc.aio.ServicerContext[bytes, bytes]") -> str | None:
    for key, value in context.invocation_metadata() or ():
        if key == AUTHORIZATION:
            return value if isinstance(value, str) else ""
    return None


def _identity(tenant: TenantSettings) -> Identity:
    return Identity(
        tenant.name,
        frozenset(RequestClass[name.upper()] for name in tenant.classes),
        frozenset(tenant.adapters),
        frozenset(tenant.models),
        _patterns(tenant.robots),
        is_operator=tenant.operator,
    )


def _patterns(names: Sequence[str]) -> tuple[re.Pattern[str], ...]:
    """One pattern that matches what any of `names` does; none where that is everything."""
    if "*" in names:
        return ()
    return (re.compile("|".join(map(_expression, names)) if names else _NOTHING),)


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(_expression(name))


def _expression(name: str) -> str:
    # Only * is special: names of certificates may hold brackets and question marks.
    return translate(name.replace("[", "[[]").replace("?", "[?]"))
