"""Names of a prompt's KV blocks, by which equal beginnings are found again.

Block i of a prompt depends on all tokens up to its end, so its name is a hash
of block i − 1's name and its own tokens (as in vLLM's automatic prefix caching).
"""

import hashlib
import struct
from collections.abc import Sequence

__all__ = ["prefix_hashes"]

_DIGEST_BYTES = 16
_BYTES_PER_TOKEN = 4


def prefix_hashes(
    tokens: Sequence[int], block_tokens: int, *, tenant: str, adapter: str = ""
) -> tuple[bytes, ...]:
    """One name for each block that the prompt fills, 128 bits.

    The first one is salted with tenant and adapter, and so all are: no tenant
    can tell from its waiting time what another one asked, and KV that an
    adapter computed is never read by another.

    Args:
        tokens: of the prompt, each below 2³².
        block_tokens: tokens in a block of KV.
        tenant: whose prompt it is.
        adapter: that computes it; empty for the base model.
    """
    data = struct.pack(f"<{len(tokens)}I", *tokens)
    size = block_tokens * _BYTES_PER_TOKEN
    # Lengths first, so that no two pairs of names give the same bytes.
    salt = f"{len(tenant)}:{tenant}{adapter}".encode()
    name = hashlib.blake2b(salt, digest_size=_DIGEST_BYTES).digest()
    names = []
    for end in range(size, len(data) + 1, size):
        name = hashlib.blake2b(name + data[end - size : end], digest_size=_DIGEST_BYTES).digest()
        names.append(name)
    return tuple(names)
