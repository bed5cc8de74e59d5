"""A daemon that is there to be killed: ``python -m tests.worker.mortal_daemon``, told what to do in lines of JSON.

The first is a `Task`: it starts or adopts the workers of one replica, sends their descriptors over a socket that it
inherits, and tells which processes they are. Each line after that is `Orders`, and answered when they are given.
"""

from __future__ import annotations

import asyncio
import socket
import sys

import msgspec

from kvcached.ledger import ProcessIdentity
from kvcached.seqpacket import send
from kvcached.worker import process
from kvcached.worker.host_memory import HostMemory
from kvcached.worker.messages import Load, Store
from kvcached.worker.supervisor import WorkerGroup
from kvcached_client.types import ShardIndex
from tests.worker.groups import Losses, tiny_pool
from tests.worker.host_rigs import HOST


class Task(msgspec.Struct, kw_only=True):
    """What to do."""

    run_dir: str
    shards: int
    grace_ms: int
    engine: int  #: a socket that takes the descriptors of each shard
    host: int = -1  #: the memory of a host pool of the shape `HOST`
    command: list[str] = []  #: of a worker; the real one where it is empty
    adoptable: dict[int, ProcessIdentity] = {}


class Orders(msgspec.Struct, kw_only=True):
    """What to order, and whether to wait for its end."""

    works: list[Store | Load]
    wait: bool


class Told(msgspec.Struct, kw_only=True):
    """What it tells of its workers."""

    adopted: bool
    processes: dict[int, ProcessIdentity]


async def serve(task: Task) -> None:
    """Do it."""
    if task.command:
        process.WORKER_COMMAND = tuple(task.command)  # type: ignore[misc,assignment]
    host = None if task.host < 0 else HostMemory(task.host, HOST.slabs, HOST.slab_bytes)
    pool = tiny_pool(task.shards, host=host, grace_ms=task.grace_ms)
    group = WorkerGroup(pool, task.run_dir, Losses().note)
    await group.start({ShardIndex(shard): each for shard, each in task.adoptable.items()})
    with socket.socket(fileno=task.engine) as engine:
        for shard in map(ShardIndex, range(task.shards)):
            send(engine, b"shard", group.descriptors(shard))
    told = Told(adopted=group.adopted, processes={int(shard): each for shard, each in group.processes.items()})
    tell(told)
    while line := await asyncio.to_thread(sys.stdin.readline):
        orders = msgspec.json.decode(line, type=Orders)
        results = [group.submit(work) for work in orders.works]
        if orders.wait:
            await asyncio.gather(*results)
        tell(len(results))


def tell(what: object) -> None:
    """Write one line."""
    sys.stdout.buffer.write(msgspec.json.encode(what) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    asyncio.run(serve(msgspec.json.decode(sys.stdin.readline(), type=Task)))
