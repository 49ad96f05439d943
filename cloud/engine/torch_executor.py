"""Executes step plans with torch."""

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cloud.engine.api import EngineDescription, EngineRequest
from cloud.engine.block_table import BlockTable
from cloud.engine.checkpoint import load_weights
from cloud.engine.errors import EngineError, PlanError
from cloud.engine.live_requests import LiveRequests
from cloud.engine.lora import Adapter, load_adapter
from cloud.engine.memory import available_bytes, require_memory
from cloud.engine.model import Model
from cloud.engine.model_config import load_model_config
from cloud.engine.sampling import Draw, sample
from cloud.engine.step_batch import StepWork, make_batch
from cloud.engine.torch_ops import Ops, TorchOps
from cloud.engine.vision import VisionEncoder
from cloud.scheduler.types import ScheduledItem, StepOutput, StepPlan, StepResult

__all__ = ["TorchExecutor"]


@dataclass(frozen=True, slots=True)
class _Tensors:
    """What a live request has in torch's terms."""

    table: BlockTable
    allowed: Tensor | None
    adapter: Adapter | None
    # (first position, embeddings [n, hidden]) of each image.
    soft_tokens: tuple[tuple[int, Tensor], ...]


class TorchExecutor:
    """A model, its KV memory, and the requests that it knows.

    Args:
        model: the model to run.
        block_tokens: tokens in one block of KV memory.
        num_blocks: blocks of KV memory, allocated now.
        num_swap_blocks: blocks of host memory for swapped KV, allocated now.
        adapters: what requests may name.
        vision: makes soft tokens of images; None: requests with images are refused.

    Raises:
        EngineError: the memory asked for is not there.
    """

    def __init__(
        self,
        model: Model,
        *,
        block_tokens: int,
        num_blocks: int,
        num_swap_blocks: int = 0,
        adapters: Sequence[Adapter] = (),
        vision: VisionEncoder | None = None,
    ) -> None:
        config = model.config
        self._model = model
        self._block_tokens = block_tokens
        self._device = model.device
        self._dtype = model.dtype
        self._vision = vision
        self._adapters = {adapter.name: adapter for adapter in adapters}
        kv_bytes = config.kv_bytes_per_token(self._dtype.itemsize)
        require_memory(
            (num_blocks + num_swap_blocks) * block_tokens * kv_bytes,
            available_bytes(self._device),
            num_blocks=num_blocks + num_swap_blocks,
        )
        # Zeros, not empty: pages are there before the first step needs them,
        # and rows that were never written stay finite.
        token_shape = (block_tokens, 2 * config.kv_heads, config.head_dim)
        self._kv = torch.zeros(
            (config.layers, num_blocks, *token_shape), dtype=self._dtype, device=self._device
        )
        self._host_kv = torch.zeros(
            (config.layers, num_swap_blocks, *token_shape), dtype=self._dtype
        )
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
        adapters: Mapping[str, Path] | None = None,
        ops: Ops | None = None,
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
            adapters: folder of each adapter, by the name that requests give.
            ops: what lies between the matrix multiplies; None: torch's.

        Raises:
            CheckpointError: the folder is not a checkpoint that can be run, or an
                adapter's folder holds none that fits it.
            EngineError: the memory asked for is not there.
        """
        config = load_model_config(folder)
        context = min(max_context_tokens or config.max_context_tokens, num_blocks * block_tokens)
        if context > config.max_context_tokens:
            raise EngineError(
                f"max_context_tokens is {context:,}, "
                f"the model in {folder} goes to {config.max_context_tokens:,}"
            )
        place = torch.device(device)
        loaded = [
            load_adapter(name, path, config, dtype, place)
            for name, path in (adapters or {}).items()
        ]
        return cls(
            Model(config, load_weights(folder, config, dtype, place), context, ops),
            block_tokens=block_tokens,
            num_blocks=num_blocks,
            num_swap_blocks=num_swap_blocks,
            adapters=loaded,
        )

    @property
    def is_low_precision(self) -> bool:
        """Whether numbers have fewer bits than float32's."""
        return self._dtype != torch.float32

    @property
    def is_compiled(self) -> bool:
        """Whether it runs on operations that were built for this processor."""
        return not isinstance(self._model.ops, TorchOps)

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
        outputs = self.choose(plan, logits)
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
        work = [self._extend(item) for item in plan.items]
        batch = make_batch(
            work,
            self._block_tokens,
            self._dtype,
            self._device,
            needs_groups=self._model.ops.needs_groups,
        )
        return self._model.forward(batch, self._layers_kv)

    def _open(self, request: EngineRequest) -> None:
        adapter = self._adapters.get(request.adapter)
        if request.adapter and adapter is None:
            raise PlanError(f"adapter {request.adapter} is not loaded")
        soft_tokens = tuple(self._soft_tokens(request))
        self._requests.open(request)
        allowed = None
        if ids := request.sampling.allowed_tokens:
            # One tensor per distinct set, so that rows which share it are chosen together.
            allowed = self._allowed_sets.get(ids)
            if allowed is None:
                allowed = self._allowed_sets[ids] = torch.tensor(ids, device=self._device)
        self._tensors[request.request_id] = _Tensors(
            BlockTable(self._block_tokens), allowed, adapter, soft_tokens
        )

    def _soft_tokens(self, request: EngineRequest) -> Iterator[tuple[int, Tensor]]:
        """Where each image of a request stands, and what stands there."""
        for image in request.images:
            if self._vision is None:
                raise PlanError(f"request {request.request_id} has images; the model cannot see")
            embeddings = self._vision.encode(image)
            expected = (image.num_tokens, self._model.config.hidden)
            if embeddings.shape != expected or image.position + len(embeddings) > len(
                request.prompt
            ):
                raise PlanError(
                    f"an image of request {request.request_id} gives {list(embeddings.shape)} at "
                    f"{image.position} of {len(request.prompt)} tokens; expected {list(expected)}"
                )
            yield image.position, embeddings

    def _swap(self, plan: StepPlan) -> None:
        """Copies whole blocks; out before in, so that a block can do both."""
        for pairs, source, target in (
            (plan.swap_out, self._kv, self._host_kv),
            (plan.swap_in, self._host_kv, self._kv),
        ):
            if pairs:
                blocks, to_blocks = (torch.tensor(one) for one in zip(*pairs, strict=True))
                copied = source.index_select(1, blocks.to(source.device)).to(target.device)
                target.index_copy_(1, to_blocks.to(target.device), copied)

    def _extend(self, item: ScheduledItem) -> StepWork:
        live = self._requests.extend(item)
        tensors = self._tensors[item.request_id]
        if item.resets_table:
            tensors.table.clear()
        tensors.table.append(item.new_blocks)
        end = item.context_tokens + item.num_tokens
        return StepWork(
            tokens=live.tokens,
            start=item.context_tokens,
            end=end,
            table=tensors.table,
            samples=item.samples,
            adapter=tensors.adapter,
            soft_tokens=tensors.soft_tokens,
        )

    @torch.inference_mode()
    def choose(self, plan: StepPlan, logits: Tensor) -> tuple[StepOutput, ...]:
        """Ends a step: chooses the tokens of the items that sample, from their logits."""
        items = [item for item in plan.items if item.samples]
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
