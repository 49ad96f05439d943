"""OperationsService over a real socket: who sees what, draining, and one request explained."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from headway.config import Settings, parse_settings
from headway.outcome import Reason
from headway.rpc.errors import CallError
from headway.rpc.status import error_from_rpc
from headway.v1 import operations_pb2, robot_pb2
from tests.support.running_server import (
    RunningServer,
    observation,
    read_error,
    running_server,
    settings,
    until,
)
from tests.support.scripted_engine import ScriptedEngine

TENANTS = """
[[tenants]]
name = "default"
weight = 2.0
tokens_per_s = 100.0
burst_tokens = 5000
classes = ["interactive", "batch"]
[[tenants]]
name = "other"
degraded_max_tokens = 7
"""


def two_tenants() -> Settings:
    """A limited tenant, whose identity development callers have, and another one."""
    return parse_settings(
        TENANTS,
        source="test",
        overrides={"server.port": 0, "server.development": True, "engine.kind": "simulated"},
    )


@contextmanager
def calling_as(running: RunningServer, tenant: str, *, is_operator: bool) -> Iterator[None]:
    """Callers are a tenant's meanwhile, as an API key of its would make them."""
    authenticator: Any = running.server._gate._authenticator
    before = authenticator._anyone
    known = authenticator._identities[tenant]
    authenticator._anyone = replace(known, is_operator=is_operator)
    try:
        yield
    finally:
        authenticator._anyone = before


async def error_of(call: Any) -> CallError:
    """What a unary call fails with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return error_from_rpc(caught.value)


def explained(running: RunningServer, name: str) -> Any:
    """A call of ExplainRequest."""
    return running.operations.ExplainRequest(operations_pb2.ExplainRequestRequest(request_id=name))


async def until_live(running: RunningServer, count: int) -> None:
    """Waits until so many requests are live."""
    await until(lambda: running.server.dispatcher.num_live == count)


async def is_serving(running: RunningServer) -> bool:
    """What load balancers are told."""
    stub: Any = HealthStub(running.channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest())
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


# --- who sees what ---


async def test_a_tenant_sees_its_own_work_and_an_operator_everyone_s() -> None:
    """Counts of classes and tenants; of replicas no more than that they are there."""
    async with running_server(two_tenants()) as running:
        await running.next_action(observation())
        with calling_as(running, "other", is_operator=False):
            await running.next_action(observation())
            await running.next_action(observation("obs-2"))
            told = await running.operations.GetStatus(operations_pb2.GetStatusRequest())
            tenants = await running.operations.ListTenants(operations_pb2.ListTenantsRequest())
        everything = await running.operations.GetStatus(operations_pb2.GetStatusRequest())
        all_tenants = await running.operations.ListTenants(operations_pb2.ListTenantsRequest())
    assert [(one.tenant, one.completed) for one in told.classes] == [("other", 2)]
    assert [one.name for one in tenants.tenants] == ["other"]
    (replica,) = told.replicas
    assert replica == operations_pb2.ReplicaStatus(replica_id="replica-0", up=True)
    assert [(one.tenant, one.completed) for one in everything.classes] == [
        ("default", 1),
        ("other", 2),
    ]
    assert [one.name for one in all_tenants.tenants] == ["default", "other"]
    assert everything.replicas[0].steps > 0


async def test_only_operators_drain_and_look_into_replicas() -> None:
    """Everybody else gets PERMISSION_DENIED, and nothing happens."""
    async with running_server(two_tenants()) as running:
        operations = running.operations
        with calling_as(running, "other", is_operator=False):
            for call in (
                operations.Drain(operations_pb2.DrainRequest()),
                operations.Undrain(operations_pb2.UndrainRequest()),
                operations.ListReplicas(operations_pb2.ListReplicasRequest()),
            ):
                assert (await error_of(call)).reason is Reason.PERMISSION_DENIED
        status = await operations.GetStatus(operations_pb2.GetStatusRequest())
        assert not status.draining


async def test_tenants_are_listed_with_what_is_set_and_what_is_left() -> None:
    """5,000 tokens at first; those of an action are off, less than a second's refill back."""
    async with running_server(two_tenants()) as running:
        before = await running.operations.ListTenants(operations_pb2.ListTenantsRequest())
        chunk = await running.next_action(observation())
        after = await running.operations.ListTenants(operations_pb2.ListTenantsRequest())
    default, other = before.tenants
    assert (default.weight, list(default.allowed_classes)) == (2.0, ["interactive", "batch"])
    assert (default.tokens_per_s, default.burst_tokens, default.bucket_tokens) == (100, 5000, 5000)
    assert not default.classes
    assert not other.HasField("bucket_tokens")
    assert other.degraded_max_tokens == 7
    (served,) = after.tenants[0].classes
    assert (served.request_class, served.completed) == ("interactive", 1)
    spent = served.prompt_tokens + 2 * served.output_tokens
    assert served.fairness_counter == spent / 2.0  # Its weight.
    assert after.tenants[0].bucket_tokens < 5000
    assert len(chunk.steps) == 10


