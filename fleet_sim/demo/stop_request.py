"""Ctrl-C and SIGTERM as a question that the main loop asks, not as an exception.

An exception could arrive between the start of a process and the line that
remembers it; a flag cannot, so that nothing is ever left behind.
"""

import signal
import time
from types import FrameType, TracebackType
from typing import Self

__all__ = ["StopRequest"]

_POLL_S = 0.05


class StopRequest:
    """Remembers that somebody asked for the end, while it is entered.

    Attributes:
        is_made: whether somebody asked.
    """

    def __init__(self) -> None:
        self.is_made = False

    def __enter__(self) -> Self:
        self._before = {
            number: signal.signal(number, self._arrived)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def sleep(self, span_s: float) -> bool:
        """Waits, and is back early when the end is asked for; whether it was."""
        until = time.monotonic() + span_s
        while not self.is_made and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, _POLL_S))
        return self.is_made

    def _arrived(self, signum: int, frame: FrameType | None) -> None:
        self.is_made = True
