from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from kvcached.memory import available
from kvcached.memory.available import NotEnoughMemory, await_available, check_available
from kvcached.memory.device_pool import ShardMemory
from kvcached.memory.sealed import SharedMemory
from kvcached_client.blocks.mapping import huge_pages
from kvcached_client.doctor.memory_bounds import memory_bounds
from tests.virtual_time import VirtualTimeLoop
from tests.worker.groups import open_descriptors

PAGE = os.sysconf("SC_PAGE_SIZE")
SIZE = 16 * PAGE


@pytest.fixture
def memory() -> Iterator[ShardMemory]:
    pool = ShardMemory.make("kvcached-test", SIZE)
    yield pool
    pool.close()


@pytest.mark.parametrize("size_bytes", [0, SIZE - PAGE, SIZE + PAGE])
def test_memory_cannot_be_resized_by_a_holder(memory: ShardMemory, size_bytes: int) -> None:
    """Whoever has the descriptor gets EPERM when it shrinks or grows the memory."""
    holder = os.dup(memory.descriptor)
    try:
        with pytest.raises(OSError, match="not permitted") as caught:
            os.ftruncate(holder, size_bytes)
    finally:
        os.close(holder)

    assert caught.value.errno == errno.EPERM
    assert os.fstat(memory.descriptor).st_size == SIZE


def test_memory_is_zero_private_to_exec_and_not_dumped(memory: ShardMemory) -> None:
    """A new pool is all zero, its descriptors close at exec, and core dumps of who maps it leave it out.

    Its mapping takes huge pages.
    """
    mapped = SharedMemory(memory.descriptor, SIZE)
    mapping = next(
        entry
        for entry in re.split(r"\n(?=[0-9a-f]+-)", Path("/proc/self/smaps").read_text())
        if entry.startswith(f"{mapped.address:x}-")
    )

    assert ctypes.string_at(mapped.address, SIZE) == bytes(SIZE)
    assert not any(os.get_inheritable(each) for each in (*memory.for_worker, *memory.for_engine))
    assert re.search(r"^VmFlags:.* dd", mapping, re.MULTILINE)
    assert huge_pages() == "none" or re.search(r"^VmFlags:.* hg", mapping, re.MULTILINE)
    mapped.close()


def test_pretouch_makes_only_its_part_resident(memory: ShardMemory) -> None:
    """Pre-touching takes as much memory as asked for and no more, and leaves what is there."""
    os.pwrite(memory.descriptor, b"there", 0)
    mapped = SharedMemory(memory.descriptor, SIZE)
    mapped.pretouch(4 * PAGE)

    assert os.fstat(memory.descriptor).st_blocks * 512 == 4 * PAGE
    assert bytes(mapped.view[:5]) == b"there"
    mapped.close()


def test_memory_gives_everything_back() -> None:
    """Closing a pool twice leaves no descriptor and no mapping."""
    before = open_descriptors()
    memory = ShardMemory.make("kvcached-gone", SIZE)

    memory.close()
    memory.close()

    assert open_descriptors() == before
    assert "kvcached-gone" not in Path("/proc/self/maps").read_text()


