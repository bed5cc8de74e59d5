"""A local disk whose directory is replaced while it is used."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from kvcached.storage.backend import DONE, StorageGone
from kvcached.storage.disk.backend import DiskStorage
from kvcached.storage.disk.directory import DiskSettings
from kvcached.storage.tiers.backend import TieredStorage
from kvcached.storage.tiers.side import LONGEST_PAUSE_S
from tests.storage.tiers.away import Clock, FakeStorage
from tests.storage.values import TIMEOUT_S, asked, key, stored


@pytest.mark.parametrize("how", ["a file", "of others"])
def test_service_goes_on_alone_until_the_directory_can_be_used(tmp_path: Path, how: str) -> None:
    """As below a mount that has gone: nothing is written there, and once it is free, it is opened anew."""
    path, clock = tmp_path / "d", Clock()
    disk = DiskStorage(DiskSettings(directory=path, capacity_bytes=8 << 20, free_space_floor_bytes=0))
    with closing(TieredStorage(disk, FakeStorage(is_shared=True), "far", clock)) as both:
        assert both.put([stored(1)], timeout_s=TIMEOUT_S) == [DONE]
        path.rename(tmp_path / "before")
        if how == "a file":
            path.touch()
        else:
            path.mkdir()
            (path / "README").touch()

        assert both.exists([key(1), key(2)], timeout_s=TIMEOUT_S) == [True, False]
        assert both.put([stored(2)], timeout_s=TIMEOUT_S) == [DONE]
        assert both.get([asked(2)], timeout_s=TIMEOUT_S) == [DONE]
        assert f"{path} was removed or replaced while it was used" in both.trouble()
        path.rename(tmp_path / "other")
        clock.now_s += LONGEST_PAUSE_S
        with pytest.raises(StorageGone):
            both.exists([key(1)], timeout_s=TIMEOUT_S)
