"""Disk backends for tests, and what tests do to their files."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from kvcached.storage.backend import DONE, Outcome, Result, Storage
from kvcached.storage.disk.backend import DiskStorage
from kvcached.storage.disk.directory import DiskSettings
from tests.storage.values import TIMEOUT_S, asked, is_right, key, stored

#: Of a value of the usual kind: a frame and two parts.
VALUE_BYTES = 4096 + 2 * 8192
MIB = 1 << 20


@contextmanager
def opened(directory: Path, clock: Callable[[], int] | None = None, **settings: Any) -> Iterator[DiskStorage]:
    """An open backend of 4 MiB, without a floor, unless settings say otherwise."""
    checked = DiskSettings(
        **{"directory": directory, "capacity_bytes": 4 * MIB, "free_space_floor_bytes": 0, **settings}
    )
    storage = DiskStorage(checked) if clock is None else DiskStorage(checked, clock_ns=clock)
    with closing(storage):
        yield storage


def put(storage: Storage, *numbers: int) -> list[Outcome]:
    """Store blocks; what became of each."""
    return [each.outcome for each in storage.put([stored(number) for number in numbers], timeout_s=TIMEOUT_S)]


def get(storage: Storage, number: int) -> Result:
    """Read one block, and see that DONE means the right bytes."""
    block = asked(number)
    (result,) = storage.get([block], timeout_s=TIMEOUT_S)
    assert result != DONE or is_right(block, number), f"wrong bytes of block {number}"
    return result


def there(storage: Storage, numbers: range) -> set[int]:
    """Which blocks exist."""
    found = storage.exists([key(number) for number in numbers], timeout_s=TIMEOUT_S)
    return {number for number, is_there in zip(numbers, found, strict=True) if is_there}


def size_on_disk(directory: Path) -> int:
    """Bytes that the file system has given to its files."""
    return sum(path.stat().st_blocks * 512 for path in directory.iterdir())


def flip(path: Path, draw: random.Random, at: int | None = None) -> tuple[int, int]:
    """Change one byte of a file; returns where, and what was there."""
    with path.open("r+b") as file:
        at = draw.randrange(path.stat().st_size) if at is None else at
        file.seek(at)
        (before,) = file.read(1)
        file.seek(at)
        file.write(bytes([before ^ (1 << draw.randrange(8))]))
    return at, before


def restore(path: Path, at: int, byte: int) -> None:
    """Undo it."""
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes([byte]))
