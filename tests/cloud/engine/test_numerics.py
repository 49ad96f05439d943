"""The engine against transformers and PEFT, in every schedule.

Whatever is done to a request, the logits of each of its output tokens are those
of the reference's one forward pass over prompt and outputs (teacher-forced), to
1e-4; and its greedy token is the reference's wherever the reference's two best
are more than 2e-4 apart.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from cloud.engine.tiny import tiny_config, write_random_checkpoint
from cloud.engine.torch_ops import TorchOps
from tests.support.native import native_ops
from tests.support.numerics import ADAPTERS, BLOCK_TOKENS, Run, Subject, random_prompt

# PEFT asks transformers by a name that is going away; nothing of ours.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

_SMALL: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 96, "intermediate_size": 160}
_SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 48,
        "tie_word_embeddings": False,
    },
}


@pytest.fixture(scope="module", params=[f"{s}-{o}" for s in _SHAPES for o in ("torch", "native")])
def subject(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, kernels: Path
) -> Subject:
    """Each shape of model with two adapters, on torch's operations and on the built ones."""
    shape, ops = request.param.split("-")
    folder = tmp_path_factory.mktemp(shape)
    write_random_checkpoint(folder / "base", tiny_config(**_SMALL, **_SHAPES[shape]), seed=7)
    built = TorchOps() if ops == "torch" else native_ops(torch.float32, kernels)
    return Subject(folder / "base", folder, built)


def test_200_tokens_through_everything_at_once(subject: Subject) -> None:
    """Mixed batches with adapters; one request preempted and recomputed, one
    swapped out and in, one behind another's cached prefix.
    """
    run = Run(subject)
    driver = run.driver
    names = ["plain", "preempted", "swapped", "cached", "act"]
    run.open("plain", random_prompt(50, 1))
    run.open("preempted", random_prompt(37, 2), "summarise")
    run.open("swapped", random_prompt(21, 3))
    run.step(("plain", 20), ("preempted", 37), ("swapped", 4))
    run.step(("swapped", 30), ("plain", 30), ("preempted", 1))
    run.open("cached", (*random_prompt(50, 1)[:24], *random_prompt(9, 4)))
    driver.share_prefix("cached", "plain", 24 // BLOCK_TOKENS)
    run.open("act", random_prompt(64, 5), "act")
    while any(len(driver.outputs[name]) < 200 for name in names):
        num = len(driver.outputs["plain"])
        if num == 40:
            driver.preempt("preempted")
            driver.swap_out("swapped")
        if num == 60:
            driver.swap_in("swapped")
        away = {"preempted", "swapped"} if 40 <= num < 60 else set()
        # Recomputation and new prompts go in chunks of 13 beside the decodes.
        run.step(
            *((name, 13) for name in names if name not in away and len(driver.outputs[name]) < 200)
        )
    assert run.check() > 0.95 * 5 * 200


def test_a_prompt_cut_at_every_boundary(subject: Subject) -> None:
    """Whole, and in two chunks at each of its 20 boundaries; two outputs each."""
    for cut in range(21):
        run = Run(subject, seed=cut)
        run.open("a", random_prompt(21, 6), "act" if cut % 2 else "")
        if cut:
            run.step(("a", cut))
        run.step(("a", 21))
        run.step(("a", 1))
        assert len(run.logits["a"]) == 2
        run.check()


_MOVES = st.sampled_from(["advance", "advance", "advance", "wait", "preempt", "swap"])


# A failing schedule is printed as it was drawn: making it smaller takes minutes.
@settings(
    max_examples=12,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow],
)
@given(data=st.data())
def test_any_schedule_and_any_batch_order(subject: Subject, data: st.DataObject) -> None:
    """Hypothesis decides who is in a step, in which order, with how many tokens,
    who is preempted, who is swapped out and when that one comes back.
    """
    run = Run(subject, seed=data.draw(st.integers(0, 5), "blocks"))
    driver = run.driver
    names = ["a", "b", "c", "d"]
    for seed, name in enumerate(names):
        adapter = data.draw(st.sampled_from(["", *ADAPTERS]), "adapter")
        run.open(name, random_prompt(data.draw(st.integers(1, 40), "prompt"), seed), adapter)
    away: set[str] = set()
    for _ in range(14):
        shares = []
        for name in data.draw(st.permutations(names), "order"):
            move = data.draw(_MOVES, name)
            if name in away:
                if move != "wait":
                    driver.swap_in(name)
                    away.remove(name)
                    shares.append((name, 1))
            elif move == "advance":
                shares.append((name, data.draw(st.integers(1, 20), "tokens")))
            elif move == "preempt":
                driver.preempt(name)
            elif move == "swap" and driver.blocks(name):
                driver.swap_out(name)
                away.add(name)
        run.step(*shares)
    for name in away:
        driver.swap_in(name)
    while missing := [name for name in names if len(driver.outputs[name]) < 3]:
        run.step(*((name, 11) for name in missing))
    run.check()
