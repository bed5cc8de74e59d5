from __future__ import annotations

from contextlib import closing

import pytest

from kvcached.storage.tiers.backend import TieredStorage
from tests.storage.test_copies import Rig, Shelf


@pytest.fixture
def disk() -> Shelf:
    return Shelf()


def test_block_that_only_the_disk_has_is_written_to_the_service(disk: Shelf) -> None:
    """A service that has lost everything is filled again by a backup, and one that has the block is not bothered."""
    rig = Rig(lambda far: TieredStorage(disk, far, "far"))
    rig.fill([0, 1])
    rig.back_up([0, 1])
    assert rig.shelf.values == disk.values
    rig.shelf.values.clear()
    rig.back_up([0, 1])
    assert rig.shelf.values == disk.values
    puts = rig.shelf.puts
    disk.values.clear()
    rig.back_up([0, 1])

    assert rig.shelf.puts == puts


def test_wrong_block_of_the_service_does_not_stay_on_the_disk(disk: Shelf) -> None:
    """It is found wrong when its bytes are compared, and then it is deleted in both."""
    tiers: list[TieredStorage] = []

    def tiered(far: Shelf) -> TieredStorage:
        tiers.append(TieredStorage(disk, far, "far"))
        return tiers[-1]

    rig = Rig(tiered)
    with closing(tiers[0]):
        rig.fill([0, 1])
        rig.back_up([0, 1])
        disk.values.clear()
        wrong = next(iter(rig.shelf.values.values()))
        wrong[-1] ^= 1

        assert rig.fetch([2, 3]) == (0, 1)
        tiers[0].refills.wait()
        assert wrong not in disk.values.values()
        assert wrong not in rig.shelf.values.values()
