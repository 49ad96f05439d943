"""What defaults depend on the machine."""

import os

__all__ = ["default_threads"]


def default_threads() -> int:
    """One less than the cores that this process may use, at least 1.

    The core that is left serves the network: an engine that takes them all
    makes every answer late.
    """
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # Not on macOS.
        cores = os.cpu_count() or 1
    return max(1, cores - 1)
