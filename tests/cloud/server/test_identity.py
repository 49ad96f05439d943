"""Who may reach a server, who a caller is, and what it may do."""

from pathlib import Path
from typing import Any

import pytest

from cloud.server.identity import CredentialAuthenticator, Identity, require_guarded
from cloud.server.keys import KeyFile, KeyRing
from cloud.server.refused import CallRefused
from headway.clock import VirtualClock
from headway.config import ServerSettings, TenantSettings, TlsSettings
from headway.errors import ConfigError
from headway.outcome import Reason, RequestClass

TLS = TlsSettings(certificate="c.pem", private_key="k.pem")
MUTUAL = TlsSettings(certificate="c.pem", private_key="k.pem", client_authorities="ca.pem")


class Caller:
    """What gRPC knows of a call: metadata, and names from a checked client certificate."""

    def __init__(self, authorization: str | bytes | None = None, names: tuple[str, ...] = ()):
        self._authorization = authorization
        self._names = names

    def invocation_metadata(self) -> tuple[tuple[str, Any], ...]:
        """As gRPC gives it."""
        rest: tuple[tuple[str, Any], ...] = (("user-agent", "robot"),)
        if self._authorization is None:
            return rest
        return (*rest, ("authorization", self._authorization))

    def auth_context(self) -> dict[str, list[bytes]]:
        """As gRPC gives it."""
        if not self._names:
            return {}
        return {"x509_subject_alternative_name": [name.encode() for name in self._names]}


def identify(authenticator: CredentialAuthenticator, *arguments: Any, **named: Any) -> Identity:
    """Who such a caller is."""
    caller: Any = Caller(*arguments, **named)
    return authenticator.identify(caller)


@pytest.fixture
def keys(tmp_path: Path) -> KeyFile:
    """A file of keys."""
    return KeyFile(tmp_path / "keys.json")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "::1", "localhost"])
def test_loopback_needs_no_credentials_for_development(host: str) -> None:
    """On one machine, and only where it was asked for."""
    require_guarded(ServerSettings(host=host, development=True))
    with pytest.raises(ConfigError, match="--dev"):
        require_guarded(ServerSettings(host=host))


@pytest.mark.parametrize(
    "host",
    ["0.0.0.0", "::", "10.0.0.1", "example.com", "localhost.evil.com"],  # noqa: S104
)
def test_others_reach_a_server_only_with_credentials_and_tls(host: str) -> None:
    """Each half alone is refused, before anything is bound."""
    for settings in (
        ServerSettings(host=host, development=True),
        ServerSettings(host=host, development=True, keys_file="keys", tls=TLS),
        ServerSettings(host=host, keys_file="keys"),
        ServerSettings(host=host, tls=TLS),
    ):
        with pytest.raises(ConfigError):
            require_guarded(settings)
    require_guarded(ServerSettings(host=host, keys_file="keys", tls=TLS))
    require_guarded(ServerSettings(host=host, tls=MUTUAL))


def test_development_caller_is_the_tenant_called_default() -> None:
    """With the classes that the settings give it, and the rights of an operator."""
    tenants = (TenantSettings(name="acme"), TenantSettings(name="default", classes=("batch",)))
    identity = identify(CredentialAuthenticator(tenants, development=True))
    assert (identity.tenant, identity.classes) == ("default", frozenset({RequestClass.BATCH}))
    identity.require_operator()
    identity.require_class(RequestClass.BATCH)
    with pytest.raises(CallRefused) as caught:
        identity.require_class(RequestClass.INTERACTIVE)
    assert caught.value.reason is Reason.PERMISSION_DENIED


def test_first_tenant_stands_in_where_none_is_called_default() -> None:
    """A server with one customer need not call it so."""
    authenticator = CredentialAuthenticator((TenantSettings(name="acme"),), development=True)
    assert identify(authenticator).tenant == "acme"


