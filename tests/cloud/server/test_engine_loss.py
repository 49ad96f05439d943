"""An engine process that dies or stands still under load: real processes and signals."""

import asyncio
import signal
from typing import Any

import grpc
import psutil
import pytest

from cloud.engine.process import EngineProcess
from cloud.engine.spec import EngineSpec
from cloud.scheduler.scheduler import Scheduler
from cloud.server.assembly import scheduler_config
from headway.outcome import Reason
from headway.rpc.errors import UnavailableError
from headway.rpc.status import error_from_rpc
from headway.v1 import operations_pb2, robot_pb2
from tests.support.running_server import RunningServer, observation, running_server, settings, until
from tests.support.verifier import verify

# A step takes 10 ms; token i of a text is letter i, so that one that came twice shows.
_SPEC = EngineSpec("simulated", simulated_ns=(10e6, 0, 0, 0, 0))
_ALPHABET = "abcdefghijklmnopqrstuvwxyz"


class _Reader:
    """Reads one text to its end, whatever that is."""

    def __init__(self, running: RunningServer, num_tokens: int) -> None:
        self.text = ""
        self.error: Any = None
        self.num_ends = 0
        self._num_tokens = num_tokens
        self.task = asyncio.ensure_future(self._read(running))

    async def _read(self, running: RunningServer) -> None:
        request = robot_pb2.GenerateRequest(
            prompt="hi", max_tokens=self._num_tokens, priority=robot_pb2.PRIORITY_BATCH
        )
        try:
            async for message in running.robots.Generate(request):
                self.text += message.text
                self.num_ends += message.HasField("summary")
        except grpc.aio.AioRpcError as error:
            self.error = error_from_rpc(error)
            self.num_ends += 1

    @property
    def is_text_in_order(self) -> bool:
        """No letter twice, none left out."""
        expected = _ALPHABET * (len(self.text) // 26 + 1)
        return self.text == expected[: len(self.text)]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_lost_engine_under_load_is_replaced_and_nothing_is_told_twice(
    number: signal.Signals,
) -> None:
    """Four texts run, six wait. The four end once, UNAVAILABLE, with what they had; the
    six are served by the next engine; the server answers all the time.
    """
    config = settings(
        scheduler__max_running=4,
        engine__restart_backoff_s=0.05,
        engine__stall_after_s=0.5,
        engine__simulated__t0_s=0.01,
        engine__simulated__prefill_token_s=0.0,
        engine__simulated__decode_s=0.0,
        scheduler__max_step_s=1.0,
    )
    made: list[EngineProcess] = []
    records: list[dict[str, Any]] = []
    policy = Scheduler(scheduler_config(config), log=records.append)

    def make_engine() -> EngineProcess:
        made.append(EngineProcess(_SPEC, stop_grace_s=0.2))
        return made[-1]

    async with running_server(config, make_engine=make_engine, policy=policy) as running:
        started = [_Reader(running, 3000) for _ in range(4)]
        await until(lambda: all(reader.text for reader in started))
        waiting = [_Reader(running, 30) for _ in range(6)]
        await until(lambda: running.server.dispatcher.num_live == 10)
        assert not any(reader.text for reader in waiting)
        first = made[0].pid
        assert first is not None

        psutil.Process(first).send_signal(number)
        (replica,) = running.server.dispatcher.replicas
        num_answers = 0
        while replica.is_up:
            await running.operations.GetStatus(operations_pb2.GetStatusRequest())
            num_answers += 1
        assert num_answers
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.next_action(observation("while down", budget_s=5.0))
        refused = error_from_rpc(caught.value)
        assert (refused.reason, refused.retry_after_s is not None) == (Reason.NO_ENGINE, True)

        await asyncio.gather(*(reader.task for reader in (*started, *waiting)))
        chunk = await running.next_action(observation("after", budget_s=5.0))
        assert chunk.observation_id == "after"
    for reader in started:
        assert isinstance(reader.error, UnavailableError)
        assert reader.error.reason is Reason.ENGINE_LOST
    for reader in waiting:
        assert (reader.error, len(reader.text)) == (None, 30)
    assert all(reader.num_ends == 1 for reader in (*started, *waiting))
    assert all(reader.is_text_in_order for reader in (*started, *waiting))
    assert len(made) == 2
    assert not psutil.pid_exists(first)
    assert verify(records) == []
