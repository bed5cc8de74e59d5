from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from kvcached.storage.backend import Storage
from kvcached.storage.disk.backend import DiskStorage
from kvcached.storage.disk.directory import DiskSettings
from kvcached.storage.encryption.backend import EncryptedStorage
from tests.project.source_tree import ROOT
from tests.storage.contract import StorageContract
from tests.storage.fault import FaultStorage

CAPACITY_BYTES = 32 << 20


def disk(directory: Path) -> DiskStorage:
    return DiskStorage(DiskSettings(directory=directory, capacity_bytes=CAPACITY_BYTES, free_space_floor_bytes=0))


class TestDisk(StorageContract):
    def open(self, directory: Path) -> Storage:
        return disk(directory)


class TestDiskThroughThePageCache(StorageContract):
    def open(self, directory: Path) -> Storage:
        settings = DiskSettings(
            directory=directory, capacity_bytes=CAPACITY_BYTES, free_space_floor_bytes=0, direct_io="off"
        )
        return DiskStorage(settings)


class TestFaultStorageWithoutFaults(StorageContract):
    def open(self, directory: Path) -> Storage:
        return FaultStorage(disk(directory))


class TestEncryptedDisk(StorageContract):
    def open(self, directory: Path) -> Storage:
        return EncryptedStorage(disk(directory), bytes(range(32)))


class TestExampleOfTheDocumentation(StorageContract):
    def open(self, directory: Path) -> Storage:
        storage = example()["open_files"]({"directory": str(directory)})
        assert isinstance(storage, Storage)
        return storage


def example() -> dict[str, Any]:
    """The names that the first Python text under "Writing a backend" defines."""
    text = (ROOT / "docs/storage.md").read_text().split("## Writing a backend")[1]
    source = text.split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {}
    exec(compile(source, "docs/storage.md", "exec"), names)  # noqa: S102 - it is ours
    return names


def test_example_of_the_documentation_is_short() -> None:
    """A complete backend takes no more than 50 lines."""
    source = (ROOT / "docs/storage.md").read_text().split("## Writing a backend")[1].split("```")[1]

    assert len([line for line in source.splitlines() if line.strip()]) - 1 <= 50


def test_documentation_tells_every_setting_of_the_disk() -> None:
    """docs/storage.md has a row for each setting, and no other."""
    section = (ROOT / "docs/storage.md").read_text().split("## The disk")[1].split("**Files.**")[0]

    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == set(DiskSettings.model_fields)
