"""What operators are told, and what the decision log holds."""

import json

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
    scheduler.drain(2)
    scheduler.replica_down("r0", 3)
    kinds = [json.loads(json.dumps(record))["kind"] for record in records]
    assert kinds == [
        "config",
        "replica_up",
        "submit",
        "submit",
        "plan",
        "end",
        "drain",
        "replica_down",
    ]
