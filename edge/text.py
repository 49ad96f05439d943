"""Text that is streamed to people and planners."""

from dataclasses import dataclass
from enum import Enum

from edge.action import Timings

__all__ = ["FinishReason", "GenerateSummary", "TextPiece"]


class FinishReason(Enum):
    """Why a text ended."""

    STOP = "stop"  # The model ended it, or a stop string was reached.
    LENGTH = "length"  # max_tokens was reached.


@dataclass(frozen=True, slots=True)
class GenerateSummary:
    """What a text took."""

    finish_reason: FinishReason
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int  # Of the prompt, held by the prefix cache.
    timings: Timings
    model: str


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text since the last piece; the last piece of a stream has the summary."""

    text: str
    summary: GenerateSummary | None = None
