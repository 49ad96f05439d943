"""What a driver needs of an engine, whatever it is made of."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cloud.scheduler.types import StepPlan, StepResult
from headway.cost_model import MeasuredStep
from headway.errors import HeadwayError

__all__ = [
    "Engine",
    "EngineDescription",
    "EngineLostError",
    "EngineRequest",
    "Executor",
    "PromptImage",
    "Sampling",
]


class EngineLostError(HeadwayError):
    """The engine is gone, or gave an answer that breaks the step protocol.

    Attributes:
        reason: one line for an operator.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Sampling:
    """How output tokens are chosen."""

    temperature: float = 0.0  # 0 is greedy.
    top_p: float = 1.0
    seed: int = 0
    stop_tokens: tuple[int, ...] = ()
    # Only these may be decoded; empty means all.
    allowed_tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptImage:
    """An image in a prompt."""

    position: int  # Of its first token in the prompt.
    num_tokens: int  # That it takes there: the prompt holds as many placeholders.
    rgb: bytes  # uint8 [height, width, 3].
    height: int
    width: int


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request as the engine sees it."""

    request_id: str
    prompt: tuple[int, ...]  # Token ids.
    sampling: Sampling = Sampling()
    adapter: str = ""
    # What it gave already, on an engine before this one: it goes on from there.
    outputs: tuple[int, ...] = ()
    images: tuple[PromptImage, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineDescription:
    """What an engine is, once it is ready."""

    kind: str  # "torch" or "simulated".
    model: str
    incarnation: str  # Fresh for every start.
    max_context_tokens: int
    block_tokens: int
    num_blocks: int
    vocabulary_tokens: int
    kv_bytes_per_token: int
    num_swap_blocks: int = 0  # Host memory for swapped KV.
    swap_block_ns: float = 0.0  # Measured time to copy a block there or back; 0 without any.
    # Steps measured on this machine, for the fit of the cost model.
    calibration: tuple[MeasuredStep, ...] = ()


class Executor(Protocol):
    """Executes plans, in the process and thread that calls it."""

    def describe(self) -> EngineDescription:
        """What the engine is."""

    def execute(self, plan: StepPlan, opened: Sequence[EngineRequest]) -> StepResult:
        """Executes one step.

        Args:
            plan: what to do; each of its requests was opened in this step or in
                an earlier one, and not closed since.
            opened: requests that are new in this step.
        """


class Engine(Protocol):
    """An executor that can be waited for, wherever it runs."""

    async def start(self) -> EngineDescription:
        """Starts the engine and waits until it is ready.

        Raises:
            EngineLostError: it did not become ready; the reason says why.
        """

    async def execute(self, plan: StepPlan, opened: Sequence[EngineRequest]) -> StepResult:
        """Executes one step. One call at a time.

        Raises:
            EngineLostError: the engine is gone; nothing of the step counts.
        """

    async def stop(self) -> None:
        """Ends the engine and everything that it started. May be called twice."""