async def test_replicas_are_listed_with_the_terms_of_their_cost() -> None:
    """As the simulated engine was set."""
    config = settings(
        engine__simulated__t0_s=0.004,
        engine__simulated__prefill_token_s=0.00003,
        engine__simulated__decode_s=0.0002,
        engine__max_context_tokens=512,
    )
    async with running_server(config) as running:
        await running.next_action(observation())
        answer = await running.operations.ListReplicas(operations_pb2.ListReplicasRequest())
    (one,) = answer.replicas
    assert (one.status.replica_id, one.status.up, one.status.steps) == ("replica-0", True, 20)
    assert one.cost.step_s == pytest.approx(0.004)
    assert one.cost.prefill_token_s == pytest.approx(0.00003)
    assert one.cost.decode_s == pytest.approx(0.0002)
    assert (one.block_tokens, one.max_context_tokens) == (16, 512)
    assert one.kv_blocks_held == 0
    assert one.kv_blocks_cached > 0  # The prompt's beginning is kept.
    assert one.margin >= 1
    assert one.overhead_p50.nanos > 0


# --- watching ---


async def test_states_come_until_the_server_goes() -> None:
    """At the interval that was asked for; the end is a status with its reason."""
    async with running_server(settings()) as running:
        request = operations_pb2.WatchStatusRequest()
        request.interval.FromMilliseconds(100)
        stream = running.operations.WatchStatus(request)
        first = await stream.read()
        second = await stream.read()
        assert first.status.model == second.status.model == "tiny"
        stopping = asyncio.ensure_future(running.server.stop(grace_s=5.0))
        error = await read_error(stream)
        await stopping
    assert error.reason is Reason.DRAINING


@pytest.mark.parametrize("interval_ms", [-1000, 0, 99, 60_001])
async def test_an_interval_out_of_range_is_refused(interval_ms: int) -> None:
    """Neither a busy loop nor a stream that says nothing for an hour."""
    async with running_server(settings()) as running:
        request = operations_pb2.WatchStatusRequest()
        request.interval.FromMilliseconds(interval_ms)
        error = await read_error(running.operations.WatchStatus(request))
    assert error.reason is Reason.INVALID
    assert "0.1 s to 60 s" in str(error)


async def test_watcher_whose_credential_ends_is_ended() -> None:
    """At the next state."""
    async with running_server(settings()) as running:
        authenticator: Any = running.server._gate._authenticator
        is_valid = [True]
        authenticator._anyone = replace(authenticator._anyone, is_current=lambda: is_valid[0])
        request = operations_pb2.WatchStatusRequest()
        request.interval.FromMilliseconds(100)
        stream = running.operations.WatchStatus(request)
        await stream.read()
        is_valid[0] = False
        assert (await read_error(stream)).reason is Reason.UNAUTHENTICATED


async def test_watcher_that_does_not_read_is_dropped() -> None:
    """States of a megabyte fill every window on the way; then the write time-out counts."""
    async with running_server(settings(server__write_timeout_s=0.1)) as running:
        operations: Any = running.server._operations
        operations._model = "x" * 1_000_000
        request = operations_pb2.WatchStatusRequest()
        request.interval.FromMilliseconds(100)
        stream = running.operations.WatchStatus(request)
        await until(lambda: running.server.num_open_calls == 1)
        await until(lambda: running.server.num_open_calls == 0)
        error = await read_error(stream)
    assert error.reason in (Reason.CANCELLED, None)  # None: the stream was reset.


# --- draining ---


async def test_a_drained_server_refuses_and_an_undrained_one_serves() -> None:
    """Health says so to load balancers; the process goes on."""
    async with running_server(settings()) as running:
        left = await running.operations.Drain(operations_pb2.DrainRequest())
        assert (left.running, left.queued) == (0, 0)
        assert (await error_of(running.next_action(observation()))).reason is Reason.DRAINING
        status = await running.operations.GetStatus(operations_pb2.GetStatusRequest())
        assert status.draining
        assert not await is_serving(running)
        await running.operations.Drain(operations_pb2.DrainRequest())
        await running.operations.Undrain(operations_pb2.UndrainRequest())
        await running.until_serving()
        await running.next_action(observation("obs-2"))


