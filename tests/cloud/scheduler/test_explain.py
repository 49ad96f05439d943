"""What operators are told, and what the decision log holds."""

import json

from cloud.scheduler.config import SchedulerConfig, TenantConfig
from cloud.scheduler.scheduler import Scheduler
from headway.outcome import Reason
from tests.support.scheduling import MS, Bench, S, batch, interactive, replica, standard


def test_explain_says_where_a_request_stands() -> None:
    """Two come before it by deadline, one of its class behind it does not count."""
    bench = Bench()
    bench.submit(standard("last", 9 * S))
    bench.submit(standard("asked", 5 * S))
    bench.submit(standard("first", 2 * S))
    bench.submit(standard("second", 3 * S))
    told = bench.scheduler.explain("asked", S)
    assert told is not None
    assert (told.stage, told.num_ahead, told.waited_ns, told.slack_ns) == ("waiting", 2, S, 4 * S)
    bench.step()
    running = bench.scheduler.explain("asked", bench.now_ns)
    assert running is not None
    assert (running.stage, running.output_tokens, running.kv_blocks) == ("running", 1, 4)
    assert running.slack_ns is None  # Its first token is out.
    assert bench.scheduler.explain("nobody", 0) is None


def test_a_batch_request_stands_behind_its_own_tenant_only() -> None:
    """Other tenants' requests are no queue to wait in."""
    bench = Bench()
    for number in range(5):
        bench.submit(batch(f"other{number}", tenant="other"))
    bench.submit(batch("mine0"))
    bench.submit(batch("mine1"))
    told = bench.scheduler.explain("mine1", 0)
    assert told is not None
    assert told.num_ahead == 1


def test_a_snapshot_counts_what_happened() -> None:
    """One completed, one refused, one cancelled: by class and tenant."""
    bench = Bench()
    bench.submit(interactive("done", S, max_output_tokens=2))
    bench.submit(interactive("late", 10 * MS))
    bench.submit(interactive("gone", S))
    bench.scheduler.cancel("gone", 0)
    bench.steps(2)
    (told,) = bench.scheduler.snapshot(bench.now_ns).tenants
    assert (told.admitted, told.completed, told.cancelled, told.missed) == (2, 1, 1, 0)
    assert told.rejected == ((Reason.LATE, 1),)
    assert (told.prompt_tokens, told.output_tokens, told.counter) == (64, 2, 64 + 2 * 2)


def test_the_log_is_json_and_begins_with_the_settings() -> None:
    """Every record can be written as one line."""
    records: list[dict[str, object]] = []
    scheduler = Scheduler(log=records.append)
    scheduler.replica_up(replica(), 0)
    scheduler.submit(interactive("robot", S), 0)
    scheduler.submit(interactive("late", MS), 0)
    scheduler.plan("r0", 0)
    scheduler.cancel("robot", 1)
    scheduler.drain_replica("r0", 2)
    scheduler.drain_replica("r0", 2)  # Nothing new.
    scheduler.undrain_replica("r0", 2)
    scheduler.drain(2)
    scheduler.undrain(2)
    scheduler.replica_down("r0", 3)
    kinds = [json.loads(json.dumps(record))["kind"] for record in records]
    assert kinds == [
        "config",
        "replica_up",
        "submit",
        "submit",
        "plan",
        "end",
        "replica_drain",
        "replica_undrain",
        "drain",
        "undrain",
        "replica_down",
    ]


def _hold(bench: Bench, name: str) -> str:
    told = bench.scheduler.explain(name, bench.now_ns)
    assert told is not None
    return told.hold.value


def test_explain_names_what_a_waiting_request_waits_for() -> None:
    """The only slot, those ahead, the step that runs, and nothing once it runs."""
    bench = Bench(SchedulerConfig(max_running=1))
    bench.submit(interactive("runs", 9 * S))
    plan = bench.plan()
    assert _hold(bench, "runs") == "NOTHING"
    bench.submit(interactive("next", 10 * S))
    bench.submit(interactive("after", 11 * S))
    assert (_hold(bench, "next"), _hold(bench, "after")) == ("SLOTS", "QUEUE")
    bench.finish(plan)
    wide = Bench()
    wide.submit(interactive("runs", 9 * S))
    wide.plan()
    wide.submit(interactive("next", 10 * S))
    assert _hold(wide, "next") == "STEP"


def test_explain_names_memory_that_lacks() -> None:
    """Of 8 blocks of 16 tokens the first holds 5; 67 tokens of the other need 5 too."""
    bench = Bench(spec=replica(num_blocks=8))
    bench.submit(interactive("runs", 9 * S))
    bench.step()
    bench.submit(interactive("next", 10 * S))
    assert _hold(bench, "next") == "KV"


def test_explain_names_why_batch_work_is_not_pulled() -> None:
    """No engine, a drained one, an empty bucket, and tenants that were served less."""
    bench = Bench(SchedulerConfig(tenants={"poor": TenantConfig(1.0, 10.0, 10)}))
    bench.submit(batch("night"))
    bench.scheduler.replica_down("r0", 0)
    assert _hold(bench, "night") == "NO_ENGINE"
    bench.scheduler.replica_up(replica("r1"), 0)
    bench.scheduler.drain_replica("r1", 0)
    assert _hold(bench, "night") == "DRAINING"

    poor = Bench(SchedulerConfig(tenants={"poor": TenantConfig(1.0, 10.0, 10)}))
    poor.submit(batch("first", tenant="poor", max_output_tokens=1))
    poor.step()
    poor.submit(batch("second", tenant="poor"))
    assert _hold(poor, "second") == "QUOTA"

    shared = Bench()
    shared.submit(batch("long", tenant="first", prompt_tokens=640))
    shared.submit(batch("short", tenant="second"))
    shared.step()
    shared.submit(batch("other", tenant="second"))
    shared.submit(batch("more", tenant="first"))
    assert _hold(shared, "more") == "SHARE"


def test_a_snapshot_tells_queues_buckets_and_replicas() -> None:
    """128 + 8 tokens wait; of 500 weighted tokens, 64 + 2 x 8 are reserved."""
    bench = Bench(SchedulerConfig(tenants={"office": TenantConfig(1.0, 10.0, 500)}))
    bench.submit(batch("waits", prompt_tokens=128))
    bench.submit(standard("promised", 9 * S))
    told = bench.scheduler.snapshot(0)
    assert told.waiting_tokens == (0, 72, 136)
    assert told.bucket_levels == (("office", 500.0 - 80.0),)
    (one,) = told.replicas
    assert (one.is_draining, one.cost_model, one.level) == (False, bench.spec.cost_model, 1.0)
