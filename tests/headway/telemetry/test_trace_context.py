"""Traceparent headers, by the W3C's specification and its own examples."""

import pytest

from headway.telemetry.trace_context import TraceParent, parse_traceparent, trace_parent_of

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
VALID = f"00-{TRACE}-{SPAN}-01"


@pytest.mark.parametrize(
    ("text", "is_sampled"),
    [
        (VALID, True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-03", True),  # Other flags say nothing of sampling.
        (f"00-{TRACE}-{SPAN}-02", False),
        (f"cc-{TRACE}-{SPAN}-01", True),  # A later version,
        (f"cc-{TRACE}-{SPAN}-01-what-the-future-will-be-like", True),  # with more fields.
    ],
)
def test_valid_headers_are_read(text: str, is_sampled: bool) -> None:
    """Section 3.2, and 4 for versions to come."""
    assert parse_traceparent(text) == TraceParent(TRACE, SPAN, is_sampled)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00",
        "garbage",
        VALID.upper(),
        VALID + "-00",
        VALID + "\n",
        " " + VALID,
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[:-1]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE[:-1]}g-{SPAN}-01",
        f"cc-{TRACE}-{SPAN}-01." + "what",
        f"cc-{TRACE}-{SPAN}-01-" + "x" * 1000,
        VALID.encode(),
        None,
    ],
)
def test_what_is_not_valid_is_ignored(text: object) -> None:
    """It comes from strangers, and would stand in the log."""
    assert parse_traceparent(text) is None


def test_metadata_names_one_span_or_none() -> None:
    """Two are as good as none: nobody knows which is meant."""
    assert trace_parent_of([("x", "y"), ("traceparent", VALID)]) is not None
    assert trace_parent_of([("traceparent", VALID), ("traceparent", VALID)]) is None
    assert trace_parent_of([("traceparent", "garbage")]) is None
    assert trace_parent_of([]) is None
    assert trace_parent_of(None) is None
