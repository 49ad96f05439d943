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
from headway.telemetry.step_metrics import (
    LATENCY_BUCKETS_S,
    RATIO_BUCKETS,
    STEP_BUCKETS_S,
    Step,
    StepMetrics,
)

__all__ = ["OTHER_TENANT", "Metrics"]

OTHER_TENANT = "other"

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
            "request_queue_time_seconds", "Arrival to the first step.", LATENCY_BUCKETS_S
        )
        self._ttft = self._histogram(
            "time_to_first_token_seconds", "Arrival to the first token.", LATENCY_BUCKETS_S
        )
        self._tpot = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean time between two tokens of a request.",
            STEP_BUCKETS_S,
        )
        self._e2e = self._histogram(
            "e2e_request_latency_seconds", "Arrival to the last token.", LATENCY_BUCKETS_S
        )
        self._answers = self._histogram(
            "answer_prediction_ratio",
            "Arrival to the promised token over what admission predicted, with margin.",
            RATIO_BUCKETS,
            ("class",),
            1,
        )
        self._steps = StepMetrics(
            lambda name, meaning, bounds, per_unit: self._histogram(
                name, meaning, bounds, ("replica",), per_unit
            )
        )
        self._running = self._gauge("num_requests_running", "Requests in a batch now.", "class")
        self._waiting = self._gauge("num_requests_waiting", "Requests waiting now.", "class")
        self._tokens_waiting = self._gauge(
            "num_tokens_waiting", "Prompt and largest output of what waits now.", "class"
        )
        self._fairness = self._gauge(
            "fairness_counter_tokens",
            "Weighted tokens served over the tenant's weight; the smallest comes next.",
            *_PER_REQUEST,
        )
        self._kv = self._gauge("kv_cache_usage_perc", "KV in use; 1 is full.", "replica")
        self._kv_blocks = self._gauge(
            "kv_cache_blocks",
            "Blocks of KV memory: held by requests, cached beginnings of prompts, free.",
            "replica",
            "state",
        )
        self._margin = self._gauge(
            "scheduler_margin_ratio", "By what predicted times are multiplied.", "replica"
        )
        self._up = self._gauge("replica_up", "1 while the replica's engine works.", "replica")
        self._draining = self._gauge(
            "replica_draining", "1 while no new work is placed on the replica.", "replica"
        )
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
        prediction_ratio: float | None = None,
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
            prediction_ratio: arrival to the promised token over what admission
                predicted; None where nothing was promised.
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
        if prediction_ratio is not None:
            self._answers.labels(request_class.label).observe(prediction_ratio)

    def preempted(self, request_class: RequestClass, count: int = 1) -> None:
        """Counts running requests that were pushed back."""
        self._preemptions.labels(request_class.label).value += count

    def step(self, replica_id: str, step: Step) -> None:
        """Takes in one step of a replica."""
        self._steps.observe(replica_id, step)

    def set_load(
        self, request_class: RequestClass, *, running: int, waiting: int, waiting_tokens: int = 0
    ) -> None:
        """Says how much of a class there is now.

        Args:
            request_class: the class.
            running: requests in a batch.
            waiting: requests that wait.
            waiting_tokens: their prompts and largest outputs.
        """
        self._running.labels(request_class.label).set(running)
        self._waiting.labels(request_class.label).set(waiting)
        self._tokens_waiting.labels(request_class.label).set(waiting_tokens)

    def set_fairness(self, request_class: RequestClass, tenant: str, counter: float) -> None:
        """Says what a tenant's counter is; one that is not configured has no series."""
        if tenant in self._tenants:
            self._fairness.labels(request_class.label, tenant).set(counter)

    def set_replica(
        self,
        replica_id: str,
        *,
        is_up: bool,
        is_draining: bool = False,
        held: int = 0,
        cached: int = 0,
        free: int = 0,
        margin: float = 0.0,
    ) -> None:
        """Says how a replica does now.

        Args:
            replica_id: configured name of the replica.
            is_up: its engine works.
            is_draining: no new work is placed on it.
            held: blocks of KV memory that requests hold.
            cached: blocks that keep a beginning of a prompt, given up when needed.
            free: blocks with nothing in them.
            margin: by what its predicted times are multiplied; 0 while it is down.
        """
        total = held + cached + free
        self._up.labels(replica_id).set(is_up)
        self._draining.labels(replica_id).set(is_draining)
        self._kv.labels(replica_id).set(held / total if total else 0.0)
        for state, blocks in (("held", held), ("cached", cached), ("free", free)):
            self._kv_blocks.labels(replica_id, state).set(blocks)
        self._margin.labels(replica_id).set(margin)

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

    def _gauge(self, name: str, meaning: str, *labels: str) -> Gauge:
        return Gauge(name, meaning, labels, namespace=_NAMESPACE, registry=self.registry)

    def _histogram(
        self,
        name: str,
        meaning: str,
        bounds: Sequence[float],
        labels: Sequence[str] = _PER_REQUEST,
        per_unit: int = 1_000_000_000,
    ) -> HistogramFamily:
        family = HistogramFamily(f"{_NAMESPACE}_{name}", meaning, labels, bounds, per_unit)
        self.registry.register(family)
        return family
