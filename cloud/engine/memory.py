"""How much memory there is for KV, and the refusal where there is too little."""

from pathlib import Path

import psutil
import torch

from cloud.engine.errors import EngineError

__all__ = ["available_bytes", "require_memory"]


def require_memory(needed_bytes: int, available: int, *, num_blocks: int) -> None:
    """Refuses KV memory that would not fit.

    Raises:
        EngineError: `needed_bytes` is more than `available`.
    """
    if needed_bytes > available:
        each = needed_bytes // num_blocks
        raise EngineError(
            f"KV memory of {num_blocks:,} blocks needs {_gib(needed_bytes)}, "
            f"{_gib(available)} is free; ask for at most {available // each:,} blocks"
        )


def available_bytes(device: torch.device) -> int:
    """Bytes that a new allocation on `device` can take."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(int(psutil.virtual_memory().available), _cgroup_bytes())


def _cgroup_bytes() -> int:
    """What a container's own limit leaves; the machine's figures do not show it."""
    root = Path("/sys/fs/cgroup")
    try:
        limit = int((root / "memory.max").read_text())
        return max(0, limit - int((root / "memory.current").read_text()))
    except (OSError, ValueError):  # No cgroup v2, or "max": no limit.
        return 2**62


def _gib(count: int) -> str:
    return f"{count / 2**30:,.2f} GiB"
