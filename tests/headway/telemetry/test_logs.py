"""Logs: one line an event, for programs or for people, and never a credential."""

import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from headway.telemetry import REDACTED, configure_logging, redact


class Terminal(io.StringIO):
    """A stream that says that a person looks at it."""

    def isatty(self) -> bool:
        """Yes."""
        return True


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Each test configures this process as a main would; put it back."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def lines_of(stream: io.StringIO) -> list[dict[str, Any]]:
    """The JSON lines that were written."""
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_an_event_is_one_json_line_with_its_facts() -> None:
    """Time, severity and event lead; facts keep their types."""
    stream = io.StringIO()
    configure_logging("json", "info", stream)
    structlog.get_logger().info("request_finished", outcome="COMPLETED", output_tokens=20, x=None)
    (line,) = lines_of(stream)
    assert list(line) == ["timestamp", "level", "event", "outcome", "output_tokens", "x"]
    assert line["event"] == "request_finished"
    assert line["level"] == "info"
    assert line["timestamp"].endswith("Z")
    assert (line["outcome"], line["output_tokens"], line["x"]) == ("COMPLETED", 20, None)


@pytest.mark.parametrize(
    ("stream", "is_json"), [(io.StringIO(), True), (Terminal(), False)], ids=["file", "terminal"]
)
def test_auto_writes_for_whoever_reads(stream: io.StringIO, is_json: bool) -> None:
    """JSON for a file or a pipe, plain text on a terminal."""
    configure_logging("auto", "info", stream)
    structlog.get_logger().info("server_ready", port=50051)
    assert stream.getvalue().startswith("{") is is_json
    assert "server_ready" in stream.getvalue()


def test_a_format_that_is_asked_for_wins_over_the_terminal() -> None:
    """JSON on a terminal where somebody wants it."""
    stream = Terminal()
    configure_logging("json", "info", stream)
    structlog.get_logger().info("server_ready")
    assert lines_of(stream)[0]["event"] == "server_ready"


def test_less_severe_events_are_left_out() -> None:
    """Of this code and of libraries alike."""
    stream = io.StringIO()
    configure_logging("json", "warning", stream)
    structlog.get_logger().info("quiet")
    structlog.get_logger().warning("loud")
    logging.getLogger("some.library").info("quiet")
    logging.getLogger("some.library").error("loud")
    assert [line["event"] for line in lines_of(stream)] == ["loud", "loud"]


def test_context_of_a_request_is_on_each_of_its_lines() -> None:
    """Bound once, merged into every line of the same task."""
    stream = io.StringIO()
    configure_logging("json", "info", stream)
    with structlog.contextvars.bound_contextvars(request_id="r1"):
        structlog.get_logger().info("inside")
    structlog.get_logger().info("outside")
    assert [line.get("request_id") for line in lines_of(stream)] == ["r1", None]


def test_lines_of_libraries_look_the_same() -> None:
    """The standard library's logging: same fields, its extras, and the logger's name."""
    stream = io.StringIO()
    configure_logging("json", "info", stream)
    logging.getLogger("grpc._channel").warning("lost %s", "peer", extra={"attempt": 3})
    (line,) = lines_of(stream)
    assert line["event"] == "lost peer"
    assert (line["logger"], line["level"], line["attempt"]) == ("grpc._channel", "warning", 3)


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_a_traceback_shows_no_variables(log_format: Any) -> None:
    """Where a variable holds a credential, a traceback with variables would print it."""
    stream = io.StringIO()
    configure_logging(log_format, "info", stream)
    held = "".join(["hun", "ter2"])
    try:
        raise RuntimeError("the call failed")
    except RuntimeError:
        structlog.get_logger().exception("call_failed")
        logging.getLogger("some.library").exception("call_failed")
    text = stream.getvalue()
    assert text.count("RuntimeError: the call failed") == 2
    assert "Traceback" in text
    assert held not in text


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_credentials_never_reach_a_line(log_format: Any) -> None:
    """However they come: as facts, in metadata, in a mapping, in a text, in an exception."""
    stream = io.StringIO()
    configure_logging(log_format, "debug", stream)
    log = structlog.get_logger()
    log.info("a", api_key="hunter2", authorization="hunter2", password="hunter2")
    log.info("b", metadata=(("authorization", "Bearer hunter2"), ("x-api-key", "hunter2")))
    log.info("c", headers={"X-Api-Key": "hunter2", "inner": {"client_secret": "hunter2"}})
    log.info("d", note="sent Authorization: Bearer hunter2 to peer", access_token=b"hunter2")
    log.info("e bearer hunter2xyz")
    logging.getLogger("lib").info("f BASIC hunter2==", extra={"refresh_token": "hunter2"})
    try:
        raise RuntimeError("refused: Bearer hunter2")
    except RuntimeError:
        log.exception("g")
    with structlog.contextvars.bound_contextvars(secret="hunter2"):
        log.info("h")
    assert "hunter2" not in stream.getvalue()
    assert stream.getvalue().count(REDACTED) >= 11


