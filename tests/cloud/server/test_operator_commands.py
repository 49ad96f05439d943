"""The operators' commands, as processes, against a whole server that asks for API keys."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

from cloud.server.keys import KeyFile
from headway.config import Settings
from tests.support.running_server import RunningServer, running_server, settings


async def run(
    running: RunningServer, key: str, *arguments: str
) -> subprocess.CompletedProcess[str]:
    """A command of whoever has `key`; none where it is empty."""
    command, *rest = arguments
    return await asyncio.to_thread(
        subprocess.run,
        [
            *(sys.executable, "-c", "from headway.cli import main; main()"),
            *(command, "--address", running.server.address, *rest),
        ],
        env={**os.environ, "HEADWAY_API_KEY": key},
        capture_output=True,
        text=True,
        check=False,
    )


def guarded(keys: KeyFile) -> Settings:
    """A server of an operator and a fleet, which show keys."""
    return settings(
        server__development=False,
        server__keys_file=str(keys.path),
        tenants=[{"name": "ops", "operator": True}, {"name": "fleet"}],
    )


async def test_the_key_decides_what_a_command_shows_and_does(tmp_path: Path) -> None:
    """The operator's everything, the fleet's its own, none nothing."""
    keys = KeyFile(tmp_path / "keys.json")
    operator, fleet = keys.issue("ops"), keys.issue("fleet")
    async with running_server(guarded(keys)) as running:
        whole = json.loads((await run(running, operator, "status", "--json")).stdout)
        assert [one["name"] for one in whole["tenants"]] == ["fleet", "ops"]
        assert [one["status"]["replica_id"] for one in whole["replicas"]] == ["replica-0"]
        own = json.loads((await run(running, fleet, "status", "--json")).stdout)
        assert [one["name"] for one in own["tenants"]] == ["fleet"]
        assert own["replicas"] == []

        denied = await run(running, fleet, "drain")
        assert (denied.returncode, denied.stdout) == (2, "")
        assert denied.stderr.startswith("headway: tenant 'fleet' may not")
        assert not running.server.dispatcher.is_draining
        unknown = await run(running, "", "status")
        assert unknown.returncode == 2
        assert unknown.stderr.count("\n") == 1

        drained = await run(running, operator, "drain", "--wait")
        assert (drained.returncode, drained.stderr) == (0, "")
        assert running.server.dispatcher.is_draining
        back = await run(running, operator, "drain", "--undo")
        assert back.returncode == 0
        assert not running.server.dispatcher.is_draining


async def test_every_replica_can_be_drained_by_the_name_that_status_shows(tmp_path: Path) -> None:
    """What a person reads in the table is what the command takes."""
    keys = KeyFile(tmp_path / "keys.json")
    operator = keys.issue("ops")
    async with running_server(guarded(keys)) as running:
        shown = json.loads((await run(running, operator, "status", "--json")).stdout)
        (name,) = [one["replica_id"] for one in shown["status"]["replicas"]]
        drained = await run(running, operator, "drain", "--replica", name)
        assert drained.stdout == f"{name} takes no new work; left to finish: nothing\n"
        assert running.server.dispatcher.replicas[0].is_draining
