"""Where a text ends: before the first stop string, and never past the beginning of one."""

from collections.abc import Sequence

__all__ = ["StopFilter"]


class StopFilter:
    """Passes text on as it comes, up to the first of `stop`.

    Text that may be the beginning of a stop string is held back until that is
    known.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.is_stopped = False

    def push(self, text: str, *, is_last: bool = False) -> str:
        """What of all that came can be told now.

        Args:
            text: what comes next.
            is_last: nothing comes after it.
        """
        if self.is_stopped:
            return ""
        if not self._stop:
            return text
        text = self._held + text
        self._held = ""
        ends = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if ends:
            self.is_stopped = True
            return text[: min(ends)]
        keep = 0 if is_last else max(_overlap(text, stop) for stop in self._stop)
        if keep:
            text, self._held = text[:-keep], text[-keep:]
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`, and is not all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0