def test_a_models_tokens_are_no_credentials() -> None:
    """Counts and token ids are what these logs are about."""
    facts = {
        "token": 17,
        "tokens": [1, 2, 3],
        "prompt_tokens": 120,
        "max_tokens": 20,
        "tokens_per_s": 3.5,
        "basic": "a basic plan",
        "pair": ("observation", "o-1"),
    }
    assert redact(None, "info", dict(facts)) == facts | {"pair": ["observation", "o-1"]}


def test_what_nests_too_deep_to_look_through_is_not_shown() -> None:
    """Rather nothing than a credential."""
    nested: Any = "hunter2"
    for _ in range(20):
        nested = {"inner": nested}
    assert "hunter2" not in repr(redact(None, "info", {"x": nested}))


def test_without_orjson_the_lines_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The robot's installation has no orjson."""

    def line() -> dict[str, Any]:
        stream = io.StringIO()
        structlog.reset_defaults()
        configure_logging("json", "info", stream)
        structlog.get_logger().info("x", number=1.5, text="µ", items=[1, None], where=RuntimeError)
        (written,) = lines_of(stream)
        del written["timestamp"]
        return written

    with_orjson = line()
    monkeypatch.setitem(sys.modules, "orjson", None)
    assert line() == with_orjson


def test_importing_headway_configures_nothing() -> None:
    """A library leaves logging to the process that it lives in."""
    script = (
        "import logging, structlog\n"
        "import headway.telemetry, headway.config, headway.cost_model, headway.telemetry.metrics\n"
        "print(logging.getLogger().handlers, structlog.is_configured())\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout == "[] False\n"


@pytest.mark.parametrize("text", ["sent bEaReR hunter2x", 'a "Basic hunter2x" header'])
def test_a_credential_in_a_plain_fact_never_reaches_a_line(text: str) -> None:
    """However it is written, and also where all facts are texts and numbers."""
    stream = io.StringIO()
    configure_logging("json", "info", stream)
    structlog.get_logger().info("x", note=text, number=1)
    (line,) = lines_of(stream)
    assert line["note"].startswith(text[:6])
    assert "hunter2" not in line["note"]
    assert REDACTED in line["note"]


def test_a_fact_with_a_reserved_name_does_not_displace_the_line_s_own() -> None:
    """When and how severe is for the logger to say."""
    stream = io.StringIO()
    configure_logging("json", "info", stream)
    structlog.get_logger().info("x", level="fatal", timestamp="yesterday", exc_info=None)
    (line,) = lines_of(stream)
    assert (line["level"], line["event"]) == ("info", "x")
    assert line["timestamp"].endswith("Z")
    assert "exc_info" not in line


@pytest.mark.parametrize(
    ("time_ns", "expected"),
    [
        (0, "1970-01-01T00:00:00.000000Z"),
        # The leap day of a year that only the rule of 400 makes one.
        (951_782_400_000_000_000, "2000-02-29T00:00:00.000000Z"),
        (1_700_000_000_123_456_789, "2023-11-14T22:13:20.123456Z"),
        (1_700_000_000_999_999_999, "2023-11-14T22:13:20.999999Z"),
        (1_700_000_001_000_000_000, "2023-11-14T22:13:21.000000Z"),
    ],
)
def test_time_of_a_line_is_utc_with_microseconds(
    monkeypatch: pytest.MonkeyPatch, time_ns: int, expected: str
) -> None:
    """ISO 8601, always of one length."""
    stream = io.StringIO()
    configure_logging("json", "info", stream)
    structlog.get_logger().info("now")
    monkeypatch.setattr("time.time_ns", lambda: time_ns)
    structlog.get_logger().info("then")
    assert lines_of(stream)[1]["timestamp"] == expected
