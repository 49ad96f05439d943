"""A network between a client and a server that goes wrong in the ways that networks do."""

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

__all__ = ["BlackHole"]

_POLL_S = 0.02


class BlackHole:
    """A TCP relay to a port on loopback.

    Attributes:
        holds_back: while set nothing is brought either way. It is kept, and comes
            late: connections stand, as behind a radio that lost its link.
        loses: the same for one of the two ways only, "up" to the server or "down" from it.
        most_bytes: what a connection brings each way in a fiftieth of a second; 0: all.
        cut_after_bytes: where set, connections end by a reset once that much more has
            come down over any of them.
    """

    def __init__(self, port: int) -> None:
        self.holds_back = False
        self.loses = ""
        self.most_bytes = 0
        self.cut_after_bytes: int | None = None
        self._ends: list[socket.socket] = []
        self._port = port
        self._is_over = threading.Event()
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(_POLL_S)

    @property
    def address(self) -> str:
        """What a client connects to."""
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        self._start(self._accept)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def reset(self) -> None:
        """Ends all connections by TCP resets, on both sides."""
        self.cut_after_bytes = None
        ends, self._ends = self._ends, []
        for end in ends:
            with contextlib.suppress(OSError):
                # Closed with a linger of 0 s, an end is reset.
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                end.close()

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._is_over.is_set():
            try:
                near, _ = self._listener.accept()
            except TimeoutError:
                continue
            far = socket.create_connection(("127.0.0.1", self._port))
            self._ends += [near, far]
            for end in (near, far):
                end.settimeout(_POLL_S)
            self._start(self._relay, near, far, "up")
            self._start(self._relay, far, near, "down")

    def _holds(self, way: str) -> bool:
        return (self.holds_back or self.loses == way) and not self._is_over.is_set()

    def _relay(self, source: socket.socket, target: socket.socket, way: str) -> None:
        """Brings bytes one way until an end closes, or the test is over."""
        with source:
            while not self._is_over.is_set():
                if self._holds(way):
                    self._is_over.wait(_POLL_S)
                    continue
                try:
                    data = source.recv(self.most_bytes or 65536)
                except TimeoutError:
                    continue
                except OSError:
                    break
                while data and self._holds(way):
                    self._is_over.wait(_POLL_S)
                data, is_cut = self._cut(data, way)
                if not self._bring(data, target):
                    break
                if is_cut:
                    self.reset()
                if not data:
                    break
                if self.most_bytes:
                    self._is_over.wait(_POLL_S)
            # The other way ends too.
            for end in (source, target):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def _cut(self, data: bytes, way: str) -> tuple[bytes, bool]:
        """What of `data` still comes through, and whether that was the last."""
        left = self.cut_after_bytes
        if left is None or way == "up":
            return data, False
        self.cut_after_bytes = left - len(data)
        return data[:left], len(data) >= left

    def _bring(self, data: bytes, target: socket.socket) -> bool:
        """Sends all of it, however slowly it is taken; whether that went well."""
        while data and not self._is_over.is_set():
            try:
                data = data[target.send(data) :]
            except TimeoutError:
                continue
            except OSError:
                return False
        return True
