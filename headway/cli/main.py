"""The process's entry. Imports next to nothing, so that Ctrl-C finds it ready."""

import atexit
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from headway.cli.interrupt import dying_of_interrupt

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs `headway` with `arguments` (default: the process's) and exits.

    Exit status: 0 done; 2 wrong input, with one line on standard error that
    says what to do; 130 interrupted, or the signal itself while the program is
    loaded and unloaded, which shells show as 130 too. Anything else is a bug and
    shows a traceback.
    """
    with dying_of_interrupt():
        from headway.cli.commands import run
    # What libraries do at the very end is not for Ctrl-C to interrupt aloud.
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_DFL)
    sys.exit(run(arguments))
