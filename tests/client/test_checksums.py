"""Checksums of blocks are those of their bytes, whoever makes them, and nobody reads the memory after the end."""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from xxhash import xxh3_128_digest

from kvcached_client.blocks import checksums
from kvcached_client.blocks.checksums import Checksums, Runs, ended


@pytest.fixture(params=[0, 2, 3])
def made(request: pytest.FixtureRequest) -> Iterator[Checksums]:
    """With threads, and without."""
    found = Checksums(request.param)
    yield found
    found.close()


def blocks_of(sizes: list[int]) -> tuple[ctypes.Array[ctypes.c_char], list[Runs], list[bytes]]:
    """Memory, blocks in it that have one run or two, and what their checksums are."""
    generator, runs, expected, at = random.Random(len(sizes)), list[Runs](), list[bytes](), 0
    content = generator.randbytes(2 * sum(sizes) + 1)
    memory = ctypes.create_string_buffer(content, len(content))
    start = ctypes.addressof(memory)
    for size in sizes:
        first = generator.choice([size, size // 2])
        parts = [(at, first), (at + size, size - first)] if first < size else [(at, size)]
        runs.append([(start + offset, length) for offset, length in parts])
        expected.append(xxh3_128_digest(b"".join(content[offset : offset + length] for offset, length in parts)))
        at += 2 * size
    return memory, runs, expected


@pytest.mark.parametrize("part_bytes", [1, 5000, 1 << 30])
@pytest.mark.parametrize("sizes", [[], [1], [700] * 40, [9000, 1, 1, 4000, 4000, 20, 30_000, 2]])
def test_sums_are_those_of_the_blocks(
    made: Checksums, sizes: list[int], part_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of the blocks, however many threads share them, and however they share them."""
    monkeypatch.setattr(checksums, "PART_BYTES", part_bytes)
    monkeypatch.setattr(checksums, "HANDED_BYTES_MIN", 0)
    _memory, blocks, expected = blocks_of(sizes)

    with ended(list(made.begin(blocks))) as parts:
        assert b"".join(part.sums() for part in parts) == b"".join(expected)
    assert list(made.each(iter(blocks))) == expected


def test_only_some_blocks_are_summed_ahead(made: Checksums, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who stops at the first wrong sum has not had all blocks summed."""
    monkeypatch.setattr(checksums, "PART_BYTES", 1400)
    monkeypatch.setattr(checksums, "HANDED_BYTES_MIN", 0)
    _memory, blocks, expected = blocks_of([700] * 40)
    left = iter(blocks)
    sums = made.each(left)

    assert next(sums) == expected[0]
    assert len(list(left)) == (40 - 2 * (made.threads + 1) if made.threads else 39)
    sums.close()


class BusyThreads:
    """Threads of `Checksums` that are at their first parts until they may go on."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.begun, self.over = threading.Semaphore(0), list[str]()
        self._goes_on = threading.Event()
        patch.setattr(checksums, "PART_BYTES", 1)
        patch.setattr(checksums, "HANDED_BYTES_MIN", 0)
        patch.setattr(checksums, "_sums", self._sums)

    def go_on(self) -> None:
        self._goes_on.set()

    def _sums(self, blocks: list[Runs]) -> bytes:
        if (name := threading.current_thread().name).startswith("kvcached-sums"):
            self.begun.release()
            self._goes_on.wait()
        self.over.append(name)
        return b"".join(map(checksums._sum, blocks))


def test_end_waits_for_threads_that_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory may be unmapped afterwards: what has begun is over, and what has not begun never does."""
    busy = BusyThreads(monkeypatch)
    _memory, blocks, _ = blocks_of([50] * 9)
    summing = Checksums(2)
    with ended(list(summing.begin(blocks))):
        busy.begun.acquire()
        busy.begun.acquire()
        threading.Timer(0.05, busy.go_on).start()
    assert len(busy.over) == 2
    summing.close()


def test_nobody_waits_for_what_no_thread_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """While all threads sum a large store, whoever loads makes the sums: a load is never behind it."""
    busy = BusyThreads(monkeypatch)
    _memory, blocks, expected = blocks_of([50] * 9)
    summing = Checksums(2)
    with ended(list(summing.begin(blocks[:4]))):
        busy.begun.acquire()
        busy.begun.acquire()
        assert list(summing.each(iter(blocks[4:]))) == expected[4:]
        assert set(busy.over) == {threading.current_thread().name}
        busy.go_on()
    summing.close()


def test_where_no_thread_can_be_had_the_caller_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of the interpreter its pools are closed, while threads of an engine may still store."""
    monkeypatch.setattr(checksums, "HANDED_BYTES_MIN", 0)
    _memory, blocks, expected = blocks_of([50] * 9)
    summing = Checksums(2)
    summing.close()

    assert [part.sums() for part in summing.begin(blocks)] == [b"".join(expected)]
    assert list(summing.each(iter(blocks))) == expected


def test_few_bytes_are_summed_by_who_asks() -> None:
    """A thread would have to wake up for them; a part of many bytes is a thread's."""
    _memory, blocks, _ = blocks_of([4000, checksums.HANDED_BYTES_MIN])
    summing, summed_by = Checksums(1), list[str]()

    def by(_: list[Runs]) -> bytes:
        summed_by.append(threading.current_thread().name)
        return b""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksums, "_sums", by)
        for block in blocks:
            for part in summing.begin([block]):
                summing.close()  # which waits for the thread
                part.sums()
            summing = Checksums(1)

    assert summed_by[0] == threading.current_thread().name
    assert summed_by[1].startswith("kvcached-sums")


@pytest.mark.parametrize(
    ("processors", "devices", "threads"),
    [(1, 1, 0), (4, 1, 0), (7, 1, 0), (8, 1, 2), (16, 1, 4), (192, 8, 4), (16, 8, 0), (64, 0, 4)],
)
def test_threads_are_few(processors: int, devices: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an engine needs the processors, nobody else sums; the processes of a machine share them."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(processors)))

    assert checksums.spare_threads(devices, Path("/nowhere")) == threads


@pytest.mark.parametrize(
    ("own", "above", "threads"),
    [("max 100000", "max 100000", 4), ("400000 100000", "max 100000", 0), ("max 100000", "1200000 100000", 3)],
)
def test_threads_keep_to_the_quota_of_the_cgroup(
    own: str, above: str, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container that may take four processors of sixty-four has none to spare."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)))
    group = tmp_path / "sys/fs/cgroup/pods/one"
    group.mkdir(parents=True)
    (group / "cpu.max").write_text(own + "\n")
    (group.parent / "cpu.max").write_text(above + "\n")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("1:cpu:/elsewhere\n0::/pods/one\n")

    assert checksums.spare_threads(1, tmp_path) == threads
