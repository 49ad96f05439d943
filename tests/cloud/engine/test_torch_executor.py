"""How a request is cut, mixed, preempted or swapped never changes its tokens."""

from pathlib import Path

import pytest
import torch

from cloud.engine.api import EngineRequest, Sampling
from cloud.engine.errors import EngineError, PlanError
from cloud.engine.torch_executor import TorchExecutor
from cloud.scheduler.types import ScheduledItem, StepPlan
from tests.support.executor_driver import ExecutorDriver

_SAMPLED = Sampling(temperature=0.9, top_p=0.9, seed=11)


def _prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(torch.randint(0, 514, (length,), generator=_generator(seed)).tolist())


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _load(folder: Path, *, num_swap_blocks: int = 0) -> TorchExecutor:
    return TorchExecutor.load(
        folder, num_blocks=64, block_tokens=8, num_swap_blocks=num_swap_blocks
    )


@pytest.fixture
def driver(tiny_folder: Path) -> ExecutorDriver:
    """Drives a fresh executor of the tiny model."""
    return ExecutorDriver(_load(tiny_folder))


def test_a_prompt_cut_anywhere_gives_the_same_logits_and_tokens(driver: ExecutorDriver) -> None:
    """Every boundary of a 21-token prompt equals the whole prefill to 1e-4."""
    executor = driver.executor
    assert isinstance(executor, TorchExecutor)
    prompt = _prompt(21)
    driver.open(EngineRequest("whole", prompt))
    whole = executor.step_logits(driver.plan([("whole", 21)]), driver.take_opened())
    driver.close("whole")
    tokens = driver.generate(EngineRequest("tokens", prompt), 4)

    for cut in range(1, 21):
        name = f"cut at {cut}"
        driver.open(EngineRequest(name, prompt))
        driver.step((name, cut))
        plan = driver.plan([(name, 21 - cut)])
        logits = executor.step_logits(plan, driver.take_opened())
        torch.testing.assert_close(logits, whole, atol=1e-4, rtol=0)
        driver.outputs[name].extend(o.token for o in executor.execute(plan, []).outputs)
        for _ in range(3):
            driver.step((name, 1))
        driver.close(name)
        assert driver.outputs[name] == tokens, name


def test_tokens_do_not_depend_on_what_else_is_in_the_step(tiny_folder: Path) -> None:
    """Five requests of all kinds, mixed and chunked, give what each gives alone."""
    requests = [
        EngineRequest("greedy", _prompt(30, 1)),
        EngineRequest("sampled", _prompt(9, 2), _SAMPLED),
        EngineRequest("same seed", _prompt(9, 3), _SAMPLED),
        EngineRequest("actions", _prompt(50, 4), Sampling(allowed_tokens=tuple(range(258, 514)))),
        EngineRequest("late", _prompt(17, 5), Sampling(temperature=1.5, seed=-4)),
    ]
    alone = {
        request.request_id: ExecutorDriver(_load(tiny_folder)).generate(request, 8)
        for request in requests
    }
    driver = ExecutorDriver(_load(tiny_folder), seed=1)
    for request in requests[:4]:
        driver.open(request)

    driver.step(("greedy", 12), ("sampled", 9), ("same seed", 4))
    driver.step(("actions", 20), ("sampled", 1), ("greedy", 18), ("same seed", 5))
    driver.open(requests[4])
    driver.step(("late", 16), ("actions", 29), ("sampled", 1))
    driver.step(("greedy", 1), ("late", 1), ("actions", 1))
    while shares := [(name, 1) for name in alone if len(driver.outputs[name]) < 8]:
        driver.step(*shares)

    assert driver.outputs == alone


@pytest.mark.parametrize("sampling", [Sampling(), _SAMPLED], ids=["greedy", "sampled"])
def test_a_recomputed_request_goes_on_as_if_it_had_not_been_preempted(
    driver: ExecutorDriver, sampling: Sampling
) -> None:
    """Prompt and own outputs are recomputed in chunks; its KV rows are others'."""
    expected = driver.generate(EngineRequest("undisturbed", _prompt(20), sampling), 10)
    driver.open(EngineRequest("a", _prompt(20), sampling))
    driver.step(("a", 20))
    for _ in range(4):
        driver.step(("a", 1))

    driver.preempt("a")
    driver.generate(EngineRequest("usurper", _prompt(90, 9)), 3)
    driver.step(("a", 11))
    driver.step(("a", 14))
    for _ in range(4):
        driver.step(("a", 1))

    assert driver.outputs["a"] == expected


