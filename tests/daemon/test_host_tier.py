"""The host tier from end to end: real daemon, real workers, host memory read behind their backs."""

from __future__ import annotations

import mmap
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvcached_client import Admin, Client, Lease, MappedPool, map_pool
from kvcached_client.blocks.host_layout import HostGeometry
from kvcached_client.errors import LoadFailed
from kvcached_client.protocol.engine import StatsReport
from tests.daemon.conftest import CONFIG, RunningDaemon, pool_stats, seconds_until, started
from tests.daemon.supervised import Supervised
from tests.daemon.test_deaths import children
from tests.host_pool_file import host_pool_file

PATIENCE_S = 20
SLOTS, BLOCK_SIZE = 16, 4
SLABS, SLAB_BYTES = 16, 65_536
#: On a busy machine a heartbeat may be late by more than `CONFIG` lets it.
PATIENT_CONFIG = CONFIG.replace("session_ttl_ms = 600", "session_ttl_ms = 20000")
HOST_CONFIG = f"{PATIENT_CONFIG}\n[host]\nsize_bytes = {SLABS * SLAB_BYTES}\nslab_bytes = {SLAB_BYTES}\n"
#: Blocks of 1 MiB: to copy a few dozen of them takes a while.
LARGE_BLOCKS = 24
LARGE_CONFIG = (
    PATIENT_CONFIG.replace("slots = 16", f"slots = {LARGE_BLOCKS}").replace("head_dim = 8", "head_dim = 16384")
    + "\n[host]\nsize_bytes = 134217728\n"
)


class Engine:
    """A session of this process, with the memory of every shard."""

    def __init__(self, run_dir: Path, shards: int, replica: str = "default") -> None:
        self._parts = ExitStack()
        client = Client.connect(run_dir, replica=replica, deadline_ms=PATIENCE_S * 1000)
        self.client = self._parts.enter_context(client)
        self.pools = [self._parts.enter_context(map_pool(self.client.session, shard)) for shard in range(shards)]

    def close(self) -> None:
        """End the session."""
        for pool in self.pools:
            pool.close()
        self._parts.close()

    def compute(self, name: str, blocks: int) -> list[bytes]:
        """Commit blocks of random bytes under a name; returns each shard's."""
        chain = self.client.chain(tokens_of(name, blocks))
        with self.client.acquire(f"compute {name}", chain, full=True) as lease:
            written = self.write(lease, name)
            lease.commit(chain.token_count)
        return written

    def write(self, lease: Lease, name: str) -> list[bytes]:
        """Fill a lease's blocks with the name's random bytes; returns each shard's."""
        blocks = len(lease.block_table)
        for shard, pool in enumerate(self.pools):
            for layer in range(pool.layout.groups[0].layers):
                pages = pool.pages(layer)
                random = np.random.default_rng([shard, layer, *name.encode()])
                pages[lease.block_table] = random.integers(0, 256, (blocks, pages.shape[1]), np.uint8)
        return [content(pool, lease) for pool in self.pools]

    def acquire(self, name: str, blocks: int, request: str = "") -> Lease:
        """A lease on what was computed under a name."""
        return self.client.acquire(request or f"use {name}", self.client.chain(tokens_of(name, blocks)), full=True)

    def evict_all(self, slots: int) -> None:
        """Use every slot of the device pool for something else: no byte stays as it was."""
        with self.client.acquire("evict", self.client.chain(tokens_of("rest", slots)), full=True) as lease:
            for pool in self.pools:
                for layer in range(pool.layout.groups[0].layers):
                    pages = pool.pages(layer)
                    pages[lease.block_table] = ~pages[lease.block_table]


def tokens_of(name: str, blocks: int) -> list[int]:
    return [*name.encode().ljust(BLOCK_SIZE), *range(BLOCK_SIZE * (blocks - 1))]


def content(pool: MappedPool, lease: Lease) -> bytes:
    """The bytes of a lease's blocks on one shard, block after block."""
    layers = [pool.pages(layer)[lease.block_table] for layer in range(pool.layout.groups[0].layers)]
    return np.stack(layers, axis=1).tobytes()


@contextmanager
def engine_on(daemon: RunningDaemon | Supervised, shards: int = 1, replica: str = "default") -> Iterator[Engine]:
    engine = Engine(daemon.run_dir, shards, replica)
    try:
        yield engine
    finally:
        engine.close()


def wait_until(run_dir: Path, reached: Callable[[StatsReport], bool]) -> None:
    """Ask until the daemon is as wanted; fails where it never is."""
    start = time.monotonic()
    with Admin.connect(run_dir, deadline_ms=PATIENCE_S * 1000) as admin:
        while not reached(stats := admin.stats()):
            assert time.monotonic() - start < PATIENCE_S, stats


