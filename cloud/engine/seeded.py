"""Numbers that look random and depend on their seed and index alone."""

import hashlib

__all__ = ["uniform"]


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1): the top 53 bits of BLAKE2b of `seed` and `index`, so
    that it is the same on every machine and in every order of asking.
    """
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)