@pytest.mark.parametrize("sampling", [Sampling(), _SAMPLED], ids=["greedy", "sampled"])
def test_a_request_that_moves_goes_on_as_if_it_had_stayed(
    driver: ExecutorDriver, tiny_folder: Path, sampling: Sampling
) -> None:
    """Another engine is told what it gave so far, and counts that: seeds go by the index."""
    expected = driver.generate(EngineRequest("undisturbed", _prompt(20), sampling), 10)
    elsewhere = ExecutorDriver(_load(tiny_folder), seed=1)
    elsewhere.open(EngineRequest("a", _prompt(20), sampling, outputs=tuple(expected[:4])))
    elsewhere.step(("a", 11))
    elsewhere.step(("a", 13))
    for _ in range(5):
        elsewhere.step(("a", 1))
    assert elsewhere.outputs["a"] == expected


def test_swapped_kv_comes_back_as_it_was(tiny_folder: Path) -> None:
    """A request whose blocks went to host memory and back elsewhere goes on unchanged."""
    driver = ExecutorDriver(_load(tiny_folder, num_swap_blocks=4))
    expected = driver.generate(EngineRequest("undisturbed", _prompt(20)), 8)
    driver.open(EngineRequest("a", _prompt(20)))
    driver.step(("a", 20))
    blocks = list(driver.blocks("a"))
    host = [3, 0, 2]

    driver.step(swap_out=tuple(zip(blocks, host, strict=True)))
    driver.free_blocks = blocks + driver.free_blocks
    for block in blocks:  # Somebody else's KV lands in each of them.
        driver.free_blocks.remove(block)
        driver.free_blocks.append(block)
    driver.generate(EngineRequest("usurper", _prompt(90, 9)), 2)
    elsewhere = [driver.free_blocks.pop(0) for _ in blocks]
    driver.replace_blocks("a", elsewhere)
    driver.step(("a", 1), swap_in=tuple(zip(host, elsewhere, strict=True)))
    for _ in range(6):
        driver.step(("a", 1))

    assert driver.outputs["a"] == expected


def test_a_shared_prefix_is_read_from_the_other_requests_blocks(driver: ExecutorDriver) -> None:
    """A request that starts behind cached blocks gives what it gives without them."""
    prompt = _prompt(24)
    expected = driver.generate(EngineRequest("alone", prompt), 1)
    driver.open(EngineRequest("owner", (*prompt[:16], 1, 2, 3)))
    driver.step(("owner", 19))
    shared = tuple(driver.blocks("owner")[:2])
    fresh = driver.free_blocks.pop()
    item = ScheduledItem("reader", 16, 8, True, True, (*shared, fresh), True)

    result = driver.executor.execute(
        StepPlan("r0", driver.step_id + 1, (item,)), [EngineRequest("reader", prompt)]
    )

    assert [output.token for output in result.outputs] == expected


def test_a_stop_token_is_reported_and_given(driver: ExecutorDriver) -> None:
    """The token that a run ends with is flagged where it is a stop token."""
    tokens = driver.generate(EngineRequest("a", _prompt(10), _SAMPLED), 6)
    stopping = Sampling(0.9, 0.9, 11, stop_tokens=(tokens[3],))
    driver.open(EngineRequest("b", _prompt(10), stopping))
    driver.step(("b", 10))
    while "b" not in driver.stopped:
        driver.step(("b", 1))

    assert driver.outputs["b"] == tokens[: tokens.index(tokens[3]) + 1]


def test_only_allowed_tokens_are_given(driver: ExecutorDriver) -> None:
    """Greedy and hot sampling alike stay inside the set, and greedy takes its best."""
    allowed = (300, 17, 411)
    executor = driver.executor
    assert isinstance(executor, TorchExecutor)
    driver.open(EngineRequest("a", _prompt(10), Sampling(allowed_tokens=allowed)))
    plan = driver.plan([("a", 10)])
    logits = executor.step_logits(plan, driver.take_opened())[0]
    [output] = executor.execute(plan, []).outputs

    assert output.token == max(allowed, key=lambda token: float(logits[token]))
    hot = Sampling(temperature=5.0, allowed_tokens=allowed)
    assert set(driver.generate(EngineRequest("hot", _prompt(10), hot), 30)) == set(allowed)