def test_without_development_nobody_is_let_in_unknown(keys: KeyFile) -> None:
    """No key, a wrong one, another scheme and bytes are all the same to a stranger."""
    key = keys.issue("acme")
    gone = keys.issue("gone")
    authenticator = CredentialAuthenticator(
        (TenantSettings(name="acme"),), keys=KeyRing(keys, VirtualClock())
    )
    assert identify(authenticator, f"Bearer {key}").tenant == "acme"
    assert identify(authenticator, f"bearer  {key} ").tenant == "acme"
    messages = set()
    for wrong in (key, f"Basic {key}", "Bearer", f"Bearer {key}x", b"\xff", f"Bearer {gone}"):
        with pytest.raises(CallRefused) as caught:
            identify(authenticator, wrong)
        assert caught.value.reason is Reason.UNAUTHENTICATED
        messages.add(caught.value.message)
    assert len(messages) == 1
    with pytest.raises(CallRefused, match="no credential"):
        identify(authenticator)


def test_a_wrong_key_is_not_let_in_as_anyone_for_development(keys: KeyFile) -> None:
    """Who shows a key means it."""
    keys.issue("acme")
    authenticator = CredentialAuthenticator(
        (TenantSettings(name="acme"),), keys=KeyRing(keys, VirtualClock()), development=True
    )
    assert identify(authenticator).tenant == "acme"
    with pytest.raises(CallRefused):
        identify(authenticator, "Bearer hw_0_0")


def test_a_certificate_is_known_by_its_subject_alternative_names() -> None:
    """The whole name; * stands for any text, and nothing else is special."""
    tenants = (
        TenantSettings(name="acme", subject_names=("robots.acme.example", "spiffe://acme/robot/*")),
        TenantSettings(name="bolt", subject_names=("[a-z].bolt.example", "b?")),
    )
    authenticator = CredentialAuthenticator(tenants, trusts_certificates=True)
    for name, tenant in (
        ("robots.acme.example", "acme"),
        ("spiffe://acme/robot/7", "acme"),
        ("[a-z].bolt.example", "bolt"),
        ("b?", "bolt"),
    ):
        assert identify(authenticator, names=("other", name)).tenant == tenant
    for name in ("robots.acme.example.evil", "xspiffe://acme/robot/7", "q.bolt.example", "bx"):
        with pytest.raises(CallRefused, match="no credential"):
            identify(authenticator, names=(name,))


def test_names_of_certificates_count_only_where_they_were_checked() -> None:
    """Without authorities nobody has vouched for them."""
    authenticator = CredentialAuthenticator((TenantSettings(name="acme", subject_names=("a",)),))
    with pytest.raises(CallRefused, match="no credential"):
        identify(authenticator, names=("a",))


def test_a_robot_must_be_the_tenants_and_the_keys(keys: KeyFile) -> None:
    """A key that leaks from one robot speaks for no other one."""
    wide, narrow = keys.issue("acme"), keys.issue("acme", robots=("arm-7", "cart-*"))
    none = keys.issue("acme", robots=())
    tenants = (TenantSettings(name="acme", robots=("arm-*", "cart-1")),)
    authenticator = CredentialAuthenticator(tenants, keys=KeyRing(keys, VirtualClock()))
    may = {
        (key, robot): _passes(identify(authenticator, f"Bearer {key}"), robot)
        for key in (wide, narrow, none)
        for robot in ("arm-1", "arm-7", "cart-1", "cart-2", "ARM-7", "xarm-7")
    }
    assert {pair for pair, passes in may.items() if passes} == {
        (wide, "arm-1"),
        (wide, "arm-7"),
        (wide, "cart-1"),
        (narrow, "arm-7"),
        (narrow, "cart-1"),
    }


def test_a_model_must_be_the_tenants() -> None:
    """By name; * is all of them."""
    tenants = (TenantSettings(name="acme", models=("smollm2",)),)
    identity = identify(CredentialAuthenticator(tenants, development=True))
    identity.require_model("smollm2")
    with pytest.raises(CallRefused, match="model 'tiny'"):
        identity.require_model("tiny")


def _passes(identity: Identity, robot: str) -> bool:
    try:
        identity.require_robot(robot)
    except CallRefused as refused:
        if refused.reason is not Reason.PERMISSION_DENIED:
            raise
        return False
    return True
