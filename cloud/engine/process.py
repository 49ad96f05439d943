"""An engine in its own process, so that its crash or stall is survived."""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import structlog

from cloud.engine.api import EngineDescription, EngineLostError, EngineRequest
from cloud.engine.spec import EngineSpec
from cloud.engine.wire import StepEncoder, decode_description
from cloud.scheduler.types import StepPlan, StepResult
from headway.internal.v1alpha import engine_pb2 as pb
from headway.internal.v1alpha import engine_pb2_grpc

__all__ = ["EngineProcess"]

_log = structlog.get_logger()

# How long a broken stream waits for the process's own account of its end.
_EXIT_ACCOUNT_S = 1.0
_STDERR_LINES = 20


class EngineProcess:
    """Starts an engine process and executes steps in it; implements
    `cloud.engine.api.Engine`. Not to be started again after its end.

    Args:
        spec: what the process is to run.
        start_timeout_s: longest time until the engine is ready.
        stop_grace_s: longest time until a process that does not end is killed.
    """

    def __init__(
        self, spec: EngineSpec, *, start_timeout_s: float = 300.0, stop_grace_s: float = 5.0
    ) -> None:
        self._spec = spec
        self._start_timeout_s = start_timeout_s
        self._stop_grace_s = stop_grace_s
        self._folder: Path | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._stderr: deque[str] = deque(maxlen=_STDERR_LINES)
        self._stderr_reader: asyncio.Task[None] | None = None
        self._channel: grpc.aio.Channel | None = None
        # StreamStreamCall; the stubs of grpc leave its type arguments open.
        self._stream: Any = None
        self._encoder = StepEncoder("")
        self._num_steps = 0
        self._last_plan_id: int | None = None
        self._last_message = pb.StepsRequest()
        self._lost_reason = ""

    @property
    def pid(self) -> int | None:
        """Process id of the engine, once it is started."""
        return self._process.pid if self._process else None

    async def start(self) -> EngineDescription:
        """Starts the process and waits until it has loaded, tested and measured.

        Raises:
            EngineLostError: it did not become ready; the reason is its own line.
        """
        try:
            async with asyncio.timeout(self._start_timeout_s):
                return await self._start()
        except TimeoutError:
            await self.stop()
            raise EngineLostError(
                f"the engine was not ready after {self._start_timeout_s:g} s"
            ) from None
        except OSError as error:
            await self.stop()
            raise EngineLostError(f"the engine process cannot be started: {error}") from error
        except BaseException:
            await self.stop()
            raise

    async def execute(self, plan: StepPlan, opened: Sequence[EngineRequest]) -> StepResult:
        """Executes one step. One call at a time; a plan with the last one's
        step id is not executed again, but gets the same answer.

        Returns:
            The result, with the time from here to the engine and back as its
            elapsed time: that is what a step takes.

        Raises:
            EngineLostError: the engine is gone; so it is after a cancelled call.
        """
        if self._stream is None or self._lost_reason:
            raise EngineLostError(self._lost_reason or "the engine is not started")
        started_ns = time.monotonic_ns()
        try:
            message = self._message(plan, opened)
            await self._stream.write(message)
            response = await self._stream.read()
            if response is grpc.aio.EOF or response.step_id != message.step_id:
                raise EngineLostError(await self._account("the engine ended the stream of steps"))
            result = self._encoder.decode_result(response, plan)
        except grpc.aio.AioRpcError as error:
            raise self._lose(await self._cause(error)) from None
        except asyncio.InvalidStateError:  # The stream had ended before the write.
            raise self._lose(await self._account("the stream of steps broke")) from None
        except EngineLostError as error:
            raise self._lose(error.reason) from None
        except KeyError as error:
            raise self._lose(f"request {error.args[0]} was never opened, or is closed") from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and not task.cancelling():  # The channel was closed under us.
                raise self._lose("the engine's channel was closed") from None
            # An answer may still come, and nobody would know to which step.
            self._lose("a step was abandoned")
            raise
        return replace(result, elapsed_ns=time.monotonic_ns() - started_ns)

    async def stop(self) -> None:
        """Ends the process and removes its socket. May be called twice."""
        # One that is lost, or was told before, is not waited for.
        grace_s = 0.0 if self._lost_reason else self._stop_grace_s
        self._lost_reason = self._lost_reason or "the engine was stopped"
        # The process first: a step that is pending then fails as a lost one.
        if self._process is not None:
            await self._end(self._process, grace_s)
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close(grace=0)
        if self._stderr_reader is not None:
            await self._stderr_reader
        self._remove_folder()

    async def _start(self) -> EngineDescription:
        # Private (0700): whoever can reach the socket can read prompts.
        self._folder = Path(tempfile.mkdtemp(prefix="headway-engine-"))
        socket = self._folder / "engine.sock"
        process = self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "cloud.engine.main", str(socket)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=1 << 20,
            env=os.environ | _environment(self._spec),
            start_new_session=True,
        )
        self._stderr_reader = asyncio.create_task(self._read_stderr(process))
        if process.stdin is None or process.stdout is None:
            raise EngineLostError("the engine process has no pipes")
        process.stdin.write(self._spec.to_json().encode() + b"\n")
        if await process.stdout.readline() != b"ready\n":
            raise EngineLostError(await self._account("the engine closed its output"))
        options = [("grpc.max_receive_message_length", -1), ("grpc.enable_http_proxy", 0)]
        self._channel = grpc.aio.insecure_channel(f"unix:{socket}", options=options)
        stub = engine_pb2_grpc.EngineServiceStub(self._channel)
        try:
            description = decode_description(
                await stub.Describe(pb.DescribeRequest(), wait_for_ready=True)
            )
        except grpc.aio.AioRpcError as error:
            raise EngineLostError(await self._cause(error)) from None
        self._encoder = StepEncoder(description.incarnation)
        self._stream = stub.Steps()
        overhead_ns = await self._measure_overhead()
        # The connection stands and there is to be no other: nobody else can
        # reach the socket now, and a server that is killed leaves no file.
        self._remove_folder()
        return replace(
            description,
            calibration=tuple(
                replace(step, elapsed_ns=step.elapsed_ns + overhead_ns)
                for step in description.calibration
            ),
        )

    def _remove_folder(self) -> None:
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    async def _measure_overhead(self) -> int:
        """Median time of a step that does nothing: what the way there and back adds."""
        times = []
        for _ in range(21):
            times.append((await self.execute(StepPlan("", -1, ()), ())).elapsed_ns)
            self._last_plan_id = None
        return sorted(times)[len(times) // 2]

    def _message(self, plan: StepPlan, opened: Sequence[EngineRequest]) -> pb.StepsRequest:
        """The step's message; the very last one for a plan that is repeated."""
        if plan.step_id != self._last_plan_id:
            if self._last_plan_id is not None and plan.step_id < self._last_plan_id:
                raise EngineLostError(
                    f"step {plan.step_id} was planned after step {self._last_plan_id}"
                )
            # Numbered here: plans that hold nothing never come this way.
            self._last_message = self._encoder.encode(plan, opened, self._num_steps + 1)
            self._num_steps += 1
            self._last_plan_id = plan.step_id
        return self._last_message

    def _lose(self, reason: str) -> EngineLostError:
        self._lost_reason = self._lost_reason or reason
        return EngineLostError(self._lost_reason)

    async def _cause(self, error: grpc.aio.AioRpcError) -> str:
        """Why a call failed, in one line."""
        details = " ".join((error.details() or "the stream of steps broke").split())
        # One status is the engine's own word, so it is still there; any other is gRPC's,
        # which says INTERNAL too where the stream breaks between its write and its read.
        is_gone = error.code() is not grpc.StatusCode.FAILED_PRECONDITION
        return await self._account(details) if is_gone else details

    async def _account(self, otherwise: str) -> str:
        """Why the process ended, in one line; `otherwise` where it did not."""
        if self._process is None or self._stderr_reader is None:
            return otherwise
        try:
            async with asyncio.timeout(_EXIT_ACCOUNT_S):
                status = await self._process.wait()
                await asyncio.shield(self._stderr_reader)
        except TimeoutError:
            return otherwise
        last_line = self._stderr[-1] if self._stderr else ""
        if status < 0:
            ending = f"the engine was ended by {signal.Signals(-status).name}"
            return f"{ending}: {last_line}" if last_line else ending
        return last_line or f"the engine exited with status {status}"

    async def _read_stderr(self, process: asyncio.subprocess.Process) -> None:
        if process.stderr is None:
            return
        async for line in process.stderr:
            text = line.decode(errors="replace").strip()
            if text:
                self._stderr.append(text)
                # What it says before it is ready is the reason that `start` gives.
                log = _log.debug if self._stream is None else _log.warning
                log("engine_said", pid=process.pid, line=text)

    async def _end(self, process: asyncio.subprocess.Process, grace_s: float) -> None:
        if process.stdin is not None:
            process.stdin.close()  # The process takes that as its end.
        try:
            async with asyncio.timeout(grace_s):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def _environment(spec: EngineSpec) -> dict[str, str]:
    """Threads that wait must not spin: the server shares the cores."""
    threads = str(spec.threads)
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_BLOCKTIME": "0",
        "GRPC_VERBOSITY": "NONE",
        "PYTHONUNBUFFERED": "1",
    }
