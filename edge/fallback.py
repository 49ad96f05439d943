"""What a robot may do at each instant: follow the cloud, itself, hold, or stop.

Pure: events and instants go in, orders come out. The control loop drives it on a
robot and the simulator in virtual time; neither decides anything beside it.

    CLOUD      plays the step of the newest answer that belongs to now
    EDGE       the robot's own policy chooses, where it has one that is ready
    HOLD       comes to rest by itself, in a way that its integrator chose
    SAFE_STOP  stands, until an answer to what it saw while standing

A robot goes down at once and comes back only by an answer that is good for some
periods more (hysteresis). What was refused, came late or never came is all the
same here: the answer that it has is played to its end or its largest age, and no
step further.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from edge.action import Action
from edge.smoothed import SmoothedSpan
from headway.errors import ConfigError

__all__ = ["Fallback", "FallbackConfig", "Level", "Order"]

# Observations whose answers are waited for; more are forgotten, oldest first.
_MAX_ASKED = 64


class Level(IntEnum):
    """Who decides; a higher number is further down."""

    CLOUD = 0
    EDGE = 1
    HOLD = 2
    SAFE_STOP = 3


@dataclass(frozen=True, slots=True)
class FallbackConfig:
    """What a robot's integrator decides.

    Attributes:
        control_period_ns: between two orders.
        max_answer_age_ns: oldest observation by whose answer the robot still moves.
        safe_stop_after_ns: in HOLD, before SAFE_STOP.
        budget_ns: how long an answer is waited for.
        max_source_age_ns: oldest data of each source by which anything may be
            decided; a source that is named here and silent is stale.
        periods_to_return: control periods that an answer must still be good for to
            bring the robot back to CLOUD.

    Raises:
        ConfigError: a span is not more than 0, or the robot would stop before any
            answer could come.
    """

    control_period_ns: int = 100_000_000
    max_answer_age_ns: int = 1_000_000_000
    safe_stop_after_ns: int = 2_000_000_000
    budget_ns: int = 500_000_000
    max_source_age_ns: Mapping[str, int] = field(default_factory=dict)
    periods_to_return: int = 2

    def __post_init__(self) -> None:
        """Checks what cannot work."""
        spans = {
            "control_period_ns": self.control_period_ns,
            "max_answer_age_ns": self.max_answer_age_ns,
            "safe_stop_after_ns": self.safe_stop_after_ns,
            "budget_ns": self.budget_ns,
            **{f"max_source_age_ns['{key}']": age for key, age in self.max_source_age_ns.items()},
        }
        for name, span_ns in spans.items():
            if span_ns <= 0:
                raise ConfigError(f"must be more than 0 ns, got {span_ns}", source=name)
        if self.periods_to_return < 1:
            raise ConfigError(
                f"must be at least 1, got {self.periods_to_return}", source="periods_to_return"
            )
        needed_ns = self.periods_to_return * self.control_period_ns
        if self.max_answer_age_ns < needed_ns:
            raise ConfigError(
                f"{self.max_answer_age_ns} ns are over before the {needed_ns} ns that an answer "
                "must be good for to be followed at all; raise it, or lower periods_to_return",
                source="max_answer_age_ns",
            )


@dataclass(frozen=True, slots=True)
class Order:
    """What holds from now until the next one.

    Attributes:
        level: who decides.
        values: of CLOUD, by name; None at every other level.
        since_ns: when the level began.
        reason: why it is not CLOUD; empty there.
    """

    level: Level
    values: Mapping[str, float] | None
    since_ns: int
    reason: str = ""


class Fallback:
    """One robot's levels. Instants are of one steady clock and never go back.

    Begins in SAFE_STOP: a robot that has just been switched on stands.

    Attributes:
        level: now.
        num_drops: how often it left CLOUD.
    """

    def __init__(self, config: FallbackConfig, now_ns: int) -> None:
        self.config = config
        self.level = Level.SAFE_STOP
        self.num_drops = 0
        self._since_ns = now_ns
        self._reason = "nothing was answered yet"  # Why the robot is not in CLOUD.
        self._last_no = ""  # Since the answer that is followed.
        self._chunk: Action | None = None
        self._observed_ns = -1  # Of the chunk.
        self._last_data_ns: dict[str, int] = {}
        self._asked: dict[str, int] = {}  # Observation -> its instant.
        self._in_flight: str | None = None
        self._asked_ns = 0
        self._ask_not_before_ns = now_ns
        self._delay = SmoothedSpan()

    # --- what happens ---

    def data(self, source: str, measured_ns: int) -> None:
        """A source measured something at that instant. The same picture again is no news."""
        if measured_ns > self._last_data_ns.get(source, -1):
            self._last_data_ns[source] = measured_ns

    def asked(self, observation_id: str, observed_ns: int, now_ns: int) -> None:
        """The cloud is asked about what was seen at `observed_ns`."""
        self._asked[observation_id] = observed_ns
        if len(self._asked) > _MAX_ASKED:
            del self._asked[next(iter(self._asked))]
        self._in_flight, self._asked_ns = observation_id, now_ns

    def answered(self, action: Action, now_ns: int) -> bool:
        """An answer came; whether it is followed from now on.

        It is not where it is late, older than the one that is followed, or the
        answer to something that this robot did not ask.
        """
        observed_ns = self._asked.pop(action.observation_id, None)
        self._settle(action.observation_id)
        if observed_ns is None:
            return False
        self._delay.observe(now_ns - observed_ns)
        if observed_ns <= self._observed_ns:
            return False
        if self.level is Level.SAFE_STOP and observed_ns < self._since_ns:
            return False
        end_ns = self._end_ns(action, observed_ns)
        least_ns = 1
        if self.level is not Level.CLOUD:
            least_ns = self.config.periods_to_return * self.config.control_period_ns
        if end_ns - now_ns < least_ns:
            return False
        self._chunk, self._observed_ns = action, observed_ns
        self._last_no = ""
        # Whatever was asked before is older now.
        self._asked = {name: at for name, at in self._asked.items() if at > observed_ns}
        return True

    def refused(
        self, observation_id: str, reason: str, now_ns: int, retry_after_ns: int | None = None
    ) -> None:
        """There is no answer, and why; asking again before the hint would be in vain."""
        self._asked.pop(observation_id, None)
        self._settle(observation_id)
        self._last_no = reason
        wait_ns = self.config.control_period_ns if retry_after_ns is None else retry_after_ns
        self._ask_not_before_ns = now_ns + max(0, wait_ns)

    # --- what follows ---

    def order(self, now_ns: int, *, edge_is_ready: bool = False) -> Order:
        """What the robot is to do now. To be asked for once a control period.

        Args:
            now_ns: this instant.
            edge_is_ready: the robot has a policy of its own that can decide now.
        """
        values = self._step(now_ns)
        if values is not None:
            self._go(Level.CLOUD, now_ns)
            return Order(Level.CLOUD, values, self._since_ns)
        if self.level is Level.SAFE_STOP:
            return Order(Level.SAFE_STOP, None, self._since_ns, self._reason)
        stale = self.stale_sources(now_ns)
        self._reason = f"{stale[0]} is stale" if stale else self._last_no or "no answer came"
        if edge_is_ready and not stale:
            self._go(Level.EDGE, now_ns)
        elif self.level is not Level.HOLD:
            self._go(Level.HOLD, now_ns)
        elif now_ns - self._since_ns >= self.config.safe_stop_after_ns:
            self._go(Level.SAFE_STOP, now_ns)
        return Order(self.level, None, self._since_ns, self._reason)

    def stop(self, reason: str, now_ns: int) -> None:
        """Stands at once: a person, or a part that failed, wants it so."""
        self._chunk = None
        self._since_ns = now_ns  # Also where it stands: what it saw before counts no more.
        self._go(Level.SAFE_STOP, now_ns)
        self._reason = reason

    def should_ask(self, now_ns: int) -> bool:
        """Whether it is time for the next question.

        So early that the answer is there before the last one is over, by the
        delay that was measured; one at a time, and never from stale data.
        """
        if now_ns < self._ask_not_before_ns or self.stale_sources(now_ns):
            return False
        if self._in_flight is not None:
            if now_ns - self._asked_ns < self.config.budget_ns:
                return False
            # Silence: whoever asks does not come back. The answer, if any, is late.
            self._delay.observe_silence()
            self._settle(self._in_flight)
            self._last_no = "no answer came"
        if self._chunk is None or self.level is not Level.CLOUD:
            return True
        ahead_ns = min(self._delay.upper_ns, self.config.budget_ns) + self.config.control_period_ns
        return self._end_ns(self._chunk, self._observed_ns) - now_ns <= ahead_ns

    def stale_sources(self, now_ns: int) -> list[str]:
        """Sources whose newest data is older than it may be, or that never gave any."""
        last = self._last_data_ns
        return [
            source
            for source, limit_ns in self.config.max_source_age_ns.items()
            if source not in last or now_ns - last[source] > limit_ns
        ]

    def _step(self, now_ns: int) -> Mapping[str, float] | None:
        """The step of the answer that belongs to now; None where there is none (any more)."""
        chunk = self._chunk
        if chunk is None:
            return None
        if now_ns >= self._end_ns(chunk, self._observed_ns):
            self._chunk = None
            return None
        return chunk.step_at(now_ns - self._observed_ns)

    def _end_ns(self, chunk: Action, observed_ns: int) -> int:
        """The first instant at which an answer is not followed any more."""
        length_ns = len(chunk.steps) * chunk.step_period_ns
        return observed_ns + min(length_ns, self.config.max_answer_age_ns)

    def _settle(self, observation_id: str) -> None:
        if self._in_flight == observation_id:
            self._in_flight = None

    def _go(self, level: Level, now_ns: int) -> None:
        if level is not self.level:
            self.num_drops += self.level is Level.CLOUD
            self.level, self._since_ns = level, now_ns
