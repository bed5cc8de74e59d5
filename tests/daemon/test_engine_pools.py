"""Device memory of engines over a real daemon's socket: it outlives the daemon, and a living engine keeps it."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from kvcached.recovery.state_file import LEDGER_NAME
from kvcached_client import Admin
from kvcached_client.blocks.engine_table import NO_PARENT, EngineTable, Row, table_bytes
from kvcached_client.blocks.memory_locks import lock_memory
from kvcached_client.errors import ErrorCode, RequestError
from kvcached_client.offload import new_instance
from kvcached_client.protocol.attach import ClaimPool
from kvcached_client.protocol.engine import EnginePoolStats
from kvcached_client.transport.attach import PoolDescriptors, claim_pool
from tests.daemon.offload_process import Scheduler
from tests.daemon.supervised import supervised

RANK_BYTES, BLOCKS = 1 << 20, 64
CONFIG = """
[host]
size_bytes = "4MiB"
slab_bytes = "1MiB"

[offload]
device_memory_bytes = "5MiB"
"""
DEADLINE_MS = 20_000


def claim(run_dir: Path, claim: str, rank: int = 0, *, rank_bytes: int = RANK_BYTES) -> PoolDescriptors:
    question = ClaimPool(name="model", claim=claim, ranks=2, rank=rank, rank_bytes=rank_bytes, blocks=BLOCKS)
    return claim_pool(run_dir, question, deadline_ms=DEADLINE_MS)


def memory_of(found: PoolDescriptors) -> int:
    assert found.memory is not None
    return found.memory


def stats(run_dir: Path) -> tuple[EnginePoolStats, ...]:
    with Admin.connect(run_dir) as admin:
        return admin.stats().engine_pools


def test_memory_outlives_daemon_and_engine(tmp_path: Path) -> None:
    """Bytes of both ranks are there after SIGKILL of the daemon; while a process of the engine lives, nobody has them.

    The next daemon has not seen who was given the memory: the lock tells it. What an engine has written into the table
    tells it nothing.
    """
    with supervised(tmp_path, CONFIG) as daemon:
        ranks = [claim(daemon.run_dir, "first", rank) for rank in range(2)]
        for rank, found in enumerate(ranks):
            os.pwrite(memory_of(found), f"rank {rank}".encode(), 1000)
        lock = lock_memory(memory_of(ranks[1]), 0)
        assert lock is not None
        pool_id = ranks[0].claimed.pool
        assert ranks[1].claimed.pool == pool_id
        os.pwrite(ranks[0].table, os.urandom(table_bytes(BLOCKS)), 0)
        daemon.kill_and_wait()

        (pool,) = stats(daemon.run_dir)
        assert (pool.used, pool.ranks, pool.name) == (True, 2, "model")
        other = claim(daemon.run_dir, "second")
        assert other.claimed.pool != pool_id
        other_lock = lock_memory(memory_of(other), 0)
        assert other_lock is not None
        os.close(lock)
        again = claim(daemon.run_dir, "third", 1)
        assert again.claimed.pool == pool_id
        assert os.pread(memory_of(again), 6, 1000) == b"rank 1"
        os.close(other_lock)
        for found in (*ranks, other, again):
            os.close(found.table)
            os.close(memory_of(found))


def test_memory_beyond_the_limit_is_refused(tmp_path: Path) -> None:
    """The error names what is asked for, what is left, and the key to set; nothing is dropped for it."""
    with supervised(tmp_path, CONFIG) as daemon:
        found = claim(daemon.run_dir, "first")
        with pytest.raises(RequestError) as refused:
            claim(daemon.run_dir, "second", rank_bytes=4 << 20)
        assert refused.value.code is ErrorCode.LIMIT
        assert "device_memory_bytes" in refused.value.fix
        assert len(stats(daemon.run_dir)) == 1
        os.close(found.table)
        os.close(memory_of(found))


@pytest.mark.parametrize("digits", [64, 16])
def test_memory_of_a_namespace_that_is_gone_is_cleared(tmp_path: Path, digits: int) -> None:
    """A daemon that has lost its ledger knows no label, and gives memory back by the digits that `stats` shows."""
    with supervised(tmp_path, CONFIG) as daemon:
        engine = Scheduler(daemon.run_dir, new_instance(), 2, 4096)
        root = engine.client.namespace
        found = claim(daemon.run_dir, "first")
        with mmap.mmap(found.table, table_bytes(BLOCKS)) as memory, memoryview(memory) as view:
            write_row(view, root)
        os.close(found.table)
        os.close(memory_of(found))
        engine.client.close()
        daemon.kill()
        (daemon.run_dir / LEDGER_NAME).write_bytes(b"{damaged")
        daemon.await_ready()
        (pool,) = stats(daemon.run_dir)
        assert (root.hex().startswith(pool.namespace), pool.named) == (True, 1)

        with Admin.connect(daemon.run_dir) as admin:
            with pytest.raises(RequestError, match=pool.namespace):  # the error lists it
                admin.clear("tiny")
            cleared = admin.clear(root.hex()[:digits])
            assert (cleared.namespace, cleared.label, cleared.generation > 0) == (root, "unknown", True)
            with pytest.raises(RequestError):
                admin.clear(root.hex()[:digits])  # nothing is left of it
        assert stats(daemon.run_dir) == ()
        again = Scheduler(daemon.run_dir, new_instance(), 2, 4096)
        assert again.client.generation == cleared.generation
        again.client.close()


def test_digits_of_two_namespaces_clear_neither(tmp_path: Path) -> None:
    """One that has only device memory counts as well: digits that it shares with another name nothing."""
    with supervised(tmp_path, CONFIG) as daemon:
        engine = Scheduler(daemon.run_dir, new_instance(), 2, 4096)
        root = engine.client.namespace
        found = claim(daemon.run_dir, "first")
        with mmap.mmap(found.table, table_bytes(BLOCKS)) as memory, memoryview(memory) as view:
            write_row(view, root[:8] + bytes(24))
        with Admin.connect(daemon.run_dir) as admin:
            with pytest.raises(RequestError, match="2 namespaces are meant"):
                admin.clear(root.hex()[:16])
            assert admin.clear(root.hex()).label == "tiny"
        (pool,) = stats(daemon.run_dir)
        assert pool.named == 1
        os.close(found.table)
        os.close(memory_of(found))
        engine.client.close()


def write_row(memory: memoryview, root: bytes) -> None:
    """One block of an engine in this namespace."""
    table = EngineTable(memory, BLOCKS)
    table.identify(bytes(32), root)
    table.write(Row(3, 1, table.epoch, NO_PARENT, 0, b"hash"))
