"""Chooses output tokens. A choice depends on the request's own logits, seed and
output index alone, never on what else is in the step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cloud.engine.api import Sampling
from cloud.engine.seeded import uniform

__all__ = ["Draw", "sample"]


@dataclass(frozen=True, slots=True)
class Draw:
    """One token to choose."""

    sampling: Sampling
    index: int  # Of the output token; 0 for the first.
    # `sampling.allowed_tokens` as int64 [n]; None: all are allowed.
    allowed: Tensor | None = None


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """Chooses one token per row.

    Args:
        logits: float32 [n, vocabulary].
        draws: one per row.
    """
    tokens = [0] * len(draws)
    for rows, allowed, is_greedy in _groups(draws):
        picked = logits if len(rows) == len(draws) else logits[rows]
        if allowed is not None:
            picked = picked.index_select(1, allowed)
        chosen = _largest(picked) if is_greedy else _nucleus(picked, [draws[row] for row in rows])
        if allowed is not None:
            chosen = allowed[chosen]
        for row, token in zip(rows, chosen.tolist(), strict=True):
            tokens[row] = token
    return tokens


def _groups(draws: Sequence[Draw]) -> list[tuple[list[int], Tensor | None, bool]]:
    """Rows that can be chosen together: same allowed set, all greedy or none."""
    groups: dict[tuple[int, bool], tuple[list[int], Tensor | None, bool]] = {}
    for row, draw in enumerate(draws):
        is_greedy = draw.sampling.temperature == 0
        # Equal sets are one tensor (see TorchExecutor), so identity will do.
        group = groups.setdefault((id(draw.allowed), is_greedy), ([], draw.allowed, is_greedy))
        group[0].append(row)
    return list(groups.values())


def _largest(logits: Tensor) -> Tensor:
    """Index of each row's largest value, the first of equals, int64 [n]."""
    if logits.device.type != "cpu":
        return logits.argmax(dim=-1)
    # numpy's is ten times as quick as torch's on a CPU.
    return torch.from_numpy(logits.numpy().argmax(axis=-1))


def _nucleus(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Inverse-transform sampling from the smallest set of likeliest tokens
    whose probability reaches top_p (Holtzman et al., ICLR'20, §3.1).
    """

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=logits.device).unsqueeze(1)

    temperature = column([draw.sampling.temperature for draw in draws])
    top_p = column([draw.sampling.top_p for draw in draws])
    point = column([uniform(draw.sampling.seed, draw.index) for draw in draws])
    # Stable: among equals the smallest id comes first, as argmax has it.
    probabilities, order = torch.sort(
        torch.softmax(logits / temperature, dim=-1), dim=-1, descending=True, stable=True
    )
    before = probabilities.cumsum(dim=-1) - probabilities
    kept = torch.where(before < top_p, probabilities, torch.zeros_like(probabilities))
    kept[:, 0] = probabilities[:, 0]  # The likeliest always counts, whatever top_p.
    upto = kept.cumsum(dim=-1)
    position = torch.searchsorted(upto, point * upto[:, -1:], right=True)
    # Rounding must not pick a token outside the nucleus.
    position = torch.minimum(position, (kept > 0).sum(dim=-1, keepdim=True) - 1)
    return order.gather(1, position).squeeze(1)
