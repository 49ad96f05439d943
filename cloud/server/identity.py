"""Who calls. Never a field of the request: only what the connection proves."""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import grpc

from cloud.server.refused import CallRefused
from headway.config import TenantSettings
from headway.errors import ConfigError
from headway.outcome import Reason, RequestClass

__all__ = ["Authenticator", "DevelopmentAuthenticator", "Identity", "require_loopback"]


@dataclass(frozen=True, slots=True)
class Identity:
    """The tenant that a caller belongs to, and what it may do."""

    tenant: str
    classes: frozenset[RequestClass]
    adapters: frozenset[str] = frozenset("*")

    def require_class(self, request_class: RequestClass) -> None:
        """Lets the classes of the tenant pass.

        Raises:
            CallRefused: PERMISSION_DENIED.
        """
        if request_class not in self.classes:
            raise CallRefused(
                Reason.PERMISSION_DENIED,
                f"tenant '{self.tenant}' may not use the class {request_class.label}; "
                "the server's configuration says which ones it may",
            )

    def require_adapter(self, adapter: str) -> None:
        """Lets the adapters of the tenant pass, and the model itself.

        Raises:
            CallRefused: PERMISSION_DENIED.
        """
        if adapter and not self.adapters & {adapter, "*"}:
            raise CallRefused(
                Reason.PERMISSION_DENIED,
                f"tenant '{self.tenant}' may not use the adapter '{adapter}'; "
                "the server's configuration says which ones it may",
            )


class Authenticator(Protocol):
    """Finds out who calls."""

    def identify(self, context: "grpc.aio.ServicerContext[bytes, bytes]") -> Identity:
        """The caller.

        Raises:
            CallRefused: UNAUTHENTICATED.
        """


class DevelopmentAuthenticator:
    """Takes every caller for one tenant. Only for a server on loopback.

    Args:
        tenants: of the configuration; the one named "default" is taken, or else
            the first.
    """

    def __init__(self, tenants: Sequence[TenantSettings]) -> None:
        named = [tenant for tenant in tenants if tenant.name == "default"]
        tenant = (named or list(tenants))[0]
        self._identity = Identity(
            tenant.name,
            frozenset(RequestClass[name.upper()] for name in tenant.classes),
            frozenset(tenant.adapters),
        )

    def identify(self, context: "grpc.aio.ServicerContext[bytes, bytes]") -> Identity:
        """The one tenant."""
        del context
        return self._identity


def require_loopback(host: str) -> None:
    """Lets only loopback addresses pass: there are no credentials yet.

    Raises:
        ConfigError: others could reach the server.
    """
    try:
        is_loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback:
        raise ConfigError(
            f"'{host}' can be reached by others, and callers have no credentials; "
            "expected a loopback address: 127.0.0.1, ::1 or localhost",
            source="settings",
            key="server.host",
        )
