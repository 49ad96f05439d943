"""Where a server without credentials may listen, and for whom."""

from typing import Any

import pytest

from cloud.server.identity import DevelopmentAuthenticator, require_loopback
from cloud.server.refused import CallRefused
from headway.config import TenantSettings
from headway.errors import ConfigError
from headway.outcome import Reason, RequestClass


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "::1", "localhost"])
def test_loopback_needs_no_credentials(host: str) -> None:
    """For development on one machine."""
    require_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.com", "localhost.evil.com"])  # noqa: S104
def test_others_cannot_reach_a_server_without_credentials(host: str) -> None:
    """Refused before anything is bound."""
    with pytest.raises(ConfigError, match=r"server\.host"):
        require_loopback(host)


def test_development_caller_is_the_tenant_called_default() -> None:
    """With the classes that the settings give it."""
    tenants = (TenantSettings(name="acme"), TenantSettings(name="default", classes=("batch",)))
    context: Any = None
    identity = DevelopmentAuthenticator(tenants).identify(context)
    assert (identity.tenant, identity.classes) == ("default", frozenset({RequestClass.BATCH}))
    identity.require_class(RequestClass.BATCH)
    with pytest.raises(CallRefused) as caught:
        identity.require_class(RequestClass.INTERACTIVE)
    assert caught.value.reason is Reason.PERMISSION_DENIED


def test_first_tenant_stands_in_where_none_is_called_default() -> None:
    """A server with one customer need not call it so."""
    context: Any = None
    identity = DevelopmentAuthenticator((TenantSettings(name="acme"),)).identify(context)
    assert identity.tenant == "acme"
