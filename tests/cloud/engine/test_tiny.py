"""The tiny checkpoint, and the commands around it."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from cloud.engine.command import model
from cloud.engine.errors import CheckpointError, EngineError
from cloud.engine.model_config import load_model_config
from cloud.engine.tiny import write_tiny_checkpoint
from cloud.engine.tokenizer import action_token_ids, load_tokenizer


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    """And another seed another model."""
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_tiny_checkpoint(tmp_path / name, seed=seed)
    a, b, c = ((tmp_path / n / "model.safetensors").read_bytes() for n in "abc")
    assert a == b != c
    assert load_model_config(tmp_path / "a").is_untrained


def test_every_byte_is_a_token_and_comes_back(tiny_folder: Path) -> None:
    """UTF-8 bytes are the ids, and decoding gives the text back."""
    tokenizer = load_tokenizer(tiny_folder)
    text = "go to dock 3 — größe ≥ 2 m 🤖\n"
    tokens = tokenizer.encode(text)
    assert tokens == tuple(text.encode())
    assert tokenizer.decode(tokens) == text


def test_no_text_gives_a_special_token(tiny_folder: Path) -> None:
    """Names of action tokens in a prompt are spelled out in bytes."""
    tokenizer = load_tokenizer(tiny_folder)
    assert max(tokenizer.encode("<act_000><|eos|> <act_255>")) < 256
    assert action_token_ids(tokenizer) == tuple(range(258, 514))


def test_the_command_writes_a_model_that_its_check_accepts(tmp_path: Path) -> None:
    """`headway model tiny` and `headway model check` agree."""
    folder = str(tmp_path / "demo")
    runner = CliRunner()
    made = runner.invoke(model, ["tiny", folder], catch_exceptions=False)
    checked = runner.invoke(model, ["check", folder], catch_exceptions=False)
    assert made.output == f"Wrote an untrained model to {folder}\n"
    assert checked.output.splitlines()[0] == (
        "demo: LlamaForCausalLM, 1.7 M parameters, 4 layers, context 4,096 tokens, "
        "vocabulary 514, 256 action tokens, untrained (random weights)"
    )


def test_the_command_overwrites_nothing(tiny_folder: Path) -> None:
    """A folder with anything in it is left alone."""
    with pytest.raises(EngineError, match="not empty; name a new folder"):
        CliRunner().invoke(model, ["tiny", str(tiny_folder)], catch_exceptions=False)


def test_the_check_reports_what_is_wrong(tmp_path: Path) -> None:
    """As an error that the command line prints as one line."""
    with pytest.raises(CheckpointError, match="cannot be read"):
        CliRunner().invoke(model, ["check", str(tmp_path)], catch_exceptions=False)