async def test_draining_a_server_finishes_batch_work_too() -> None:
    """It is not shut down: what was admitted is finished, whatever its class."""
    async with running_server(settings(engine__simulated__t0_s=0.002)) as running:
        request = robot_pb2.GenerateRequest(
            prompt="hi", max_tokens=30, priority=robot_pb2.PRIORITY_BATCH
        )
        stream = running.robots.Generate(request)
        await stream.read()
        left = await running.operations.Drain(operations_pb2.DrainRequest())
        assert (left.running, left.queued) == (1, 0)
        while await stream.read() is not grpc.aio.EOF:
            pass
        explained_batch = await explained(running, "text-1")
    assert (explained_batch.outcome, explained_batch.output_tokens) == ("COMPLETED", 30)


async def test_a_drained_replica_is_given_nothing_until_it_is_undrained() -> None:
    """The other one has it all; with both drained the server is not serving."""
    async with running_server(settings(engine__replicas=2)) as running:
        operations = running.operations

        async def steps() -> list[int]:
            answer = await operations.ListReplicas(operations_pb2.ListReplicasRequest())
            return [one.status.steps for one in answer.replicas]

        await operations.Drain(operations_pb2.DrainRequest(replica_id="replica-0"))
        before = await steps()
        for number in range(4):
            await running.next_action(observation(f"obs-{number}"))
        after = await steps()
        assert after[0] == before[0]
        assert after[1] == before[1] + 4 * 20
        assert await is_serving(running)
        status = await operations.GetStatus(operations_pb2.GetStatusRequest())
        assert [(one.up, one.draining) for one in status.replicas] == [(True, True), (True, False)]
        await operations.Drain(operations_pb2.DrainRequest(replica_id="replica-1"))
        error = await error_of(running.next_action(observation("nowhere")))
        assert error.reason is Reason.DRAINING
        assert not await is_serving(running)
        await operations.Undrain(operations_pb2.UndrainRequest(replica_id="replica-0"))
        await running.next_action(observation("again"))
        assert (await steps())[0] == before[0] + 20


async def test_a_drained_replica_stays_so_when_its_engine_comes_back() -> None:
    """Lost and started again: the operator's word still holds."""
    engines: list[ScriptedEngine] = []

    def make() -> ScriptedEngine:
        engines.append(ScriptedEngine())
        if len(engines) == 1:
            engines[0].is_open.clear()
        return engines[-1]

    config = settings(
        engine__replicas=2, engine__restart_backoff_s=0.01, engine__stall_after_s=3600.0
    )
    async with running_server(config, make_engine=make) as running:
        call = asyncio.ensure_future(running.next_action(observation(budget_s=3600.0)))
        await until(lambda: engines[0].num_steps == 1)
        request = operations_pb2.DrainRequest(replica_id="replica-0")
        left = await running.operations.Drain(request)
        assert (left.running, left.queued) == (1, 0)
        engines[0].lose("killed")
        # It had given nothing yet, and goes on at the other one.
        assert len((await call).steps) == 10
        replica = running.server.dispatcher.replicas[0]
        await until(lambda: len(engines) == 3 and replica.is_up)
        await running.next_action(observation("obs-2"))
        assert engines[2].num_steps == 0
        status = await running.operations.GetStatus(operations_pb2.GetStatusRequest())
        assert [(one.up, one.draining) for one in status.replicas] == [(True, True), (True, False)]


async def test_draining_a_replica_that_is_not_there_names_those_that_are() -> None:
    """And drains nothing."""
    async with running_server(settings()) as running:
        request = operations_pb2.DrainRequest(replica_id="replica-9")
        error = await error_of(running.operations.Drain(request))
        assert error.reason is Reason.NOT_FOUND
        assert "expected one of replica-0" in str(error)
        await running.next_action(observation())


# --- one request ---


async def test_a_completed_action_is_explained_by_either_of_its_names() -> None:
    """Its id in the log, and what its robot knows it by."""
    async with running_server(settings()) as running:
        await running.next_action(observation("obs-1"))
        by_label = await explained(running, "r1/obs-1")
        by_id = await explained(running, by_label.request_id)
    assert by_id.label == by_label.label == "r1/obs-1"
    assert by_label.state == operations_pb2.REQUEST_STATE_ENDED
    assert (by_label.outcome, by_label.reason, by_label.output_tokens) == ("COMPLETED", "", 20)
    assert by_label.explanation.startswith("completed 0.")
    spans = [by_label.queue, by_label.prefill, by_label.decode]
    assert sum(one.ToNanoseconds() for one in spans) <= by_label.age.ToNanoseconds()
    assert by_label.predicted.ToNanoseconds() > 0


