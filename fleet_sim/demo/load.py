"""Robots and batch work against one server, each in a thread of its own."""

import threading
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Self

from edge.answer import Answer
from edge.asking import AskingLoop
from edge.client import Priority, RobotClient
from edge.diff_drive import DiffDriveRobot
from fleet_sim.demo.measures import FleetMeasures
from headway.clock import MonotonicClock
from headway.rpc.errors import CallError

__all__ = ["WORK_ORDER", "FleetLoad"]

_BATCH_TIMEOUT_S = 600.0
# What batch work waits after a "no" without a hint.
_BATCH_PAUSE_S = 0.25
_BATCH_MAX_TOKENS = 96
# What visitors bring along: much longer than a resident's task, so that few of
# them are a lot to read.
WORK_ORDER = (
    "Unload truck 12 at gate 4: heavy pallets first, cold goods to aisle C at once, glass to "
    "aisle F at walking pace. Wait for people, never pass them from behind, keep out of the "
    "yellow zone. When the truck is empty, sweep the ramp and drive back to the dock to charge."
)
_LOG = (
    "Summarise the shift of robot {robot} for the morning meeting. Log {number}: 06:02 left dock, "
    "battery {battery} %. 06:11 aisle {aisle} blocked by a pallet, waited 41 s, rerouted. 06:40 "
    "wheel slip on the ramp, speed limited to 0.6 m/s. 07:15 delivered {number} totes. Summary:"
)


class FleetLoad:
    """Entered: robots ask and batch work runs. Left: every answer is in and no thread is left.

    Args:
        address: of the server.
        measures: where answers are counted.
        num_robots: robots that are there all the time.
        rate_hz: how often each asks.
        budget_s: how long each waits.
        num_batch: batch texts that are wanted at any time.
    """

    def __init__(
        self,
        address: str,
        measures: FleetMeasures,
        *,
        num_robots: int,
        rate_hz: float,
        budget_s: float,
        num_batch: int,
    ) -> None:
        self._address = address
        self._measures = measures
        self._num_robots = num_robots
        self._rate_hz = rate_hz
        self._budget_s = budget_s
        self._num_batch = num_batch
        self._is_over = threading.Event()
        self._is_quiet = threading.Event()  # The burst is over.
        self._threads: list[threading.Thread] = []
        self._clients: list[RobotClient] = []
        self._failure: BaseException | None = None

    def __enter__(self) -> Self:
        for index in range(self._num_robots):
            name = f"amr-{index + 1}"
            on_answer = partial(self._measures.add_resident, name)
            # Spread over a period: robots don't wake up together of themselves.
            delay_s = index / (self._num_robots * self._rate_hz)
            self._start(name, self._robot(name, index, on_answer, self._is_over, delay_s))
        for index in range(self._num_batch):
            self._start(f"batch-{index + 1}", partial(self._write_texts, index))
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end_burst()
        self._is_over.set()
        # Robots first: what they asked is answered within a budget. Batch texts
        # may take long, and end with their connection.
        for thread in self._threads:
            if not thread.name.startswith("batch-"):
                thread.join()
        for client in self._clients:
            client.close()
        for thread in self._threads:
            thread.join()

    def start_burst(self, num_visitors: int) -> None:
        """That many more robots, which all ask at the same instants."""
        for index in range(num_visitors):
            name = f"visitor-{index + 1}"
            seed = self._num_robots + index
            run = self._robot(
                name, seed, self._measures.add_visitor, self._is_quiet, 0.0, task=WORK_ORDER
            )
            self._start(name, run)

    def end_burst(self) -> None:
        """No further question from the visitors."""
        self._is_quiet.set()

    def check(self) -> None:
        """Raises what a thread failed with, if one did.

        Raises:
            Exception: of the first thread that failed.
        """
        if self._failure is not None:
            raise self._failure

    def _start(self, name: str, run: Callable[[], None]) -> None:
        thread = threading.Thread(target=self._guarded, args=(run,), name=name)
        self._threads.append(thread)
        thread.start()

    def _guarded(self, run: Callable[[], None]) -> None:
        try:
            run()
        except Exception as failure:  # The main thread raises it: see check().
            self._failure = self._failure or failure

    def _connect(self, name: str) -> RobotClient:
        client = RobotClient.connect(
            self._address, robot_id=name, embodiment=DiffDriveRobot.embodiment
        )
        self._clients.append(client)
        return client

    def _robot(
        self,
        name: str,
        seed: int,
        on_answer: Callable[[Answer], None],
        stop: threading.Event,
        delay_s: float,
        *,
        task: str = "drive to the goal",
    ) -> Callable[[], None]:
        asking = AskingLoop(
            self._connect(name),
            DiffDriveRobot(name, seed, MonotonicClock().now_ns(), task=task),
            rate_hz=self._rate_hz,
            budget_s=self._budget_s,
            on_answer=on_answer,
        )

        def run() -> None:
            if not stop.wait(delay_s):
                asking.run(stop)

        return run

    def _write_texts(self, index: int) -> None:
        """Batch texts, one after the other, until the end."""
        client = self._connect(f"batch-{index + 1}")
        number = index
        while not self._is_over.is_set():
            number += self._num_batch
            prompt = _LOG.format(
                robot=f"amr-{number % 8 + 1}",
                number=number,
                battery=40 + number % 60,
                aisle=number % 12,
            )
            try:
                for piece in client.generate(
                    prompt,
                    max_tokens=_BATCH_MAX_TOKENS,
                    priority=Priority.BATCH,
                    seed=number,
                    timeout_s=_BATCH_TIMEOUT_S,
                ):
                    if piece.summary is not None:
                        self._measures.add_text(piece.summary.output_tokens)
            except CallError as no:
                self._is_over.wait(no.retry_after_s or _BATCH_PAUSE_S)
