"""`headway serve` as a child that does not outlive its parent.

The parent holds the other end of standard input. When the parent is gone,
however it went, the end of that file says so.
"""

import os
import signal
import sys
import threading

from headway.cli import main

__all__: list[str] = []


def _end_with_parent() -> None:
    # Nothing is ever sent, so that a read only returns at the end.
    while os.read(sys.stdin.fileno(), 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    main(["serve", "--dev", *sys.argv[1:]])
