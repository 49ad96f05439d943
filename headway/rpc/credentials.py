"""What a client shows to a server, and the channels that it opens with it."""

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from headway.errors import HeadwayError
from headway.rpc.channel import Options, channel_options
from headway.rpc.metadata import AUTHORIZATION

__all__ = ["NO_CREDENTIALS", "Credentials", "open_aio_channel", "open_channel"]


@dataclass(frozen=True, slots=True)
class Credentials:
    """By what a server knows its caller. Without any: one that serves for development.

    Attributes:
        api_key: as `headway tenant add` printed it; never shown by `repr`.
        uses_tls: whether the connection is encrypted. On where any of the files
            below is given.
        authorities: PEM file of who may vouch for the server; empty: the system's.
        certificate: PEM file of the client's certificate chain, for mutual TLS.
        private_key: PEM file of its key.
    """

    api_key: str = field(default="", repr=False)
    uses_tls: bool = False
    authorities: str = ""
    certificate: str = ""
    private_key: str = ""

    def __post_init__(self) -> None:
        if not self.api_key.isascii() or not self.api_key.isprintable():
            raise HeadwayError(
                "the API key has characters that no key has; expected one line, as "
                "'headway tenant add' printed it"
            )
        if bool(self.certificate) != bool(self.private_key):
            raise HeadwayError("a client certificate and its private key are needed together")
        if self.authorities or self.certificate:
            object.__setattr__(self, "uses_tls", True)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """To be sent with each call."""
        return ((AUTHORIZATION, f"Bearer {self.api_key}"),) if self.api_key else ()

    def require_private(self, address: str) -> None:
        """Lets a connection pass on which nobody else can read the API key.

        Raises:
            HeadwayError: it would cross a network in the clear.
        """
        if self.api_key and not self.uses_tls and not _is_on_this_machine(address):
            raise HeadwayError(
                f"the API key would be sent to {address} in the clear; use TLS "
                "(--tls, or --ca FILE for authorities of your own)"
            )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For a channel with TLS.

        Raises:
            HeadwayError: a file cannot be read.
        """
        return grpc.ssl_channel_credentials(
            root_certificates=_read(self.authorities),
            private_key=_read(self.private_key),
            certificate_chain=_read(self.certificate),
        )


NO_CREDENTIALS = Credentials()


def open_channel(
    address: str, credentials: Credentials, options: Options | None = None
) -> grpc.Channel:
    """A channel to "host:port"; it connects when it is first used.

    Raises:
        HeadwayError: a file cannot be read, or an API key would be sent in the clear.
    """
    credentials.require_private(address)
    options = channel_options() if options is None else options
    if credentials.uses_tls:
        return grpc.secure_channel(address, credentials.channel_credentials(), options=options)
    return grpc.insecure_channel(address, options=options)


def open_aio_channel(
    address: str, credentials: Credentials, options: Options | None = None
) -> grpc.aio.Channel:
    """The same, for asyncio.

    Raises:
        HeadwayError: as `open_channel`.
    """
    credentials.require_private(address)
    options = channel_options() if options is None else options
    if credentials.uses_tls:
        return grpc.aio.secure_channel(address, credentials.channel_credentials(), options=options)
    return grpc.aio.insecure_channel(address, options=options)


def _read(name: str) -> bytes | None:
    if not name:
        return None
    try:
        return Path(name).read_bytes()
    except OSError as error:
        raise HeadwayError(
            f"{name}: cannot be read ({error.strerror or error}); expected a PEM file"
        ) from None


def _is_on_this_machine(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