def test_bfloat16_stays_close_to_float32(tiny_folder: Path) -> None:
    """Logits differ by bfloat16's precision (8 bits), not more."""
    logits = {}
    for dtype in (torch.float32, torch.bfloat16):
        driver = ExecutorDriver(TorchExecutor.load(tiny_folder, dtype=dtype, num_blocks=16))
        driver.open(EngineRequest("a", _prompt(40)))
        driver.step(("a", 25))
        assert isinstance(driver.executor, TorchExecutor)
        logits[dtype] = driver.executor.step_logits(driver.plan([("a", 15)]), [])

    spread = float(logits[torch.float32].std())
    error = float((logits[torch.bfloat16] - logits[torch.float32]).abs().max())
    assert 0 < error < 0.1 * spread


def test_an_empty_step_gives_nothing(driver: ExecutorDriver) -> None:
    """A plan without items is legal."""
    assert driver.step().outputs == ()


_A = EngineRequest("a", (1, 2, 3))
_WRONG_PLANS: dict[str, tuple[ScheduledItem, EngineRequest]] = {
    "never opened": (ScheduledItem("b", 0, 3, True, True, (0,), True), _A),
    "has tokens from -1": (
        ScheduledItem("a", 0, 3, True, True, (0,), True),
        EngineRequest("a", (1, -1, 3)),
    ),
    "the vocabulary has 514": (
        ScheduledItem("a", 0, 3, True, True, (0,), True),
        EngineRequest("a", (1, 2), Sampling(allowed_tokens=(514,))),
    ),
    "KV rows for 0": (ScheduledItem("a", 0, 3, True, True, (), True), _A),
    "was given blocks": (ScheduledItem("a", 0, 3, True, True, (64,), True), _A),
    "adapter act is not loaded": (
        ScheduledItem("a", 0, 3, True, True, (0,), True),
        EngineRequest("a", (1, 2, 3), adapter="act"),
    ),
    "the context holds 512": (
        ScheduledItem("a", 0, 513, True, True, (*range(64), 0), True),
        EngineRequest("a", (1,) * 513),
    ),
    "it has 3": (ScheduledItem("a", 0, 4, True, False, (0,), True), _A),
    "to compute 0 tokens": (ScheduledItem("a", 0, 0, True, False, (0,), True), _A),
    "to sample after token 2 of 3": (ScheduledItem("a", 0, 2, True, True, (0,), True), _A),
}


@pytest.mark.parametrize("problem", _WRONG_PLANS)
def test_a_plan_that_contradicts_the_executors_state_is_refused(
    tiny_folder: Path, problem: str
) -> None:
    """Each contradiction is named in one line, before anything is computed."""
    item, request = _WRONG_PLANS[problem]
    with pytest.raises(PlanError, match=problem):
        _load(tiny_folder).execute(StepPlan("r0", 1, (item,)), [request])


def test_a_closed_request_is_forgotten(driver: ExecutorDriver) -> None:
    """Its id can be used again, and not without opening it."""
    driver.generate(EngineRequest("a", _prompt(5)), 1)
    driver.open(EngineRequest("a", _prompt(5)))
    driver.step(("a", 5))
    driver.open(EngineRequest("a", _prompt(5)))
    with pytest.raises(PlanError, match="was opened before"):
        driver.step(("a", 5))


def test_more_kv_than_there_is_memory_is_refused(tiny_folder: Path) -> None:
    """The line says what is free and how many blocks would fit."""
    with pytest.raises(EngineError, match=r"GiB is free; ask for at most [\d,]+ blocks"):
        TorchExecutor.load(tiny_folder, num_blocks=2**40)


def test_a_longer_context_than_the_models_is_refused(tiny_folder: Path) -> None:
    """Positions beyond the model's own limit would give nonsense."""
    with pytest.raises(EngineError, match=r"is 5,000, the model in .* goes to 4,096"):
        TorchExecutor.load(tiny_folder, num_blocks=1000, max_context_tokens=5000)
