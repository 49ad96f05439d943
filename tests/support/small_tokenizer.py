"""A small byte-level tokenizer in a folder, with ChatML's special tokens."""

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

__all__ = ["CHATML", "SPECIAL_TOKENS", "write_small_tokenizer"]

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_small_tokenizer(folder: Path, *, chat_template: str | None = CHATML) -> None:
    """Writes tokenizer.json and tokenizer_config.json: 3 special tokens, then one
    token a byte, then a few merges.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "t"), ("Ã", "©")]
    contents = [*SPECIAL_TOKENS, *alphabet, *(left + right for left, right in merges)]
    model = models.BPE(vocab={c: i for i, c in enumerate(contents)}, merges=merges)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "bos_token": {"content": "<|im_start|>"}}
    if chat_template is not None:
        settings["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
