"""The tokenizer inside a GGUF file, made tokenizer.json."""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from cloud.engine.errors import CheckpointError
from cloud.engine.gguf_metadata import GgufMetadata

__all__ = ["write_tokenizer"]

# Kinds of tokens: `llama_token_type` in llama.cpp's llama.h.
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4


def write_tokenizer(metadata: GgufMetadata, folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json (special tokens, chat
    template) to `folder`.

    Raises:
        CheckpointError: a kind of tokenizer that is not known, or damaged.
        OSError: `folder` cannot be written.
    """
    contents = metadata.texts("tokenizer.ggml.tokens")
    tokenizer = _byte_pair_tokenizer(metadata, contents)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = _settings(metadata, contents)
    text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _byte_pair_tokenizer(metadata: GgufMetadata, contents: list[str]) -> tokenizers.Tokenizer:
    """Byte-level BPE that splits as SmolLM's: every digit by itself, the rest by
    GPT-2's pattern (`LLAMA_VOCAB_PRE_TYPE_SMOLLM` in llama.cpp's llama-vocab.cpp).
    """
    kind = metadata.value("tokenizer.ggml.model", str), metadata.value("tokenizer.ggml.pre", str)
    if kind != ("gpt2", "smollm"):
        raise CheckpointError(
            metadata.source, f"tokenizer is {'/'.join(kind)}; only gpt2/smollm can be converted"
        )
    if metadata.get("tokenizer.ggml.add_bos_token"):
        raise CheckpointError(metadata.source, "a SmolLM tokenizer that begins texts is not known")
    vocabulary = {content: token for token, content in enumerate(contents)}
    kinds = metadata.numbers("tokenizer.ggml.token_type")
    if len(vocabulary) != len(contents) or len(kinds) != len(contents):
        raise CheckpointError(metadata.source, "the vocabulary repeats itself, or lacks kinds")
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=_merges(metadata, vocabulary))
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    for content, token_kind in zip(contents, kinds, strict=True):
        if token_kind in (_CONTROL, _USER_DEFINED):
            is_special = token_kind == _CONTROL
            added = AddedToken(content, special=is_special, normalized=False)
            (tokenizer.add_special_tokens if is_special else tokenizer.add_tokens)([added])
        elif token_kind != _NORMAL:
            raise CheckpointError(
                metadata.source, f"token {content!r} is of the unknown kind {token_kind}"
            )
    return tokenizer


def _merges(metadata: GgufMetadata, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    for line in metadata.texts("tokenizer.ggml.merges"):
        left, _, right = line.partition(" ")
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise CheckpointError(metadata.source, f"the merge {line!r} is not of its vocabulary")
        merges.append((left, right))
    return merges


def _settings(metadata: GgufMetadata, contents: list[str]) -> dict[str, Any]:
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    for role, name in roles.items():
        token = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if token is None:
            continue
        if not isinstance(token, int) or not 0 <= token < len(contents):
            raise CheckpointError(metadata.source, f"{name} token {token!r} is not a token")
        settings[f"{role}_token"] = contents[token]
    template = metadata.get("tokenizer.chat_template")
    if template is not None:
        settings["chat_template"] = template
    return settings
