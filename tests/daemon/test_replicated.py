"""A replica whose shards all hold the same bytes: the tiers below have each block once, and every shard gets it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from kvcached_client import Lease
from tests.daemon.conftest import CONFIG, RunningDaemon, started
from tests.daemon.supervised import Supervised, supervised
from tests.daemon.test_host_tier import (
    BLOCK_SIZE,
    SLAB_BYTES,
    SLABS,
    SLOTS,
    Engine,
    content,
    host_memory,
    is_sound,
    losing_a_worker,
    tokens_of,
    wait_stored,
)
from tests.daemon.test_storage import backed_up

SHARDS, BLOCKS = 2, 5
REPLICATED = CONFIG.replace("shards = 1", f"shards = {SHARDS}").replace(
    'dtype = "float32"', 'dtype = "float32"\nreplicated = true'
)
HOST = f"\n[host]\nsize_bytes = {SLABS * SLAB_BYTES}\nslab_bytes = {SLAB_BYTES}\n"


class Replicas(Engine):
    """A session whose shards compute the same bytes."""

    def __init__(self, daemon: RunningDaemon | Supervised) -> None:
        super().__init__(daemon.run_dir, SHARDS)

    def write(self, lease: Lease, name: str) -> list[bytes]:
        """Fill a lease's blocks with the name's random bytes, alike on all shards; returns each shard's."""
        blocks = len(lease.block_table)
        for pool in self.pools:
            for layer in range(pool.layout.groups[0].layers):
                pages = pool.pages(layer)
                random = np.random.default_rng([layer, *name.encode()])
                pages[lease.block_table] = random.integers(0, 256, (blocks, pages.shape[1]), np.uint8)
        return [content(pool, lease) for pool in self.pools]

    def load(self, name: str) -> list[bytes]:
        """What each shard has of a name when its loads are done; empty where it is no hit."""
        with self.acquire(name, BLOCKS) as lease:
            size = lease.wait_loaded() // BLOCK_SIZE * self.client.layout.bytes_per_block()
            return [content(pool, lease)[:size] for pool in self.pools]


def occurrences(memory: bytes, written: bytes, block_bytes: int) -> list[int]:
    """How often each block is there."""
    return [memory.count(written[at : at + block_bytes]) for at in range(0, len(written), block_bytes)]


def test_host_pool_holds_each_block_once_for_all_shards(tmp_path: Path) -> None:
    """What was committed is in host memory once, and after its eviction every shard has it again, byte for byte."""
    with started(tmp_path, REPLICATED + HOST) as daemon:
        engine = Replicas(daemon)
        written = engine.compute("a", BLOCKS)
        wait_stored(daemon.run_dir, BLOCKS)
        block_bytes = engine.client.layout.bytes_per_block()
        memory = host_memory(daemon.process.pid)[:]
        engine.evict_all(SLOTS)
        loaded = engine.load("a")
        engine.close()
        assert is_sound(daemon)
    assert (len(set(written)), loaded) == (1, written)
    assert occurrences(memory, written[0], block_bytes) == [1] * BLOCKS


@pytest.mark.parametrize("shard", range(SHARDS))
def test_host_copies_outlive_any_worker(tmp_path: Path, shard: int) -> None:
    """Whichever shard's worker is killed, the copies that it wrote serve all shards of the next session."""
    with started(tmp_path, REPLICATED + HOST) as daemon:
        engine = Replicas(daemon)
        written = engine.compute("a", BLOCKS)
        wait_stored(daemon.run_dir, BLOCKS)
        with losing_a_worker(daemon, shard) as worker:
            os.kill(worker, signal.SIGKILL)
        engine.close()
        engine = Replicas(daemon)
        assert engine.load("a") == written
        engine.close()
        assert is_sound(daemon)


def test_host_copies_outlive_the_daemon(tmp_path: Path) -> None:
    """A daemon that takes the host pool over finds the blocks by their one header, and loads them to every shard."""
    with supervised(tmp_path, REPLICATED + HOST) as daemon:
        engine = Replicas(daemon)
        written = engine.compute("a", BLOCKS)
        wait_stored(daemon.run_dir, BLOCKS)
        daemon.kill_and_wait()
        engine.close()
        engine = Replicas(daemon)
        assert engine.load("a") == written
        engine.close()
        assert is_sound(daemon)


def test_storage_holds_each_block_once_for_all_shards(tmp_path: Path) -> None:
    """After a stop of everything a block comes back from one copy on disk to every shard."""
    storage = (
        "\n[storage]\nprefetch_threshold_blocks = 1\n\n[storage.settings]\n"
        f'directory = "{tmp_path / "disk"}"\ncapacity_bytes = {8 << 20}\nfree_space_floor_bytes = 0\n'
    )
    with started(tmp_path, REPLICATED + HOST + storage) as daemon:
        engine = Replicas(daemon)
        written = engine.compute("a", BLOCKS)
        block_bytes = engine.client.layout.bytes_per_block()
        backed_up(daemon, BLOCKS)
        engine.close()
    files = b"".join(path.read_bytes() for path in (tmp_path / "disk").rglob("*") if path.is_file())
    with started(tmp_path, REPLICATED + HOST + storage) as daemon:
        engine = Replicas(daemon)
        chain = engine.client.chain(tokens_of("a", BLOCKS))
        assert engine.client.prefetch(chain, stop="wait_complete", deadline_ms=20_000, full=True).fetched == BLOCKS
        assert engine.load("a") == written
        engine.close()
    assert occurrences(files, written[0], block_bytes) == [1] * BLOCKS
