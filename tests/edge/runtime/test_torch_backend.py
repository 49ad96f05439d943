"""The scene decoder however it is cut, against one written from the formulas."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from edge.runtime.backend import BackendError
from edge.runtime.shapes import ControlShape, SceneShape
from edge.runtime.torch_backend import TorchBackend
from edge.runtime.torch_models import SceneDecoder, SceneWeights, merge_by_lse

SHAPE = SceneShape(vocabulary=97, width=32, layers=2, heads=4, kv_heads=2, hidden=48, max_tokens=64)
WEIGHTS = SceneWeights.random(SHAPE, seed=3)


def reference(tokens: Tensor) -> Tensor:
    """The whole scene in float64, a token pair at a time, as the papers write it.

    RMSNorm: Zhang and Sennrich 2019; rotary positions: Su et al. 2021, eq. 34; attention:
    Vaswani et al. 2017, eq. 1; SwiGLU: Shazeer 2020.
    """

    def norm(rows: Tensor) -> Tensor:
        return rows / (rows.square().mean(-1, keepdim=True) + SHAPE.epsilon).sqrt()

    width, half = SHAPE.head_width, SHAPE.head_width // 2

    def rotate(head: Tensor, position: int) -> Tensor:
        turned = head.clone()
        for i in range(half):
            angle = position * SHAPE.rope_theta ** (-i / half)
            a, b = head[i], head[i + half]
            turned[i] = a * math.cos(angle) - b * math.sin(angle)
            turned[i + half] = b * math.cos(angle) + a * math.sin(angle)
        return turned

    hidden = WEIGHTS.embedding.double()[tokens]
    for layer in WEIGHTS.layers:
        rows = (norm(hidden) @ layer.qkv.double().T).view(len(tokens), -1, width)
        out = torch.zeros(len(tokens), SHAPE.heads, width, dtype=torch.float64)
        for head in range(SHAPE.heads):
            shared = head * SHAPE.kv_heads // SHAPE.heads
            keys = [rotate(row, at) for at, row in enumerate(rows[:, SHAPE.heads + shared])]
            values = rows[:, SHAPE.heads + SHAPE.kv_heads + shared]
            for at in range(len(tokens)):
                query = rotate(rows[at, head], at)
                scores = torch.stack([query @ key for key in keys[: at + 1]]) / math.sqrt(width)
                out[at, head] = scores.softmax(0) @ values[: at + 1]
        hidden = hidden + out.reshape(len(tokens), -1) @ layer.out.double().T
        gate, up = (norm(hidden) @ layer.gate_up.double().T).chunk(2, dim=-1)
        hidden = hidden + (gate * torch.sigmoid(gate) * up) @ layer.down.double().T
    return norm(hidden)


TOKENS = torch.randint(0, SHAPE.vocabulary, (40,), generator=torch.Generator().manual_seed(1))
EXPECTED = reference(TOKENS)


def test_one_go_is_what_the_papers_say() -> None:
    """Every position's output, to 1e-4."""
    found = SceneDecoder(WEIGHTS).chunk(TOKENS, 0)
    torch.testing.assert_close(found.double(), EXPECTED, atol=1e-4, rtol=0)


@settings(max_examples=60, deadline=None)
@given(st.sets(st.integers(1, 39), max_size=8))
def test_however_it_is_cut_it_is_the_same(cuts: set[int]) -> None:
    """A later chunk with the upper-left mask would see too little of what came before."""
    decoder = SceneDecoder(WEIGHTS)
    bounds = [0, *sorted(cuts), 40]
    found = [decoder.chunk(TOKENS[a:b], a) for a, b in itertools.pairwise(bounds)]
    torch.testing.assert_close(torch.cat(found).double(), EXPECTED, atol=1e-4, rtol=0)


def test_a_chunk_that_failed_can_be_computed_again() -> None:
    """What it left in memory is written over."""
    decoder = SceneDecoder(WEIGHTS)
    decoder.chunk(TOKENS[:16], 0)
    decoder.chunk(torch.zeros(24, dtype=torch.int64), 16)
    found = decoder.chunk(TOKENS[16:], 16)
    torch.testing.assert_close(found.double(), EXPECTED[16:], atol=1e-4, rtol=0)


def test_a_scene_after_another_one_knows_nothing_of_it() -> None:
    """The memory is the same, the scene is new."""
    decoder = SceneDecoder(WEIGHTS)
    decoder.chunk(torch.zeros(64, dtype=torch.int64), 0)
    torch.testing.assert_close(decoder.chunk(TOKENS, 0).double(), EXPECTED, atol=1e-4, rtol=0)


def test_two_parts_of_attention_are_merged_exactly() -> None:
    """Softmax over two sets of scores, from each one's own."""
    generator = torch.Generator().manual_seed(5)
    scores = torch.randn(2, 3, 7, generator=generator) * 4
    values = torch.randn(2, 7, 8, generator=generator)
    whole = scores.softmax(-1) @ values
    parts = [
        scores[..., :3].softmax(-1) @ values[:, :3],
        scores[..., 3:].softmax(-1) @ values[:, 3:],
    ]
    lse = [scores[..., :3].logsumexp(-1), scores[..., 3:].logsumexp(-1)]
    torch.testing.assert_close(merge_by_lse(parts[0], lse[0], parts[1], lse[1]), whole)


def test_the_backend_gives_the_last_state_to_control() -> None:
    """Only at the end; the commands depend on it."""
    backend = TorchBackend.random(SHAPE, ControlShape(inputs=4, hidden=16, layers=2, outputs=3))
    tokens = TOKENS.tolist()
    assert backend.prefill(tokens[:16], 0, 16, is_last=False) is None
    scene = backend.prefill(tokens[16:], 16, 32, is_last=True)
    assert scene is not None
    before, after = backend.control((1.0, 2.0), None), backend.control((1.0, 2.0), scene)
    assert len(before) == len(after) == 3
    assert before != after
    assert backend.control((1.0, 2.0), None) == before
    assert all(-1 <= value <= 1 for value in after)


def test_what_the_models_cannot_take_is_one_line() -> None:
    """A token beyond the vocabulary, a scene beyond the memory, too many values."""
    backend = TorchBackend.random(SHAPE, ControlShape(inputs=4))
    for call in (
        lambda: backend.prefill([97], 0, 16, is_last=True),
        lambda: backend.prefill([1] * 2, 63, 16, is_last=True),
        lambda: backend.control((0.0,) * 5, None),
    ):
        with pytest.raises(BackendError) as caught:
            call()
        assert "\n" not in caught.value.message


def test_a_model_is_known_by_its_numbers() -> None:
    """The digest changes with any weight and with the shape."""
    same = SceneWeights.random(SHAPE, seed=3)
    assert same.digest == WEIGHTS.digest
    assert SceneWeights.random(SHAPE, seed=4).digest != WEIGHTS.digest
