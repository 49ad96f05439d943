"""What is told of a request to a trace collector."""

from dataclasses import dataclass

from headway.outcome import Outcome, Reason

__all__ = ["RequestSpan"]


@dataclass(frozen=True, slots=True)
class RequestSpan:
    """A request that came to its end, or was refused.

    Attributes:
        request_id: of the log.
        label: what its client knows it by, or empty.
        request_class: label of its class.
        tenant: whose it was.
        outcome: how it ended.
        reason: why, where it was not completed.
        total_ns: arrival to end.
        queue_ns: arrival to the first step with it.
        prefill_ns: from there to the first token.
        decode_ns: from there to the end.
        prompt_tokens: of the prompt, cached ones included.
        cached_tokens: of the prompt, found in the prefix cache.
        output_tokens: decoded.
    """

    request_id: str
    label: str
    request_class: str
    tenant: str
    outcome: Outcome
    reason: Reason | None
    total_ns: int
    queue_ns: int = 0
    prefill_ns: int = 0
    decode_ns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
