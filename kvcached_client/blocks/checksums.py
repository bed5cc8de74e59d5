"""Checksums of blocks in the memory of this process, by several threads where it has processors to spare.

One processor sums more slowly than a device copies: stores, and loads that are verified, would wait for the sums.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import islice
from typing import Final, TypeAlias

from xxhash import xxh3_128

from kvcached_client.blocks.header import CHECKSUM_BYTES

#: Of one process: a node has one for each device, and engines beside them.
THREADS_MAX: Final = 4
#: A thread for so many processors.
PROCESSORS_EACH: Final = 4
#: What a thread sums at a time, or one block, if that has more.
PART_BYTES: Final = 2 << 20

#: The bytes of one block: addresses and sizes, in their order.
Runs: TypeAlias = Sequence[tuple[int, int]]


class Checksums:
    """Sums blocks. May be used by several threads.

    Args:
        threads: that sum; None = as many as the machine can spare. Without any, who asks for sums makes them.
    """

    def __init__(self, threads: int | None = None) -> None:
        self.threads: Final = spare_threads() if threads is None else threads
        self._pool = ThreadPoolExecutor(self.threads, "kvcached-sums") if self.threads else None

    def begin(self, blocks: Sequence[Runs]) -> list[Future[bytes]]:
        """Sum blocks. The results, one after the other, are the xxh3_128 of each block.

        A thread may read the memory until all of them are there, see `ended`. What one thread does as fast is done at
        once.
        """
        parts = list(_parts(blocks))
        if self._pool is not None and len(parts) > 1:
            return [self._pool.submit(_sums, part) for part in parts]
        return [_done(_sums(part)) for part in parts]

    def each(self, blocks: Iterable[Runs]) -> Generator[bytes]:
        """The xxh3_128 of each block. No more is summed ahead of who takes the sums than threads sum at once.

        Take all of them, or close the generator.
        """
        left = iter(blocks)
        for first in left:
            ahead = max(1, self.threads) * max(1, PART_BYTES // max(1, _size(first))) - 1
            with ended(self.begin([first, *islice(left, ahead)])) as under_way:
                for part in under_way:
                    sums = part.result()
                    yield from (sums[at : at + CHECKSUM_BYTES] for at in range(0, len(sums), CHECKSUM_BYTES))

    def close(self) -> None:
        """End the threads. All that was begun has ended."""
        if self._pool is not None:
            self._pool.shutdown()


@contextmanager
def ended(under_way: list[Future[bytes]]) -> Iterator[list[Future[bytes]]]:
    """However the block is left, no thread reads the memory afterwards."""
    try:
        yield under_way
    finally:
        for each in under_way:
            each.cancel()
        wait(under_way)


def spare_threads() -> int:
    """How many threads sum in this process."""
    threads = min(THREADS_MAX, len(os.sched_getaffinity(0)) // PROCESSORS_EACH)
    return threads if threads > 1 else 0


def _parts(blocks: Sequence[Runs]) -> Iterator[Sequence[Runs]]:
    first = size = 0
    for index, runs in enumerate(blocks):
        if size and size + _size(runs) > PART_BYTES:
            yield blocks[first:index]
            first, size = index, 0
        size += _size(runs)
    if first < len(blocks):
        yield blocks[first:]


def _size(runs: Runs) -> int:
    return sum(size for _, size in runs)


def _sums(blocks: Sequence[Runs]) -> bytes:
    return b"".join(map(_sum, blocks))


def _sum(runs: Runs) -> bytes:
    checksum = xxh3_128()
    for address, size in runs:
        checksum.update((ctypes.c_ubyte * size).from_address(address))
    return checksum.digest()


def _done(sums: bytes) -> Future[bytes]:
    future: Future[bytes] = Future()
    future.set_result(sums)
    return future
