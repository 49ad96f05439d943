"""One engine's life, in virtual time."""

import asyncio
from collections.abc import Iterable

from cloud.engine.api import EngineRequest
from cloud.scheduler.policy import Policy
from cloud.scheduler.types import DeadlineCovers, Event, ReplicaSpec, Request, StepResult
from cloud.server.ledger import StepTimes
from cloud.server.replica import Replica
from headway.clock import VirtualClock
from headway.cost_model import CostModel
from headway.outcome import RequestClass
from tests.support.fifo_policy import FifoPolicy
from tests.support.scripted_engine import ScriptedEngine


class _Host(FifoPolicy):
    """A dispatcher with one request; it is its own policy, and keeps what is committed."""

    def __init__(self) -> None:
        super().__init__()
        self.policy: Policy = self
        self.committed: asyncio.Queue[StepResult] = asyncio.Queue()

    def commit(self, replica_id: str, result: StepResult, now_ns: int) -> tuple[Event, ...]:
        self.committed.put_nowait(result)
        return super().commit(replica_id, result, now_ns)

    def tell(self, events: Iterable[Event]) -> None:
        pass

    def open(self, request_id: str) -> EngineRequest:
        return EngineRequest(request_id, (1, 2, 3))

    def wake_idle(self) -> None:
        pass


async def test_a_step_takes_all_that_passes_from_its_plan_to_its_result() -> None:
    """Whatever the engine says: a loop that is busy with others delays a token as well."""
    clock, host, engine = VirtualClock(), _Host(), ScriptedEngine()
    engine.is_open.clear()
    spec = ReplicaSpec("r0", 64, 16, 1024, CostModel(t0_ns=1.0))
    times = StepTimes("r0")
    replica = Replica("r0", lambda: engine, lambda name, description: spec, clock, times)
    await replica.start(host)
    host.submit(
        Request("a", "default", RequestClass.STANDARD, 3, 2, 10**12, DeadlineCovers.LAST_TOKEN), 0
    )
    feeding = asyncio.ensure_future(replica.run(host))
    try:
        await asyncio.wait_for(engine.is_executing.wait(), 30)
        clock.advance(7_000_000)
        engine.is_open.set()
        # The scripted engine says that its steps take no time at all.
        assert (await asyncio.wait_for(host.committed.get(), 30)).elapsed_ns == 7_000_000
        assert (await asyncio.wait_for(host.committed.get(), 30)).elapsed_ns == 0
        assert list(times.engine_ns) == [0, 0]
        assert list(times.added_ns) == [7_000_000, 0]
    finally:
        feeding.cancel()
        await asyncio.gather(feeding, return_exceptions=True)
        await replica.stop()


class _StubbornEngine(ScriptedEngine):
    """Does not end while it is waited for the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.is_told = asyncio.Event()

    async def stop(self) -> None:
        if not self.is_told.is_set():
            self.is_told.set()
            await asyncio.Event().wait()
        await super().stop()


async def test_an_engine_that_is_being_given_up_is_ended_by_a_server_that_goes() -> None:
    """Else its process would outlive the server."""
    clock, host, engine = VirtualClock(), _Host(), _StubbornEngine()
    spec = ReplicaSpec("r0", 64, 16, 1024, CostModel(t0_ns=1.0))
    replica = Replica("r0", lambda: engine, lambda name, description: spec, clock, StepTimes("r0"))
    await replica.start(host)
    engine.is_open.clear()
    host.submit(
        Request("a", "default", RequestClass.STANDARD, 3, 2, 10**12, DeadlineCovers.LAST_TOKEN), 0
    )
    feeding = asyncio.ensure_future(replica.run(host))
    await asyncio.wait_for(engine.is_executing.wait(), 30)
    engine.lose("it hangs")
    await asyncio.wait_for(engine.is_told.wait(), 30)
    feeding.cancel()
    await asyncio.gather(feeding, return_exceptions=True)
    assert not engine.is_stopped
    await replica.stop()
    assert engine.is_stopped
