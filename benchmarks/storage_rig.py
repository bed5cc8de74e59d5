"""What the suite `storage` measures with: raw reads and writes, a directory of many blocks, a process that opens it.

``python -m benchmarks.storage_rig DIRECTORY`` opens a disk backend and prints a JSON object: seconds, MiB of memory.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import xxhash

from kvcached.storage.disk.backend import DiskStorage
from kvcached.storage.disk.directory import DiskSettings
from kvcached.storage.disk.index import Entry, create_index, place_of
from kvcached.storage.frame import FRAME_BYTES

#: Past what any test file system has: nothing is evicted at the start.
_CAPACITY_BYTES = 1 << 40
_SLOT_BYTES = 4096
_ENTRIES_AT_A_TIME = 1 << 14
_KIB_PER_MIB = 1024


def value_memory(part_bytes: int, shards: int) -> list[memoryview]:
    """Random bytes for a frame and its parts, each on a page of its own."""
    parts = [memoryview(mmap.mmap(-1, size)) for size in [FRAME_BYTES] + [part_bytes] * shards]
    for part in parts:
        part[:] = os.urandom(part.nbytes)
    return parts


class RawFile:
    """A preallocated file without anything around it: the floor."""

    def __init__(self, path: Path, slot_bytes: int, slots: int) -> None:
        self._slot_bytes = slot_bytes
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            self._descriptor = os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError:  # the backend then goes without, too
            self._descriptor = os.open(path, flags, 0o600)
        os.posix_fallocate(self._descriptor, 0, slots * slot_bytes)

    def write(self, slot: int, parts: Sequence[memoryview]) -> None:
        """A value in one call."""
        assert os.pwritev(self._descriptor, parts, slot * self._slot_bytes) == self._slot_bytes

    def read(self, slot: int, parts: Sequence[memoryview]) -> None:
        """The same."""
        assert os.preadv(self._descriptor, parts, slot * self._slot_bytes) == self._slot_bytes

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self._descriptor)


def in_threads(pool: ThreadPoolExecutor, work: Callable[[int], None], threads: int) -> None:
    """Run work with 0 … threads - 1 at a time; raises what one of them raises."""
    for done in [pool.submit(work, number) for number in range(threads)]:
        done.result()


def write_index(directory: Path, blocks: int) -> None:
    """A directory of so many blocks, as a daemon could have left it. The slots take no space."""
    directory.mkdir(mode=0o700)
    (directory / "lock").touch(mode=0o600)
    with (directory / f"00000001-{_SLOT_BYTES}.slots").open("wb") as slots:
        slots.truncate(blocks * _SLOT_BYTES)
    now = time.time_ns()
    with closing(create_index(directory / "index.db")) as index:
        for first in range(0, blocks, _ENTRIES_AT_A_TIME):
            with index.changes():
                for number in range(first, min(blocks, first + _ENTRIES_AT_A_TIME)):
                    key = bytes(16) + xxhash.xxh3_128_digest(number.to_bytes(8, "little"))
                    index.add(Entry(key, place_of(1, number), _SLOT_BYTES, _SLOT_BYTES, now + number), now + number)


def forget_cached_pages(directory: Path) -> None:
    """Let the next reader of these files wait for the device."""
    for path in directory.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _memory_mib(field: str) -> float:
    (line,) = [each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith(field)]
    return int(line.split()[1]) / _KIB_PER_MIB


def _measure(directory: Path) -> dict[str, float]:
    before = _memory_mib("VmRSS")
    began = time.perf_counter()
    storage = DiskStorage(DiskSettings(directory=directory, capacity_bytes=_CAPACITY_BYTES, free_space_floor_bytes=0))
    seconds = time.perf_counter() - began
    measured = {
        "seconds": seconds,
        "grown_mib": _memory_mib("VmRSS") - before,
        "blocks": storage.usage().blocks,
    }
    storage.close()
    return measured


if __name__ == "__main__":
    print(json.dumps(_measure(Path(sys.argv[1]))))
