"""What each robot asked lately, so that asking again is no new work.

A robot whose connection broke sends the same observation once more. It gets the
answer that is under way or done, as long as that is in time.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import TypeAlias

from cloud.server.call import Call
from headway.outcome import Outcome, Reason

__all__ = ["ObservationKey", "Replays"]

# Tenant, robot, observation.
ObservationKey: TypeAlias = tuple[str, str, str]

_NUM_KEPT = 4096
_KEPT_NS = 60_000_000_000


class Replays:
    """The latest calls by observation; bounded in number and age.

    Args:
        now_ns: of the dispatcher's clock.
        num_kept: most calls that are remembered.
    """

    def __init__(self, now_ns: Callable[[], int], num_kept: int = _NUM_KEPT) -> None:
        self._now_ns = now_ns
        self._num_kept = num_kept
        self._calls: OrderedDict[ObservationKey, tuple[int, Call]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._calls)

    def find(self, key: ObservationKey) -> Call | None:
        """The call for that observation; None where it is to be worked on (anew).

        One that was cancelled or lost its engine is forgotten: nobody had an answer.
        One that a newer observation took the place of must not take it back.
        """
        found = self._calls.get(key)
        if found is None:
            return None
        forget_ns, call = found
        if _came_to_nothing(call) or forget_ns <= self._now_ns():
            del self._calls[key]
            return None
        return call

    def keep(self, key: ObservationKey, call: Call) -> None:
        """Remembers an admitted call, at most until its deadline."""
        now_ns = self._now_ns()
        calls = self._calls
        while calls:
            oldest = next(iter(calls))
            if len(calls) < self._num_kept and calls[oldest][0] > now_ns:
                break
            del calls[oldest]
        deadline_ns = call.request.deadline_ns
        forget_ns = now_ns + _KEPT_NS
        calls[key] = (forget_ns if deadline_ns is None else min(deadline_ns, forget_ns), call)
        calls.move_to_end(key)


def _came_to_nothing(call: Call) -> bool:
    ended = call.ended
    if ended is None or ended.reason is Reason.SUPERSEDED:
        return False
    return ended.outcome in (Outcome.CANCELLED, Outcome.FAILED)
