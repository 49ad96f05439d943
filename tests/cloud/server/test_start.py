"""A start that is given up half-way."""

import asyncio

import pytest

from cloud.server.app import Server
from tests.support.running_server import settings


@pytest.mark.parametrize("turns", range(8))
async def test_start_that_is_cancelled_ends_as_cancelled_and_can_be_stopped(turns: int) -> None:
    """After any turn of the loop. gRPC's own start does not stand it: the process
    of a server that was left in the middle crashed at its end.
    """
    server = Server(settings())
    starting = asyncio.ensure_future(server.start())
    for _ in range(turns):
        await asyncio.sleep(0)
    starting.cancel()
    (ended,) = await asyncio.gather(starting, return_exceptions=True)
    # None: the start was over before.
    assert ended is None or isinstance(ended, asyncio.CancelledError)
    await server.stop(grace_s=0)
