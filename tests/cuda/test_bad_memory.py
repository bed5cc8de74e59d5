"""A byte of a kept pool that no copy can read: the workers that copy its block die, and the others get through."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from kvcached.config.schema import load_config
from kvcached_client import Admin
from kvcached_client.blocks.pages import pool_geometry
from kvcached_client.protocol.reports import PoolStats, StatsReport
from tests.cuda.test_copy_process import wait_until
from tests.cuda.test_pool import BLOCKS, HOST, ON_DEVICE, OnDevice, ended, prompts
from tests.daemon.supervised import supervised

SLOT, PROMPTS = 4, 8
#: The store of a prompt of three blocks: with others, alone, and block by block.
DEATHS = 3


def offset(tmp_path: Path) -> int:
    """Where the slot begins in the pool's memory."""
    path = tmp_path / "offset.toml"
    path.write_text(ON_DEVICE + HOST)
    (replica,) = load_config(path).replica
    strip = pool_geometry(replica.layout, replica.slot_count).strips[0]
    return strip.offset_bytes + SLOT * strip.page_bytes


def stats(run_dir: Path) -> StatsReport:
    with Admin.connect(run_dir, deadline_ms=20_000) as admin:
        return admin.stats()


def pool(run_dir: Path) -> PoolStats:
    return stats(run_dir).pools[0]


def test_block_that_cannot_be_read_is_given_up(use_device: Callable[..., None], device: Path, tmp_path: Path) -> None:
    """It is found by few deaths, which name what the device said; all other blocks are stored, and workers live on.

    Sleep and wake renew the memory.
    """
    use_device(bad_memory=1, bad_offset=offset(tmp_path))
    with supervised(tmp_path, ON_DEVICE + HOST, pause_min_s=0.01, pause_max_s=0.01) as daemon:
        on_device, run_dir = OnDevice(daemon, device, tmp_path / "trace"), daemon.run_dir
        with ended(on_device.engine()) as engine:
            prompts(engine, range(PROMPTS))
            wait_until(lambda: stats(run_dir).counters.get("store_given_up_blocks", 0) == 1)
            stored = PROMPTS * BLOCKS - (BLOCKS - SLOT % BLOCKS)  # all before the bad block of its prompt, too
            wait_until(lambda: stats(run_dir).hosts[0].states["cached"] == stored)
            on_device.await_worker()
            restarts = pool(run_dir).restarts
            assert 2 <= restarts <= DEATHS
            prompts(engine, range(100, 104))
            on_device.await_stores()
        assert (pool(run_dir).healthy, pool(run_dir).restarts) == (True, restarts)
        log = (run_dir / "worker-default-0.log").read_text()
        assert re.search(r"ERROR ending: the device has failed, .*: cu\w+: CUDA_ERROR_ECC_UNCORRECTABLE", log)
        with Admin.connect(run_dir, deadline_ms=20_000) as admin:
            admin.sleep("default")
            admin.wake("default")
        with ended(on_device.engine()) as engine:
            prompts(engine, range(200, 216))
            on_device.await_stores()
        # The workers are counted anew.
        assert (stats(run_dir).counters["store_given_up_blocks"], pool(run_dir).restarts) == (1, 0)