def write_tree(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


MACHINE = {"proc/meminfo": "MemTotal:  2000 kB\nMemAvailable:    1000 kB\n"}
UNLIMITED = {"sys/fs/cgroup/a/memory.max": "max\n", "sys/fs/cgroup/a/memory.current": "99999999\n"}
VERSION_2 = {
    "proc/self/cgroup": "0::/a/b\n",
    "sys/fs/cgroup/a/b/memory.max": "max\n",
    "sys/fs/cgroup/a/memory.max": "600000\n",
    "sys/fs/cgroup/a/memory.current": "200000\n",
    "sys/fs/cgroup/a/memory.stat": "anon 7\ninactive_file 50000\n",
}
VERSION_1 = {
    "proc/self/cgroup": "4:cpu:/\n3:hugetlb,memory:/seen/by/the/host/only\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "500000\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": "300000\n",
    "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 1000\n",
}


@pytest.mark.parametrize(
    ("files", "available", "limit"),
    [
        (MACHINE, 1024000, 2048000),
        (MACHINE | {"proc/self/cgroup": "0::/a\n"} | UNLIMITED, 1024000, 2048000),
        (MACHINE | VERSION_2, 450000, 600000),
        (MACHINE | VERSION_1, 201000, 500000),
    ],
    ids=["machine", "unlimited cgroup", "parent cgroup v2", "cgroup v1 in a container"],
)
def test_available_memory_is_the_tightest_limit(
    tmp_path: Path, files: dict[str, str], available: int, limit: int
) -> None:
    """The memory of the machine and every cgroup above bound a pool; page cache that can go counts as free."""
    write_tree(tmp_path, files)

    assert min(bound.limit_bytes for bound in memory_bounds(tmp_path)) == limit

    check_available(available, "it", root=tmp_path)

    with pytest.raises(NotEnoughMemory, match=f"it needs {available + 1} bytes, but {available} are available"):
        check_available(available + 1, "it", root=tmp_path)


@pytest.mark.parametrize(
    ("dropped", "gained"), [(100_000, 100_000), (10**7, 409_600)], ids=["all of it", "as far as it is there"]
)
@pytest.mark.parametrize(
    ("files", "available"),
    [
        ({"proc/meminfo": "MemTotal: 2000 kB\nMemAvailable: 1000 kB\nShmem: 400 kB\n"}, 1024000),
        (MACHINE | VERSION_2 | {"sys/fs/cgroup/a/memory.stat": "inactive_file 50000\nshmem 409600\n"}, 450000),
        (
            MACHINE | VERSION_1
            | {"sys/fs/cgroup/memory/memory.stat": "total_inactive_file 1000\nshmem 1\ntotal_shmem 409600\n"},
            201000,
        ),
    ],
    ids=["machine", "cgroup v2", "cgroup v1"],
)  # fmt: skip
def test_dropped_memory_counts_as_available_where_it_is_in_use(
    tmp_path: Path, files: dict[str, str], available: int, dropped: int, gained: int
) -> None:
    """Each limit gets back what it has of shared memory at most; without any dropped memory, nothing."""
    write_tree(tmp_path, files)
    if "proc/self/cgroup" in files:  # the cgroup is the tightest limit, whatever the machine gets back
        write_tree(tmp_path, {"proc/meminfo": "MemTotal: 2000 kB\nMemAvailable: 2000 kB\n"})

    check_available(available + gained, "it", dropped, root=tmp_path)
    for dropped_bytes, too_much in ((dropped, available + gained + 1), (0, available + 1)):
        with pytest.raises(NotEnoughMemory, match=f"{too_much - 1} are available"):
            check_available(too_much, "it", dropped_bytes, root=tmp_path)


@pytest.mark.parametrize(("kept", "gained"), [(0, 409600), (9600, 400000), (409600, 0), (10**6, 0)])
def test_memory_that_is_kept_does_not_come_back(tmp_path: Path, kept: int, gained: int) -> None:
    """What was dropped may lie in swap space: the shared memory in use is then that of pools that stay."""
    write_tree(tmp_path, {"proc/meminfo": "MemTotal: 2000 kB\nMemAvailable: 1000 kB\nShmem: 400 kB\n"})

    check_available(1024000 + gained, "it", 10**6, kept, root=tmp_path)
    with pytest.raises(NotEnoughMemory):
        check_available(1024000 + gained + 1, "it", 10**6, kept, root=tmp_path)


@pytest.mark.parametrize(("freed_at", "is_enough"), [(0, True), (3, True), (10**9, False)])
def test_memory_on_its_way_back_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, freed_at: int, *, is_enough: bool
) -> None:
    """What was dropped is free some looks later; what is not there in time is refused then, and not looked for on."""
    looks: list[float] = []
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        loop = runner.get_loop()

        def check(*_: object) -> None:
            looks.append(loop.time())
            if len(looks) <= freed_at:
                raise NotEnoughMemory("it needs more")

        monkeypatch.setattr(available, "check_available", check)
        with nullcontext() if is_enough else pytest.raises(NotEnoughMemory):
            runner.run(await_available(SIZE, "it", 2.0))
    assert 2.0 <= looks[-1] < 2.2 if not is_enough else len(looks) == freed_at + 1


def test_who_has_dropped_nothing_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without patience the first look decides."""

    def refuse(*_: object) -> None:
        raise NotEnoughMemory("it needs more")

    monkeypatch.setattr(available, "check_available", refuse)
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        with pytest.raises(NotEnoughMemory):
            runner.run(await_available(SIZE, "it", 0))
        assert runner.get_loop().time() == 0
