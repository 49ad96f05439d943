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
from collections.abc import Callable
from typing import Any, Literal, TextIO

import structlog
from structlog.typing import EventDict, Processor

from headway.telemetry.redaction import redact

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
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        # Plain tracebacks: one with local variables would show credentials.
        structlog.processors.format_exc_info,
        redact,
    ]
    final = _json() if as_json else _console(colors=target.isatty())
    structlog.configure(
        processors=[*shared, *final],
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


def _serializer() -> Callable[..., str]:
    """JSON text of an event; with orjson where it is installed, several times quicker."""
    try:
        import orjson
    except ModuleNotFoundError:
        return json.dumps

    def dumps(event: EventDict, default: Callable[[Any], Any]) -> str:
        return orjson.dumps(event, default=default, option=orjson.OPT_NON_STR_KEYS).decode()

    return dumps
