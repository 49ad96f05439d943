"""The cost model: its worked numbers, and that its inverses are exact."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.cost_model import UNBOUNDED, CostModel, StepShape, chunk_pairs

MS = 1_000_000

# t0 20 ms, c_p 0.1 ms a token, c_d 0.2 ms a request: the design's example.
EXAMPLE = CostModel(t0_ns=20 * MS, prefill_ns=0.1 * MS, decode_ns=0.2 * MS)


def test_a_budget_of_100_ms_leaves_736_prefill_tokens_beside_32_decodes() -> None:
    """(100 − 20 − 32·0.2) / 0.1 = 736."""
    assert EXAMPLE.prefill_budget(100 * MS, decodes=32) == 736


def test_a_step_of_50_ms_decodes_150_requests_at_3000_tokens_a_second() -> None:
    """(50 − 20) / 0.2 = 150, and 150 / 0.05 = 3,000."""
    cap = EXAMPLE.decode_cap(50 * MS)
    assert cap == 150
    step_ns = EXAMPLE.predict_ns(StepShape(decodes=cap))
    assert cap * 1_000_000_000 / step_ns == pytest.approx(3000)


def test_32_requests_decode_1212_tokens_a_second() -> None:
    """32 / (20 + 32·0.2 ms) = 1,212."""
    step_ns = EXAMPLE.predict_ns(StepShape(decodes=32))
    assert round(32 * 1_000_000_000 / step_ns) == 1212


def test_a_step_costs_the_sum_of_its_parts() -> None:
    """Each coefficient is charged for its own count, by hand."""
    model = CostModel(t0_ns=1000, prefill_ns=100, pair_ns=10, decode_ns=7, kv_ns=3)
    # One chunk of 4 tokens after 6: 4·(6 + 2.5) = 34 pairs, and 6 tokens read.
    shape = StepShape.of([(6, 4)], [10, 20])
    assert shape == StepShape(prefill_tokens=4, prefill_pairs=34, decodes=2, kv_tokens=36)
    assert model.predict_ns(shape) == 1000 + 4 * 100 + 34 * 10 + 2 * 7 + 36 * 3


@given(
    cuts=st.lists(st.integers(1, 5000), min_size=1, max_size=20),
    context=st.integers(0, 100_000),
)
def test_pairs_are_the_same_however_a_prompt_is_cut(cuts: list[int], context: int) -> None:
    """The chunks of a prompt have as many pairs as the prompt in one piece has."""
    done, pairs = context, 0
    for chunk in cuts:
        pairs += chunk_pairs(done, chunk)
        done += chunk
    # Token number i of a causal prompt is paired with i tokens, itself included.
    assert pairs == sum(range(context + 1, done + 1))


# From nothing and from far below a nanosecond to ten minutes.
coefficients = st.one_of(st.just(0.0), st.floats(1e-9, 1e12))
models = st.builds(
    CostModel,
    t0_ns=st.floats(0, 1e9),
    prefill_ns=coefficients,
    pair_ns=coefficients,
    decode_ns=coefficients,
    kv_ns=coefficients,
)


@given(
    model=models,
    target_ns=st.integers(0, 10**12),
    decodes=st.integers(0, 1000),
    kv_tokens=st.integers(0, 10**6),
    context=st.integers(0, 10**6),
)
def test_the_prefill_budget_fits_and_one_token_more_does_not(
    model: CostModel, target_ns: int, decodes: int, kv_tokens: int, context: int
) -> None:
    """The budget is an exact maximum of what predict_ns itself says."""
    budget = model.prefill_budget(
        target_ns, decodes=decodes, kv_tokens=kv_tokens, context_tokens=context
    )

    def step_ns(chunk: int) -> int:
        shape = StepShape(chunk, chunk_pairs(context, chunk), decodes, kv_tokens + context)
        return model.predict_ns(shape)

    assert 0 <= budget <= UNBOUNDED
    if budget:
        assert step_ns(budget) <= target_ns
    if budget < UNBOUNDED:
        assert step_ns(budget + 1) > target_ns


@given(model=models, target_ns=st.integers(0, 10**12), kv_tokens_each=st.integers(0, 10**6))
def test_the_decode_cap_fits_and_one_request_more_does_not(
    model: CostModel, target_ns: int, kv_tokens_each: int
) -> None:
    """The cap is an exact maximum of what predict_ns itself says."""
    cap = model.decode_cap(target_ns, kv_tokens_each=kv_tokens_each)

    def step_ns(decodes: int) -> int:
        return model.predict_ns(StepShape(decodes=decodes, kv_tokens=decodes * kv_tokens_each))

    assert 0 <= cap <= UNBOUNDED
    if cap:
        assert step_ns(cap) <= target_ns
    if cap < UNBOUNDED:
        assert step_ns(cap + 1) > target_ns


@given(
    model=models.filter(lambda model: model.prefill_ns + model.pair_ns >= 1),
    chunk=st.integers(1, 10**6),
    decodes=st.integers(0, 1000),
    context=st.integers(0, 10**6),
)
def test_a_target_that_a_chunk_just_meets_permits_it(
    model: CostModel, chunk: int, decodes: int, context: int
) -> None:
    """On the very boundary, where a rounded square root is off by one: not a token is lost."""
    shape = StepShape(chunk, chunk_pairs(context, chunk), decodes, context)
    exact_ns = model.predict_ns(shape)

    def budget(target_ns: int) -> int:
        return model.prefill_budget(target_ns, decodes=decodes, context_tokens=context)

    assert budget(exact_ns) >= chunk
    assert budget(exact_ns - 1) < chunk


@given(
    model=models.filter(lambda model: model.decode_ns + model.kv_ns >= 1),
    decodes=st.integers(1, 10**6),
    kv_tokens_each=st.integers(1, 10**6),
)
def test_a_target_that_decodes_just_meet_permits_them(
    model: CostModel, decodes: int, kv_tokens_each: int
) -> None:
    """On the very boundary, where a rounded division is off by one: not a request is lost."""
    shape = StepShape(decodes=decodes, kv_tokens=decodes * kv_tokens_each)
    exact_ns = model.predict_ns(shape)
    assert model.decode_cap(exact_ns, kv_tokens_each=kv_tokens_each) >= decodes
    assert model.decode_cap(exact_ns - 1, kv_tokens_each=kv_tokens_each) < decodes


@given(
    t0=st.integers(0, 500),
    prefill=st.integers(0, 20),
    pair=st.integers(0, 3),
    decode=st.integers(0, 20),
    target=st.integers(0, 2000),
    decodes=st.integers(0, 8),
    context=st.integers(0, 30),
)
@settings(max_examples=200)
def test_both_inverses_agree_with_brute_force(
    t0: int, prefill: int, pair: int, decode: int, target: int, decodes: int, context: int
) -> None:
    """Whole coefficients, so the sums here are exact: count up until it is too long."""
    model = CostModel(t0_ns=t0, prefill_ns=prefill, pair_ns=pair, decode_ns=decode)

    def largest(step_ns: list[int]) -> int:
        return max((count for count, ns in enumerate(step_ns) if ns <= target), default=0)

    if prefill or pair:
        steps = [
            t0 + decode * decodes + prefill * n + pair * (n * context + n * (n + 1) // 2)
            for n in range(2002)
        ]
        budget = model.prefill_budget(target, decodes=decodes, context_tokens=context)
        assert budget == largest(steps)
    if decode:
        assert model.decode_cap(target) == largest([t0 + decode * n for n in range(2002)])


def test_what_costs_nothing_has_no_bound() -> None:
    """A free token, or a free decode, sets no limit; a step that is too long anyway does."""
    free = CostModel(t0_ns=10)
    assert free.prefill_budget(10) == UNBOUNDED
    assert free.decode_cap(10) == UNBOUNDED
    assert free.prefill_budget(9) == 0
    assert free.decode_cap(9) == 0


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
@pytest.mark.parametrize("name", ["t0_ns", "prefill_ns", "pair_ns", "decode_ns", "kv_ns"])
def test_what_could_not_be_a_time_is_refused(name: str, value: float) -> None:
    """The message names the coefficient."""
    with pytest.raises(ValueError, match=name):
        CostModel(**{"t0_ns": 1.0, name: value})


@pytest.mark.parametrize("margin", [0.99, math.nan, math.inf])
def test_a_margin_below_one_is_refused(margin: float) -> None:
    """A margin that shortens predictions is no margin."""
    with pytest.raises(ValueError, match="margin"):
        CostModel(t0_ns=1, margin=margin)
