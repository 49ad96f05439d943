"""The engine's own process: real processes, sockets and signals."""

import asyncio
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest

from cloud.engine.api import EngineLostError, EngineRequest, Sampling
from cloud.engine.process import EngineProcess
from cloud.engine.simulated import SimulatedExecutor
from cloud.engine.spec import EngineSpec
from cloud.engine.torch_executor import TorchExecutor
from cloud.scheduler.types import ScheduledItem, StepPlan, StepResult
from headway.cost_model import CostModel
from tests.support.executor_driver import ExecutorDriver

_SIMULATED = EngineSpec("simulated")
_A_MINUTE = EngineSpec("simulated", simulated_ns=(60e9, 0, 0, 0, 0))
_REQUEST = EngineRequest("a", (1, 2, 3))
_FIRST_STEP = StepPlan("r0", 1, (ScheduledItem("a", 0, 3, True, True, (0,), True),))


@pytest.fixture(autouse=True)
def sockets(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder in which sockets are made; its path is short enough for one."""
    with tempfile.TemporaryDirectory(prefix="hw-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@pytest.fixture
async def engine() -> AsyncIterator[EngineProcess]:
    """A simulated engine, started, whose steps cost nothing."""
    engine = EngineProcess(_SIMULATED)
    await engine.start()
    yield engine
    await engine.stop()


def _is_gone(pid: int | None) -> bool:
    return pid is not None and not psutil.pid_exists(pid)


def _is_empty(folder: Path) -> bool:
    return not list(folder.iterdir())


async def _until_it_is_sent() -> None:
    """Lets the loop run. Where exactly the step then is makes no difference to
    what must come of it.
    """
    for _ in range(5):
        await asyncio.sleep(0)


def _decode(step_id: int, context: int) -> StepPlan:
    return StepPlan("r0", step_id, (ScheduledItem("a", context, 1, False, True),))


async def test_a_stopped_engine_leaves_nothing(sockets: Path) -> None:
    """No process, no socket, no folder; a second stop does nothing."""
    engine = EngineProcess(_SIMULATED)
    description = await engine.start()
    assert description.kind == "simulated"
    assert not _is_gone(engine.pid)

    await engine.stop()
    await engine.stop()

    assert _is_gone(engine.pid)
    assert _is_empty(sockets)
    with pytest.raises(EngineLostError, match="the engine was stopped"):
        await engine.execute(_FIRST_STEP, [_REQUEST])


async def test_an_engine_that_was_never_started_can_be_stopped() -> None:
    """And says that it was not started."""
    engine = EngineProcess(_SIMULATED)
    with pytest.raises(EngineLostError, match="not started"):
        await engine.execute(_FIRST_STEP, [_REQUEST])
    await engine.stop()


async def test_the_socket_is_private_and_gone_once_it_is_connected(
    sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else can connect, before or after, and a killed server leaves no file."""
    modes = []
    make = tempfile.mkdtemp

    def watched(*args: str, **kwargs: str) -> str:
        folder = make(*args, **kwargs)
        modes.append(Path(folder).stat().st_mode & 0o777)
        return folder

    monkeypatch.setattr(tempfile, "mkdtemp", watched)
    engine = EngineProcess(_SIMULATED)
    await engine.start()
    assert modes == [0o700]
    assert _is_empty(sockets)
    await engine.stop()


async def test_a_repeated_step_gets_the_same_answer_and_is_executed_once(
    engine: EngineProcess,
) -> None:
    """The simulated tokens count up with each execution: b after a."""
    first = await engine.execute(_FIRST_STEP, [_REQUEST])
    again = await engine.execute(_FIRST_STEP, [_REQUEST])
    second = await engine.execute(_decode(5, 3), [])
    assert [o.token for r in (first, again, second) for o in r.outputs] == [97, 97, 98]
    assert [r.step_id for r in (first, again, second)] == [1, 1, 5]


async def test_a_step_from_the_past_loses_the_engine(engine: EngineProcess) -> None:
    """Steps go forward only; what is lost stays lost, with the first reason."""
    await engine.execute(StepPlan("r0", 7, ()), [])
    for _ in range(2):
        with pytest.raises(EngineLostError, match="step 6 was planned after step 7"):
            await engine.execute(StepPlan("r0", 6, ()), [])


async def test_a_wrong_plan_loses_the_engine_with_its_own_words(engine: EngineProcess) -> None:
    """The engine says what contradicts what it knows."""
    await engine.execute(_FIRST_STEP, [_REQUEST])
    with pytest.raises(EngineLostError, match="to compute 1 tokens after 99; it has 4"):
        await engine.execute(_decode(2, 99), [])


async def test_a_request_that_was_not_opened_loses_the_engine(engine: EngineProcess) -> None:
    """It has no handle, so it is not even sent."""
    with pytest.raises(EngineLostError, match="request a was never opened"):
        await engine.execute(_FIRST_STEP, [])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
async def test_a_killed_engine_fails_the_pending_step(number: signal.Signals) -> None:
    """At once, naming the signal, though the step would take a minute."""
    engine = EngineProcess(_A_MINUTE)
    await engine.start()
    step = asyncio.create_task(engine.execute(_FIRST_STEP, [_REQUEST]))
    await _until_it_is_sent()
    assert engine.pid is not None
    os.kill(engine.pid, number)
    with pytest.raises(EngineLostError, match=f"the engine was ended by {number.name}"):
        await step
    await engine.stop()
    assert _is_gone(engine.pid)


@pytest.mark.parametrize("is_noticed", [False, True])
async def test_an_engine_that_died_between_steps_fails_the_next_one(
    engine: EngineProcess, is_noticed: bool
) -> None:
    """With the signal as the reason, whether or not the stream has ended by then."""
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)
    if is_noticed:
        await engine._stream.code()
    with pytest.raises(EngineLostError, match="ended by SIGKILL"):
        await engine.execute(_FIRST_STEP, [_REQUEST])


