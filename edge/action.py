"""What a robot is to do, and where the time for the answer went."""

from dataclasses import dataclass

__all__ = ["Action", "Timings"]


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time of a request went, by the server's monotonic clock."""

    queue_ns: int  # Arrival until the first step that worked on it began.
    prefill_ns: int  # From there until the first token.
    decode_ns: int  # From there until the last token.
    total_ns: int  # Arrival until the answer.


@dataclass(frozen=True, slots=True)
class Action:
    """A chunk of actions, a few control periods long, that came in time.

    `steps` has one tuple a control period, and each has one value a name, in SI
    units. Step i belongs to the time from i × `step_period_ns` after the
    observation, so an answer has used up some of its first steps on arrival:
    see `step_at`.
    """

    observation_id: str  # The observation that this answers.
    names: tuple[str, ...]
    steps: tuple[tuple[float, ...], ...]
    step_period_ns: int
    timings: Timings
    round_trip_ns: int  # By the robot's clock, from asking to having the answer.
    model: str

    def step_at(self, since_observation_ns: int) -> dict[str, float] | None:
        """Values by name to play that long after the observation.

        None once the chunk has been played: the robot then needs a newer answer
        or must come to rest.
        """
        index = max(0, since_observation_ns) // self.step_period_ns
        if index >= len(self.steps):
            return None
        return dict(zip(self.names, self.steps[index], strict=True))
