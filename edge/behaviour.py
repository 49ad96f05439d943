"""How a robot comes to rest by itself: supplied ways, and the interface for others."""

import math
from collections.abc import Mapping
from typing import Protocol

from headway.errors import ConfigError

__all__ = ["Behaviour", "Stop", "VelocityRamp"]


class Behaviour(Protocol):
    """What to command where nobody else decides.

    Called once a control period, from the control thread: it must not wait.
    """

    def values(self, last: Mapping[str, float], elapsed_ns: int) -> Mapping[str, float]:
        """The values to command now.

        Args:
            last: what was commanded when this began, by name, in SI units.
            elapsed_ns: since then.
        """


class Stop:
    """Zero at once, for every value: for velocities and torques, never for positions."""

    def values(self, last: Mapping[str, float], elapsed_ns: int) -> Mapping[str, float]:
        """All zero."""
        del elapsed_ns
        return dict.fromkeys(last, 0.0)


class VelocityRamp:
    """Brings every velocity to zero evenly, and keeps it there.

    Args:
        decelerations: by name, what its velocity changes by in a second (m/s², rad/s²).
            A value that is not named is brought to zero at once.

    Raises:
        ConfigError: a deceleration is not finite and more than 0.
    """

    def __init__(self, decelerations: Mapping[str, float]) -> None:
        for name, per_s in decelerations.items():
            if not (math.isfinite(per_s) and per_s > 0):
                raise ConfigError(
                    f"a deceleration must be finite and more than 0, got {per_s}", source=name
                )
        self._decelerations = dict(decelerations)

    def values(self, last: Mapping[str, float], elapsed_ns: int) -> Mapping[str, float]:
        """The ramp at this instant."""
        return {name: self._slowed(name, value, elapsed_ns) for name, value in last.items()}

    def _slowed(self, name: str, value: float, elapsed_ns: int) -> float:
        per_s = self._decelerations.get(name)
        if per_s is None:
            return 0.0
        return math.copysign(max(0.0, abs(value) - per_s * elapsed_ns / 1e9), value)
