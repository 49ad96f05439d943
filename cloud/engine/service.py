"""The engine's end of the internal EngineService."""

import time
from collections.abc import AsyncIterator
from typing import Any

import grpc

from cloud.engine.api import EngineDescription, Executor
from cloud.engine.errors import PlanError
from cloud.engine.wire import decode_step, encode_description, encode_result
from headway.internal.v1alpha import engine_pb2 as pb
from headway.internal.v1alpha import engine_pb2_grpc

__all__ = ["EngineService", "StepProtocol"]


class StepProtocol:
    """Executes each step of a stream once and in order.

    Args:
        executor: what executes them.
        description: what was said of it, with its incarnation.
    """

    def __init__(self, executor: Executor, description: EngineDescription) -> None:
        self._executor = executor
        self._incarnation = description.incarnation
        # A simulated step is over at once; here it is to take its time.
        self._is_simulated = description.kind == "simulated"
        self._last: pb.StepsResponse = pb.StepsResponse(step_id=0)

    def answer(self, request: pb.StepsRequest) -> pb.StepsResponse:
        """The step's result; for the last step once more, the same one.

        Raises:
            PlanError: another incarnation is meant, steps are missing, or the
                step contradicts those before it.
        """
        if request.incarnation != self._incarnation:
            raise PlanError(
                f"the step is for incarnation {request.incarnation or 'none'}, "
                f"this is {self._incarnation}"
            )
        if request.step_id == self._last.step_id:
            return self._last
        if request.step_id != self._last.step_id + 1:
            raise PlanError(f"step {request.step_id} came after step {self._last.step_id}")
        result = self._executor.execute(*decode_step(request))
        if self._is_simulated and result.elapsed_ns:
            time.sleep(result.elapsed_ns / 1e9)
        self._last = encode_result(result)
        return self._last


class EngineService(engine_pb2_grpc.EngineServiceServicer):
    """Serves one executor. A step holds up the process's loop: there is nothing
    else for it to do.
    """

    def __init__(self, executor: Executor, description: EngineDescription) -> None:
        self._description = description
        self._steps = StepProtocol(executor, description)

    async def Describe(  # noqa: N802
        self, request: pb.DescribeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.DescribeResponse:
        """What the engine is."""
        return encode_description(self._description)

    async def Steps(  # noqa: N802
        self,
        request_iterator: AsyncIterator[pb.StepsRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[pb.StepsResponse]:
        """Answers each step in order; the stream ends with a plan that is wrong."""
        async for request in request_iterator:
            try:
                response = self._steps.answer(request)
            except PlanError as error:
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, error.message)
            yield response
