"""A model's chat template, run as what it is: a program that came with a download."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox

from headway.errors import HeadwayError

__all__ = ["ChatMessage", "ChatTemplate", "ChatTemplateError"]


class ChatTemplateError(HeadwayError):
    """The model has no usable chat template, or it refuses these messages."""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str  # "system", "user" or "assistant".
    content: str


class ChatTemplate:
    """Turns a conversation into the text that a model was trained on.

    The template runs in jinja2's immutable sandbox: it sees the messages, the
    names of the special tokens and nothing else. The environment (trimmed
    blocks, `raise_exception`, `tojson`, loop controls) is the one that
    templates on the Hugging Face hub are written for:
    https://huggingface.co/docs/transformers/chat_templating_writing
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compiles `source`.

        Args:
            source: the template.
            special_tokens: by the names that templates use, such as "bos_token".

        Raises:
            ChatTemplateError: the template is malformed.
        """
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the model's chat template is malformed: {error}") from error

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """The conversation as text, up to where the model's answer begins.

        Raises:
            ChatTemplateError: the template does not accept these messages.
        """
        try:
            return self._template.render(
                messages=[{"role": m.role, "content": m.content} for m in messages],
                add_generation_prompt=True,
                **self._special_tokens,
            )
        # A template may divide by zero, index past an end or overflow: it is a
        # program, and whatever it raises is about it and these messages.
        except Exception as error:
            raise ChatTemplateError(
                f"the model's chat template does not accept these messages: {error}"
            ) from error


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    """As JSON, without the escapes for HTML that jinja2's own filter adds."""
    return json.dumps(value, ensure_ascii=False, indent=indent)
