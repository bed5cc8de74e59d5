"""More work than fits: what is found is right, and what is not found was given up with a reason."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvcached_client import Admin
from kvcached_client.blocks.host_layout import HostGeometry
from tests.daemon.conftest import CONFIG, started
from tests.daemon.test_host_tier import Engine, content, engine_on, is_sound, wait_until

pytestmark = pytest.mark.slow

SLAB_BYTES = 65_536
PROMPT_BLOCKS = 4
#: The host pool holds a tenth of what is computed.
OVERCOMMIT = 10
LOSSES = ("dropped_blocks", "host_evicted_blocks", "host_dropped_blocks", "store_refused_blocks")


def use(engine: Engine, name: str, written: list[bytes], use_number: int) -> int:
    """Read what is cached of a prompt, compare every byte, and return how many blocks it were."""
    with engine.acquire(name, PROMPT_BLOCKS, request=f"use {use_number} of {name}") as lease:
        hit = lease.wait_loaded() // engine.client.layout.block_size
        size = hit * engine.client.layout.bytes_per_block()
        for pool, expected in zip(engine.pools, written, strict=True):
            assert content(pool, lease)[:size] == expected[:size]
        return hit


def test_work_of_ten_times_the_pool_is_readable_or_accounted_for(tmp_path: Path) -> None:
    """With ten times the work that the host pool holds, no hit has a wrong byte and no block vanishes uncounted."""
    config = f"{CONFIG}\n[host]\nsize_bytes = {SLAB_BYTES}\nslab_bytes = {SLAB_BYTES}\n"
    chooser = random.Random(3)
    with started(tmp_path, config) as daemon, engine_on(daemon) as engine:
        block_bytes = engine.client.layout.bytes_per_block()
        host_slots = HostGeometry(slabs=1, slab_bytes=SLAB_BYTES, shards=1, block_bytes=block_bytes).slots
        names = [f"p{number:03}" for number in range(OVERCOMMIT * host_slots // PROMPT_BLOCKS)]
        written: dict[str, list[bytes]] = {}
        for number, name in enumerate(names):
            written[name] = engine.compute(name, PROMPT_BLOCKS)
            again = chooser.choice(names[max(number - 5, 0) : number + 1])
            use(engine, again, written[again], number)

        wait_until(daemon.run_dir, lambda stats: not any(stats.transfers.values()))
        found = sum(use(engine, name, written[name], -1) for name in names)
        with Admin.connect(daemon.run_dir) as admin:
            counters = admin.stats().counters
        lost = len(names) * PROMPT_BLOCKS - found
        assert host_slots // 2 <= found < len(names) * PROMPT_BLOCKS
        assert 0 < lost <= sum(counters.get(name, 0) for name in LOSSES)
        assert counters["loaded_blocks"] > 0
        assert is_sound(daemon)