def wait_stored(run_dir: Path, blocks: int) -> None:
    wait_until(run_dir, lambda stats: stats.counters.get("stored_blocks", 0) == blocks)


def host_memory(pid: int, size_bytes: int = SLABS * SLAB_BYTES) -> mmap.mmap:
    """The host pool of a daemon's process, mapped here."""
    descriptor = os.open(host_pool_file(pid), os.O_RDWR)
    try:
        return mmap.mmap(descriptor, size_bytes)
    finally:
        os.close(descriptor)


def is_sound(daemon: RunningDaemon | Supervised) -> bool:
    with Admin.connect(daemon.run_dir, deadline_ms=PATIENCE_S * 1000) as admin:
        return admin.check().violations == () and admin.health().ok


def worker_of(daemon: RunningDaemon, replica: str = "default", shard: int = 0) -> int:
    """The pid of the worker that holds a shard's memory."""
    memory = f"/memfd:kvcached-{replica}-{shard} "
    (pid,) = (pid for pid in children(daemon.process.pid) if memory in Path(f"/proc/{pid}/maps").read_text())
    return pid


@contextmanager
def losing_a_worker(daemon: RunningDaemon, shard: int = 0) -> Iterator[int]:
    """The pid of a worker that is killed inside; afterwards the replica's workers run again."""
    epoch, worker = pool_stats(daemon.run_dir).epoch, worker_of(daemon, shard=shard)
    with Admin.connect(daemon.run_dir) as admin:
        lost = admin.stats().counters.get("workers_lost", 0)
    yield worker
    wait_until(daemon.run_dir, lambda stats: stats.counters.get("workers_lost", 0) > lost and stats.pools[0].healthy)
    assert pool_stats(daemon.run_dir).epoch == epoch


@pytest.mark.parametrize("shards", [1, 2])
def test_evicted_blocks_come_back_from_host_memory(tmp_path: Path, shards: int) -> None:
    """What was committed lies in the host pool, where each shard has its part, and comes back byte for byte."""
    config = HOST_CONFIG.replace("shards = 1", f"shards = {shards}")
    with started(tmp_path, config) as daemon, engine_on(daemon, shards) as engine:
        written = engine.compute("a", 4)
        wait_stored(daemon.run_dir, 4)
        block_bytes = engine.client.layout.bytes_per_block()
        geometry = HostGeometry(slabs=SLABS, slab_bytes=SLAB_BYTES, shards=shards, block_bytes=block_bytes)
        memory = host_memory(daemon.process.pid)
        for shard, blocks in enumerate(written):
            places = {memory.find(blocks[at : at + block_bytes]) for at in range(0, len(blocks), block_bytes)}
            assert places < {geometry.block_offset(slot, shard) for slot in range(geometry.slots)}
        engine.evict_all(SLOTS)
        with engine.acquire("a", 4) as lease:
            assert (lease.hit_blocks, lease.is_loading) == (4, True)
            assert lease.wait_loaded() == 4 * BLOCK_SIZE
            assert [content(pool, lease) for pool in engine.pools] == written
        assert is_sound(daemon)


@pytest.mark.parametrize("orders", [("layer_first", "block_first"), ("block_first", "layer_first")], ids="-".join)
def test_replicas_with_other_orders_of_pages_share_their_blocks(tmp_path: Path, orders: tuple[str, str]) -> None:
    """A block that one replica has stored is loaded by another one whose pool has its pages in another order."""
    first, second = (
        CONFIG[CONFIG.index("[[replica]]") :]
        .replace('name = "default"', f'name = "{name_of(order)}"\npage_order = "{order}"')
        .replace("slots = 16", f"slots = {slots}")
        for order, slots in zip(orders, (16, 12), strict=True)
    )
    text = HOST_CONFIG[: HOST_CONFIG.index("[[replica]]")] + first + second + HOST_CONFIG[HOST_CONFIG.index("[host]") :]
    with (
        started(tmp_path, text) as daemon,
        engine_on(daemon, replica=name_of(orders[0])) as one,
        engine_on(daemon, replica=name_of(orders[1])) as two,
    ):
        assert one.pools[0].layout.order != two.pools[0].layout.order
        written = one.compute("a", 5)
        wait_stored(daemon.run_dir, 5)
        with two.acquire("a", 5) as lease:
            assert lease.hit_blocks == 5
            lease.wait_loaded()
            assert [content(pool, lease) for pool in two.pools] == written
        assert is_sound(daemon)


