"""How long a step may get beside promises: closed forms."""

import pytest

from cloud.scheduler.laxity import GUARD, StepBound, open_promises
from tests.support.scheduling import MS


def test_a_promise_leaves_to_the_next_step_what_the_others_do_not_need() -> None:
    """Five steps until 100 ms, four of them of 10 ms: 60 ms, the guard taken off twice."""
    bound = StepBound({5: 100.0 * MS}.items(), later_ns=10.0 * MS)
    assert bound.longest_ns == pytest.approx(100 * MS * (1 - 2 * GUARD) - 40 * MS)
    late = StepBound({5: 100.0 * MS}.items(), later_ns=10.0 * MS, stretch=1.5, excess=0.5)
    assert late.longest_ns == pytest.approx((100 * MS * (1 - 2 * GUARD) - 60 * MS) / 2)


def test_whoever_decodes_from_then_on_makes_every_later_step_longer() -> None:
    """Two prefills that end in this step add 2 ms each to the four steps after it."""
    bound = StepBound({5: 100.0 * MS}.items(), later_ns=10.0 * MS)
    free_ns = 100 * MS * (1 - 2 * GUARD)
    assert bound.with_decode_ns(2.0 * MS) == pytest.approx(free_ns - 48 * MS)
    bound.end_prefill(2.0 * MS, 9, None)
    assert bound.longest_ns == pytest.approx(free_ns - 48 * MS)
    bound.end_prefill(2.0 * MS, 9, None)
    assert bound.longest_ns == pytest.approx(free_ns - 56 * MS)
    # One that has a promise of its own: three steps until 60 ms, two of 16 ms.
    bound.end_prefill(2.0 * MS, 3, 60 * MS)
    own_ns = 60 * MS * (1 - 2 * GUARD) - 32 * MS
    assert bound.longest_ns == pytest.approx(min(free_ns - 64 * MS, own_ns))


def test_without_promises_only_the_ceiling_bounds() -> None:
    """Whatever decodes."""
    bound = StepBound(ceiling_ns=7.0 * MS)
    bound.end_prefill(2.0 * MS, 9, None)
    assert bound.longest_ns == 7 * MS


def test_nobody_open_means_no_promise() -> None:
    """An empty batch."""
    assert open_promises((), 0, 1.0) == {}
