"""One TOML file, typed and validated."""

from headway.config.load import load_settings, parse_settings
from headway.config.schema import (
    ActionSettings,
    BatchSettings,
    ClassName,
    EmbodimentSettings,
    EngineSettings,
    InteractiveSettings,
    SchedulerSettings,
    ServerSettings,
    Settings,
    SimulatedSettings,
    StandardSettings,
    TelemetrySettings,
    TenantSettings,
    TlsSettings,
)

__all__ = [
    "ActionSettings",
    "BatchSettings",
    "ClassName",
    "EmbodimentSettings",
    "EngineSettings",
    "InteractiveSettings",
    "SchedulerSettings",
    "ServerSettings",
    "Settings",
    "SimulatedSettings",
    "StandardSettings",
    "TelemetrySettings",
    "TenantSettings",
    "TlsSettings",
    "load_settings",
    "parse_settings",
]
