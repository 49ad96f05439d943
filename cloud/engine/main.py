"""The engine process: `python -m cloud.engine.main SOCKET`, started by a server.

Its standard input brings the spec as one line and stays open for as long as
the server lives; its end ends this process. On standard output it says "ready"
once. Whatever is wrong is said on standard error, in one line, with status 2.
"""

import asyncio
import ctypes
import gc
import os
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path

import grpc

from cloud.engine.api import EngineDescription, Executor
from cloud.engine.service import EngineService
from cloud.engine.spec import EngineSpec, make_executor
from headway.errors import HeadwayError
from headway.internal.v1alpha import engine_pb2_grpc

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1


def main(socket_path: str) -> int:
    """Serves one engine on `socket_path` until standard input ends."""
    _die_with_parent()
    # Ctrl-C in a terminal reaches the whole group; the server decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    spec = EngineSpec.from_json(sys.stdin.readline())
    threading.Thread(target=_end_with_input, daemon=True).start()
    try:
        executor, description = _prepare(spec)
    except HeadwayError as error:
        sys.stderr.write(f"{error.message}\n")
        return 2
    asyncio.run(_serve(socket_path, EngineService(executor, description)))
    return 0


def _prepare(spec: EngineSpec) -> tuple[Executor, EngineDescription]:
    """Loads, tests and measures; the executor, and what is to be said of it."""
    from cloud.engine.calibration import measure_steps, measure_swap_ns

    executor = make_executor(spec)
    description = executor.describe()
    if spec.kind == "torch":
        from cloud.engine.self_test import check_reference, self_test
        from cloud.engine.torch_executor import TorchExecutor

        if isinstance(executor, TorchExecutor):
            self_test(executor)
            check_reference(executor, Path(spec.model_folder))
        description = replace(
            description,
            calibration=measure_steps(executor, budget_s=spec.calibration_s),
            swap_block_ns=measure_swap_ns(executor),
        )
    # What is alive now lives as long as the process: a collection need not look at it.
    gc.collect()
    gc.freeze()
    return executor, description


async def _serve(socket_path: str, service: EngineService) -> None:
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
    engine_pb2_grpc.add_EngineServiceServicer_to_server(service, server)
    server.add_insecure_port(f"unix:{socket_path}")
    await server.start()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await server.wait_for_termination()


def _end_with_input() -> None:
    """Ends the process when the server closes our input, or dies. At once, in
    the middle of a step too: nothing here outlives the server.
    """
    while os.read(0, 4096):
        pass
    os._exit(0)


def _die_with_parent() -> None:
    """Linux ends this process even where it hangs, should the server be killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
