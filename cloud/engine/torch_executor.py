"""Executes step plans with torch."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cloud.engine.api import EngineDescription, EngineRequest
from cloud.engine.attention import lower_right_mask
from cloud.engine.block_table import BlockTable
from cloud.engine.checkpoint import load_weights
from cloud.engine.errors import EngineError, PlanError
from cloud.engine.live_requests import LiveRequest, LiveRequests
from cloud.engine.memory import available_bytes, require_memory
from cloud.engine.model import Model, Segment
from cloud.engine.model_config import load_model_config
from cloud.engine.sampling import Draw, sample
from cloud.scheduler.types import ScheduledItem, StepOutput, StepPlan, StepResult

__all__ = ["TorchExecutor"]


@dataclass(frozen=True, slots=True)
class _Tensors:
    """What a live request has in torch's terms."""

    table: BlockTable
    allowed: Tensor | None


class TorchExecutor:
    """A model, its KV memory, and the requests that it knows.

    Args:
        model: the model to run.
        block_tokens: tokens in one block of KV memory.
        num_blocks: blocks of KV memory, allocated now.
        num_swap_blocks: blocks of host memory for swapped KV, allocated now.

    Raises:
        EngineError: the memory asked for is not there.
    """

    def __init__(
        self, model: Model, *, block_tokens: int, num_blocks: int, num_swap_blocks: int = 0
    ) -> None:
        config, embedding = model.config, model.weights.embedding
        self._model = model
        self._block_tokens = block_tokens
        self._device = embedding.device
        self._dtype = embedding.dtype
        kv_bytes = config.kv_bytes_per_token(embedding.element_size())
        require_memory(
            (num_blocks + num_swap_blocks) * block_tokens * kv_bytes,
            available_bytes(self._device),
            num_blocks=num_blocks + num_swap_blocks,
        )
        # Zeros, not empty: pages are there before the first step needs them,
        # and rows that were never written stay finite.
        shape = (config.layers, num_blocks * block_tokens, 2 * config.kv_heads, config.head_dim)
        self._kv = torch.zeros(shape, dtype=self._dtype, device=self._device)
        host_shape = (config.layers, num_swap_blocks * block_tokens, *shape[2:])
        self._host_kv = torch.zeros(host_shape, dtype=self._dtype)
        self._layers_kv = list(self._kv.unbind())
        self._tensors: dict[str, _Tensors] = {}
        self._allowed_sets: dict[tuple[int, ...], Tensor] = {}
        self._description = EngineDescription(
            kind="torch",
            model=config.name,
            incarnation=uuid.uuid4().hex,
            max_context_tokens=model.max_context_tokens,
            block_tokens=block_tokens,
            num_blocks=num_blocks,
            vocabulary_tokens=config.vocabulary_tokens,
            kv_bytes_per_token=kv_bytes,
            num_swap_blocks=num_swap_blocks,
        )
        self._requests = LiveRequests(self._description)

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        block_tokens: int = 16,
        num_blocks: int = 512,
        num_swap_blocks: int = 0,
        max_context_tokens: int | None = None,
    ) -> "TorchExecutor":
        """An executor for the checkpoint in `folder`.

        Args:
            folder: a Hugging Face checkpoint.
            dtype: of weights, activations and KV.
            device: torch's name of where to run.
            block_tokens: tokens in one block of KV memory.
            num_blocks: blocks of KV memory.
            num_swap_blocks: blocks of host memory for swapped KV.
            max_context_tokens: longest prompt plus output; None: what the model
                allows. Never more than the KV memory holds.

        Raises:
            CheckpointError: the folder is not a checkpoint that can be run.
            EngineError: the memory asked for is not there.
        """
        config = load_model_config(folder)
        context = min(max_context_tokens or config.max_context_tokens, num_blocks * block_tokens)
        if context > config.max_context_tokens:
            raise EngineError(
                f"max_context_tokens is {context:,}, "
                f"the model in {folder} goes to {config.max_context_tokens:,}"
            )
        weights = load_weights(folder, config, dtype, torch.device(device))
        model = Model(config, weights, context)
        return cls(
            model,
            block_tokens=block_tokens,
            num_blocks=num_blocks,
            num_swap_blocks=num_swap_blocks,
        )

    @property
    def is_low_precision(self) -> bool:
        """Whether numbers have fewer bits than float32's."""
        return self._dtype != torch.float32

    def describe(self) -> EngineDescription:
        """What the engine is."""
        return self._description

    def execute(self, plan: StepPlan, opened: Sequence[EngineRequest]) -> StepResult:
        """Executes one step.

        Raises:
            PlanError: the plan contradicts what the executor knows; nothing of
                the step counts, and the executor is not to be used again.
        """
        started_ns = time.monotonic_ns()
        logits = self.step_logits(plan, opened)
        outputs = self._sample([item for item in plan.items if item.samples], logits)
        return StepResult(plan.step_id, outputs, time.monotonic_ns() - started_ns)

    @torch.inference_mode()
    def step_logits(self, plan: StepPlan, opened: Sequence[EngineRequest]) -> Tensor:
        """Executes a step up to the choice of tokens.

        Returns:
            Logits of the items that sample, in order, float32 [n, vocabulary].
        """
        for request_id in plan.closed:
            self._requests.close(request_id)
            self._tensors.pop(request_id, None)
        for request in opened:
            self._open(request)
        self._swap(plan)
        if not plan.items:
            return torch.empty(0, self._model.config.vocabulary_tokens)
        return self._forward([(item, *self._extend(item)) for item in plan.items])

    def _open(self, request: EngineRequest) -> None:
        if request.adapter:
            raise PlanError(f"adapter {request.adapter} is not loaded")
        self._requests.open(request)
        allowed = None
        if ids := request.sampling.allowed_tokens:
            # One tensor per distinct set, so that rows which share it are chosen together.
            allowed = self._allowed_sets.get(ids)
            if allowed is None:
                allowed = self._allowed_sets[ids] = torch.tensor(ids, device=self._device)
        self._tensors[request.request_id] = _Tensors(BlockTable(self._block_tokens), allowed)

    def _swap(self, plan: StepPlan) -> None:
        """Copies whole blocks; out before in, so that a block can do both."""
        for pairs, source, target in (
            (plan.swap_out, self._kv, self._host_kv),
            (plan.swap_in, self._host_kv, self._kv),
        ):
            if pairs:
                from_rows, to_rows = (
                    self._block_rows(blocks) for blocks in zip(*pairs, strict=True)
                )
                rows = source.index_select(1, from_rows.to(source.device)).to(target.device)
                target.index_copy_(1, to_rows.to(target.device), rows)

    def _block_rows(self, blocks: Sequence[int]) -> Tensor:
        first = torch.tensor(blocks).unsqueeze(1) * self._block_tokens
        return (first + torch.arange(self._block_tokens)).view(-1)

    def _extend(self, item: ScheduledItem) -> tuple[LiveRequest, BlockTable]:
        live = self._requests.extend(item)
        table = self._tensors[item.request_id].table
        if item.resets_table:
            table.clear()
        table.append(item.new_blocks)
        return live, table

    def _forward(self, work: Sequence[tuple[ScheduledItem, LiveRequest, BlockTable]]) -> Tensor:
        tokens: list[int] = []
        positions: list[int] = []
        spans = []
        segments = []
        last_rows = []
        for item, live, table in work:
            start, end = item.context_tokens, item.context_tokens + item.num_tokens
            first_row = len(tokens)
            tokens.extend(live.tokens[start:end])
            positions.extend(range(start, end))
            spans.append(table.span(start, end))
            mask = lower_right_mask(item.num_tokens, end, self._dtype, self._device)
            rows = table.upto(end, self._device)
            segments.append(Segment(first_row, len(tokens), rows, mask))
            if item.samples:
                last_rows.append(len(tokens) - 1)
        write_slots = torch.from_numpy(np.concatenate(spans))
        return self._model.forward(
            torch.tensor(tokens, device=self._device),
            torch.tensor(positions, device=self._device),
            write_slots.to(self._device),
            segments,
            torch.tensor(last_rows, dtype=torch.int64, device=self._device),
            self._layers_kv,
        )

    @torch.inference_mode()
    def _sample(self, items: Sequence[ScheduledItem], logits: Tensor) -> tuple[StepOutput, ...]:
        if not items:
            return ()
        lives = [self._requests[item.request_id] for item in items]
        draws = [
            Draw(live.request.sampling, live.num_outputs, self._tensors[item.request_id].allowed)
            for item, live in zip(items, lives, strict=True)
        ]
        outputs = []
        for item, live, token in zip(items, lives, sample(logits, draws), strict=True):
            live.tokens.append(token)
            is_stop = token in live.request.sampling.stop_tokens
            outputs.append(StepOutput(item.request_id, token, is_stop))
        return tuple(outputs)
