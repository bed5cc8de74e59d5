from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvcached.memory.sealed import SharedMemory
from kvcached.worker.messages import Probe
from kvcached.worker.pool_memory import CpuMemory
from kvcached.worker.probe import CorruptCopy, DevicePool, probe
from kvcached_client.blocks.pages import pool_geometry
from tests.worker.groups import SLOTS, tiny_layout
from tests.worker.host_rigs import made_memory

GEOMETRY = pool_geometry(tiny_layout(), SLOTS)


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    pool = made_memory(GEOMETRY.size_bytes)
    yield pool
    pool.close()


class LossyPool(DevicePool):
    """Does not copy at all."""

    def duplicate(self, source: int, target: int) -> None:
        pass


class ScribbledPool(DevicePool):
    """Copies, and spoils the source on the way."""

    def duplicate(self, source: int, target: int) -> None:
        super().duplicate(source, target)
        self.zero(source)


def is_zero(pool: DevicePool, slot: int) -> bool:
    return pool.checksum(slot) == pool.checksum(SLOTS - 1)


def test_probe_passes_and_leaves_zeros(memory: SharedMemory) -> None:
    """A probe of a working pool passes, and both slots are zero afterwards."""
    pool = DevicePool(GEOMETRY, CpuMemory(memory))

    probe(pool, Probe(source=0, target=1, seed=9))

    assert is_zero(pool, 0)
    assert is_zero(pool, 1)


@pytest.mark.parametrize(("kind", "spoilt"), [(LossyPool, 3), (ScribbledPool, 2)])
def test_probe_detects_corruption(memory: SharedMemory, kind: type[DevicePool], spoilt: int) -> None:
    """A probe names the slot that does not read as written, and still leaves zeros."""
    pool = kind(GEOMETRY, CpuMemory(memory))

    with pytest.raises(CorruptCopy, match=f"probe 2 → 3, seed 9: slot {spoilt} has checksum"):
        probe(pool, Probe(source=2, target=3, seed=9))

    assert is_zero(pool, 2)
    assert is_zero(pool, 3)
