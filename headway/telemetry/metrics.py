"""Prometheus metrics of a server.

Names are vLLM's with another prefix where the meaning is the same (vLLM,
docs/design/metrics), so that its dashboards can be kept. Base units, closed
label sets: a stranger can never add a time series.

Needs the cloud extra (prometheus_client).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prometheus_client import (
    CollectorRegistry,
    Gauge,
    ProcessCollector,
    generate_latest,
)

from headway.outcome import Outcome, Reason, RequestClass
from headway.telemetry.metrics_server import MetricsServer
from headway.telemetry.series import CounterFamily, Distribution, HistogramFamily, Tally

__all__ = ["OTHER_TENANT", "Metrics"]

OTHER_TENANT = "other"

# Seconds. From a tenth of a robot's shortest deadline to a patient person.
_LATENCY_BUCKETS = (
    0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.0, 5.0,
    10.0, 30.0, 60.0, 300.0,
)  # fmt: skip
_STEP_BUCKETS = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1.0, 5.0,
)  # fmt: skip
_OVERHEAD_BUCKETS = (
    0.00005, 0.0001, 0.0002, 0.0004, 0.0006, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1,
)  # fmt: skip
_NAMESPACE = "headway"
_PER_REQUEST = ("class", "tenant")


@dataclass(frozen=True, slots=True)
class _Series:
    """The time series of one class and tenant, found once and not for each request."""

    admitted: Tally
    missed: Tally
    prompt_tokens: Tally
    cached_tokens: Tally
    output_tokens: Tally
    queue: Distribution
    ttft: Distribution
    tpot: Distribution
    e2e: Distribution
    finished: dict[tuple[Outcome, Reason | None], Tally]
    rejected: dict[Reason, Tally]


class Metrics:
    """What a server counts and times, on a registry of its own.

    Args:
        tenants: names that may become labels; every other tenant is "other".
        registry: where to register; a new one where None.
    """

    def __init__(
        self, tenants: Iterable[str] = (), registry: CollectorRegistry | None = None
    ) -> None:
        self.registry = CollectorRegistry() if registry is None else registry
        self._tenants = frozenset(tenants)
        self._series: dict[tuple[RequestClass, str], _Series] = {}
        self._steps: dict[str, tuple[Distribution, Distribution]] = {}
        ProcessCollector(registry=self.registry)
        self._admitted = self._counter("requests_admitted", "Requests admitted.", _PER_REQUEST)
        self._rejected = self._counter(
            "requests_rejected", "Requests refused at admission.", (*_PER_REQUEST, "reason")
        )
        self._finished = self._counter(
            "requests_finished",
            "Admitted requests that ended; reason is empty for COMPLETED.",
            (*_PER_REQUEST, "outcome", "reason"),
        )
        self._missed = self._counter(
            "deadline_misses",
            "Admitted requests with a deadline that were not completed in time, whatever the "
            "cause save the client's cancel.",
            _PER_REQUEST,
        )
        self._prompt_tokens = self._counter(
            "prompt_tokens", "Prompt tokens of requests that ended.", _PER_REQUEST
        )
        self._cached_tokens = self._counter(
            "prompt_tokens_cached", "Prompt tokens that the prefix cache held.", _PER_REQUEST
        )
        self._output_tokens = self._counter("generation_tokens", "Tokens decoded.", _PER_REQUEST)
        self._preemptions = self._counter(
            "num_preemptions", "Running requests pushed back for others.", ("class",)
        )
        self._queue = self._histogram(
            "request_queue_time_seconds", "Arrival to the first step.", _LATENCY_BUCKETS
        )
        self._ttft = self._histogram(
            "time_to_first_token_seconds", "Arrival to the first token.", _LATENCY_BUCKETS
        )
        self._tpot = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean time between two tokens of a request.",
            _STEP_BUCKETS,
        )
        self._e2e = self._histogram(
            "e2e_request_latency_seconds", "Arrival to the last token.", _LATENCY_BUCKETS
        )
        self._step = self._histogram(
            "step_time_seconds", "Time that the engine took for a step.", _STEP_BUCKETS, "replica"
        )
        self._overhead = self._histogram(
            "step_host_overhead_seconds",
            "Time of a step outside the engine: planning, transport, committing.",
            _OVERHEAD_BUCKETS,
            "replica",
        )
        self._running = self._gauge("num_requests_running", "Requests in a batch now.", "class")
        self._waiting = self._gauge("num_requests_waiting", "Requests waiting now.", "class")
        self._kv = self._gauge("kv_cache_usage_perc", "KV in use; 1 is full.", "replica")
        self._up = self._gauge("replica_up", "1 while the replica can be given work.", "replica")
        self._start_at_zero()

    def admitted(self, request_class: RequestClass, tenant: str) -> None:
        """Counts a request that was taken in."""
        self._of(request_class, tenant).admitted.value += 1

    def rejected(self, request_class: RequestClass, tenant: str, reason: Reason) -> None:
        """Counts a request that was refused at admission."""
        series = self._of(request_class, tenant)
        tally = series.rejected.get(reason)
        if tally is None:
            labels = (request_class.label, self._tenant(tenant), reason.value)
            tally = series.rejected[reason] = self._rejected.labels(*labels)
        tally.value += 1

    def finished(
        self,
        request_class: RequestClass,
        tenant: str,
        outcome: Outcome,
        reason: Reason | None = None,
        *,
        missed: bool = False,
        prompt_tokens: int = 0,
        cached_tokens: int = 0,
        output_tokens: int = 0,
        queue_ns: int = 0,
        prefill_ns: int = 0,
        decode_ns: int = 0,
    ) -> None:
        """Counts the end of an admitted request, and times a completed one.

        Args:
            request_class: class of the request.
            tenant: whose it was.
            outcome: how it ended.
            reason: why, where it was not completed.
            missed: it had a deadline, was not completed in time, and that was
                not the client's own wish.
            prompt_tokens: of the prompt, cached ones included.
            cached_tokens: of the prompt, found in the prefix cache.
            output_tokens: decoded.
            queue_ns: arrival to the first step with the request.
            prefill_ns: from there to the first token.
            decode_ns: from there to the last token.
        """
        series = self._of(request_class, tenant)
        tally = series.finished.get((outcome, reason))
        if tally is None:
            why = reason.value if reason else ""
            labels = (request_class.label, self._tenant(tenant), outcome.value, why)
            tally = series.finished[outcome, reason] = self._finished.labels(*labels)
        tally.value += 1
        series.missed.value += missed
        series.prompt_tokens.value += prompt_tokens
        series.cached_tokens.value += cached_tokens
        series.output_tokens.value += output_tokens
        if outcome is not Outcome.COMPLETED:
            return  # Times of what was cut short would flatter the rest.
        first_ns = queue_ns + prefill_ns
        series.queue.observe(queue_ns)
        series.ttft.observe(first_ns)
        series.e2e.observe(first_ns + decode_ns)
        if output_tokens > 1:
            series.tpot.observe(decode_ns / (output_tokens - 1))

    def preempted(self, request_class: RequestClass, count: int = 1) -> None:
        """Counts running requests that were pushed back."""
        self._preemptions.labels(request_class.label).value += count

    def step(self, replica_id: str, engine_ns: int, host_overhead_ns: int) -> None:
        """Times one step: in the engine, and outside of it."""
        series = self._steps.get(replica_id)
        if series is None:
            series = (self._step.labels(replica_id), self._overhead.labels(replica_id))
            self._steps[replica_id] = series
        series[0].observe(engine_ns)
        series[1].observe(host_overhead_ns)

    def set_load(self, request_class: RequestClass, *, running: int, waiting: int) -> None:
        """Says how many requests of a class there are now."""
        self._running.labels(request_class.label).set(running)
        self._waiting.labels(request_class.label).set(waiting)

    def set_replica(self, replica_id: str, *, is_up: bool, kv_usage: float = 0.0) -> None:
        """Says how a replica does now.

        Args:
            replica_id: configured name of the replica.
            is_up: it can be given work.
            kv_usage: share of its KV in use, 0 to 1.
        """
        self._up.labels(replica_id).set(is_up)
        self._kv.labels(replica_id).set(kv_usage)

    def exposition(self) -> bytes:
        """All of it in Prometheus's text format."""
        return generate_latest(self.registry)

    def serve(self, host: str, port: int) -> "MetricsServer":
        """Starts to answer Prometheus over HTTP.

        Raises:
            HeadwayError: the address cannot be had.
        """
        return MetricsServer(self.registry, host, port)

    def _tenant(self, tenant: str) -> str:
        return tenant if tenant in self._tenants else OTHER_TENANT

    def _of(self, request_class: RequestClass, tenant: str) -> _Series:
        name = self._tenant(tenant)
        series = self._series.get((request_class, name))
        if series is None:
            labels = (request_class.label, name)
            series = self._series[request_class, name] = _Series(
                self._admitted.labels(*labels),
                self._missed.labels(*labels),
                self._prompt_tokens.labels(*labels),
                self._cached_tokens.labels(*labels),
                self._output_tokens.labels(*labels),
                self._queue.labels(*labels),
                self._ttft.labels(*labels),
                self._tpot.labels(*labels),
                self._e2e.labels(*labels),
                finished={},
                rejected={},
            )
        return series

    def _start_at_zero(self) -> None:
        """Makes the series that are known beforehand: a rate needs its zero."""
        for request_class in RequestClass:
            self._preemptions.labels(request_class.label)
            self.set_load(request_class, running=0, waiting=0)
            for tenant in (*sorted(self._tenants), OTHER_TENANT):
                self._admitted.labels(request_class.label, tenant)
                self._missed.labels(request_class.label, tenant)

    def _counter(self, name: str, meaning: str, labels: Sequence[str]) -> CounterFamily:
        family = CounterFamily(f"{_NAMESPACE}_{name}", meaning, labels)
        self.registry.register(family)
        return family

    def _gauge(self, name: str, meaning: str, label: str) -> Gauge:
        return Gauge(name, meaning, (label,), namespace=_NAMESPACE, registry=self.registry)

    def _histogram(
        self, name: str, meaning: str, buckets: Sequence[float], label: str = ""
    ) -> HistogramFamily:
        labels = (label,) if label else _PER_REQUEST
        family = HistogramFamily(f"{_NAMESPACE}_{name}", meaning, labels, buckets)
        self.registry.register(family)
        return family
