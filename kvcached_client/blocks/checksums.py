"""Checksums of blocks in the memory of this process, by several threads where it has processors to spare.

One processor sums more slowly than a device copies: stores, and loads that are verified, would wait for the sums.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from itertools import chain, islice, repeat
from pathlib import Path
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


class Part:
    """Some blocks that a thread sums, or, if none has begun, who asks for the sums: no load is behind a store.

    Args:
        blocks: to sum.
        pool: of threads, if one of them is to do it.
    """

    def __init__(self, blocks: list[Runs], pool: ThreadPoolExecutor | None) -> None:
        self._blocks = blocks
        self._future: Future[bytes] | None = None
        if pool is not None:
            with suppress(RuntimeError):  # the interpreter ends, or the system gives no thread
                self._future = pool.submit(_sums, blocks)

    def sums(self) -> bytes:
        """The xxh3_128 of each block, one after the other."""
        if self._future is None or self._future.cancel():
            return _sums(self._blocks)
        return self._future.result()

    def cancel(self) -> None:
        """No thread begins any more."""
        if self._future is not None:
            self._future.cancel()

    def wait(self) -> None:
        """No thread reads the blocks when this returns."""
        if self._future is not None and not self._future.cancelled():
            wait([self._future])


class Checksums:
    """Sums blocks. May be used by several threads.

    Args:
        threads: that sum beside those that ask for sums, see `spare_threads`.
    """

    def __init__(self, threads: int) -> None:
        self.threads: Final = threads
        self._pool = ThreadPoolExecutor(threads, "kvcached-sums") if threads else None

    def begin(self, blocks: Iterable[Runs]) -> Iterator[Part]:
        """Sum blocks, in parts. A part is begun when it is taken, and has to be ended, see `ended`."""
        return map(self._begin, _parts(blocks))

    def each(self, blocks: Iterable[Runs]) -> Generator[bytes]:
        """The xxh3_128 of each block. No more is summed ahead of who takes the sums than threads sum at once.

        Take all of them, or close the generator.
        """
        if self._pool is None:
            yield from map(_sum, blocks)
            return
        parts = self.begin(blocks)
        with ended([]) as under_way:
            under_way.extend(islice(parts, self.threads))
            for part in chain(parts, repeat(None)):
                if part is not None:
                    under_way.append(part)
                if not under_way:
                    return
                sums = under_way[0].sums()
                del under_way[0]
                yield from (sums[at : at + CHECKSUM_BYTES] for at in range(0, len(sums), CHECKSUM_BYTES))

    def close(self) -> None:
        """End the threads. All that was begun has ended."""
        if self._pool is not None:
            self._pool.shutdown()

    def _begin(self, part: list[Runs]) -> Part:
        return Part(part, self._pool if sum(map(_size, part)) >= HANDED_BYTES_MIN else None)


@contextmanager
def ended(under_way: list[Part]) -> Iterator[list[Part]]:
    """However the block is left, no thread reads the memory of what is in the list afterwards."""
    try:
        yield under_way
    finally:
        for part in under_way:
            part.cancel()
        for part in under_way:
            part.wait()


def spare_threads(devices: int, root: Path = Path("/")) -> int:
    """How many threads the machine can spare for the sums of this process; 0 = none.

    Args:
        devices: of the machine, each with such a process.
        root: directory that holds /proc and /sys.
    """
    processors = min(len(os.sched_getaffinity(0)), _quota(root))
    threads = min(THREADS_MAX, int(processors / (PROCESSORS_EACH * max(1, devices))))
    return threads if threads > 1 else 0


def _quota(root: Path) -> float:
    """How many processors the cgroup of this process and the cgroup's ancestors may take, by version 2."""
    quotas = [float("inf")]
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            groups = () if controllers else (Path(path.lstrip("/")), *Path(path.lstrip("/")).parents)
            for group in groups:
                with suppress(OSError, ValueError):
                    limit, period = (root / "sys/fs/cgroup" / group / "cpu.max").read_text().split()
                    quotas.append(int(limit) / int(period))  # "max" is no number
    return min(quotas)


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
