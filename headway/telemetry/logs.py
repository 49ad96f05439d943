"""Logs: one event, its facts as fields, one line.

A process's `main` calls `configure_logging`; nothing else ever does. Server
code logs with `structlog.get_logger()`; the robot's library, which lives in
other people's processes, with the standard library's `logging`. Both arrive in
the same lines. Events are snake_case words, facts are keyword arguments:

    log.info("request_finished", request_id=..., outcome=..., output_tokens=...)
"""

import json
import logging
import sys
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal, TextIO

import structlog
from structlog.typing import EventDict, Processor

from headway.telemetry.redaction import is_secret, may_hold_credential, redact

__all__ = ["LogFormat", "LogLevel", "configure_logging"]

LogFormat = Literal["auto", "json", "console"]
LogLevel = Literal["debug", "info", "warning", "error"]


def configure_logging(
    log_format: LogFormat = "auto", log_level: LogLevel = "info", stream: TextIO | None = None
) -> None:
    """Decides where this process's log lines go. For a process's `main` only.

    Args:
        log_format: "json" writes JSON lines, "console" lines for people, "auto"
            the latter on a terminal and the former elsewhere.
        log_level: least severity that is written.
        stream: where to; standard error as it is now where None.
    """
    target = sys.stderr if stream is None else stream
    as_json = log_format == "json" or (log_format == "auto" and not target.isatty())
    level = logging.getLevelNamesMapping()[log_level.upper()]
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        _Timestamp(),
        # Plain tracebacks: one with local variables would show credentials.
        structlog.processors.format_exc_info,
        redact,
    ]
    final = _json() if as_json else _console(colors=target.isatty())
    own = [*shared, *final]
    structlog.configure(
        processors=[shared[0], _JsonLine(own[1:])] if as_json else own,
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(target),
        cache_logger_on_first_use=True,
    )
    # Lines of libraries that log with the standard library.
    handler = logging.StreamHandler(target)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[
                structlog.stdlib.ExtraAdder(),
                structlog.stdlib.add_logger_name,
                *shared,
            ],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *final],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)


def _json() -> list[Processor]:
    return [_lead_with_event, structlog.processors.JSONRenderer(serializer=_serializer())]


def _console(*, colors: bool) -> list[Processor]:
    return [
        structlog.dev.ConsoleRenderer(
            colors=colors, exception_formatter=structlog.dev.plain_traceback
        )
    ]


def _lead_with_event(logger: object, method: str, event: EventDict) -> EventDict:
    """Time, severity and event first, as a person looks for them there."""
    lead = {name: event.pop(name) for name in ("timestamp", "level", "event") if name in event}
    lead.update(event)
    return lead


class _Timestamp:
    """A processor: the time in UTC, ISO 8601 with microseconds."""

    def __init__(self) -> None:
        # One value, since any thread may write a line.
        self._latest = (0, "1970-01-01T00:00:00")

    def __call__(self, logger: object, method: str, event: EventDict) -> EventDict:
        event["timestamp"] = self.now()
        return event

    def now(self) -> str:
        """The time as text."""
        # The calendar is worked out once a second, not for each line.
        second, ns = divmod(time.time_ns(), 1_000_000_000)
        at, text = self._latest
        if second != at:
            text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
            self._latest = (second, text)
        return f"{text}.{ns // 1000:06d}Z"


_PLAIN = frozenset({str, int, float, bool, type(None)})
# Where they are facts, the processors decide between them and their own.
_TAKEN = frozenset({"timestamp", "level", "exc_info"})


@lru_cache(maxsize=1024)
def _are_plain(names: tuple[str, ...]) -> bool:
    """Whether facts with these names need nothing done to them."""
    return "event" in names and not any(name in _TAKEN or is_secret(name) for name in names)


class _JsonLine:
    """The last processor of JSON lines: what `whole` gives, several times quicker for
    an event of plain facts (numbers and texts, none of them secret) such as each
    request writes.

    Args:
        whole: processors from the severity to the line, for all other events.
    """

    def __init__(self, whole: list[Processor]) -> None:
        self._whole = whole
        self._timestamp = _Timestamp()
        self._dumps = _serializer()

    def __call__(self, logger: object, method: str, event: EventDict) -> str:
        if _PLAIN.issuperset(map(type, event.values())) and _are_plain(tuple(event)):
            now = self._timestamp.now()
            # What stands there already keeps its place.
            facts = {"timestamp": now, "level": method, "event": event["event"], **event}
            line = self._dumps(facts, default=str)
            if not may_hold_credential(line):
                return line
        result: Any = event
        for processor in self._whole:
            result = processor(logger, method, result)
        return str(result)


def _serializer() -> Callable[..., str]:
    """JSON text of an event; with orjson where it is installed, several times quicker."""
    try:
        import orjson
    except ModuleNotFoundError:
        return json.dumps

    def dumps(event: EventDict, default: Callable[[Any], Any]) -> str:
        return orjson.dumps(event, default=default, option=orjson.OPT_NON_STR_KEYS).decode()

    return dumps
