"""Histograms of the steps of each replica: time, what was in them, how well they were foretold.

Needs the cloud extra (prometheus_client).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headway.telemetry.series import Distribution, HistogramFamily

__all__ = ["LATENCY_BUCKETS_S", "RATIO_BUCKETS", "STEP_BUCKETS_S", "Step", "StepMetrics"]

# Seconds. From a tenth of a robot's shortest deadline to a patient person.
LATENCY_BUCKETS_S = (
    0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.0, 5.0,
    10.0, 30.0, 60.0, 300.0,
)  # fmt: skip
STEP_BUCKETS_S = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1.0, 5.0,
)  # fmt: skip
_OVERHEAD_BUCKETS_S = (
    0.00005, 0.0001, 0.0002, 0.0004, 0.0006, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1,
)  # fmt: skip
# Actual over predicted: fine about 1, where the margin lies.
RATIO_BUCKETS = (
    0.25, 0.5, 0.75, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.35, 1.5, 2.0, 3.0, 5.0, 10.0,
)  # fmt: skip
_PREFILL_BUCKETS = (0, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_REQUEST_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, slots=True)
class Step:
    """What is measured of one step.

    Attributes:
        engine_ns: in the engine.
        overhead_ns: outside of it: planning, transport, committing.
        spent_ns: from plan to plan, which promises are made of.
        predicted_ns: what that was to be.
        prefill_tokens: prompt tokens in it.
        requests: in its batch.
    """

    engine_ns: int
    overhead_ns: int
    spent_ns: int
    predicted_ns: int
    prefill_tokens: int
    requests: int


@dataclass(frozen=True, slots=True)
class _Series:
    """Of one replica, found once and not for each step."""

    engine: Distribution
    overhead: Distribution
    ratio: Distribution
    prefill_tokens: Distribution
    requests: Distribution


class StepMetrics:
    """The families of steps.

    Args:
        make: registers a family: name, meaning, upper bounds, what one unit of the
            name is in the values that are observed.
    """

    def __init__(self, make: Callable[[str, str, Sequence[float], int], HistogramFamily]) -> None:
        ns = 1_000_000_000
        self._engine = make(
            "step_time_seconds", "Time that the engine took for a step.", STEP_BUCKETS_S, ns
        )
        self._overhead = make(
            "step_host_overhead_seconds",
            "Time of a step outside the engine: planning, transport, committing.",
            _OVERHEAD_BUCKETS_S,
            ns,
        )
        self._ratio = make(
            "step_prediction_ratio",
            "Time from plan to plan over what the cost model predicted, without margin.",
            RATIO_BUCKETS,
            1,
        )
        self._prefill = make(
            "step_prefill_tokens", "Prompt tokens computed in a step.", _PREFILL_BUCKETS, 1
        )
        self._requests = make(
            "step_requests", "Requests that take part in a step.", _REQUEST_BUCKETS, 1
        )
        self._series: dict[str, _Series] = {}

    def observe(self, replica_id: str, step: Step) -> None:
        """Takes in one step of a replica."""
        series = self._series.get(replica_id) or self._make_series(replica_id)
        series.engine.observe(step.engine_ns)
        series.overhead.observe(step.overhead_ns)
        if step.predicted_ns > 0:
            series.ratio.observe(step.spent_ns / step.predicted_ns)
        series.prefill_tokens.observe(step.prefill_tokens)
        series.requests.observe(step.requests)

    def _make_series(self, replica_id: str) -> _Series:
        families = (self._engine, self._overhead, self._ratio, self._prefill, self._requests)
        series = _Series(*(family.labels(replica_id) for family in families))
        self._series[replica_id] = series
        return series
