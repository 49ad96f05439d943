"""Who gives way when room is short: as many as it takes, or nobody."""

from collections.abc import Sequence
from typing import Protocol

from cloud.scheduler.config import SchedulerConfig
from cloud.scheduler.replica import Replica
from cloud.scheduler.request_state import LiveRequest

__all__ = ["Evict", "Preemption"]


class Evict(Protocol):
    """Pushes a running request back to its queue and takes its room."""

    def __call__(self, live: LiveRequest, now_ns: int) -> None:
        """Carries it out."""


class Preemption:
    """Chooses victims; `evict` carries it out."""

    __slots__ = ("_config", "_evict")

    def __init__(self, config: SchedulerConfig, evict: Evict) -> None:
        self._config = config
        self._evict = evict

    def make_room(
        self,
        replica: Replica,
        rank: int,
        *,
        num_slots: int,
        num_blocks: int,
        kept: Sequence[int],
        now_ns: int,
    ) -> bool:
        """Frees slots and blocks for a promise of class `rank`.

        Blocks of `kept`, which the newcomer shares, are none that it gains.
        Only strictly lower classes give way: the lowest first, in it kept
        promises before open ones, who was evicted too often after the others, and
        the newest first.

        Returns:
            Whether the room is there now. If not, nobody was evicted.
        """
        victims = sorted(
            (live for live in replica.running if live.rank > rank), key=self._gives_way_first
        )
        chosen: list[LiveRequest] = []
        for victim in victims:
            if _is_enough(replica, chosen, num_slots, num_blocks, kept):
                break
            chosen.append(victim)
        if not _is_enough(replica, chosen, num_slots, num_blocks, kept):
            return False
        # A large last one may have made earlier ones needless.
        for victim in list(chosen):
            others = [live for live in chosen if live is not victim]
            if _is_enough(replica, others, num_slots, num_blocks, kept):
                chosen = others
        for victim in chosen:
            self._evict(victim, now_ns)
        return True

    def make_room_to_grow(
        self, replica: Replica, live: LiveRequest, now_ns: int, *, is_last_resort: bool = False
    ) -> bool:
        """Frees a block for a running request whose next token has none.

        The newest of the lowest class gives way, an equal one only while the
        rate of such evictions permits; an open promise never does.

        Returns:
            Whether there is a block. If not, the request stands still in this
            step, or was itself the newest and was evicted.
        """
        victim = min(
            (
                other
                for other in replica.running
                if other.rank >= live.rank and (other.is_met or other.rank > 1)
            ),
            key=self._gives_way_first,
            default=None,
        )
        if victim is None:
            return False
        is_equal = victim.rank == live.rank and not is_last_resort
        if is_equal:
            if replica.growth_evictions.level(now_ns) < 1:
                return False
            replica.growth_evictions.draw(1, now_ns)
        self._evict(victim, now_ns)
        return victim is not live and replica.pool.num_available > 0

    def _gives_way_first(self, live: LiveRequest) -> tuple[int, bool, bool, int]:
        is_spared = live.num_preemptions >= self._config.max_evictions_each
        return (-live.rank, not live.is_met, is_spared, -live.seq)


def _is_enough(
    replica: Replica,
    victims: list[LiveRequest],
    num_slots: int,
    num_blocks: int,
    kept: Sequence[int],
) -> bool:
    """Whether the room is there once the victims are gone."""
    if num_slots > len(victims):
        return False
    gained = replica.pool.num_released([live.blocks for live in victims], kept)
    gained += sum(live.reserved_blocks for live in victims)
    return replica.pool.num_available + gained >= num_blocks
