"""What robot and cloud share: contract, clock, cost model, telemetry, configuration."""

__version__ = "0.1.0"