async def test_stop_ends_an_engine_in_the_middle_of_a_step() -> None:
    """And the step's caller hears of it."""
    engine = EngineProcess(_A_MINUTE)
    await engine.start()
    step = asyncio.create_task(engine.execute(_FIRST_STEP, [_REQUEST]))
    await _until_it_is_sent()
    await engine.stop()
    with pytest.raises(EngineLostError, match="the engine was stopped"):
        await step
    assert _is_gone(engine.pid)


async def test_stop_kills_an_engine_that_hangs(sockets: Path) -> None:
    """A process that is suspended cannot take the hint."""
    engine = EngineProcess(_SIMULATED, stop_grace_s=0.05)
    await engine.start()
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGSTOP)
    await engine.stop()
    assert _is_gone(engine.pid)
    assert _is_empty(sockets)


async def test_a_lost_engine_is_not_waited_for(sockets: Path) -> None:
    """One that hangs in a step is lost by giving the step up; the next one is waiting."""
    engine = EngineProcess(_A_MINUTE, stop_grace_s=3600.0)
    await engine.start()
    step = asyncio.create_task(engine.execute(_FIRST_STEP, [_REQUEST]))
    await _until_it_is_sent()
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGSTOP)
    step.cancel()
    await asyncio.gather(step, return_exceptions=True)
    await engine.stop()
    assert _is_gone(engine.pid)
    assert _is_empty(sockets)


async def test_a_stop_that_is_given_up_is_finished_by_the_next_one(sockets: Path) -> None:
    """The server goes while it still waits for an engine that hangs."""
    engine = EngineProcess(_SIMULATED, stop_grace_s=3600.0)
    await engine.start()
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGSTOP)
    stopping = asyncio.create_task(engine.stop())
    await asyncio.sleep(0)
    stopping.cancel()
    await asyncio.gather(stopping, return_exceptions=True)
    assert not _is_gone(engine.pid)
    await engine.stop()
    assert _is_gone(engine.pid)
    assert _is_empty(sockets)


