"""What an executor must know of each request, and the check of plans against it.

Needs no torch: the simulated executor holds plans to the same rules.
"""

from dataclasses import dataclass

from cloud.engine.api import EngineDescription, EngineRequest
from cloud.engine.errors import PlanError
from cloud.scheduler.types import ScheduledItem

__all__ = ["LiveRequest", "LiveRequests"]


@dataclass(slots=True)
class LiveRequest:
    """A request between its first step and its end."""

    request: EngineRequest
    tokens: list[int]  # Prompt, then own outputs: what a preempted request computes anew.
    num_rows: int = 0  # Of KV memory, in its block table.

    @property
    def num_outputs(self) -> int:
        """Output tokens so far."""
        return len(self.tokens) - len(self.request.prompt)


class LiveRequests:
    """The requests that were opened and not closed."""

    def __init__(self, description: EngineDescription) -> None:
        self._description = description
        self._live: dict[str, LiveRequest] = {}

    def __getitem__(self, request_id: str) -> LiveRequest:
        """A live request."""
        return self._live[request_id]

    def open(self, request: EngineRequest) -> None:
        """Makes a request known.

        Raises:
            PlanError: its id is known already, or a token is outside the vocabulary.
        """
        vocabulary = self._description.vocabulary_tokens
        if request.request_id in self._live:
            raise PlanError(f"request {request.request_id} was opened before")
        for tokens in (request.prompt, request.outputs, request.sampling.allowed_tokens):
            if tokens and not 0 <= min(tokens) <= max(tokens) < vocabulary:
                raise PlanError(
                    f"request {request.request_id} has tokens from {min(tokens)} to "
                    f"{max(tokens)}; the vocabulary has {vocabulary}"
                )
        self._live[request.request_id] = LiveRequest(request, [*request.prompt, *request.outputs])

    def close(self, request_id: str) -> None:
        """Forgets a request. An unknown one is no error."""
        self._live.pop(request_id, None)

    def extend(self, item: ScheduledItem) -> LiveRequest:
        """Takes an item's blocks in and checks that it can be computed.

        Raises:
            PlanError: the item contradicts what is known of its request.
        """
        name, blocks = item.request_id, item.new_blocks
        live = self._live.get(name)
        if live is None:
            raise PlanError(f"request {name} was never opened, or is closed")
        if item.resets_table:
            live.num_rows = 0
        if blocks:
            if not 0 <= min(blocks) <= max(blocks) < self._description.num_blocks:
                raise PlanError(
                    f"request {name} was given blocks {blocks}; "
                    f"there are {self._description.num_blocks}"
                )
            live.num_rows += len(blocks) * self._description.block_tokens
        end = item.context_tokens + item.num_tokens
        if item.num_tokens < 1 or end > live.num_rows or end > len(live.tokens):
            raise PlanError(
                f"request {name} is to compute {item.num_tokens} tokens after "
                f"{item.context_tokens}; it has {len(live.tokens)}, "
                f"and KV rows for {live.num_rows}"
            )
        if end > self._description.max_context_tokens:
            raise PlanError(
                f"request {name} would have {end} tokens; "
                f"the context holds {self._description.max_context_tokens}"
            )
        if item.samples and end != len(live.tokens):
            raise PlanError(f"request {name} is to sample after token {end} of {len(live.tokens)}")
        return live
