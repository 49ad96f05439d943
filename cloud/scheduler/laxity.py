"""How long the next step may get so that all promises beside it are still kept."""

from __future__ import annotations

from collections.abc import Iterable

from cloud.scheduler.request_state import LiveRequest

__all__ = ["GUARD", "StepBound", "open_promises"]

# Share of a span that is kept for what is rounded: contexts at the middle of their
# growth, steps in whole nanoseconds.
GUARD = 1 / 1024


def open_promises(decoding: Iterable[LiveRequest]) -> dict[int, int]:
    """Steps until promises of requests that decode are kept -> earliest such deadline."""
    due: dict[int, int] = {}
    for live in decoding:
        if not live.is_met:  # Then it is about the last token: the first one is out.
            steps = live.max_output - live.num_output
            deadline_ns = live.deadline_ns
            if due.get(steps, deadline_ns) >= deadline_ns:
                due[steps] = deadline_ns
    return due


class StepBound:
    """The longest that a step may get, while prefills are put into it.

    Of the n steps that a promise needs, the next one may be so long that those after it
    are still in time: they take `later_ns` each, more where prefills that end in this step
    decode from then on, with the margin on each and the excess kept for the longest. Twice
    the guard is kept: once more than of a newcomer's own span. A promise that would
    not even be kept if it ran alone binds nobody: if it held all prefills back until its
    deadline, it would take other promises with it.

    Args:
        due: (steps until a promise is kept, its deadline).
        now_ns: when the step begins.
        later_ns: time of a step after it, with the decodes that there are.
        growth_ns: by how much each step is longer than the one before.
        stretch: what predicted times are multiplied with.
        excess: by what share of itself a single step may be longer still.
        alone_ns: expected time of a step with a single decode, with no margin.
        ceiling_ns: what it must not exceed for another reason.
    """

    __slots__ = (
        "_alone_ns",
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
        alone_ns: float = 0.0,
        ceiling_ns: float = float("inf"),
    ) -> None:
        self._due = list(due)
        self._now_ns = now_ns
        self._later_ns = later_ns
        self._growth_ns = growth_ns
        self._stretch = stretch
        self._excess = excess
        self._alone_ns = alone_ns
        self._ceiling_ns = ceiling_ns
        # Longest step with which all promises are kept; infinite where nothing bounds it.
        self.longest_ns = self._longest_ns(self._due, later_ns)

    def with_decode_ns(self, decode_ns: float) -> float:
        """The longest step if one more decodes from then on, which adds `decode_ns` to each."""
        if not (decode_ns and self._due):
            return self.longest_ns
        return self._longest_ns(self._due, self._later_ns + decode_ns)

    def end_prefill(self, decode_ns: float, steps: int, deadline_ns: int | None) -> None:
        """Takes in a prefill that ends in this step.

        Args:
            decode_ns: what it adds to each step from then on.
            steps: until its promise is kept, this one included.
            deadline_ns: of its promise; None where that is kept or there is none.
        """
        self._later_ns += decode_ns
        if deadline_ns is not None:
            self._due.append((steps, deadline_ns))
        self.longest_ns = self._longest_ns(self._due, self._later_ns)

    def _longest_ns(self, due: list[tuple[int, float]], later_ns: float) -> float:
        least_ns = float("inf")
        for steps, deadline_ns in due:
            left_ns = deadline_ns - self._now_ns
            after_ns = (steps - 1) * (later_ns + self._growth_ns * steps / 2)
            spare_ns = left_ns * (1 - 2 * GUARD) - self._stretch * after_ns
            if spare_ns < least_ns and steps * self._alone_ns <= left_ns:
                least_ns = spare_ns
        return min(self._ceiling_ns, least_ns / (self._stretch + self._excess))
