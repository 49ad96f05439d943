"""RobotService: bytes in, bytes out; the work is done by its three methods' modules.

Handlers take and give bytes, so that what cannot be parsed is answered like
any other wrong call.
"""

import asyncio

import grpc

from cloud.server.calls import CallGate, Context
from cloud.server.generate import Generate
from cloud.server.identity import Identity
from cloud.server.next_action import ActionCall, ActionRequests
from cloud.server.session import Sessions
from cloud.server.validation import check_id, parse
from headway.clock import Clock, ns_from_s
from headway.outcome import RequestClass
from headway.telemetry.trace_context import trace_parent_of
from headway.v1 import robot_pb2

__all__ = ["ROBOT_SERVICE", "RobotService"]

ROBOT_SERVICE: str = robot_pb2.DESCRIPTOR.services_by_name["RobotService"].full_name


class RobotService:
    """What a robot, or a person beside it, asks for.

    Args:
        gate: the way in.
        requests: asks for actions.
        sessions: robots' streams.
        generate: texts.
        clock: of the dispatcher.
    """

    def __init__(
        self,
        gate: CallGate,
        requests: ActionRequests,
        sessions: Sessions,
        generate: Generate,
        clock: Clock,
    ) -> None:
        self.sessions = sessions
        self._gate = gate
        self._requests = requests
        self._generate = generate
        self._clock = clock

    def handler(self) -> grpc.GenericRpcHandler:
        """For `add_generic_rpc_handlers`."""
        gate = self._gate
        return grpc.method_handlers_generic_handler(
            ROBOT_SERVICE,
            {
                "NextAction": grpc.unary_unary_rpc_method_handler(
                    gate.unary(self._next_action, RequestClass.INTERACTIVE)
                ),
                "Session": grpc.stream_stream_rpc_method_handler(
                    gate.streaming(self.sessions.serve, RequestClass.INTERACTIVE)
                ),
                "Generate": grpc.unary_stream_rpc_method_handler(
                    gate.streaming(self._generate.serve, RequestClass.STANDARD)
                ),
            },
        )

    async def _next_action(self, data: bytes, identity: Identity, context: Context) -> bytes:
        arrived_ns = self._clock.now_ns()
        left_s = context.time_remaining()
        message = parse(robot_pb2.NextActionRequest, data)
        check_id("robot_id", message.robot_id)
        requests = self._requests
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def on_ended(call: ActionCall) -> None:
            del call
            if not done.done():
                done.set_result(None)

        call = requests.submit(
            identity,
            message.robot_id,
            requests.embodiment(message.embodiment, "embodiment"),
            message.observation,
            arrived_ns=arrived_ns,
            call_deadline_ns=None if left_s is None else arrived_ns + ns_from_s(left_s),
            on_ended=on_ended,
            trace=trace_parent_of(context.invocation_metadata()),
        )
        try:
            await done
            response = robot_pb2.NextActionResponse()
            requests.fill(response.action, call)
            return response.SerializeToString()
        finally:
            # The client may be gone: then what it asked for goes too.
            requests.release(call, on_ended)
