"""How quick this machine is, asked before the demo chooses its numbers.

A budget that a workstation keeps easily is impossible on a small virtual
machine, and a burst that swamps the one is nothing to the other.
"""

import math
import threading
import time
from dataclasses import dataclass

from edge.answer import percentile_ns
from edge.client import RobotClient
from edge.diff_drive import DiffDriveRobot
from fleet_sim.demo.load import WORK_ORDER
from headway.clock import MonotonicClock, s_from_ns

__all__ = ["Pilot", "run_pilot"]

_PATIENCE_S = 30.0
_NUM_ALONE = 7
_NUM_TOGETHER = 8
_BUDGET_GRAIN_S = 0.05
_MIN_BUDGET_S = 0.3
_MIN_VISITORS, _MAX_VISITORS = 12, 40


@dataclass(frozen=True, slots=True)
class Pilot:
    """What was measured, and what follows from it."""

    alone_ns: int  # An action when nobody else asks, median.
    together_ns: int  # The last of eight visitors that asked at once.

    @property
    def budget_s(self) -> float:
        """Four times what an action takes alone, in whole 50 ms, and no less than 300 ms."""
        grains = math.ceil(4 * s_from_ns(self.alone_ns) / _BUDGET_GRAIN_S)
        return max(_MIN_BUDGET_S, round(grains * _BUDGET_GRAIN_S, 2))

    @property
    def num_visitors(self) -> int:
        """As many as need twice the budget, when they all ask at once."""
        each_s = max(1e-4, s_from_ns(self.together_ns - self.alone_ns) / (_NUM_TOGETHER - 1))
        swamp = math.ceil(2 * self.budget_s / each_s)
        return max(_MIN_VISITORS, min(_MAX_VISITORS, swamp))


def run_pilot(address: str) -> Pilot:
    """Asks for a few actions, alone and then together.

    Raises:
        CallError: the server gives none.
    """
    clients = [
        RobotClient.connect(
            address, robot_id=f"pilot-{index}", embodiment=DiffDriveRobot.embodiment
        )
        for index in range(_NUM_TOGETHER)
    ]
    try:
        alone = [_ask(clients[0], seed, "drive to the goal") for seed in range(_NUM_ALONE)]
        together: list[int] = []
        threads = [
            threading.Thread(
                target=lambda client=client, seed=seed: together.append(
                    _ask(client, seed, WORK_ORDER)
                )
            )
            for seed, client in enumerate(clients)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        for client in clients:
            client.close()
    median_ns = percentile_ns(alone, 0.5) or 0
    return Pilot(median_ns, max([median_ns, *together]))


def _ask(client: RobotClient, seed: int, task: str) -> int:
    """One action with all the time in the world; how long it took."""
    start_ns = time.monotonic_ns()
    robot = DiffDriveRobot(f"pilot-{seed}", seed, MonotonicClock().now_ns(), task=task)
    client.next_action(robot.observe(start_ns), _PATIENCE_S)
    return time.monotonic_ns() - start_ns
