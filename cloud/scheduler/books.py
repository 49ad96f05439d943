"""Compares the scheduler's books with each other: for tests, after every operation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from cloud.scheduler.fairness import Accounts
from cloud.scheduler.kv import KvInvariantError
from cloud.scheduler.replica import Replica
from cloud.scheduler.request_state import LiveRequest, Stage

__all__ = ["check_books"]


def check_books(
    live: Mapping[str, LiveRequest], replicas: Iterable[Replica], accounts: Accounts
) -> None:
    """Raises where two books say different things.

    Raises:
        KvInvariantError: they do; the message says which.
    """
    running = [one for one in live.values() if one.stage is Stage.RUNNING]
    at_replicas: list[LiveRequest] = []
    replicas = list(replicas)
    for replica in replicas:
        _check_replica(replica)
        at_replicas.extend(replica.running)
    _require(set(running) == set(at_replicas), "running requests and replicas' batches differ")
    _require(all(one.stage is not Stage.ENDED for one in live.values()), "an ended request lives")
    for replica in replicas:
        held = [
            block for one in live.values() if one.host is replica.host for block in one.host_blocks
        ]
        _require(replica.host.is_balanced(held), f"host blocks of '{replica.replica_id}'")
    for one in live.values():
        _require((one.host is None) == (not one.host_blocks), f"'{one.request_id}' in host memory")
        if one.stage is Stage.WAITING:
            _require(one.host is not None or not one.computed, f"KV of '{one.request_id}'")
            _require(
                not one.blocks and not one.reserved_blocks,
                f"'{one.request_id}' waits and holds device memory",
            )
    counts = Counter((one.rank, one.tenant, one.stage) for one in live.values())
    for account in accounts:
        name = (account.rank, account.tenant)
        _require(account.num_waiting == counts[(*name, Stage.WAITING)], f"waiting of {name}")
        _require(account.num_running == counts[(*name, Stage.RUNNING)], f"running of {name}")


def _check_replica(replica: Replica) -> None:
    replica.pool.check_invariants([one.blocks for one in replica.running])
    reserved = sum(one.reserved_blocks for one in replica.running)
    _require(reserved == replica.pool.reserved, "reserved blocks are not the sum of reservations")
    members = [one for part in (*replica.decoding, *replica.prefilling) for one in part]
    _require(
        len(members) == len(set(members)) and set(members) == set(replica.running),
        "a batch is not those that decode and those that prefill",
    )
    for rank, decoding in enumerate(replica.decoding):
        read = sum(one.computed for one in decoding)
        _require(read == replica.decode_kv[rank], f"KV read by decodes of class {rank}")
        room = sum(len(o.blocks) + o.reserved_blocks for o in replica.running if o.rank == rank)
        _require(room == replica.room_blocks[rank], f"room of class {rank}")
    for one in replica.running:
        _require(one.computed <= one.capacity, f"'{one.request_id}' has tokens without a block")
        _require(
            one.capacity == len(one.blocks) * replica.pool.block_tokens,
            f"capacity of '{one.request_id}'",
        )


def _require(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise KvInvariantError(f"the books differ: {otherwise}")
