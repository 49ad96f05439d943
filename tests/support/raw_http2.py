"""HTTP/2 frame by frame, for clients that no library would be (RFC 9113, RFC 7541)."""

import re
import socket
import struct
from types import TracebackType
from typing import Self

__all__ = ["RawClient", "call_frames", "metadata_bytes"]

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _CONTINUATION = 0x0, 0x1, 0x3, 0x4, 0x6, 0x9
_END_STREAM = _ACK = 0x1
_END_HEADERS = 0x4
_INITIAL_WINDOW_SIZE = 0x4
_CANCEL = b"\0\0\0\x08"
_MAX_FRAME_BYTES = 16_384
_STATUS = re.compile(rb"grpc-status.(\d+)", re.DOTALL)

Fields = tuple[tuple[str, bytes], ...]


def _frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    # The length has three bytes.
    return struct.pack(">IBBI", len(payload), kind, flags, stream_id)[1:] + payload


def _length(value: int) -> bytes:
    """A string's length: a 7-bit prefix, and what goes beyond it in sevens."""
    if value < 0x7F:
        return bytes([value])
    value -= 0x7F
    rest = b""
    while value >= 0x80:
        rest += bytes([value & 0x7F | 0x80])
        value >>= 7
    return b"\x7f" + rest + bytes([value])


def _block(fields: Fields) -> bytes:
    """Each field written out, with neither table nor Huffman code."""
    out = b""
    for name, value in fields:
        key = name.encode()
        out += b"\x00" + _length(len(key)) + key + _length(len(value)) + value
    return out


def _fields(path: str, extra: Fields) -> Fields:
    return (
        (":method", b"POST"),
        (":scheme", b"http"),
        (":path", path.encode()),
        (":authority", b"localhost"),
        ("te", b"trailers"),
        ("content-type", b"application/grpc"),
        *extra,
    )


def metadata_bytes(path: str, extra: Fields = ()) -> int:
    """Size of a call's metadata as HTTP/2 counts it (RFC 9113, section 6.5.2)."""
    return sum(len(name) + len(value) + 32 for name, value in _fields(path, extra))


def call_frames(
    stream_id: int,
    path: str,
    message: bytes | None,
    *,
    extra: Fields = (),
    is_compressed: bool = False,
) -> bytes:
    """A call's headers, and its one message where there is one."""
    block = _block(_fields(path, extra))
    out = b""
    for first in range(0, len(block), _MAX_FRAME_BYTES):
        flags = _END_HEADERS if first + _MAX_FRAME_BYTES >= len(block) else 0
        kind = _CONTINUATION if first else _HEADERS
        out += _frame(kind, flags, stream_id, block[first : first + _MAX_FRAME_BYTES])
    if message is not None:
        data = struct.pack(">BI", is_compressed, len(message)) + message
        for first in range(0, len(data), _MAX_FRAME_BYTES):
            piece = data[first : first + _MAX_FRAME_BYTES]
            is_last = first + _MAX_FRAME_BYTES >= len(data)
            out += _frame(_DATA, _END_STREAM if is_last else 0, stream_id, piece)
    return out


class RawClient:
    """A connection that does what it is told, and answers pings and settings.

    Args:
        port: on loopback.
        window: bytes that the server may send on a stream; it is never told of more.
    """

    def __init__(self, port: int, *, window: int = 65_535) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        self.greeting = _PREFACE + _frame(
            _SETTINGS, 0, 0, struct.pack(">HI", _INITIAL_WINDOW_SIZE, window)
        )
        self._next_stream = 1
        self._inbox = b""

    def __enter__(self) -> Self:
        self.socket.sendall(self.greeting)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.socket.close()

    def settle(self) -> None:
        """Acknowledges the server's settings: some of its limits hold from then on."""
        while (head := self._take(9)) is not None:
            self._take(int.from_bytes(head[:3], "big"))
            if head[3] == _SETTINGS and not head[4] & _ACK:
                self.socket.sendall(_frame(_SETTINGS, _ACK, 0))
                return

    def call(
        self,
        path: str,
        message: bytes | None = None,
        *,
        extra: Fields = (),
        is_compressed: bool = False,
    ) -> int:
        """Begins a call; its stream's id."""
        stream_id, self._next_stream = self._next_stream, self._next_stream + 2
        self.socket.sendall(
            call_frames(stream_id, path, message, extra=extra, is_compressed=is_compressed)
        )
        return stream_id

    def cancel(self, stream_id: int) -> None:
        """Resets a call."""
        self.socket.sendall(_frame(_RST_STREAM, 0, stream_id, _CANCEL))

    def reset_connection(self) -> None:
        """Ends the connection by a TCP reset: what is on its way is thrown away."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def until_begun(self) -> None:
        """Waits for the headers of an answer."""
        while (found := self._receive()) is not None and found[0] != _HEADERS:
            pass

    def status(self) -> int | None:
        """Status of the call that ends next; None: it was reset, or the connection ended."""
        while (found := self._receive()) is not None:
            kind, payload = found
            if kind == _HEADERS and (status := _STATUS.search(payload)):
                return int(status[1])
            if kind == _RST_STREAM:
                return None
        return None

    def _receive(self) -> tuple[int, bytes] | None:
        """Kind and payload of the next frame that is about a call; None: there is none."""
        while (head := self._take(9)) is not None:
            kind, flags = head[3], head[4]
            payload = self._take(int.from_bytes(head[:3], "big"))
            if payload is None:
                break
            if kind in (_SETTINGS, _PING) and not flags & _ACK:
                self.socket.sendall(_frame(kind, _ACK, 0, payload if kind == _PING else b""))
            elif kind in (_DATA, _HEADERS, _RST_STREAM):
                return kind, payload
        return None

    def _take(self, size: int) -> bytes | None:
        while len(self._inbox) < size:
            try:
                data = self.socket.recv(65_536)
            except ConnectionError:
                data = b""
            if not data:
                return None
            self._inbox += data
        taken, self._inbox = self._inbox[:size], self._inbox[size:]
        return taken
