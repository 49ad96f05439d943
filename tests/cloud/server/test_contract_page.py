"""docs/contract.md says what the code does, and its example runs as it stands."""

import asyncio
import re
import sys
from pathlib import Path

import pytest

from cloud.server.action import MAX_TEXT_CHARACTERS
from cloud.server.validation import (
    MAX_IMAGES,
    MAX_NAME_CHARACTERS,
    MAX_STATE_SOURCES,
    MAX_STATE_VALUES,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
)
from headway.outcome import Reason
from headway.rpc.channel import server_options
from headway.rpc.status import STATUS_TABLE
from tests.support.fifo_policy import FifoPolicy
from tests.support.running_server import running_server, settings
from tests.support.scripted_engine import ScriptedEngine

PAGE = Path(__file__).parents[3] / "docs" / "contract.md"


def test_status_table_of_the_page_is_that_of_the_code() -> None:
    """Every reason stands there once, with its status and its details."""
    told: dict[str, tuple[str, str]] = {}
    rows = re.compile(r"^\| (`[A-Z_`, ]+`) \| `([A-Z_]+)` \| ([^|]*)\|", re.MULTILINE)
    for row in rows.findall(PAGE.read_text()):
        for reason in re.findall(r"[A-Z_]+", row[0]):
            assert reason not in told
            told[reason] = (row[1], row[2])
    assert set(told) == {reason.value for reason in Reason}
    for reason, rule in STATUS_TABLE.items():
        code, details = told[reason.value]
        assert code == rule.code.name
        assert ("QuotaFailure" in details) == rule.is_quota
        assert ("RetryInfo" in details) == rule.is_retriable


def test_limits_of_the_page_are_those_of_the_code() -> None:
    """Numbers in prose go stale otherwise."""
    text = PAGE.read_text()
    assert f"1 to {MAX_NAME_CHARACTERS} printable characters" in text
    assert f"| {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_CHARACTERS} characters |" in text
    assert f"| {MAX_STATE_SOURCES} sources, {MAX_STATE_VALUES:,} values in all |" in text
    assert f"| images of an observation | {MAX_IMAGES} |" in text
    assert f"| {MAX_TEXT_CHARACTERS:,} characters |" in text
    options = dict(server_options(max_calls=1))
    num_streams, handshake_ms = (
        options[f"grpc.{name}"]
        for name in ("max_concurrent_streams", "server_handshake_timeout_ms")
    )
    assert f"| {num_streams - 1:,} more than `server.max_calls` |" in text
    assert f"| {handshake_ms / 1000:g} s | the connection is closed |" in text
    assert f"never more than {options['grpc.absolute_max_metadata_size'] // 1024} KiB" in text


async def run_example(address: str, folder: Path) -> str:
    """What the page's example prints."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    script = folder / "example.py"
    script.write_text(code)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(script),
        address,
        stdout=asyncio.subprocess.PIPE,
        cwd=PAGE.parents[1],
        env={"PYTHONPATH": str(PAGE.parents[1])},
    )
    stdout, _ = await process.communicate()
    assert process.returncode == 0
    return stdout.decode()


@pytest.mark.parametrize("has_engine", [True, False])
async def test_example_of_the_page_runs(tmp_path: Path, *, has_engine: bool) -> None:
    """It prints the chunk, or the reason why there is none."""
    policy = FifoPolicy()
    async with running_server(settings(), make_engine=ScriptedEngine, policy=policy) as running:
        if not has_engine:
            policy.replica_down("replica-0", 0)
        printed = await run_example(running.server.address, tmp_path)
    if has_engine:
        assert printed == "10 steps of linear_velocity, angular_velocity\n"
    else:
        assert printed.startswith("no: UNAVAILABLE NO_ENGINE: ")
