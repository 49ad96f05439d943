"""The same inputs give the same decisions, byte for byte, in any process."""

import json
import os
import subprocess
import sys
from pathlib import Path

_PROGRAM = """
import hashlib, json, random
from cloud.scheduler.config import SchedulerConfig, TenantConfig
from cloud.scheduler.scheduler import Scheduler
from cloud.scheduler.simulated import Arrival
from cloud.scheduler.virtual import VirtualDriver
from tests.support.scheduling import S, batch, interactive, replica, standard

digest = hashlib.sha256()
count = 0
def sink(record):
    global count
    count += 1
    digest.update(json.dumps(record).encode())

generator = random.Random(1)
config = SchedulerConfig(max_running=16, tenants={"t1": TenantConfig(weight=2)})
driver = VirtualDriver(Scheduler(config, log=sink))
for name in ("a", "b"):
    driver.add_replica(replica(name, num_blocks=100))
for number in range(400):
    at_ns = int(generator.uniform(0, 10) * S)
    tenant = f"t{number % 5}"
    kind = generator.choice([interactive, standard, batch])
    keys = tuple(bytes([number % 5, n]) for n in range(4))
    changes = dict(tenant=tenant, prompt_tokens=generator.randint(1, 300), prefix_hashes=keys)
    if kind is batch:
        request = batch(f"b{number}", max_output_tokens=40, **changes)
    else:
        request = kind(f"p{number}", at_ns + int(generator.uniform(0.1, 1) * S), **changes)
    driver.add([Arrival(at_ns, request, generator.randint(1, 40))])
    if number % 7 == 0:
        name = request.request_id
        driver.at(at_ns + S // 5, lambda name=name: driver.cancel(name))
driver.at(5 * S, lambda: driver.lose_replica("b"))
driver.run()
driver.policy.check_invariants()
print(json.dumps([count, digest.hexdigest(), len(driver.ended)]))
"""


def _decisions(hash_seed: str) -> list[object]:
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(root)},
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    result: list[object] = json.loads(done.stdout)
    return result


def test_decisions_do_not_depend_on_the_process_or_its_hash_seed() -> None:
    """Three processes, three hash seeds, one decision log."""
    first = _decisions("0")
    assert isinstance(first[0], int)
    assert first[0] > 1000
    assert _decisions("1") == first
    assert _decisions("12345") == first
