"""What one replica pushes back, another takes up: told in full, and at once."""

import asyncio
from typing import Any

import pytest

from headway.v1 import robot_pb2
from tests.support.running_server import RunningServer, observation, running_server, settings, until
from tests.support.scripted_engine import ScriptedEngine


class _Paced:
    """Two engines that take a step for each permit."""

    def __init__(self) -> None:
        self.engines: list[ScriptedEngine] = []

    def make(self) -> ScriptedEngine:
        engine = ScriptedEngine()
        engine.pace = asyncio.Semaphore(0)
        self.engines.append(engine)
        return engine

    def permit(self, number: int, steps: int = 1) -> None:
        """Lets an engine take so many steps more."""
        pace = self.engines[number].pace
        assert pace is not None
        for _ in range(steps):
            pace.release()


async def _read_tokens(stream: Any, count: int) -> str:
    text = ""
    while len(text) < count:
        text += (await stream.read()).text
    return text


def _ask(running: RunningServer, robot: str) -> "asyncio.Task[robot_pb2.ActionChunk]":
    return asyncio.ensure_future(
        running.next_action(observation(robot, budget_s=3600.0), robot_id=robot)
    )


async def test_a_text_that_is_pushed_back_goes_on_at_an_idle_replica_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Letter after letter, none twice: the other engine is told what was given, and is woken.

    Each replica has room for one. Robot A runs on one, the text on the other; robot B
    waits for the text's replica, A's falls idle, and then B pushes the text back.
    """
    # Steps take here as long as they are held; that is to teach nobody anything.
    monkeypatch.setattr("cloud.scheduler.replica.Replica.observe", lambda *step: None)
    paced = _Paced()
    config = settings(
        engine__replicas=2,
        engine__stall_after_s=3600.0,
        scheduler__max_running=1,
        scheduler__prefix_cache=False,
        actions__chunk_steps=1,
    )
    async with running_server(config, make_engine=paced.make) as running:
        robot_a = _ask(running, "a")
        await until(lambda: any(engine.num_steps for engine in paced.engines))
        other = 0 if paced.engines[0].num_steps else 1
        night = 1 - other
        stream = running.robots.Generate(
            robot_pb2.GenerateRequest(prompt="hi", max_tokens=20, priority=robot_pb2.PRIORITY_BATCH)
        )
        paced.permit(night, 3)
        text = await _read_tokens(stream, 3)
        await until(lambda: paced.engines[night].num_steps == 4)

        # With A it would have to wait a step more than in place of the text.
        robot_b = _ask(running, "b")
        await until(lambda: running.server.dispatcher.num_live == 3)
        paced.permit(other, 2)  # One step of reading and one value more: the whole chunk.
        await robot_a
        assert paced.engines[other].num_steps == 2

        paced.permit(night, 1)
        text += await _read_tokens(stream, 1)
        # B is in, the text is out, and nothing else happens at the other one.
        await until(lambda: paced.engines[other].num_steps == 3)
        paced.permit(night, 2)
        await robot_b
        paced.permit(other, 16)
        text += await _read_tokens(stream, 16)
    assert text == "abcdefghijklmnopqrst"
