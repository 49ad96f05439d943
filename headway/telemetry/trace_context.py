"""W3C Trace Context: whose trace a call belongs to, as its metadata says.

https://www.w3.org/TR/trace-context/, section 3.2. What is not valid is ignored,
as the specification asks for: it comes from strangers and goes to logs.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from headway.rpc.metadata import TRACE_PARENT

__all__ = ["TraceParent", "parse_traceparent", "trace_parent_of"]

_FORM = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})"
    r"(?P<more>-.*)?"
)
_LONGEST = 512
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class TraceParent:
    """The caller's span.

    Attributes:
        trace_id: 32 hexadecimal digits, not all 0.
        span_id: 16 hexadecimal digits, not all 0.
        is_sampled: whether the caller records it.
    """

    trace_id: str
    span_id: str
    is_sampled: bool


def parse_traceparent(text: object) -> TraceParent | None:
    """The span that a header names; None where it is not valid."""
    if not isinstance(text, str) or len(text) > _LONGEST:
        return None
    found = _FORM.fullmatch(text)
    if found is None or found["version"] == "ff":
        return None
    # Later versions may add fields; of this one there are four.
    if found["version"] == "00" and found["more"] is not None:
        return None
    if not int(found["trace"], 16) or not int(found["span"], 16):
        return None
    return TraceParent(found["trace"], found["span"], bool(int(found["flags"], 16) & _SAMPLED))


def trace_parent_of(metadata: Iterable[tuple[str, object]] | None) -> TraceParent | None:
    """The span that a call's metadata names; None where it names none, or several."""
    values = [value for key, value in metadata or () if key == TRACE_PARENT]
    return parse_traceparent(values[0]) if len(values) == 1 else None