async def test_a_cancelled_step_loses_the_engine() -> None:
    """Its answer could be taken for a later step's."""
    engine = EngineProcess(_A_MINUTE)
    await engine.start()
    step = asyncio.create_task(engine.execute(_FIRST_STEP, [_REQUEST]))
    await _until_it_is_sent()
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    with pytest.raises(EngineLostError, match="a step was abandoned"):
        await engine.execute(StepPlan("r0", 2, ()), [])
    await engine.stop()


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (EngineSpec("torch", "/nowhere"), r"^/nowhere: no such folder; expected a Hugging Face"),
        (EngineSpec("torch", "TINY", num_blocks=2**30), r"GiB is free; ask for at most"),
    ],
)
async def test_an_engine_that_cannot_start_says_why_in_its_own_line(
    spec: EngineSpec, reason: str, tiny_folder: Path, sockets: Path
) -> None:
    """One line, and nothing is left."""
    folder = spec.model_folder.replace("TINY", str(tiny_folder))
    engine = EngineProcess(EngineSpec("torch", folder, num_blocks=spec.num_blocks))
    with pytest.raises(EngineLostError, match=reason) as caught:
        await engine.start()
    assert "\n" not in caught.value.reason
    assert _is_gone(engine.pid)
    assert _is_empty(sockets)


async def test_without_a_folder_for_its_socket_an_engine_says_so(
    sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is named."""
    monkeypatch.setattr(tempfile, "tempdir", str(sockets / "gone"))
    with pytest.raises(EngineLostError, match=r"cannot be started: .*No such file.*/gone/"):
        await EngineProcess(_SIMULATED).start()


async def test_an_engine_that_takes_too_long_is_given_up(tiny_folder: Path, sockets: Path) -> None:
    """Loading torch takes longer than a millisecond; no process is left."""
    engine = EngineProcess(EngineSpec("torch", str(tiny_folder)), start_timeout_s=0.001)
    with pytest.raises(EngineLostError, match=r"not ready after 0\.001 s"):
        await engine.start()
    assert engine.pid is None or _is_gone(engine.pid)
    assert _is_empty(sockets)


@pytest.mark.skipif(sys.platform != "linux", reason="pidfd_open is Linux's")
def test_the_engine_ends_with_a_server_that_is_killed() -> None:
    """Even in the middle of a step."""
    script = """
import asyncio
from cloud.engine.process import EngineProcess
from cloud.engine.spec import EngineSpec
from tests.cloud.engine.test_process import _A_MINUTE, _FIRST_STEP, _REQUEST

async def main():
    engine = EngineProcess(_A_MINUTE)
    await engine.start()
    print(engine.pid, flush=True)
    await engine.execute(_FIRST_STEP, [_REQUEST])

asyncio.run(main())
"""
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
    ) as server:
        assert server.stdout is not None
        # Readable when the process has ended, whoever is to reap it.
        engine = os.pidfd_open(int(server.stdout.readline()))
        try:
            assert select.select([engine], [], [], 0)[0] == []
            server.kill()
            assert select.select([engine], [], [], 60)[0] == [engine]
        finally:
            os.close(engine)


async def test_a_torch_engine_gives_the_tokens_of_the_executor_alone(tiny_folder: Path) -> None:
    """Tested, measured, and then the same tokens as in this process."""
    request = EngineRequest("a", tuple(b"go to the dock"), Sampling(0.8, 0.9, seed=4))
    expected = ExecutorDriver(TorchExecutor.load(tiny_folder, num_blocks=64)).generate(request, 6)
    spec = EngineSpec("torch", str(tiny_folder), num_blocks=64, calibration_s=0)
    engine = EngineProcess(spec)
    description = await engine.start()

    driver = ExecutorDriver(SimulatedExecutor(CostModel(0), num_blocks=64))  # Plans alone.
    driver.open(request)
    tokens: list[int] = []
    for _ in range(6):
        plan = driver.plan([("a", driver.remaining("a"))])
        result: StepResult = await engine.execute(plan, driver.take_opened())
        tokens.extend(output.token for output in result.outputs)
        driver.outputs["a"] = tokens
    await engine.stop()

    assert tokens == expected
    assert description.model == "tiny"
    assert description.kv_bytes_per_token == 4 * 2 * 4 * 2 * 32
    shapes = {step.shape for step in description.calibration}
    assert {shape.decodes for shape in shapes} >= {0, 1, 2, 4, 8, 16}
    assert {shape.prefill_tokens for shape in shapes} >= {0, 1, 16, 64, 256}
    assert all(step.elapsed_ns > 0 for step in description.calibration)
