"""Ctrl-C while a program is still being loaded."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["dying_of_interrupt"]


@contextmanager
def dying_of_interrupt() -> Iterator[None]:
    """Ctrl-C ends the process at once meanwhile, without a word. For imports.

    KeyboardInterrupt would come up inside of them: as a traceback, as the
    TypeError of a library that was in the middle of something, or not at all.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Signals are the main thread's.
        return
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
