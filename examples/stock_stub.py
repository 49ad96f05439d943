"""The contract without our client: nothing but gRPC's generated stub.

What a robot in any language does; the .proto files are in proto/headway/v1.
Start a server first (`headway serve --dev`), then: python examples/stock_stub.py
"""

import sys

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

from headway.v1 import robot_pb2
from headway.v1.robot_pb2_grpc import RobotServiceStub

BUDGET_S = 0.3


def main(address: str) -> None:
    """Asks once and prints what came of it."""
    request = robot_pb2.NextActionRequest(
        robot_id="amr-1",
        embodiment="diff_drive",
        observation=robot_pb2.Observation(
            observation_id="seen-1",
            task="drive to the dock",
            # A remaining duration: the clocks of robots are never trusted.
            budget=Duration(nanos=int(BUDGET_S * 1e9)),
        ),
    )
    with grpc.insecure_channel(address) as channel:
        try:
            # The deadline of the call as well: silence is an answer, too.
            action = RobotServiceStub(channel).NextAction(request, timeout=BUDGET_S).action
        except grpc.RpcError as error:
            explain(error, address)
            return
    for step in action.steps:
        print("  ".join(f"{n} {v:+.2f}" for n, v in zip(action.names, step.values, strict=True)))
    print(f"in {action.timings.total.ToMilliseconds()} ms by {action.model}")


def explain(error: grpc.RpcError, address: str) -> None:
    """Prints a "no": its status, its reason and when to ask again."""
    metadata = {entry.key: entry.value for entry in error.trailing_metadata() or ()}
    details = metadata.get("grpc-status-details-bin")
    if details is None and error.code() is grpc.StatusCode.UNAVAILABLE:
        # By gRPC itself. A "no" of the server's own has details.
        print(f"no server at {address}; start one with 'headway serve --dev'")
        return
    print(f"no: {error.code().name}: {error.details()}")
    if isinstance(details, bytes):
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        for detail in status_pb2.Status.FromString(details).details:
            if detail.Unpack(info):
                print(f"reason: {info.reason}")
            elif detail.Unpack(retry):
                print(f"ask again in {retry.retry_delay.ToMilliseconds()} ms")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051")
