"""A robot in a few lines: ask for actions, play them, and act safely on a "no".

Start a server first (`headway serve --dev`), then: python examples/robot.py
"""

import sys
import time

from edge.client import RobotClient
from edge.observation import Observation, StateSource
from headway.rpc.errors import CallError, InvalidRequestError

BUDGET_S = 0.3


def drive(values: dict[str, float]) -> None:
    """Stands for the wheels."""
    print("drive", " ".join(f"{name} {value:+.2f}" for name, value in values.items()))


def stop() -> None:
    """What this robot does when nobody tells it what to do."""
    print("brake")


def main(address: str, rounds: int) -> None:
    """Asks once a second, that many times."""
    with RobotClient.connect(address, robot_id="amr-1", embodiment="diff_drive") as client:
        for number in range(rounds):
            odometry = StateSource("odometry", {"x": 1.0 + 0.1 * number, "y": 2.0, "heading": 0.5})
            seen_ns = time.monotonic_ns()
            observation = Observation(f"seen-{number}", task="drive to the dock", state=(odometry,))
            try:
                action = client.next_action(observation, BUDGET_S)
            except InvalidRequestError:
                raise  # This program is wrong: no other answer would come next time.
            except CallError as no:
                # Refused, late, or nobody there: all of them known within the budget.
                print(f"no action: {no}")
                stop()
            else:
                # Some of the chunk's time has passed while the answer came.
                values = action.step_at(time.monotonic_ns() - seen_ns)
                drive(values) if values is not None else stop()
            time.sleep(1.0)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051", rounds=5)
