"""How long the next step may get so that all promises beside it are still kept."""

from __future__ import annotations

from collections.abc import Iterable

from cloud.scheduler.request_state import LiveRequest

__all__ = ["GUARD", "StepBound", "open_promises"]

# Share of a span that is kept for what is rounded: contexts at the middle of their
# growth, steps in whole nanoseconds.
GUARD = 1 / 1024


def open_promises(decoding: Iterable[LiveRequest], now_ns: int, alone_ns: float) -> dict[int, int]:
    """Steps until promises of requests that decode are kept -> earliest such deadline.

    Without those that would not even be kept if they ran alone, in steps of `alone_ns`:
    if they held others back until their deadline, they would take those with them.
    """
    due: dict[int, int] = {}
    for live in decoding:
        if not live.is_met:  # Then it is about the last token: the first one is out.
            steps = live.max_output - live.num_output
            deadline_ns = live.deadline_ns
            is_first = due.get(steps, deadline_ns) >= deadline_ns
            if is_first and deadline_ns - now_ns >= steps * alone_ns:
                due[steps] = deadline_ns
    return due


class StepBound:
    """The longest that a step may get, while prefills are put into it.

    Of the n steps that a promise needs, the next one may be so long that those after it
    are still in time: they take `later_ns` each, more where prefills that end in this step
    decode from then on, with the margin on each and the excess kept for the longest. Twice
    the guard is kept: once more than of a newcomer's own span.

    Args:
        due: (steps until a promise is kept, its deadline).
        now_ns: when the step begins.
        later_ns: time of a step after it, with the decodes that there are.
        growth_ns: by how much each step is longer than the one before.
        stretch: what predicted times are multiplied with.
        excess: by what share of itself a single step may be longer still.
        ceiling_ns: what it must not exceed for another reason.
    """

    __slots__ = (
        "_asked",
        "_ceiling_ns",
        "_due",
        "_excess",
        "_growth_ns",
        "_later_ns",
        "_now_ns",
        "_stretch",
        "longest_ns",
    )

    def __init__(
        self,
        due: Iterable[tuple[int, float]] = (),
        *,
        now_ns: float = 0.0,
        later_ns: float = 0.0,
        growth_ns: float = 0.0,
        stretch: float = 1.0,
        excess: float = 0.0,
        ceiling_ns: float = float("inf"),
    ) -> None:
        self._due = dict(due)
        self._now_ns = now_ns
        self._later_ns = later_ns
        self._growth_ns = growth_ns
        self._stretch = stretch
        self._excess = excess
        self._ceiling_ns = ceiling_ns
        # Longest step with which all promises are kept; infinite where nothing bounds it.
        self.longest_ns = self._longest_ns(self._due.items(), later_ns)
        self._asked = (0.0, self.longest_ns)  # The last answer, which is asked for twice.

    def with_decode_ns(self, decode_ns: float) -> float:
        """The longest step if one more decodes from then on, which adds `decode_ns` to each."""
        if not (decode_ns and self._due):
            return self.longest_ns
        if decode_ns != self._asked[0]:
            longest_ns = self._longest_ns(self._due.items(), self._later_ns + decode_ns)
            self._asked = (decode_ns, longest_ns)
        return self._asked[1]

    def end_prefill(self, decode_ns: float, steps: int, deadline_ns: int | None) -> None:
        """Takes in a prefill that ends in this step.

        Args:
            decode_ns: what it adds to each step from then on.
            steps: until its promise is kept, this one included.
            deadline_ns: of its promise; None where that binds nobody.
        """
        longest_ns = self.with_decode_ns(decode_ns)
        self._later_ns += decode_ns
        if deadline_ns is not None:
            own_ns = self._longest_ns([(steps, deadline_ns)], self._later_ns)
            longest_ns = min(longest_ns, own_ns)
            self._due[steps] = min(self._due.get(steps, deadline_ns), deadline_ns)
        self.longest_ns = longest_ns
        self._asked = (0.0, longest_ns)

    def _longest_ns(self, due: Iterable[tuple[int, float]], later_ns: float) -> float:
        least_ns = float("inf")
        for steps, deadline_ns in due:
            left_ns = deadline_ns - self._now_ns
            after_ns = (steps - 1) * (later_ns + self._growth_ns * steps / 2)
            spare_ns = left_ns * (1 - 2 * GUARD) - self._stretch * after_ns
            if spare_ns < least_ns:
                least_ns = spare_ns
        return min(self._ceiling_ns, least_ns / (self._stretch + self._excess))
