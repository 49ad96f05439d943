"""Options of channels and servers: limits, and how soon a dead peer is noticed."""

from collections.abc import Sequence
from typing import Any

__all__ = [
    "DEFAULT_MAX_CALLS",
    "DEFAULT_MAX_MESSAGE_BYTES",
    "KEEPALIVE_TIMEOUT_MS",
    "KEEPALIVE_TIME_MS",
    "Options",
    "channel_options",
    "server_options",
]

Options = Sequence[tuple[str, Any]]

# A dead peer is noticed after the sum of the two: 4 s.
KEEPALIVE_TIME_MS = 2_000
KEEPALIVE_TIMEOUT_MS = 2_000
# Room for a few camera pictures.
DEFAULT_MAX_MESSAGE_BYTES = 4 * 1024 * 1024
# Calls and sessions of a server at once.
DEFAULT_MAX_CALLS = 4096
# Of one connection, beside those.
_MOST_UNCOUNTED_CALLS = 1_000
_HANDSHAKE_TIMEOUT_MS = 10_000
# gRPC refuses calls with more metadata than this (hard limit).
_MAX_METADATA_BYTES = 16 * 1024


def _shared_options(max_message_bytes: int) -> list[tuple[str, Any]]:
    return [
        ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
        # Both: a ping's time-out is the larger one of the two, and the second
        # is a minute by default, so that the first alone changes nothing.
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        # Without a limit: an idle robot must still notice that its server died.
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
    ]


def channel_options(*, max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES) -> Options:
    """Options for a robot's channel.

    Args:
        max_message_bytes: largest message that is sent or taken.
    """
    return [
        *_shared_options(max_message_bytes),
        # A robot comes back quickly after its server did.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2_000),
    ]


def server_options(
    *, max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES, max_calls: int = DEFAULT_MAX_CALLS
) -> Options:
    """Options for a server.

    Args:
        max_message_bytes: largest message that is sent or taken.
        max_calls: most calls and sessions that the server takes at once.
    """
    return [
        *_shared_options(max_message_bytes),
        # Permits the pings that `channel_options` asks for, with room for
        # jitter; a server that does not ends such connections ("too many pings").
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_TIME_MS // 2),
        ("grpc.http2.max_ping_strikes", 10),
        ("grpc.max_metadata_size", _MAX_METADATA_BYTES // 2),
        ("grpc.absolute_max_metadata_size", _MAX_METADATA_BYTES),
        # A call whose message never comes is no call yet that could be counted and
        # refused, but holds memory. With room for calls that wait for their "no":
        # beyond this limit a client waits itself, and is told nothing.
        ("grpc.max_concurrent_streams", max_calls + _MOST_UNCOUNTED_CALLS),
        # A peer that connects and says nothing holds a descriptor; 2 min by default.
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_TIMEOUT_MS),
        # Otherwise two servers would share a port, and neither would say so.
        ("grpc.so_reuseport", 0),
    ]
