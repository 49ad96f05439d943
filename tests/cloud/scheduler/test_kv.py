"""KV memory: blocks, prefixes, and that the books always balance."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloud.scheduler.kv import BlockPool, KvInvariantError, blocks_for
from cloud.scheduler.types import Admitted, Ended, Rejected
from headway.outcome import Outcome, Reason
from tests.support.scheduling import Bench, S, batch, ids, interactive, replica, standard


def _hashes(*names: str) -> tuple[bytes, ...]:
    return tuple(name.encode() for name in names)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_blocks_are_whole(tokens: int, blocks: int) -> None:
    """A partial block is a block."""
    assert blocks_for(tokens, 16) == blocks


def test_a_request_larger_than_the_pool_is_refused_at_once() -> None:
    """It is never queued: even alone it could not run."""
    bench = Bench(spec=replica(num_blocks=10))
    decision = bench.submit(batch("big", prompt_tokens=150, max_output_tokens=20))
    assert isinstance(decision, Rejected)
    assert decision.reason is Reason.TOO_LARGE
    assert decision.retry_after_ns is None
    assert not bench.scheduler.has_work("r0")


def test_a_request_that_just_fits_the_pool_runs() -> None:
    """150 prompt and 11 output tokens need 160 tokens of KV: the last is never computed."""
    bench = Bench(spec=replica(num_blocks=10))
    assert isinstance(bench.submit(batch("b", prompt_tokens=150, max_output_tokens=11)), Admitted)
    bench.steps(11)
    (ended,) = [event for event in bench.events if isinstance(event, Ended)]
    assert (ended.outcome, ended.output_tokens) == (Outcome.COMPLETED, 11)


def test_all_blocks_come_back_at_the_end() -> None:
    """Free + cached is the whole pool once nothing lives."""
    bench = Bench()
    for number in range(5):
        bench.submit(batch(f"b{number}"))
    while bench.scheduler.has_work("r0"):
        bench.step()
    (state,) = bench.scheduler.snapshot(bench.now_ns).replicas
    assert state.blocks_free == state.blocks_total
    assert state.blocks_held == 0


def test_a_known_prefix_is_not_computed_again() -> None:
    """The second prompt of 64 tokens shares its first 48 tokens' blocks."""
    bench = Bench()
    keys = _hashes("a", "b", "c", "d")
    bench.submit(standard("first", 60 * S, prefix_hashes=keys, max_output_tokens=1))
    bench.step()
    bench.submit(standard("second", 60 * S, prefix_hashes=keys))
    (item,) = bench.plan().items
    assert (item.context_tokens, item.num_tokens) == (48, 16)
    assert len(item.new_blocks) == 4


def test_the_last_prompt_token_is_always_computed() -> None:
    """A prompt that is cached to its end gives up its last block, or no token would come."""
    pool = BlockPool(8, 16)
    blocks = pool.allocate(4)
    for block, key in zip(blocks, _hashes("a", "b", "c", "d"), strict=True):
        pool.register(block, key)
    assert pool.match(_hashes("a", "b", "c", "d"), 64) == blocks[:3]
    assert pool.match(_hashes("a", "b", "c", "d"), 65) == blocks


def test_a_prefix_is_shared_only_once_it_is_computed() -> None:
    """Two equal prompts in one step do not read what is not there yet."""
    bench = Bench()
    keys = _hashes("a", "b", "c")
    bench.submit(standard("first", 60 * S, prefix_hashes=keys))
    bench.submit(standard("second", 60 * S, prefix_hashes=keys))
    assert [item.context_tokens for item in bench.plan().items] == [0, 0]


def test_a_prefix_survives_its_owner_until_the_room_is_needed() -> None:
    """Least recently used goes first, and the end of a prefix before its beginning."""
    pool = BlockPool(4, 16)
    old, new = pool.allocate(2), pool.allocate(2)
    for block, key in zip((*old, *new), _hashes("o1", "o2", "n1", "n2"), strict=True):
        pool.register(block, key)
    pool.release(old)
    pool.release(new)
    assert pool.num_cached == 4
    pool.allocate(1)
    assert pool.match(_hashes("o1", "o2"), 100) == old[:1]
    assert pool.match(_hashes("n1", "n2"), 100) == new


def test_cold_prompts_are_not_starved_by_prefix_hits() -> None:
    """Order is the deadline's: a hit makes a request cheaper, not earlier."""
    bench = Bench()
    keys = _hashes("a", "b", "c", "d")
    bench.submit(standard("warm", 60 * S, prefix_hashes=keys, max_output_tokens=1))
    bench.step()
    bench.submit(standard("cold", 60 * S))
    bench.submit(standard("hot", 60 * S, prefix_hashes=keys))
    assert ids(bench.plan()) == ["cold", "hot"]


def test_a_double_release_is_found() -> None:
    """The pool says so instead of giving a block to two requests."""
    pool = BlockPool(4, 16)
    blocks = pool.allocate(2)
    pool.release(blocks)
    with pytest.raises(KvInvariantError):
        pool.release(blocks)


def test_interactive_reserves_all_it_can_need() -> None:
    """Once it runs, nothing else can take the blocks of its last token."""
    bench = Bench(spec=replica(num_blocks=10))
    bench.submit(interactive("robot", 10 * S, prompt_tokens=64, max_output_tokens=65))
    bench.step()
    bench.submit(batch("b", prompt_tokens=32, max_output_tokens=32))
    bench.steps(64)
    robots = [e for e in bench.events if isinstance(e, Ended) and e.request_id == "robot"]
    assert robots[0].outcome is Outcome.COMPLETED


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 7)), max_size=60))
def test_the_pool_conserves_blocks(operations: list[tuple[int, int]]) -> None:
    """Free + cached + held = total after any sequence of operations."""
    pool = BlockPool(12, 16)
    tables: list[list[int]] = []
    for kind, number in operations:
        if kind == 0 and number <= pool.num_free + pool.num_cached:
            tables.append(pool.allocate(number))
        elif kind == 1 and tables:
            pool.release(tables.pop(number % len(tables)))
        elif kind == 2 and tables:
            for place, block in enumerate(tables[number % len(tables)]):
                pool.register(block, bytes([number, place]))
        elif kind == 3:
            found = pool.match([bytes([number, place]) for place in range(8)], 1000)
            pool.take(found)
            tables.append(found)
        pool.check_invariants(tables)
        assert pool.num_free + pool.num_cached + pool.num_held == 12
