"""Choosing tokens: the right odds, and nothing but the own seed and index."""

import math

import pytest
import torch

from cloud.engine.api import Sampling
from cloud.engine.sampling import Draw, sample
from cloud.engine.seeded import uniform

_LOGITS = torch.tensor([0.0, math.log(2), math.log(5), math.log(2)])  # Odds 1 : 2 : 5 : 2.


def _frequencies(sampling: Sampling, *, num: int = 20_000) -> list[float]:
    draws = [Draw(sampling, index) for index in range(num)]
    tokens = sample(_LOGITS.expand(num, -1), draws)
    return [tokens.count(token) / num for token in range(4)]


@pytest.mark.parametrize(
    ("temperature", "top_p", "expected"),
    [
        (1.0, 1.0, [0.1, 0.2, 0.5, 0.2]),
        # Halving the temperature squares the odds: 1 : 4 : 25 : 4.
        (0.5, 1.0, [1 / 34, 4 / 34, 25 / 34, 4 / 34]),
        # The likeliest reaches 0.5 alone; up to 0.7 needs the lower id of the equal two.
        (1.0, 0.5, [0, 0, 1, 0]),
        (1.0, 0.69, [0, 2 / 7, 5 / 7, 0]),
        (1.0, 0.85, [0, 2 / 9, 5 / 9, 2 / 9]),
        (1.0, 1e-9, [0, 0, 1, 0]),
    ],
)
def test_tokens_come_with_the_odds_asked_for(
    temperature: float, top_p: float, expected: list[float]
) -> None:
    """Frequencies over 20,000 draws, within five standard errors."""
    found = _frequencies(Sampling(temperature=temperature, top_p=top_p, seed=5))
    for frequency, odds in zip(found, expected, strict=True):
        assert abs(frequency - odds) <= 5 * math.sqrt(odds * (1 - odds) / 20_000)


def test_a_draw_depends_on_its_seed_and_index_alone() -> None:
    """Neither its row nor its neighbours matter; another seed or index does."""
    hot = Sampling(temperature=2.0, seed=9)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 500, generator=generator)
    draws = [Draw(hot, index) for index in range(64)]
    together = sample(logits, draws)
    backwards = sample(logits.flip(0), draws[::-1])[::-1]
    alone = [sample(logits[i : i + 1], draws[i : i + 1])[0] for i in range(64)]
    assert together == backwards == alone
    assert together != sample(logits, [Draw(Sampling(2.0, seed=10), i) for i in range(64)])
    assert len({uniform(9, index) for index in range(64)}) == 64


def test_greedy_takes_the_first_of_the_likeliest() -> None:
    """Ties go to the smaller id, in mixed batches too."""
    logits = torch.tensor([[1.0, 3.0, 3.0], [9.0, 0.0, 0.0], [1.0, 5.0, 2.0]])
    allowed = torch.tensor([2, 0])
    draws = [
        Draw(Sampling(), 0),
        Draw(Sampling(temperature=1e-4, seed=1), 3),
        Draw(Sampling(allowed_tokens=(2, 0)), 0, allowed),
    ]
    assert sample(logits, draws) == [1, 0, 2]
