"""Where things are kept that could be made or fetched again."""

import os
from pathlib import Path

__all__ = ["default_cache_dir"]


def default_cache_dir() -> Path:
    """HEADWAY_CACHE_DIR, else `headway` in the user's cache (XDG_CACHE_HOME, ~/.cache)."""
    own = os.environ.get("HEADWAY_CACHE_DIR")
    if own:
        return Path(own)
    user = os.environ.get("XDG_CACHE_HOME")
    return (Path(user) if user else Path.home() / ".cache") / "headway"
