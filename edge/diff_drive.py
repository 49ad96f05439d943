"""A made-up robot with two driven wheels, for demonstrations and examples."""

import math
import random

from edge.action import Action
from edge.observation import Observation, StateSource

__all__ = ["DiffDriveRobot"]

_GOAL_REACHED_M = 0.5
_FLOOR_M = 20.0  # Goals lie on a square floor with this side.
_MAX_LINEAR_M_S = 1.5
_MAX_ANGULAR_RAD_S = 2.0
_HOLD_DECELERATION_M_S2 = 1.5  # What it brakes with where it has no order.
_BATTERY_PER_S = 1 / (4 * 3600)  # Standing still, empty after four hours.
_BATTERY_PER_M = 1 / 20_000
_TICK_NS = 20_000_000  # Integration step.


class DiffDriveRobot:
    """Moves by the unicycle model, plays action chunks, and brakes without one.

    Time is passed in; nothing here reads a clock. The seed decides start and
    goals, so that two robots with one seed and the same answers move alike.
    """

    embodiment = "diff_drive"

    def __init__(
        self, robot_id: str, seed: int, now_ns: int, *, task: str = "drive to the goal"
    ) -> None:
        self.robot_id = robot_id
        self._task = task
        self._random = random.Random(seed)  # noqa: S311 - a toy world, not a secret.
        self._x_m, self._y_m = self._random_place()
        self._goal_m = self._random_place()
        self._heading_rad = self._random.uniform(-math.pi, math.pi)
        self._linear_m_s = 0.0
        self._angular_rad_s = 0.0
        self._battery = self._random.uniform(0.4, 1.0)
        self._now_ns = now_ns
        self._num_observations = 0
        self._observed_ns: dict[str, int] = {}
        self._playing: tuple[Action, int] | None = None

    @property
    def is_moving(self) -> bool:
        """Whether the wheels turn."""
        return self._linear_m_s != 0 or self._angular_rad_s != 0

    def observe(self, now_ns: int) -> Observation:
        """Moves up to `now_ns` and says what is seen there."""
        self._advance(now_ns)
        self._num_observations += 1
        name = f"{self.robot_id}-{self._num_observations:05d}"
        self._observed_ns[name] = now_ns
        odometry = {
            "x": self._x_m,
            "y": self._y_m,
            "heading": self._heading_rad,
            "linear_velocity": self._linear_m_s,
            "angular_velocity": self._angular_rad_s,
        }
        goal = {"distance": self._goal_distance_m(), "bearing": self._goal_bearing_rad()}
        return Observation(
            observation_id=name,
            task=self._task,
            state=(
                StateSource("odometry", {key: round(value, 3) for key, value in odometry.items()}),
                StateSource("goal", {key: round(value, 3) for key, value in goal.items()}),
                StateSource("power", {"battery": round(self._battery, 3)}),
            ),
        )

    def play(self, action: Action, now_ns: int) -> None:
        """Follows `action` from now on, from the step that now belongs to it.

        An answer to an observation that is older than the one being followed,
        or that this robot never made, is ignored.
        """
        self._advance(now_ns)
        observed_ns = self._observed_ns.get(action.observation_id)
        if observed_ns is None or (self._playing and observed_ns <= self._playing[1]):
            return
        self._playing = (action, observed_ns)
        # Answers come in any order, but nothing older than this one matters now.
        self._observed_ns = {
            name: at_ns for name, at_ns in self._observed_ns.items() if at_ns > observed_ns
        }

    def _advance(self, to_ns: int) -> None:
        while self._now_ns < to_ns:
            left_ns = to_ns - self._now_ns
            # A robot that was not asked for an hour must not be computed for seconds.
            tick_ns = left_ns if self._is_at_rest() else min(_TICK_NS, left_ns)
            self._command(tick_ns)
            self._move(tick_ns / 1e9)
            self._now_ns += tick_ns

    def _is_at_rest(self) -> bool:
        """Whether it stands, and will until it is told otherwise."""
        return not self.is_moving and self._ordered() is None

    def _ordered(self) -> dict[str, float] | None:
        """What it is to do now; None where that is nothing (more)."""
        if self._playing is None:
            return None
        action, observed_ns = self._playing
        return action.step_at(self._now_ns - observed_ns)

    def _command(self, tick_ns: int) -> None:
        values = self._ordered()
        if values is None:
            slower = _HOLD_DECELERATION_M_S2 * tick_ns / 1e9
            self._linear_m_s = math.copysign(
                max(0.0, abs(self._linear_m_s) - slower), self._linear_m_s
            )
            self._angular_rad_s = 0.0
            return
        linear, angular = _wheels(values)
        self._linear_m_s = max(-_MAX_LINEAR_M_S, min(_MAX_LINEAR_M_S, linear))
        self._angular_rad_s = max(-_MAX_ANGULAR_RAD_S, min(_MAX_ANGULAR_RAD_S, angular))

    def _move(self, tick_s: float) -> None:
        travelled_m = self._linear_m_s * tick_s
        self._heading_rad = _wrapped(self._heading_rad + self._angular_rad_s * tick_s)
        self._x_m = _on_floor(self._x_m + travelled_m * math.cos(self._heading_rad))
        self._y_m = _on_floor(self._y_m + travelled_m * math.sin(self._heading_rad))
        spent = _BATTERY_PER_S * tick_s + _BATTERY_PER_M * abs(travelled_m)
        self._battery = max(0.0, self._battery - spent)
        if self._goal_distance_m() < _GOAL_REACHED_M:
            self._goal_m = self._random_place()

    def _random_place(self) -> tuple[float, float]:
        return self._random.uniform(0, _FLOOR_M), self._random.uniform(0, _FLOOR_M)

    def _goal_distance_m(self) -> float:
        return math.dist((self._x_m, self._y_m), self._goal_m)

    def _goal_bearing_rad(self) -> float:
        ahead = math.atan2(self._goal_m[1] - self._y_m, self._goal_m[0] - self._x_m)
        return _wrapped(ahead - self._heading_rad)


def _wheels(values: dict[str, float]) -> tuple[float, float]:
    """(linear, angular) velocity of an action, whatever else it commands."""
    linear = next((v for name, v in values.items() if "linear" in name), 0.0)
    angular = next((v for name, v in values.items() if "angular" in name), 0.0)
    return linear, angular


def _wrapped(angle_rad: float) -> float:
    return math.remainder(angle_rad, math.tau)


def _on_floor(coordinate_m: float) -> float:
    """Walls stop the robot."""
    return max(0.0, min(_FLOOR_M, coordinate_m))