async def test_a_refused_action_is_explained_with_what_its_robot_was_told() -> None:
    """Late by prediction; and malformed, before it ever got an id."""
    config = settings(engine__simulated__t0_s=0.010)
    async with running_server(config) as running:
        error = await error_of(running.next_action(observation("late", budget_s=0.05)))
        late = await explained(running, "r1/late")
        wrong = observation("wrong")
        wrong.state[0].values[0].value = float("nan")
        await error_of(running.next_action(wrong))
        malformed = await explained(running, "r1/wrong")
    assert (late.state, late.reason) == (operations_pb2.REQUEST_STATE_REFUSED, "LATE")
    assert late.explanation == f"refused: {error}"
    assert late.predicted.ToNanoseconds() >= 200_000_000
    assert late.retry_after.ToNanoseconds() > 0
    assert (malformed.request_id, malformed.reason) == ("", "INVALID")


async def test_live_requests_are_explained_while_they_run_and_wait() -> None:
    """One slot: the first holds it, the second waits for it, the third behind the second."""
    engine = ScriptedEngine()
    engine.pace = asyncio.Semaphore(0)
    config = settings(scheduler__max_running=1, engine__stall_after_s=3600.0)
    async with running_server(config, make_engine=lambda: engine) as running:
        asked = []
        for number in range(3):
            call = running.next_action(observation(budget_s=3000.0 + number), robot_id=f"r{number}")
            asked.append(asyncio.ensure_future(call))
            await until_live(running, number + 1)
            if not number:
                await until(lambda: engine.num_steps == 1)
        told = [await explained(running, f"r{number}/obs-1") for number in range(3)]
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await until(lambda: running.server.dispatcher.num_live == 0)
        gone = await explained(running, "r2/obs-1")
    runs, waits, behind = told
    assert (runs.state, runs.replica_id) == (operations_pb2.REQUEST_STATE_RUNNING, "replica-0")
    assert runs.kv_blocks > 0
    assert waits.state == operations_pb2.REQUEST_STATE_WAITING
    assert waits.hold == operations_pb2.REQUEST_HOLD_SLOTS
    assert "scheduler.max_running" in waits.explanation
    assert (behind.hold, behind.num_ahead) == (operations_pb2.REQUEST_HOLD_QUEUE, 1)
    assert behind.explanation == "waits: 1 request of its queue comes first"
    assert behind.slack.seconds >= 2900
    assert (gone.outcome, gone.reason) == ("CANCELLED", "CANCELLED")


async def test_another_tenant_s_request_is_not_found() -> None:
    """By the same words as one that never was; an operator finds it, with its replica."""
    async with running_server(two_tenants()) as running:
        await running.next_action(observation("mine"))
        known = await explained(running, "r1/mine")
        with calling_as(running, "other", is_operator=False):
            hidden = await error_of(explained(running, known.request_id))
            labelled = await error_of(explained(running, "r1/mine"))
            never = await error_of(explained(running, "action-99"))
            await running.next_action(observation("theirs"))
            own = await explained(running, "r1/theirs")
        seen = await explained(running, "r1/theirs")
    for error in (hidden, labelled, never):
        assert error.reason is Reason.NOT_FOUND
    assert str(hidden).replace(known.request_id, "action-99") == str(never)
    assert own.tenant == seen.tenant == "other"


async def test_an_empty_name_is_no_request() -> None:
    """Said as any other wrong field."""
    async with running_server(settings()) as running:
        error = await error_of(explained(running, ""))
    assert error.reason is Reason.INVALID


async def test_bytes_that_are_no_message_are_refused_by_every_method() -> None:
    """By operators too; nothing is drained by them."""
    async with running_server(settings()) as running:
        for method in (
            *("GetStatus", "Drain", "Undrain"),
            *("ListTenants", "ListReplicas", "ExplainRequest"),
        ):
            call: Any = running.channel.unary_unary(f"/headway.v1.OperationsService/{method}")
            assert (await error_of(call(b"\xff"))).reason is Reason.INVALID, method
        watch: Any = running.channel.unary_stream("/headway.v1.OperationsService/WatchStatus")
        assert (await read_error(watch(b"\xff"))).reason is Reason.INVALID
        assert not running.server.dispatcher.is_draining
