"""Device memory of engines over a real daemon's socket: it outlives the daemon, and a living engine keeps it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvcached_client import Admin
from kvcached_client.blocks.engine_table import table_bytes
from kvcached_client.blocks.memory_locks import lock_memory
from kvcached_client.errors import ErrorCode, RequestError
from kvcached_client.protocol.attach import ClaimPool
from kvcached_client.protocol.engine import EnginePoolStats
from kvcached_client.transport.attach import PoolDescriptors, claim_pool
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
