from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvcached.worker.copier_host import HostCopier
from kvcached.worker.geometry import pool_geometry
from kvcached.worker.memory import PoolMemory
from kvcached.worker.messages import Probe
from kvcached.worker.probe import CorruptCopy, probe
from tests.worker.groups import SLOTS, tiny_layout

GEOMETRY = pool_geometry(tiny_layout(), SLOTS)


@pytest.fixture
def memory() -> Iterator[PoolMemory]:
    pool = PoolMemory("kvcached-test", GEOMETRY.size_bytes)
    yield pool
    pool.close()


class LossyCopier(HostCopier):
    """Does not copy at all."""

    def duplicate(self, source: int, target: int) -> None:
        pass


class ScribblingCopier(HostCopier):
    """Copies, and spoils the source on the way."""

    def duplicate(self, source: int, target: int) -> None:
        super().duplicate(source, target)
        self.zero(source)


def is_zero(copier: HostCopier, slot: int) -> bool:
    return copier.checksum(slot) == copier.checksum(SLOTS - 1)


def test_probe_passes_and_leaves_zeros(memory: PoolMemory) -> None:
    """A probe of a working copier passes, and both slots are zero afterwards."""
    copier = HostCopier(GEOMETRY, memory.address)

    probe(copier, GEOMETRY.slot_bytes, Probe(source=0, target=1, seed=9))

    assert is_zero(copier, 0)
    assert is_zero(copier, 1)


@pytest.mark.parametrize(("kind", "spoilt"), [(LossyCopier, 3), (ScribblingCopier, 2)])
def test_probe_detects_corruption(memory: PoolMemory, kind: type[HostCopier], spoilt: int) -> None:
    """A probe names the slot that does not read as written, and still leaves zeros."""
    copier = kind(GEOMETRY, memory.address)

    with pytest.raises(CorruptCopy, match=f"probe 2 → 3, seed 9: slot {spoilt} has checksum"):
        probe(copier, GEOMETRY.slot_bytes, Probe(source=2, target=3, seed=9))

    assert is_zero(copier, 2)
    assert is_zero(copier, 3)
