"""KV memory of one replica: a pool of fixed-size blocks with a prefix cache.

A block is in exactly one of three places: free, cached (nobody holds it, but its
content is known by hash and can be taken again) or held by one request, or by
several that share a prefix. free + cached + held = total, always.
"""

from collections import OrderedDict
from collections.abc import Sequence

__all__ = ["BlockPool", "KvInvariantError", "blocks_for"]


class KvInvariantError(AssertionError):
    """The pool's books do not balance: a bug in the scheduler."""


def blocks_for(tokens: int, block_tokens: int) -> int:
    """Blocks that hold `tokens`."""
    return -(-tokens // block_tokens)


class BlockPool:
    """Gives out block numbers and takes them back. All methods are O(blocks touched)."""

    __slots__ = (
        "_block_of_hash",
        "_cached",
        "_free",
        "_hash_of_block",
        "_holders",
        "block_tokens",
        "num_blocks",
        "reserved",
    )

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        if num_blocks < 1 or block_tokens < 1:
            raise ValueError(
                f"a pool needs at least one block of one token, got {num_blocks} blocks "
                f"of {block_tokens} tokens"
            )
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        # Blocks that are spoken for by running promised requests and not yet
        # allocated to them.
        self.reserved = 0
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # Least recently used first.
        self._holders = [0] * num_blocks
        self._hash_of_block: dict[int, bytes] = {}
        self._block_of_hash: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks without content."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds, with content that can be taken again."""
        return len(self._cached)

    @property
    def num_held(self) -> int:
        """Blocks in at least one request."""
        return self.num_blocks - len(self._free) - len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that can be given out and that no running promise counts on."""
        return len(self._free) + len(self._cached) - self.reserved

    def match(self, hashes: Sequence[bytes], prompt_tokens: int) -> list[int]:
        """Blocks that hold the longest known beginning of a prompt.

        The last prompt token is never among them: a step has to compute it for
        the first output token. So a prompt that is known to its end gives up
        its last block.
        """
        most = (prompt_tokens - 1) // self.block_tokens
        found: list[int] = []
        for key in hashes[:most]:
            block = self._block_of_hash.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def num_unheld(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` nobody holds: taking them takes from what is available."""
        holders = self._holders
        return sum(1 for block in blocks if not holders[block])

    def num_released(self, tables: Sequence[Sequence[int]], kept: Sequence[int]) -> int:
        """Blocks that would become available if all these tables let go of theirs,
        and `kept` were taken by somebody else.
        """
        gone: dict[int, int] = {}
        for table in tables:
            for block in table:
                gone[block] = gone.get(block, 0) + 1
        for block in kept:
            gone.pop(block, None)
        return sum(1 for block, count in gone.items() if count == self._holders[block])

    def take(self, blocks: Sequence[int]) -> None:
        """Holds blocks that `match` found."""
        for block in blocks:
            if not self._holders[block]:
                del self._cached[block]
            self._holders[block] += 1

    def allocate(self, count: int) -> list[int]:
        """`count` blocks without content; cached content is given up, oldest first.

        Raises:
            KvInvariantError: fewer are left. Callers check first.
        """
        if count > len(self._free) + len(self._cached):
            raise KvInvariantError(
                f"{count} blocks wanted of {len(self._free)} free and {len(self._cached)} cached"
            )
        given: list[int] = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                del self._block_of_hash[self._hash_of_block.pop(block)]
            self._holders[block] = 1
            given.append(block)
        return given

    def release(self, blocks: Sequence[int]) -> None:
        """Lets go of blocks. The end of a prefix is given up before its beginning."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                if block in self._hash_of_block:
                    self._cached[block] = None
                else:
                    self._free.append(block)
            elif self._holders[block] < 0:
                raise KvInvariantError(f"block {block} was released by nobody who held it")

    def register(self, block: int, key: bytes) -> None:
        """Says that a held block has computed content that others may share."""
        if key not in self._block_of_hash and block not in self._hash_of_block:
            self._block_of_hash[key] = block
            self._hash_of_block[block] = key

    def check_invariants(self, tables: Sequence[Sequence[int]]) -> None:
        """Compares the books with the requests' block tables.

        Raises:
            KvInvariantError: they differ.
        """
        holders = [0] * self.num_blocks
        for table in tables:
            _require(len(set(table)) == len(table), "a request has a block twice")
            for block in table:
                holders[block] += 1
        _require(holders == self._holders, "the holders of blocks are not the block tables")
        known = set(self._hash_of_block)
        shared = {block for block, count in enumerate(holders) if count > 1}
        _require(shared <= known, "a block is shared and holds no known prefix")
        held = {block for block, count in enumerate(holders) if count}
        free, cached = set(self._free), set(self._cached)
        _require(len(free) == len(self._free), "a block is free twice")
        _require(not (free & cached or free & held or cached & held), "a block is in two places")
        _require(
            len(free) + len(cached) + len(held) == self.num_blocks,
            "free + cached + held is not the total",
        )
        _require(
            {block: key for key, block in self._block_of_hash.items()} == self._hash_of_block,
            "hashes and blocks disagree",
        )
        _require(cached <= known and not free & known, "content is known where there is none")
        _require(
            0 <= self.reserved <= len(free) + len(cached),
            f"{self.reserved} blocks are reserved, fewer can be given out",
        )


def _require(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise KvInvariantError(otherwise)
