"""A server of the demo's own, as a child process."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import IO, Self

from headway.errors import HeadwayError

__all__ = ["ServerProcess", "ServerProcessError"]

# "headway: serving tiny (untrained: …) on 127.0.0.1:40123, torch engine. …"
_READY = re.compile(
    r"serving (?P<model>\S+)(?P<untrained> \(untrained)?.* on (?P<address>\S+:\d+),"
)
_POLL_S = 0.05


class ServerProcessError(HeadwayError):
    """The server did not start, or ended by itself."""


class ServerProcess:
    """`headway serve` on a free port, in a process group of its own.

    A Ctrl-C in the terminal therefore reaches the demo alone, which ends the
    server in order. Entering starts it, leaving ends it and everything that it
    started, by force after `grace_s`.

    Args:
        arguments: more options of `headway serve`.
        grace_s: how long an orderly end may take.
    """

    def __init__(self, arguments: Sequence[str] = (), *, grace_s: float = 8.0) -> None:
        self._arguments = arguments
        self._grace_s = grace_s
        self._ready: re.Match[str] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether it serves.

        Raises:
            ServerProcessError: it ended; with its own last line.
        """
        status = self._process.poll()
        if status is not None:
            raise ServerProcessError(self._last_words(status))
        return self._ready is not None

    @property
    def address(self) -> str:
        """Where it listens, once it is ready."""
        return self._told("address")

    @property
    def model(self) -> str:
        """What it serves, once it is ready."""
        return self._told("model")

    @property
    def is_untrained(self) -> bool:
        """Whether what its model says means nothing, once it is ready."""
        return bool(self._told("untrained"))

    def __enter__(self) -> Self:
        self._log: IO[bytes] = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [
                sys.executable, "-m", "fleet_sim.demo.served", "--port", "0", *self._arguments
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, name="server-output")
        self._reader.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(self._grace_s)
        # The group, so that an engine whose server was killed goes as well.
        self._signal_group(signal.SIGKILL)
        self._process.wait()
        self._reader.join()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self._log.close()

    def wait_for_group(self, timeout_s: float) -> bool:
        """Whether every process of the server's group is gone within `timeout_s`."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            try:
                os.killpg(self._process.pid, 0)
            except ProcessLookupError:
                return True
            time.sleep(_POLL_S)
        return False

    def _read(self) -> None:
        """Takes in what it prints, to the end, so that it never waits for a reader."""
        for line in self._process.stdout or ():
            self._ready = self._ready or _READY.search(line)

    def _told(self, what: str) -> str:
        if self._ready is None:
            raise ServerProcessError("the server is not ready yet; wait for is_ready")
        return self._ready[what] or ""

    def _last_words(self, status: int) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        said = lines[-1].removeprefix("headway: ") if lines else "it said nothing"
        how = f"signal {-status}" if status < 0 else f"status {status}"
        return f"the server ended by itself ({how}): {said}"

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)
