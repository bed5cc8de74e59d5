"""A daemon that has something to show: conversations on a replica, an engine in offload mode, and a disk."""

from __future__ import annotations

import random
import socket
from collections import deque
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from kvcached_client import Admin, Client, Lease
from kvcached_client.errors import NoCapacity
from tests.daemon.conftest import RunningDaemon, started
from tests.daemon.offload_process import Scheduler, ShardMemory

BLOCK_TOKENS = 4
SLOTS = 640
PAGE_BYTES = 1024
#: Requests that run at a time; the part of them that begins another conversation, and how many there are at most.
RUNNING, FORKS, TALKS_MAX = 3, 0.2, 80
#: Anybody who may be an engine chooses its label.
HOSTILE = "<img src=x onerror=\"document.title='pwned'\"><b>tiny</b>"
CONFIG = """
heartbeat_interval_ms = 500
session_ttl_ms = 30_000

[[replica]]
name = "chat"
model = "tiny-chat"
block_size = 4
shards = 1
slots = {slots}
[[replica.group]]
layers = 2
kv_heads = 1
head_dim = 8
v_head_dim = 8
dtype = "float32"

[host]
size_bytes = "768KiB"
slab_bytes = "32KiB"

[offload]

[storage]
[storage.settings]
directory = "{directory}"
capacity_bytes = "64MiB"

[http]
listen = "127.0.0.1:{port}"
"""


class Scene(NamedTuple):
    """A daemon, and where its page is."""

    daemon: RunningDaemon
    url: str


@contextmanager
def scene(directory: Path, port: int = 0) -> Iterator[Scene]:
    """A daemon with a port for its page, a free one unless it is named. Nothing is cached yet."""
    if not port:
        with closing(socket.create_server(("127.0.0.1", 0))) as free:
            port = free.getsockname()[1]
    config = CONFIG.format(slots=SLOTS, directory=directory / "disk", port=port)
    with started(directory, config) as daemon:
        yield Scene(daemon, f"http://127.0.0.1:{port}/")


class Conversations:
    """An engine with users who go on with what was said, or say something else at an earlier place.

    Some requests are always running. The same seed says the same.
    """

    def __init__(self, client: Client, users: int = 24, seed: int = 0) -> None:
        self._client = client
        self._random = random.Random(seed)
        systems = [self._say(blocks) for blocks in (40, 24, 12)]
        self._talks = [list(systems[min(self._random.randrange(5), 2)]) for _ in range(users)]
        self._running: deque[tuple[Lease, int]] = deque()
        self._requests = 0

    def turn(self) -> None:
        """Somebody, more often one of the first ones, asks something; an earlier request ends."""
        number = min(int(self._random.expovariate(0.15)), len(self._talks) - 1)
        if self._random.random() < FORKS and len(self._talks) < TALKS_MAX:
            kept = self._random.randrange(40, 40 + len(self._talks[number]))
            self._talks.append(self._talks[number][:kept])
            number = -1
        self._talks[number] += self._say(self._random.randrange(1, 9))
        if len(self._running) == RUNNING:
            lease, tokens = self._running.popleft()
            lease.finish(computed_tokens=tokens)
        self._requests += 1
        chain = self._client.chain(self._talks[number])
        with suppress(NoCapacity):  # where so much of the pool waits for its copies
            lease = self._client.acquire(f"request {self._requests}", chain)
            lease.wait_loaded()
            self._running.append((lease, len(self._talks[number])))

    def _say(self, blocks: int) -> list[int]:
        return [self._random.randrange(1000) for _ in range(blocks * BLOCK_TOKENS)]


@contextmanager
def offload_engine(daemon: RunningDaemon, label: str = HOSTILE) -> Iterator[Scheduler]:
    """An engine in offload mode, with a namespace of this label, that has stored two prompts.

    Two leases keep their blocks, however many others want the room.
    """
    scheduler = Scheduler(daemon.run_dir, b"i" * 16, 1, PAGE_BYTES, label=label)
    memory = ShardMemory(0, PAGE_BYTES)
    memory.join(scheduler.client.session)
    for name, blocks in (("long", 20), ("short", 6)):
        _, order = scheduler.prepare_store(name, blocks)
        memory.store(order)
        scheduler.acquire(name, blocks)
    try:
        yield scheduler
    finally:
        scheduler.client.close()
        if memory.link is not None:
            memory.link.close()


def wait_at_rest(daemon: RunningDaemon) -> None:
    """Until no copy is under way. The test's timeout bounds it."""
    with Admin.connect(daemon.run_dir) as admin:
        while any(admin.stats().transfers.values()):
            pass
