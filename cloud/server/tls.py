"""TLS: the server's certificate, which may change while it runs."""

import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import structlog

from headway.config import TlsSettings
from headway.errors import ConfigError

__all__ = ["server_credentials"]

_log = structlog.get_logger()


def server_credentials(settings: TlsSettings) -> grpc.ServerCredentials:
    """For a server's port: TLS, mutual where `client_authorities` is set.

    The files are looked at for each new connection, so that a new certificate is
    taken without a restart; connections that stand keep the old one.

    Raises:
        ConfigError: a file cannot be read, or they do not fit together.
    """
    files = _Files(settings)
    # The stubs of gRPC forget that None means "as before".
    changed: Callable[[], Any] = files.changed
    return grpc.dynamic_ssl_server_credentials(
        files.load(), changed, require_client_authentication=bool(settings.client_authorities)
    )


class _Files:
    """Certificate, key and authorities on disk."""

    def __init__(self, settings: TlsSettings) -> None:
        self._settings = settings
        names = (settings.certificate, settings.private_key, settings.client_authorities)
        self._paths = [Path(name) for name in names if name]
        self._stamps: Sequence[object] = ()

    def load(self) -> grpc.ServerCertificateConfiguration:
        """What the files hold now.

        Raises:
            ConfigError: as `server_credentials`.
        """
        self._stamps = self._look()
        settings = self._settings
        certificate = _read(settings.certificate, "certificate")
        key = _read(settings.private_key, "private_key")
        authorities = None
        if settings.client_authorities:
            authorities = _read(settings.client_authorities, "client_authorities")
        # What gRPC says of a file that it cannot use is no help to anybody.
        _check_pair(settings)
        if authorities is not None:
            _check_authorities(settings.client_authorities, authorities)
        return grpc.ssl_server_certificate_configuration([(key, certificate)], authorities)

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """What the files hold, where it has changed and fits; for each new connection."""
        stamps = self._look()
        if stamps == self._stamps:
            return None
        try:
            found = self.load()
        except ConfigError as error:
            # Half of them may be written yet: the old ones go on until all fit. Each
            # new connection looks again.
            self._stamps = ()
            _log.error("certificate_not_read", problem=error.message)
            return None
        _log.info("certificate_read", path=self._settings.certificate)
        return found

    def _look(self) -> Sequence[object]:
        stamps: list[object] = []
        for path in self._paths:
            try:
                found = path.stat()
                stamps.append((found.st_mtime_ns, found.st_ino, found.st_size))
            except OSError:
                stamps.append(None)
        return stamps


def _read(name: str, key: str) -> bytes:
    try:
        return Path(name).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"cannot be read ({error.strerror or error}); expected a PEM file",
            source=name,
            key=f"server.tls.{key}",
        ) from None


def _check_pair(settings: TlsSettings) -> None:
    """Lets a certificate and its own key pass.

    Raises:
        ConfigError: they are no PEM files, or do not belong together.
    """
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # Without the empty password it would ask the terminal for one.
        context.load_cert_chain(settings.certificate, settings.private_key, password="")
    except (ssl.SSLError, OSError, ValueError) as error:
        why = getattr(error, "reason", None) or str(error) or "unreadable"
        raise ConfigError(
            f"no certificate that belongs to {settings.private_key} ({why}); expected PEM files "
            "of a certificate chain and its private key, without a password",
            source=settings.certificate,
            key="server.tls.certificate",
        ) from None


def _check_authorities(name: str, data: bytes) -> None:
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_verify_locations(cadata=data.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        why = getattr(error, "reason", None) or "unreadable"
        raise ConfigError(
            f"no authorities in it ({why}); expected certificates in PEM form",
            source=name,
            key="server.tls.client_authorities",
        ) from None
