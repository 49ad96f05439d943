"""How quick this machine is, asked before the demo chooses its numbers.

A budget that a workstation keeps easily is impossible on a small virtual
machine, and a burst that swamps the one is nothing to the other.
"""

import math
from dataclasses import dataclass

from edge.action import Action
from edge.answer import Answer, percentile_ns
from edge.client import RobotClient
from edge.diff_drive import DiffDriveRobot
from fleet_sim.demo.load import WORK_ORDER
from fleet_sim.demo.measures import FleetMeasures
from headway.clock import MonotonicClock, s_from_ns

__all__ = ["Pilot", "run_pilot"]

_PATIENCE_S = 30.0
_NUM_ASKED = 7
_BUDGET_GRAIN_S = 0.05
_MIN_BUDGET_S = 0.4
_MIN_VISITORS, _MAX_VISITORS = 8, 20


@dataclass(frozen=True, slots=True)
class Pilot:
    """What was measured, and what follows from it."""

    action_ns: int  # Round trip of a resident when nobody else asks, median.
    visitor_prefill_ns: int  # To read what a visitor sends, median.

    @property
    def budget_s(self) -> float:
        """Five times what an action takes, in whole 50 ms, and no less than 400 ms."""
        grains = math.ceil(5 * s_from_ns(self.action_ns) / _BUDGET_GRAIN_S)
        return max(_MIN_BUDGET_S, round(grains * _BUDGET_GRAIN_S, 2))

    @property
    def num_visitors(self) -> int:
        """As many as it takes twice the budget to read, when all ask at once."""
        swamp = math.ceil(2 * self.budget_s / max(1e-3, s_from_ns(self.visitor_prefill_ns)))
        return max(_MIN_VISITORS, min(_MAX_VISITORS, swamp))


def run_pilot(address: str, measures: FleetMeasures) -> Pilot:
    """Asks for a few actions, one after the other.

    Args:
        address: of the server.
        measures: where the answers are counted.

    Raises:
        CallError: the server gives none.
    """
    with RobotClient.connect(
        address, robot_id="pilot", embodiment=DiffDriveRobot.embodiment
    ) as client:
        actions = _actions(client, measures, "pilot", "drive to the goal")
        resident = [action.round_trip_ns for action in actions]
        actions = _actions(client, measures, "pilot-visitor", WORK_ORDER)
        visitor = [action.timings.prefill_ns for action in actions]
    return Pilot(percentile_ns(resident, 0.5) or 0, percentile_ns(visitor, 0.5) or 0)


def _actions(client: RobotClient, measures: FleetMeasures, name: str, task: str) -> list[Action]:
    """A few, with all the time in the world; `name` tells their observations from others."""
    clock = MonotonicClock()
    robot = DiffDriveRobot(name, 0, clock.now_ns(), task=task)
    actions = []
    for _ in range(_NUM_ASKED):
        asked_ns = clock.now_ns()
        seen = robot.observe(asked_ns)
        action = client.next_action(seen, _PATIENCE_S)
        measures.add_pilot(Answer(seen.observation_id, asked_ns, clock.now_ns(), action=action))
        actions.append(action)
    return actions
