"""Names of KV blocks: equal where, and only where, what they hold may be shared."""

import pytest

from cloud.scheduler.prefix import prefix_hashes

_TOKENS = tuple(range(100, 150))


def _names(tokens: tuple[int, ...] = _TOKENS, tenant: str = "a", adapter: str = "") -> list[bytes]:
    return list(prefix_hashes(tokens, 8, tenant=tenant, adapter=adapter))


def test_only_full_blocks_have_names() -> None:
    """50 tokens fill six blocks of eight; 8 fill one, 7 none."""
    assert [len(_names(_TOKENS[:num])) for num in (50, 8, 7, 0)] == [6, 1, 0, 0]


def test_equal_beginnings_have_equal_names() -> None:
    """Up to the block in which the prompts differ, and from there on never again."""
    other = (*_TOKENS[:20], 7, *_TOKENS[21:])
    same = [one == two for one, two in zip(_names(), _names(other), strict=True)]
    assert same == [True, True, False, False, False, False]


@pytest.mark.parametrize(
    ("tenant", "adapter"), [("b", ""), ("a", "act"), ("", "a"), ("aa", ""), ("1:a", "")]
)
def test_nothing_is_shared_between_tenants_or_adapters(tenant: str, adapter: str) -> None:
    """The same prompt has no name in common."""
    assert not set(_names()) & set(_names(tenant=tenant, adapter=adapter))


def test_tokens_and_their_order_count() -> None:
    """Swapped tokens, and tokens whose bytes look alike, are other blocks."""
    blocks = [(1, 2), (2, 1), (256, 2), (1, 512), (0x10001, 2)]
    names = {prefix_hashes(block, 2, tenant="a") for block in blocks}
    assert len(names) == len(blocks)
