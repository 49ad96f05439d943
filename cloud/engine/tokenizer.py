"""Text to tokens and back for a checkpoint folder, safe for text from outside."""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import tokenizers
import tokenizers.decoders

from cloud.engine.chat_template import ChatMessage, ChatTemplate, ChatTemplateError
from cloud.engine.errors import CheckpointError
from cloud.engine.model_config import load_model_config

__all__ = [
    "Detokenizer",
    "FolderTokenizer",
    "Tokenizer",
    "action_token_ids",
    "load_tokenizer",
]

# From here on a text takes a millisecond and more.
_LONG_CHARACTERS = 2048
# Characters that Unicode reserves for inside a program; text has no use for them.
_NONCHARACTERS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))


class Detokenizer:
    """Turns output tokens into text as they come, and never splits a character.

    What it has given, put together, is what `Tokenizer.decode` gives for all of
    the tokens at once.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = tokenizers.decoders.DecodeStream(skip_special_tokens=True)
        self._tokens: list[int] = []
        self._num_characters = 0

    def push(self, token: int) -> str:
        """The text that is certain with `token`; empty where a character is incomplete."""
        self._tokens.append(token)
        text = self._stream.step(self._tokenizer, token) or ""
        self._num_characters += len(text)
        return text

    def finish(self) -> str:
        """What was held back: no token comes after this. Bytes that never became
        a character are U+FFFD.
        """
        whole = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        return whole[self._num_characters :]


class Tokenizer(Protocol):
    """What the product needs of a model's tokenizer.

    The ids with which a model ends its answer are `ModelConfig.eos_tokens`.
    """

    @property
    def vocabulary_tokens(self) -> int:
        """How many ids there are; the model's own vocabulary may be padded beyond."""

    @property
    def longest_token(self) -> int:
        """Characters of the longest token: a text of n has n / longest tokens at least."""

    def token_id(self, content: str) -> int | None:
        """The id of the token with exactly this content, if there is one."""

    def last_text_ids(self, count: int) -> tuple[int, ...]:
        """The `count` highest ids that are no special tokens, the highest first;
        fewer where there are no more.
        """

    def encode(self, text: str) -> tuple[int, ...]:
        """The ids of a prompt, with whatever the model wants at its start.

        What looks like a special token in `text` is plain text: nobody can
        write an end of text or an action into a prompt.
        """

    def encode_chat(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        """The ids of a conversation, up to where the model's answer begins.

        Special tokens come from the template alone, never from a message.

        Raises:
            ChatTemplateError: there is no template, or it refuses the messages.
        """

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`, without special tokens."""

    def detokenizer(self) -> Detokenizer:
        """For one output that comes token by token."""


class FolderTokenizer:
    """The `Tokenizer` of a checkpoint folder. Safe to share between threads."""

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, template: ChatTemplate | None = None
    ) -> None:
        # Special tokens are then found only where this class looks for them.
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        self._template = template
        self._special_ids = {
            added.content: token
            for token, added in tokenizer.get_added_tokens_decoder().items()
            if added.special
        }
        # Longest first, so that a name that begins with another one is found.
        names = sorted(self._special_ids, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        self.longest_token = max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=1)

    @property
    def vocabulary_tokens(self) -> int:
        """How many ids there are."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def token_id(self, content: str) -> int | None:
        """The id of the token with exactly this content, if there is one."""
        return self._tokenizer.token_to_id(content)

    def last_text_ids(self, count: int) -> tuple[int, ...]:
        """The highest ids that are no special tokens; see `Tokenizer.last_text_ids`."""
        ids = set(self._tokenizer.get_vocab(with_added_tokens=True).values())
        return tuple(sorted(ids.difference(self._special_ids.values()), reverse=True)[:count])

    def encode(self, text: str) -> tuple[int, ...]:
        """The ids of a prompt; see `Tokenizer.encode`."""
        if len(text) < _LONG_CHARACTERS:
            return tuple(self._tokenizer.encode(text).ids)
        # Of the library's ways this one alone lets other threads run meanwhile.
        return tuple(self._tokenizer.encode_batch_fast([text])[0].ids)

    def encode_chat(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        """The ids of a conversation; see `Tokenizer.encode_chat`."""
        if self._template is None:
            raise ChatTemplateError(
                "the model has no chat template: send it a plain prompt, "
                "or take a model that was trained to follow instructions"
            )
        guard = _absent_character(message.content for message in messages)
        text = self._template.render(
            [ChatMessage(m.role, self._guarded(m.content, guard)) for m in messages]
        )
        tokens: list[int] = []
        start = 0
        for match in self._special.finditer(text):
            tokens += self._encode_part(text[start : match.start()], guard)
            tokens.append(self._special_ids[match[0]])
            start = match.end()
        return (*tokens, *self._encode_part(text[start:], guard))

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`, without special tokens."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)

    def detokenizer(self) -> Detokenizer:
        """For one output that comes token by token."""
        return Detokenizer(self._tokenizer)

    def _guarded(self, content: str, guard: str) -> str:
        """`content` with the names of special tokens broken by `guard`."""
        return self._special.sub(lambda match: match[0][0] + guard + match[0][1:], content)

    def _encode_part(self, text: str, guard: str) -> list[int]:
        return self._tokenizer.encode(text.replace(guard, ""), add_special_tokens=False).ids


def load_tokenizer(folder: Path) -> FolderTokenizer:
    """The tokenizer of a checkpoint folder, with its chat template.

    Args:
        folder: holds tokenizer.json, and where the model has them
            tokenizer_config.json and chat_template.jinja.

    Raises:
        CheckpointError: a file is missing or malformed, or the tokenizer has more
            tokens than the model of the folder's config.json.
        ChatTemplateError: the template is malformed.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(path, "no such file; expected a Hugging Face tokenizer")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # The library raises nothing narrower.
        raise CheckpointError(path, f"is not a tokenizer ({error})") from error
    _check_vocabulary(path, tokenizer)
    settings = _read_settings(folder / "tokenizer_config.json")
    source = _template_source(folder, settings)
    template = None if source is None else ChatTemplate(source, _special_token_names(settings))
    return FolderTokenizer(tokenizer, template)


def _check_vocabulary(path: Path, tokenizer: tokenizers.Tokenizer) -> None:
    if not path.with_name("config.json").is_file():
        return
    num_known = load_model_config(path.parent).vocabulary_tokens
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    if highest >= num_known:
        raise CheckpointError(
            path,
            f"has tokens up to id {highest:,}, the model in config.json knows {num_known:,}; "
            "expected the tokenizer that came with the model",
        )


def action_token_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids of the action tokens `<act_000>`, `<act_001>`, … in order; empty
    where the model has none.
    """
    ids: list[int] = []
    while (token := tokenizer.token_id(f"<act_{len(ids):03d}>")) is not None:
        ids.append(token)
    return tuple(ids)


def _absent_character(texts: Iterable[str]) -> str:
    """A character that stands in none of `texts`."""
    used = set().union(*texts)
    for character in _NONCHARACTERS:
        if character not in used:
            return character
    raise ChatTemplateError("a message holds all of Unicode's noncharacters; it must be text")


def _read_settings(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; empty where there is no such file."""
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(path, f"cannot be read as JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(path, "expected a JSON object")
    return value


def _special_token_names(settings: dict[str, Any]) -> dict[str, str]:
    """Special tokens by role ("eos_token"); older files hold an object for each."""
    names: dict[str, str] = {}
    for role in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = settings.get(role)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            names[role] = content
    return names


def _template_source(folder: Path, settings: dict[str, Any]) -> str | None:
    """The chat template: a file of its own, or in tokenizer_config.json, there
    also as one of several by name.
    """
    own_file = folder / "chat_template.jinja"
    if own_file.is_file():
        return own_file.read_text(encoding="utf-8")
    value = settings.get("chat_template")
    if isinstance(value, list):
        value = next((t.get("template") for t in value if t.get("name") == "default"), None)
    return value if isinstance(value, str) else None
