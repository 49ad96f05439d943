"""Numbers that look random and depend on their seed and index alone."""

import hashlib

__all__ = ["uniform"]


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1): the top 53 bits of BLAKE2b of `seed` (mod 2⁶⁴) and `index`, so
    that it is the same on every machine and in every order of asking.
    """
    text = f"{seed % (1 << 64)}:{index}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)
