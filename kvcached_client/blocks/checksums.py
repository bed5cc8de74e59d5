"""Checksums of blocks in the memory of this process, by several threads where it has processors to spare.

One processor sums more slowly than a device copies: stores, and loads that are verified, would wait for the sums.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import chain, islice, repeat
from typing import Final, TypeAlias

from xxhash import xxh3_128

from kvcached_client.blocks.header import CHECKSUM_BYTES

#: Of one process: a node has one for each device, and engines beside them.
THREADS_MAX: Final = 4
#: A thread for so many processors.
PROCESSORS_EACH: Final = 4
#: What a thread sums at a time, or one block, if that has more. To hand it to a thread takes as long as to sum 1 MiB.
PART_BYTES: Final = 8 << 20
HANDED_BYTES_MIN: Final = 1 << 20

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

    def begin(self, blocks: Iterable[Runs]) -> list[Future[bytes]]:
        """Sum blocks. The results, one after the other, are the xxh3_128 of each block.

        A thread may read the memory until all of them are there, see `ended`.
        """
        return list(map(self._begin, _parts(blocks)))

    def each(self, blocks: Iterable[Runs]) -> Generator[bytes]:
        """The xxh3_128 of each block. No more is summed ahead of who takes the sums than threads sum at once.

        Take all of them, or close the generator.
        """
        parts = _parts(blocks)
        with ended([]) as under_way:
            under_way.extend(map(self._begin, islice(parts, self.threads)))
            for part in chain(parts, repeat(None)):
                if part is not None:
                    under_way.append(self._begin(part))
                if not under_way:
                    return
                sums = under_way.pop(0).result()
                yield from (sums[at : at + CHECKSUM_BYTES] for at in range(0, len(sums), CHECKSUM_BYTES))

    def close(self) -> None:
        """End the threads. All that was begun has ended."""
        if self._pool is not None:
            self._pool.shutdown()

    def _begin(self, part: list[Runs]) -> Future[bytes]:
        if self._pool is not None and sum(map(_size, part)) >= HANDED_BYTES_MIN:
            return self._pool.submit(_sums, part)
        done: Future[bytes] = Future()
        done.set_result(_sums(part))
        return done


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


def _parts(blocks: Iterable[Runs]) -> Iterator[list[Runs]]:
    part: list[Runs] = []
    size = 0
    for runs in blocks:
        part.append(runs)
        size += _size(runs)
        if size >= PART_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


def _size(runs: Runs) -> int:
    return sum(size for _, size in runs)


def _sums(blocks: Sequence[Runs]) -> bytes:
    return b"".join(map(_sum, blocks))


def _sum(runs: Runs) -> bytes:
    checksum = xxh3_128()
    for address, size in runs:
        checksum.update((ctypes.c_ubyte * size).from_address(address))
    return checksum.digest()