def name_of(order: str) -> str:
    return order.replace("_", "-")


def test_session_goes_on_over_the_death_of_a_worker(tmp_path: Path) -> None:
    """SIGKILL of a worker costs no block on any tier and no session: what was cached is hit, and loads work again."""
    with started(tmp_path, HOST_CONFIG.replace("shards = 1", "shards = 2")) as daemon:
        with engine_on(daemon, 2) as engine:
            written = engine.compute("a", 4)
            wait_stored(daemon.run_dir, 4)
            with losing_a_worker(daemon) as worker:
                os.kill(worker, signal.SIGKILL)
            with engine.acquire("a", 4) as lease:
                assert (lease.hit_blocks, lease.is_loading) == (4, False)
                assert [content(pool, lease) for pool in engine.pools] == written
            engine.evict_all(SLOTS)
            with engine.acquire("a", 4) as lease:
                assert (lease.hit_blocks, lease.is_loading) == (4, True)
                for pool in engine.pools:  # the page of progress is the same, too
                    pool.wait_layer(lease.loads, 0, deadline_ms=PATIENCE_S * 1000)
                assert lease.wait_loaded() == 4 * BLOCK_SIZE
                assert [content(pool, lease) for pool in engine.pools] == written
        assert is_sound(daemon)
        log = (tmp_path / "run.log").read_text()
    for line in ("lost the worker of shard", "they are started again in 0 s", "workers run again"):
        assert log.count(line) == 1


@pytest.mark.parametrize("begun", [False, True], ids=["before it begins", "while it copies"])
def test_worker_killed_under_a_store_leaves_no_wrong_byte(tmp_path: Path, begun: bool) -> None:
    """A store that its worker's death cut short is made again by the next one; whatever is found is right."""
    with started(tmp_path, LARGE_CONFIG) as daemon:
        with losing_a_worker(daemon) as worker, engine_on(daemon) as engine:
            if not begun:
                os.kill(worker, signal.SIGSTOP)
            (written,) = engine.compute("a", LARGE_BLOCKS)
            os.kill(worker, signal.SIGKILL)
        wait_until(daemon.run_dir, lambda stats: not any(stats.transfers.values()))
        with engine_on(daemon) as engine, engine.acquire("a", LARGE_BLOCKS) as lease:
            hit_blocks = lease.wait_loaded() // BLOCK_SIZE
            size = hit_blocks * engine.client.layout.bytes_per_block()
            assert content(engine.pools[0], lease)[:size] == written[:size]
            assert hit_blocks == LARGE_BLOCKS
        assert is_sound(daemon)


def test_worker_killed_under_a_load_ends_every_wait(tmp_path: Path) -> None:
    """Who waits for a layer is told at once that the load failed, and who waits for the load gets a shorter hit."""
    with started(tmp_path, HOST_CONFIG) as daemon, engine_on(daemon) as engine, ThreadPoolExecutor() as threads:
        engine.compute("a", 4)
        wait_stored(daemon.run_dir, 4)
        engine.evict_all(SLOTS)
        with losing_a_worker(daemon) as worker:
            os.kill(worker, signal.SIGSTOP)
            lease = engine.acquire("a", 4)
            assert lease.is_loading
            layer = threads.submit(engine.pools[0].wait_layer, lease.loads, 0, deadline_ms=PATIENCE_S * 1000)
            load = threads.submit(lease.wait_loaded)
            os.kill(worker, signal.SIGKILL)
            with pytest.raises(LoadFailed):
                layer.result(PATIENCE_S)
            assert load.result(PATIENCE_S) == 0
        assert is_sound(daemon)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_hung_worker_is_killed_and_replaced(tmp_path: Path) -> None:
    """A worker that stops in the middle of its work is killed at its deadline; then its replica serves again."""
    with started(tmp_path, HOST_CONFIG) as daemon:
        with losing_a_worker(daemon) as worker, engine_on(daemon) as engine:
            os.kill(worker, signal.SIGSTOP)
            engine.compute("a", 4)
            seconds_until(daemon.run_dir, lambda pool: not pool.healthy, 60)
        with engine_on(daemon) as engine:
            (written,) = engine.compute("a", 4)
            wait_stored(daemon.run_dir, 4)
            engine.evict_all(SLOTS)
            with engine.acquire("a", 4) as lease:
                lease.wait_loaded()
                assert content(engine.pools[0], lease) == written
        assert is_sound(daemon)
        assert "it had not acknowledged command" in (tmp_path / "run.log").read_text()
