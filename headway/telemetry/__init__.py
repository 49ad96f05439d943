"""Logs and metrics.

`headway.telemetry.metrics` needs the cloud extra, and is imported by name.
"""

from headway.telemetry.logs import LogFormat, LogLevel, configure_logging
from headway.telemetry.redaction import REDACTED, redact

__all__ = ["REDACTED", "LogFormat", "LogLevel", "configure_logging", "redact"]
