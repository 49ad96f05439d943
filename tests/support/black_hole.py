"""A network between a client and a server that can stop bringing anything."""

import contextlib
import socket
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
    """

    def __init__(self, port: int) -> None:
        self.holds_back = False
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

    def _start(self, work: Callable[..., None], *arguments: socket.socket) -> None:
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
            for source, target in ((near, far), (far, near)):
                source.settimeout(_POLL_S)
                self._start(self._relay, source, target)

    def _relay(self, source: socket.socket, target: socket.socket) -> None:
        """Brings bytes one way until an end closes, or the test is over."""
        with source:
            while not self._is_over.is_set():
                if self.holds_back:
                    self._is_over.wait(_POLL_S)
                    continue
                try:
                    data = source.recv(65536)
                except TimeoutError:
                    continue
                except OSError:
                    break
                while data and self.holds_back and not self._is_over.is_set():
                    self._is_over.wait(_POLL_S)
                try:
                    target.sendall(data)
                except OSError:
                    break
                if not data:
                    break
            # The other way ends too.
            for end in (source, target):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
