"""Metrics: names, units and labels as documented, and nobody can add a series."""

import socket
import threading
import urllib.request

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from headway.errors import HeadwayError
from headway.outcome import Outcome, Reason, RequestClass
from headway.telemetry.metrics import Metrics
from headway.telemetry.step_metrics import Step

MS = 1_000_000


@pytest.fixture
def metrics() -> Metrics:
    """Of a server with two tenants."""
    return Metrics(["acme", "night"])


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    """A sample, as Prometheus would read it; `class_` stands for the label class."""
    wanted = {key.rstrip("_"): text for key, text in labels.items()}
    return metrics.registry.get_sample_value(f"headway_{name}", wanted)


def test_a_completed_request_is_counted_and_timed(metrics: Metrics) -> None:
    """5 ms queue, 20 ms prefill, 190 ms for the other 19 tokens: 10 ms a token."""
    metrics.admitted(RequestClass.INTERACTIVE, "acme")
    metrics.finished(
        RequestClass.INTERACTIVE,
        "acme",
        Outcome.COMPLETED,
        prompt_tokens=120,
        cached_tokens=64,
        output_tokens=20,
        queue_ns=5 * MS,
        prefill_ns=20 * MS,
        decode_ns=190 * MS,
    )
    who = {"class_": "interactive", "tenant": "acme"}
    assert value(metrics, "requests_admitted_total", **who) == 1
    assert value(metrics, "requests_finished_total", outcome="COMPLETED", reason="", **who) == 1
    assert value(metrics, "prompt_tokens_total", **who) == 120
    assert value(metrics, "prompt_tokens_cached_total", **who) == 64
    assert value(metrics, "generation_tokens_total", **who) == 20
    assert value(metrics, "deadline_misses_total", **who) == 0
    for name, seconds in {
        "request_queue_time_seconds": 0.005,
        "time_to_first_token_seconds": 0.025,
        "e2e_request_latency_seconds": 0.215,
        "request_time_per_output_token_seconds": 0.010,
    }.items():
        assert value(metrics, f"{name}_sum", **who) == pytest.approx(seconds)
        assert value(metrics, f"{name}_count", **who) == 1


def test_a_single_token_has_no_time_between_tokens(metrics: Metrics) -> None:
    """Dividing by no gaps would be wrong in any way."""
    metrics.finished(RequestClass.STANDARD, "acme", Outcome.COMPLETED, output_tokens=1)
    who = {"class_": "standard", "tenant": "acme"}
    assert value(metrics, "request_time_per_output_token_seconds_count", **who) == 0


def test_a_request_that_was_cut_short_is_counted_and_not_timed(metrics: Metrics) -> None:
    """Its short latency would flatter the rest; its tokens were computed all the same."""
    metrics.finished(
        RequestClass.INTERACTIVE,
        "acme",
        Outcome.EXPIRED,
        Reason.DEADLINE_MISSED,
        missed=True,
        output_tokens=3,
        queue_ns=MS,
    )
    who = {"class_": "interactive", "tenant": "acme"}
    ended = {"outcome": "EXPIRED", "reason": "DEADLINE_MISSED"}
    assert value(metrics, "requests_finished_total", **who, **ended) == 1
    assert value(metrics, "deadline_misses_total", **who) == 1
    assert value(metrics, "generation_tokens_total", **who) == 3
    assert value(metrics, "e2e_request_latency_seconds_count", **who) == 0


def test_a_promise_is_compared_with_what_came_of_it(metrics: Metrics) -> None:
    """By class; what ended otherwise came of nothing that could be compared."""
    interactive = RequestClass.INTERACTIVE
    metrics.finished(interactive, "acme", Outcome.COMPLETED, prediction_ratio=0.8)
    metrics.finished(
        interactive, "acme", Outcome.EXPIRED, Reason.DEADLINE_MISSED, prediction_ratio=2.0
    )
    metrics.finished(RequestClass.BATCH, "night", Outcome.COMPLETED)
    assert value(metrics, "answer_prediction_ratio_sum", class_="interactive") == 0.8
    assert value(metrics, "answer_prediction_ratio_count", class_="interactive") == 1
    assert value(metrics, "answer_prediction_ratio_count", class_="batch") is None


def test_a_refusal_is_counted_by_its_reason(metrics: Metrics) -> None:
    """Refused is not admitted, and not finished."""
    metrics.rejected(RequestClass.INTERACTIVE, "acme", Reason.LATE)
    who = {"class_": "interactive", "tenant": "acme"}
    assert value(metrics, "requests_rejected_total", reason="LATE", **who) == 1
    assert value(metrics, "requests_admitted_total", **who) == 0


def test_a_tenant_that_is_not_configured_is_other(metrics: Metrics) -> None:
    """However many names strangers invent, there is one series for them."""
    before = metrics.exposition().count(b"\n")
    metrics.admitted(RequestClass.BATCH, "stranger-0")
    first = metrics.exposition().count(b"\n")
    for number in range(1, 100):
        metrics.admitted(RequestClass.BATCH, f"stranger-{number}")
    assert metrics.exposition().count(b"\n") == first > before
    assert value(metrics, "requests_admitted_total", class_="batch", tenant="other") == 100
    assert b"stranger" not in metrics.exposition()


