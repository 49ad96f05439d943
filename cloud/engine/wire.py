"""Plans and results as messages of `headway.internal.v1alpha`, and back.

A request is sent once, under a short handle; after that a step costs a few
small numbers for each item.
"""

from collections.abc import Sequence
from itertools import islice

from cloud.engine.api import EngineDescription, EngineRequest, Sampling
from cloud.scheduler.types import ScheduledItem, StepOutput, StepPlan, StepResult
from headway.cost_model import MeasuredStep, StepShape
from headway.internal.v1alpha import engine_pb2 as pb

__all__ = [
    "StepEncoder",
    "decode_description",
    "decode_step",
    "encode_description",
    "encode_result",
]


class StepEncoder:
    """The server's side: keeps which handle stands for which request.

    Args:
        incarnation: of the engine that the messages go to.
    """

    def __init__(self, incarnation: str) -> None:
        self._incarnation = incarnation
        self._handles: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._num_opened = 0

    def encode(
        self, plan: StepPlan, opened: Sequence[EngineRequest], step_id: int
    ) -> pb.StepsRequest:
        """The message of a step, numbered `step_id` on the stream.

        Raises:
            KeyError: an item's request was never opened, or is closed.
        """
        closed = [handle for name in plan.closed if (handle := self._close(name)) is not None]
        openings = [self._open(request) for request in opened]
        items, handles = plan.items, self._handles
        return pb.StepsRequest(
            incarnation=self._incarnation,
            step_id=step_id,
            opened=openings,
            closed=closed,
            handles=[handles[item.request_id] for item in items],
            context_tokens=[item.context_tokens for item in items],
            num_tokens=[item.num_tokens for item in items],
            samples=[item.samples for item in items],
            is_prefill=[item.is_prefill for item in items],
            resets_table=[item.resets_table for item in items],
            num_new_blocks=[len(item.new_blocks) for item in items],
            new_blocks=[block for item in items for block in item.new_blocks],
            swap_out=[block for pair in plan.swap_out for block in pair],
            swap_in=[block for pair in plan.swap_in for block in pair],
        )

    def decode_result(self, response: pb.StepsResponse, plan: StepPlan) -> StepResult:
        """The result of `plan`.

        Raises:
            KeyError: the engine answered for a request that it does not have.
        """
        names = self._names
        outputs = tuple(
            StepOutput(names[handle], token, stopped)
            for handle, token, stopped in zip(
                response.handles, response.tokens, response.stopped, strict=True
            )
        )
        return StepResult(plan.step_id, outputs, response.elapsed_ns)

    def _close(self, name: str) -> int | None:
        handle = self._handles.pop(name, None)
        if handle is not None:
            del self._names[handle]
        return handle

    def _open(self, request: EngineRequest) -> pb.OpenRequest:
        if request.images:
            raise ValueError(f"request {request.request_id} has images, which do not travel yet")
        self._num_opened += 1
        handle = self._num_opened
        self._handles[request.request_id] = handle
        self._names[handle] = request.request_id
        sampling = request.sampling
        return pb.OpenRequest(
            handle=handle,
            prompt_tokens=request.prompt,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=sampling.seed % (1 << 64),
            stop_tokens=sampling.stop_tokens,
            allowed_tokens=sampling.allowed_tokens,
            adapter=request.adapter,
            output_tokens=request.outputs,
        )


def decode_step(message: pb.StepsRequest) -> tuple[StepPlan, list[EngineRequest]]:
    """The engine's side: a step whose requests are named by their handles."""
    blocks = iter(message.new_blocks)
    columns = zip(
        message.handles,
        message.context_tokens,
        message.num_tokens,
        message.is_prefill,
        message.samples,
        message.num_new_blocks,
        message.resets_table,
        strict=True,
    )
    items = tuple(
        ScheduledItem(
            str(handle),
            context,
            num,
            is_prefill,
            samples,
            tuple(islice(blocks, num_blocks)),
            resets,
        )
        for handle, context, num, is_prefill, samples, num_blocks, resets in columns
    )
    plan = StepPlan(
        replica_id="",
        step_id=message.step_id,
        items=items,
        closed=tuple(map(str, message.closed)),
        swap_out=_pairs(message.swap_out),
        swap_in=_pairs(message.swap_in),
    )
    return plan, [_decode_open(request) for request in message.opened]


def encode_result(result: StepResult) -> pb.StepsResponse:
    """The message of a step's result."""
    outputs = result.outputs
    return pb.StepsResponse(
        step_id=result.step_id,
        handles=[int(output.request_id) for output in outputs],
        tokens=[output.token for output in outputs],
        stopped=[output.is_stop for output in outputs],
        elapsed_ns=result.elapsed_ns,
    )


def encode_description(description: EngineDescription) -> pb.DescribeResponse:
    """The message that says what an engine is."""
    return pb.DescribeResponse(
        incarnation=description.incarnation,
        model=description.model,
        kind=description.kind,
        max_context_tokens=description.max_context_tokens,
        block_tokens=description.block_tokens,
        num_blocks=description.num_blocks,
        num_swap_blocks=description.num_swap_blocks,
        swap_block_ns=description.swap_block_ns,
        vocabulary_tokens=description.vocabulary_tokens,
        kv_bytes_per_token=description.kv_bytes_per_token,
        calibration=[
            pb.MeasuredStep(
                prefill_tokens=step.shape.prefill_tokens,
                prefill_pairs=step.shape.prefill_pairs,
                decodes=step.shape.decodes,
                kv_tokens=step.shape.kv_tokens,
                elapsed_ns=step.elapsed_ns,
            )
            for step in description.calibration
        ],
    )


def decode_description(message: pb.DescribeResponse) -> EngineDescription:
    """What the engine at the other end is."""
    return EngineDescription(
        kind=message.kind,
        model=message.model,
        incarnation=message.incarnation,
        max_context_tokens=message.max_context_tokens,
        block_tokens=message.block_tokens,
        num_blocks=message.num_blocks,
        vocabulary_tokens=message.vocabulary_tokens,
        kv_bytes_per_token=message.kv_bytes_per_token,
        num_swap_blocks=message.num_swap_blocks,
        swap_block_ns=message.swap_block_ns,
        calibration=tuple(
            MeasuredStep(
                StepShape(step.prefill_tokens, step.prefill_pairs, step.decodes, step.kv_tokens),
                step.elapsed_ns,
            )
            for step in message.calibration
        ),
    )


def _decode_open(message: pb.OpenRequest) -> EngineRequest:
    return EngineRequest(
        request_id=str(message.handle),
        prompt=tuple(message.prompt_tokens),
        sampling=Sampling(
            temperature=message.temperature,
            top_p=message.top_p,
            seed=message.seed,
            stop_tokens=tuple(message.stop_tokens),
            allowed_tokens=tuple(message.allowed_tokens),
        ),
        adapter=message.adapter,
        outputs=tuple(message.output_tokens),
    )


def _pairs(flat: Sequence[int]) -> tuple[tuple[int, int], ...]:
    return tuple(zip(flat[::2], flat[1::2], strict=True))
