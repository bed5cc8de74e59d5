"""200 SIGKILLs under load, of a worker, of the daemon, of both: no wrong byte, and what was cached is hit again."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvcached_client import Admin, Client, KeyChain, Lease, MappedPool, map_pool
from kvcached_client.types import FenceSequence
from tests.daemon.conftest import CONFIG
from tests.daemon.supervised import Supervised, supervised

KILLS = 200
SLOTS = 256
BLOCKS = 8
#: Prompts whose device blocks are looked for again; used last before a kill, so that no load evicts them.
WATCHED = 8
#: Requests that are computed while the kill comes.
REQUESTS = 12
#: Prompts of long ago whose host copies are looked for again.
SAMPLED = 2
KINDS = ("worker", "daemon", "both")
HOST = "[host]\nsize_bytes = 67108864\nslab_bytes = 1048576\n"


class Engine:
    """An engine that writes each block's key into all of its layers, and compares what it hits."""

    def __init__(self, run_dir: Path, seen: Counter[str]) -> None:
        self.parts = ExitStack()
        self.client = self.parts.enter_context(Client.connect(run_dir, deadline_ms=20_000, failures="miss"))
        self.pool: MappedPool = map_pool(self.client.session, 0, deadline_ms=20_000)
        self.parts.callback(self.pool.close)
        self.layers = [self.pool.pages(layer) for layer in range(2)]
        self._seen = seen
        self._fence = 0
        self._requests = 0

    def chain(self, number: int) -> KeyChain:
        return self.client.chain(range(number * 100, number * 100 + 4 * BLOCKS))

    def acquire(self, number: int) -> Lease:
        """A lease, whose hit has the right bytes as far as it can be read now."""
        self._requests += 1
        lease = self.client.acquire(f"{id(self)}-{self._requests}", self.chain(number), full=True)
        self.compare(lease, number, lease.ready_blocks)
        return lease

    def compare(self, lease: Lease, number: int, blocks: int) -> None:
        chain = self.chain(number)
        for depth in range(blocks):
            key, slot = chain.key_range(depth, depth + 1), lease.block_table[depth]
            wrong = [layer for layer in range(2) if not (self.layers[layer][slot] == key[layer]).all()]
            self._seen["wrong blocks"] += bool(wrong)
            self._seen["blocks compared"] += 1

    def compute(self, number: int) -> bool:
        """Serve a prompt, as far as the daemon lives; whether its blocks are surely cached then."""
        lease = self.acquire(number)
        if not lease.granted:
            return False
        if lease.is_loading:
            lease.wait_loaded()
            if lease.is_loading:
                lease.release()
                return False
            self.compare(lease, number, lease.hit_blocks)
        chain = self.chain(number)
        for depth in range(lease.hit_blocks, BLOCKS):
            key = chain.key_range(depth, depth + 1)
            for layer in range(2):
                self.layers[layer][lease.block_table[depth]] = key[layer]
        self._fence += number % 2
        lease.commit(4 * BLOCKS, fence=FenceSequence(self._fence if number % 2 else 0), wait=number % 3 != 0)
        if number % 2:
            self.client.signal_fence(FenceSequence(self._fence))
        if number % 5 == 0:
            lease.release(wait=False)  # under way while others are served, and perhaps when the kill comes
            return False
        lease.release()
        return lease.depth == BLOCKS and lease.reason is None