def test_steps_split_into_engine_and_overhead(metrics: Metrics) -> None:
    """What the engine took, and what everything around it took."""
    metrics.step("r0", Step(20 * MS, 400_000, 21 * MS, 20 * MS, 736, 33))
    metrics.step("r0", Step(0, 0, MS, 0, 0, 1))  # Nothing was predicted: no ratio.
    assert value(metrics, "step_time_seconds_sum", replica="r0") == pytest.approx(0.02)
    assert value(metrics, "step_host_overhead_seconds_sum", replica="r0") == pytest.approx(0.0004)
    assert value(metrics, "step_prediction_ratio_sum", replica="r0") == pytest.approx(1.05)
    assert value(metrics, "step_prediction_ratio_count", replica="r0") == 1
    assert value(metrics, "step_prefill_tokens_sum", replica="r0") == 736
    assert value(metrics, "step_requests_sum", replica="r0") == 34


def test_gauges_say_what_is_now(metrics: Metrics) -> None:
    """The last value counts."""
    metrics.set_load(RequestClass.STANDARD, running=3, waiting=9)
    metrics.set_load(RequestClass.STANDARD, running=2, waiting=0, waiting_tokens=640)
    metrics.set_replica("r0", is_up=True, held=16, cached=8, free=40, margin=1.25)
    metrics.set_fairness(RequestClass.STANDARD, "acme", 1234.5)
    metrics.set_fairness(RequestClass.STANDARD, "stranger", 1.0)
    metrics.preempted(RequestClass.BATCH, 2)
    assert value(metrics, "num_requests_running", class_="standard") == 2
    assert value(metrics, "num_requests_waiting", class_="standard") == 0
    assert value(metrics, "num_tokens_waiting", class_="standard") == 640
    assert value(metrics, "kv_cache_usage_perc", replica="r0") == 0.25
    blocks = [value(metrics, "kv_cache_blocks", replica="r0", state=s) for s in ("held", "cached")]
    assert blocks == [16, 8]
    assert value(metrics, "scheduler_margin_ratio", replica="r0") == 1.25
    who = {"class_": "standard", "tenant": "acme"}
    assert value(metrics, "fairness_counter_tokens", **who) == 1234.5
    assert b"stranger" not in metrics.exposition()
    assert value(metrics, "replica_up", replica="r0") == 1
    assert value(metrics, "num_preemptions_total", **{"class": "batch"}) == 2
    metrics.set_replica("r0", is_up=False, is_draining=True)
    assert value(metrics, "replica_up", replica="r0") == 0
    assert value(metrics, "replica_draining", replica="r0") == 1
    assert value(metrics, "kv_cache_usage_perc", replica="r0") == 0


def test_known_series_start_at_zero(metrics: Metrics) -> None:
    """A rate over a counter that appears with 1 misses that one."""
    for request_class in RequestClass:
        for tenant in ("acme", "night", "other"):
            who = {"class_": request_class.label, "tenant": tenant}
            assert value(metrics, "requests_admitted_total", **who) == 0
            assert value(metrics, "deadline_misses_total", **who) == 0


def test_times_are_in_seconds_and_counts_are_totals(metrics: Metrics) -> None:
    """Prometheus's naming: base units, and _total only on counters."""
    metrics.step("r0", Step(MS, MS, MS, MS, 1, 1))
    families = [
        family
        for family in text_string_to_metric_families(metrics.exposition().decode())
        if family.name.startswith("headway_") and not family.name.endswith("_created")
    ]
    assert len(families) > 15
    for family in families:
        assert "milli" not in family.name
        assert not family.name.endswith(("_ms", "_ns"))
        if family.type == "histogram":
            assert family.name.endswith(("_seconds", "_ratio", "_tokens", "_requests"))
        assert family.documentation.endswith(".")


def test_two_servers_in_a_process_do_not_share() -> None:
    """Nothing is registered globally."""
    one, other = Metrics(["acme"]), Metrics(["acme"])
    one.admitted(RequestClass.BATCH, "acme")
    who = {"class_": "batch", "tenant": "acme"}
    assert value(one, "requests_admitted_total", **who) == 1
    assert value(other, "requests_admitted_total", **who) == 0


def test_a_registry_can_be_brought_along() -> None:
    """A process that has its own keeps it."""
    registry = CollectorRegistry()
    assert Metrics(registry=registry).registry is registry


def test_prometheus_reads_them_over_http(metrics: Metrics) -> None:
    """A real socket; after closing, neither thread nor port is left."""
    metrics.admitted(RequestClass.BATCH, "acme")
    threads = threading.active_count()
    with metrics.serve("127.0.0.1", 0) as server:
        port = server.port
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    assert 'headway_requests_admitted_total{class="batch",tenant="acme"} 1.0' in text
    assert threading.active_count() == threads
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), 10):
        pass


def test_closing_twice_is_once(metrics: Metrics) -> None:
    """A shutdown that is interrupted may come back."""
    server = metrics.serve("127.0.0.1", 0)
    server.close()
    server.close()


def test_a_port_that_is_taken_is_one_line(metrics: Metrics) -> None:
    """The key to change is named."""
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(HeadwayError) as raised:
            metrics.serve("127.0.0.1", port)
    assert str(raised.value) == (
        f"cannot serve metrics on 127.0.0.1:{port}: Address already in use. "
        "Choose another server.metrics_port, or 0 for none"
    )
