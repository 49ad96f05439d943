"""Latest times, and what a person can read of them."""

import pytest

from cloud.server.ledger import quantile


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([], 0.5, 0),
        ([7], 0.5, 7),
        ([7], 0.99, 7),
        ([3, 1, 2], 0.5, 2),
        ([4, 3, 2, 1], 0.5, 2),
        (list(range(1, 101)), 0.99, 99),
        (list(range(1, 1001)), 0.99, 990),
        ([1, 2, 3], 1.0, 3),
    ],
)
def test_quantile_is_the_nearest_rank(values: list[int], share: float, expected: int) -> None:
    """The definition by rank: the smallest value that a share of them does not exceed."""
    assert quantile(values, share) == expected