class Loop:
    """Kills, and what became of the blocks.

    Attributes:
        seen: what was counted.
    """

    def __init__(self, daemon: Supervised) -> None:
        self.seen: Counter[str] = Counter()
        self._daemon = daemon
        self._chance = random.Random(1)
        self._engine = Engine(daemon.run_dir, self.seen)
        self._last = 0  #: of the prompts
        self._cached: list[int] = []  #: prompts that were computed, oldest first

    def run(self) -> None:
        """All of them."""
        for number in range(KILLS):
            self._load_until(WATCHED + len(self._cached))
            watched = self._cached[-WATCHED:]
            before = {each: self._slots_of(each) for each in watched}
            self._kill_under_load(KINDS[number % len(KINDS)])
            if number % len(KINDS):
                self._come_back(is_new=number % 2 == 0)
            self._look_again(before)
            with Admin.connect(self._daemon.run_dir, deadline_ms=20_000) as admin:
                while not admin.health().ok:  # until there are workers again
                    self.seen["waits for workers"] += 1
                assert admin.check().violations == ()
            self._look_at_host_copies()

    def close(self) -> None:
        self._engine.parts.close()

    def _load_until(self, prompts: int) -> None:
        while len(self._cached) < prompts:
            self._serve()

    def _serve(self) -> None:
        self._last += 1
        if self._engine.compute(self._last):
            self._cached.append(self._last)

    def _slots_of(self, number: int) -> list[int]:
        """Where the blocks of a prompt lie in the device pool, as far as they do; they are used now."""
        lease = self._engine.acquire(number)
        slots: list[int] = lease.block_table[: lease.ready_blocks].tolist()
        if lease.is_loading:
            lease.wait_loaded()
        lease.release()
        return slots

    def _kill_under_load(self, kind: str) -> None:
        """Requests go on until the kill, which comes at any moment."""
        pids = [self._daemon.daemon_pid] if kind != "worker" else []
        pids += [_worker_pid(self._daemon)] if kind != "daemon" else []
        delay_s, killed = self._chance.uniform(0, 0.02), threading.Event()

        def kill() -> None:
            killed.wait(delay_s)
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            killed.set()

        thread = threading.Thread(target=kill)
        thread.start()
        for _ in range(REQUESTS):
            self._serve()
        thread.join()
        self.seen[f"kills: {kind}"] += 1

    def _come_back(self, *, is_new: bool) -> None:
        """The next daemon serves the engine that lived, or another one."""
        if is_new:
            self._engine.parts.close()
        self._daemon.await_ready()
        if is_new:
            self._engine = Engine(self._daemon.run_dir, self.seen)
        else:
            self._engine.client.match(self._engine.chain(0))  # at the latest now it knows that its daemon is gone
            self._engine.client.rejoin()

    def _look_again(self, before: dict[int, list[int]]) -> None:
        for number, slots in before.items():
            again = self._slots_of(number)
            self.seen["device blocks"] += len(slots)
            self.seen["device blocks hit again, where they were"] += sum(
                one == other for one, other in zip(slots, again, strict=False)
            )

    def _look_at_host_copies(self) -> None:
        older = self._cached[: -2 * SLOTS // BLOCKS]  # none of them can be in the device pool
        for number in self._chance.sample(older, min(len(older), SAMPLED)):
            lease = self._engine.acquire(number)
            ready = lease.ready_blocks
            if lease.is_loading:
                lease.wait_loaded()
                self._engine.compare(lease, number, lease.hit_blocks)
            self.seen["host blocks"] += BLOCKS - ready
            self.seen["host blocks hit again"] += lease.hit_blocks - ready
            lease.release()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_hundred_kills_lose_no_block(tmp_path: Path) -> None:
    """No hit has a wrong byte, and 99 of 100 blocks of either tier are hit again, on the device where they lay."""
    config = CONFIG.replace("slots = 16", f"slots = {SLOTS}").replace("session_ttl_ms = 600", "session_ttl_ms = 20000")
    with supervised(tmp_path, config + HOST, pause_min_s=0.01, pause_max_s=0.01) as daemon:
        loop = Loop(daemon)
        try:
            loop.run()
        finally:
            loop.close()
    seen = loop.seen

    assert sum(seen[f"kills: {kind}"] for kind in KINDS) == KILLS
    assert seen["wrong blocks"] == 0
    assert seen["device blocks"] > KILLS * BLOCKS * WATCHED * 0.9
    assert seen["host blocks"] > KILLS
    assert seen["device blocks hit again, where they were"] >= 0.99 * seen["device blocks"], seen
    assert seen["host blocks hit again"] >= 0.99 * seen["host blocks"], seen


def _worker_pid(daemon: Supervised) -> int:
    """Of the only worker."""
    children = Path(f"/proc/{daemon.daemon_pid}/task/{daemon.daemon_pid}/children").read_text().split()
    (worker,) = (int(pid) for pid in children if b"kvcached.worker.main" in Path(f"/proc/{pid}/cmdline").read_bytes())
    return worker
