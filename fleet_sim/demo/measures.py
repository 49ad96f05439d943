"""What the fleet sees: counts and times on the robots' side of the wire."""

import threading
from dataclasses import dataclass

from edge.answer import Answer, Tally

__all__ = ["FleetMeasures", "LastAnswer"]


@dataclass(frozen=True, slots=True)
class LastAnswer:
    """The newest answer of a robot."""

    robot_id: str
    answer: Answer


class FleetMeasures:
    """Counts the answers of many robots, and what batch work gave. Safe for threads.

    Attributes:
        residents: tally of the robots that are there all the time.
        visitors: tally of those that come for the burst.
        pilot: tally of the one that was there before, alone. The server counts
            its questions as well.
    """

    def __init__(self) -> None:
        self.residents = Tally()
        self.visitors = Tally()
        self.pilot = Tally()
        self._lock = threading.Lock()
        self._last: dict[str, Answer] = {}
        self._batch_tokens = 0
        self._batch_texts = 0

    def add_resident(self, robot_id: str, answer: Answer) -> None:
        """Counts an answer of a robot that is there all the time."""
        with self._lock:
            self.residents.add(answer)
            self._last[robot_id] = answer

    def add_visitor(self, answer: Answer) -> None:
        """Counts an answer of a robot that came for the burst."""
        with self._lock:
            self.visitors.add(answer)

    def add_pilot(self, answer: Answer) -> None:
        """Counts an answer to the robot that measures."""
        with self._lock:
            self.pilot.add(answer)

    def add_text(self, num_tokens: int) -> None:
        """Counts a batch text that is done."""
        with self._lock:
            self._batch_texts += 1
            self._batch_tokens += num_tokens

    @property
    def batch_texts(self) -> int:
        """Batch texts done."""
        return self._batch_texts

    @property
    def batch_tokens(self) -> int:
        """Tokens of those texts."""
        return self._batch_tokens

    def last_answers(self) -> list[LastAnswer]:
        """The newest answer of each resident robot, by its name."""
        with self._lock:
            return [LastAnswer(robot_id, answer) for robot_id, answer in sorted(self._last.items())]
