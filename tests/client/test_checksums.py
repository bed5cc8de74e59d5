"""Checksums of blocks are those of their bytes, whoever makes them, and nobody reads the memory after the end."""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Iterator

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

    assert b"".join(part.result() for part in made.begin(blocks)) == b"".join(expected)
    assert list(made.each(iter(blocks))) == expected


def test_only_some_blocks_are_summed_ahead(made: Checksums, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who stops at the first wrong sum has not had all blocks summed."""
    monkeypatch.setattr(checksums, "PART_BYTES", 1400)
    monkeypatch.setattr(checksums, "HANDED_BYTES_MIN", 0)
    _memory, blocks, expected = blocks_of([700] * 40)
    left = iter(blocks)
    sums = made.each(left)

    assert next(sums) == expected[0]
    assert len(list(left)) == 40 - 2 * (made.threads + 1)
    sums.close()


def test_end_waits_for_threads_that_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory may be unmapped afterwards: what has begun is over, and what has not begun never does."""
    monkeypatch.setattr(checksums, "PART_BYTES", 1)
    monkeypatch.setattr(checksums, "HANDED_BYTES_MIN", 0)
    _memory, blocks, _ = blocks_of([50] * 9)
    goes_on, begun, over = threading.Event(), threading.Semaphore(0), []

    def slow(some: list[Runs]) -> bytes:
        begun.release()
        goes_on.wait()
        over.append(some)
        return b""

    monkeypatch.setattr(checksums, "_sums", slow)
    summing = Checksums(2)
    with ended(summing.begin(blocks)):
        begun.acquire()
        begun.acquire()
        threading.Timer(0.05, goes_on.set).start()
    assert len(over) == 2
    summing.close()


def test_few_bytes_are_summed_by_who_asks() -> None:
    """A thread would have to wake up for them; a part of many bytes is a thread's."""
    summing, summed_by = Checksums(2), list[str]()
    _memory, blocks, _ = blocks_of([4000, checksums.HANDED_BYTES_MIN])

    def by(_: list[Runs]) -> bytes:
        summed_by.append(threading.current_thread().name)
        return b""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksums, "_sums", by)
        for block in blocks:
            summing.begin([block])[0].result()
    summing.close()

    assert summed_by[0] == threading.current_thread().name
    assert summed_by[1].startswith("kvcached-sums")


@pytest.mark.parametrize(("processors", "threads"), [(1, 0), (4, 0), (7, 0), (8, 2), (16, 4), (192, 4)])
def test_threads_are_few(processors: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an engine needs the processors, nobody else sums."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(processors)))

    assert checksums.spare_threads() == threads
