"""A backend of two: a disk of this machine, and a service further away that other machines use as well.

Blocks are written to both. They are read from the disk, and what it lacks from the service; that goes to the disk, too.
While one of the two fails, the other one goes on alone. The service has the record of generations: the keys on the disk
contain the generation, so what it has of an earlier one is never found.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, NoReturn, TypeVar

from kvcached.storage.backend import (
    ABSENT,
    PREFIX_BYTES,
    Block,
    LocalDisk,
    Outcome,
    Result,
    Storage,
    Usage,
    VersionedRecord,
    no_progress,
)
from kvcached.storage.tiers.full_pauses import FullPauses
from kvcached.storage.tiers.refills import Refills
from kvcached.storage.tiers.side import Side

T = TypeVar("T")

#: Nobody waits for what is written behind an answer.
_REFILL_TIMEOUT_S: Final = 60.0

#: Blocks of which it is remembered that they came from the service: whoever reads them compares them at once.
CAME_MAX: Final = 4096

_log: Final = logging.getLogger(__name__)


class TieredStorage(Storage):
    """Two backends, both open.

    Args:
        disk: of this machine.
        far: the service, and its name.
        clock_s: for pauses and limits.
    """

    def __init__(self, disk: Storage, far: Storage, name: str, clock_s: Callable[[], float] = time.monotonic) -> None:
        batch_blocks = min(disk.capabilities.batch_blocks, far.capabilities.batch_blocks)
        self.capabilities = far.capabilities._replace(batch_blocks=batch_blocks, persistent=True)
        self._clock_s = clock_s
        self._disk, self._far = disk, far
        self._disk_reads = Side("reads from the local disk", disk, clock_s)
        self._disk_writes = Side("writes to the local disk", disk, clock_s)
        self._far_reads = Side(f"reads from storage {name!r}", far, clock_s)
        self._far_writes = Side(f"writes to storage {name!r}", far, clock_s)
        self._cleared: dict[tuple[Storage, bytes], int] = {}  #: what one of the two has cleared, and the other not yet
        self._came: dict[bytes, None] = {}  #: keys of the last blocks that came from the service
        self._read_from_disk = 0
        self._of_disk = disk.usage()  #: after the last call that changed it: a disk that hangs holds up nobody who asks
        self._full = FullPauses(clock_s)  #: of the service: the disk takes blocks all the same
        self._lock = threading.Lock()
        self._is_cleared = False  #: the disk, since the service was found empty
        self.refills = Refills(self._refill)

    def exists(self, keys: Sequence[bytes], *, timeout_s: float) -> list[bool]:
        """Whether one of the two has it. The service is asked only for what the disk lacks."""
        limit = _Limit(self._clock_s, timeout_s)
        on_disk = self._disk_reads.call(lambda disk: disk.exists(keys, timeout_s=timeout_s), slow_s=limit.slow_s)
        found = [False] * len(keys) if on_disk is None else on_disk
        lacking = [key for key, is_there in zip(keys, found, strict=True) if not is_there]
        if keys and not lacking:
            return found
        beyond = limit.ask(self._far_reads, lambda far, left_s: far.exists(lacking, timeout_s=left_s))
        if beyond is None:
            return found if on_disk is not None else _neither(self._disk_reads, self._far_reads)
        rest = iter(beyond)
        return [is_there or next(rest) for is_there in found]

    def missing(self, keys: Sequence[bytes], *, timeout_s: float) -> list[bool]:
        """What the service lacks: the others need it there. While the service fails, what the disk lacks."""
        limit = _Limit(self._clock_s, timeout_s)
        lacks = limit.ask(self._far_reads, lambda far, left_s: far.missing(keys, timeout_s=left_s))
        if lacks is None:
            lacks = self._disk_reads.call(lambda disk: disk.missing(keys, timeout_s=timeout_s))
        return lacks if lacks is not None else _neither(self._disk_reads, self._far_reads)

    def get(self, blocks: Sequence[Block], *, timeout_s: float) -> list[Result]:
        """Read from the disk, and the rest from the service."""
        limit, epoch = _Limit(self._clock_s, timeout_s), self.refills.epoch()
        on_disk = self._disk_reads.carry_out(lambda disk: disk.get(blocks, timeout_s=timeout_s), slow_s=limit.slow_s)
        results = [ABSENT] * len(blocks) if on_disk is None else list(on_disk)
        lacking = [number for number, result in enumerate(results) if result.outcome is not Outcome.DONE]
        self._remember((), [blocks[at] for at, result in enumerate(results) if result.outcome is Outcome.DONE])
        if blocks and not lacking:
            return results
        asked = [blocks[number] for number in lacking]
        beyond = limit.carry_out(self._far_reads, lambda far, left_s: far.get(asked, timeout_s=left_s))
        if beyond is None:
            return results if on_disk is not None else _neither(self._disk_reads, self._far_reads)
        for number, result in zip(lacking, beyond, strict=True):
            if on_disk is None or result.outcome is not Outcome.FAILED:
                results[number] = result
        pairs = list(zip(asked, beyond, strict=True))
        self._remember([block for block, result in pairs if result.outcome in {Outcome.DONE, Outcome.WRONG}], ())
        self.refills.add([block for block, result in pairs if result.outcome is Outcome.DONE], epoch)
        return results

    def put(self, blocks: Sequence[Block], *, timeout_s: float) -> list[Result]:
        """Write to both. A block is as good as the service says; while that fails, as the disk says."""
        limit = _Limit(self._clock_s, timeout_s)
        on_disk = self._put_on_disk(blocks, timeout_s, limit.slow_s)
        beyond = self._put_beyond(blocks, limit)
        if beyond is None:
            return on_disk if on_disk is not None else _neither(self._disk_writes, self._far_writes)
        if on_disk is None:
            return beyond
        pairs = zip(on_disk, beyond, strict=True)
        return [here if there.outcome is Outcome.FAILED else there for here, there in pairs]

    def delete(self, keys: Sequence[bytes], *, timeout_s: float) -> int:
        """Delete in both; returns how many the one had that had more."""
        try:
            there = self._far.delete(keys, timeout_s=timeout_s)
        finally:
            here = self.refills.without(lambda: self._changed(self._disk.delete(keys, timeout_s=timeout_s)))
        if there:
            self._full.forget()
        return max(here, there)

    def unsettled(self, keys: Sequence[bytes]) -> str:
        """In the service; a write to the disk is over when its call is."""
        return self._far.unsettled(keys)

    def discard(self, keys: Sequence[bytes], *, timeout_s: float) -> None:
        """Delete on the disk; in the service only what was read there lately: else it has them as they should be."""
        beyond = [key for key in keys if key in self._came]
        try:
            if beyond:
                self._far.discard(beyond, timeout_s=timeout_s)
        finally:
            self.refills.without(lambda: self._disk.discard(keys, timeout_s=timeout_s))
            self._changed(None)

    def clear(self, prefix: bytes, *, timeout_s: float, progress: Callable[[], None] = no_progress) -> int:
        """Clear both; returns how many the one had that had more. What one of them fails to do is an error.

        The service first: what is read from it meanwhile is on the disk then, or on its way to it. A prefix that one of
        the two has cleared before, and the other has not, is cleared there only: nobody writes such blocks any more.
        """
        try:
            there = self._clear(self._far, prefix, timeout_s, progress)
        finally:
            here = self.refills.without(lambda: self._clear(self._disk, prefix, timeout_s, progress))
        for storage in (self._disk, self._far):
            self._cleared.pop((storage, prefix), None)
        self._full.forget()
        return max(here, there)

    def usage(self) -> Usage:
        """Of the service, and of the disk beside it."""
        disk = self._of_disk
        local = LocalDisk(disk.blocks, disk.size_bytes, disk.capacity_bytes, self._read_from_disk)
        return self._far.usage()._replace(local_disk=local)

    def trouble(self) -> str:
        """What is left out, and why."""
        sides = (self._disk_reads, self._disk_writes, self._far_reads, self._far_writes)
        return "; ".join(side.words() for side in sides if side.is_out)

    def read_record(self, *, timeout_s: float) -> VersionedRecord | None:
        """Of the service. If that has lost everything, with what others have cleared, the disk is cleared, too."""
        record = self._far.read_record(timeout_s=timeout_s)
        if record is not None or self._far.usage().blocks:
            self._is_cleared = False
        elif not self._is_cleared and self._disk.usage().blocks:
            _log.warning("the service is empty, so the local disk is cleared: it may have what others have cleared")
            self.refills.without(lambda: self._changed(self._disk.clear(b"", timeout_s=timeout_s)))
            self._is_cleared = True
        return record

    def write_record(self, data: bytes, after: bytes, *, timeout_s: float) -> bytes | None:
        """Of the service."""
        return self._far.write_record(data, after, timeout_s=timeout_s)

    def close(self) -> None:
        """Close both. Blocks on their way to the disk are left out."""
        self.refills.close()
        try:
            self._disk.close()
        finally:
            self._far.close()

    def _clear(self, storage: Storage, prefix: bytes, timeout_s: float, progress: Callable[[], None]) -> int:
        if (storage, prefix) not in self._cleared:
            count = self._changed(storage.clear(prefix, timeout_s=timeout_s, progress=progress))
            if not prefix:  # who clears everything means it each time
                return count
            self._cleared[storage, prefix] = count
        return self._cleared[storage, prefix]

    def _remember(self, came: Sequence[Block], from_disk: Sequence[Block]) -> None:
        """Where blocks were read last."""
        with self._lock:
            for block in (*came, *from_disk):
                self._came.pop(block.key, None)
            self._read_from_disk += len(from_disk)
            self._came.update((block.key, None) for block in came)
            for key in list(self._came)[: max(len(self._came) - CAME_MAX, 0)]:
                del self._came[key]

    def _put_beyond(self, blocks: Sequence[Block], limit: _Limit) -> list[Result] | None:
        """Write to the service, unless it had no room a moment ago; all blocks of a call are of one namespace.

        One that fails now is not full but away: then the answer is that of the disk.
        """
        prefix = blocks[0].key[:PREFIX_BYTES] if blocks else b""
        is_away = self._far_reads.is_out or self._far_writes.is_out
        if not is_away and (refusal := self._full.refusal(prefix)) is not None:
            return [refusal] * len(blocks)
        beyond = limit.carry_out(self._far_writes, lambda far, left_s: far.put(blocks, timeout_s=left_s))
        self._full.note(prefix, beyond or ())
        return beyond

    def _put_on_disk(self, blocks: Sequence[Block], timeout_s: float, slow_s: float) -> list[Result] | None:
        results = self._disk_writes.carry_out(
            lambda disk: self._changed(disk.put(blocks, timeout_s=timeout_s)), slow_s=slow_s
        )
        self._disk_writes.note_full(results or ())
        return results

    def _changed(self, answer: T) -> T:
        """The answer of a call that may have changed how full the disk is."""
        self._of_disk = self._disk.usage()
        return answer

    def _refill(self, blocks: Sequence[Block]) -> None:
        """Write to the disk what came from the service: a hint, so nobody hears of failures but the log."""
        size = self.capabilities.batch_blocks
        for first in range(0, len(blocks), size):
            self._put_on_disk(blocks[first : first + size], _REFILL_TIMEOUT_S, math.inf)


class _Limit:
    """The time that both have together for a call; the service gets what the disk has left of it.

    Attributes:
        slow_s: a disk that takes longer is at fault if the service then has too little.
    """

    def __init__(self, clock_s: Callable[[], float], timeout_s: float) -> None:
        self.slow_s = timeout_s / 2
        self._clock_s = clock_s
        self._until_s = clock_s() + timeout_s

    def ask(self, side: Side, ask: Callable[[Storage, float], T]) -> T | None:
        """The answer of the service; None if it fails, or has not enough time to be asked."""
        left_s = self._left_s()
        return None if left_s is None else side.call(lambda far: ask(far, left_s))

    def carry_out(self, side: Side, ask: Callable[[Storage, float], list[Result]]) -> list[Result] | None:
        """The same for a batch."""
        left_s = self._left_s()
        return None if left_s is None else side.carry_out(lambda far: ask(far, left_s))

    def _left_s(self) -> float | None:
        left_s = self._until_s - self._clock_s()
        return left_s if left_s >= self.slow_s else None


def _neither(*sides: Side) -> NoReturn:
    raise OSError("; ".join(side.words() for side in sides))
