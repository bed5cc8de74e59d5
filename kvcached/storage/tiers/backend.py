"""A backend of two: a disk of this machine, and a service further away that other machines use as well.

Blocks are written to both. They are read from the disk, and what it lacks from the service; that goes to the disk, too.
While one of the two fails, the other one goes on alone. The service has the record of generations: the keys on the disk
contain the generation, so what it has of an earlier one is never found.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeVar

from kvcached.storage.backend import ABSENT, Block, Outcome, Result, Storage, Usage, VersionedRecord
from kvcached.storage.tiers.refills import Refills
from kvcached.storage.tiers.side import Side

T = TypeVar("T")

#: Nobody waits for what is written behind an answer.
_REFILL_TIMEOUT_S: Final = 60.0


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
        self._disk = Side("the local disk", disk, clock_s)
        self._far = Side(f"storage {name!r}", far, clock_s)
        self.refills = Refills(self._refill)

    def exists(self, keys: Sequence[bytes], *, timeout_s: float) -> list[bool]:
        """Whether one of the two has it. The service is asked only for what the disk lacks."""
        until_s = self._clock_s() + timeout_s
        on_disk = self._disk.call(lambda disk: disk.exists(keys, timeout_s=timeout_s))
        found = [False] * len(keys) if on_disk is None else on_disk
        lacking = [key for key, is_there in zip(keys, found, strict=True) if not is_there]
        if keys and not lacking:
            return found
        beyond = self._ask_far(until_s, lambda far, left_s: far.exists(lacking, timeout_s=left_s))
        if beyond is None:
            self._check(on_disk)
            return found
        rest = iter(beyond)
        return [is_there or next(rest) for is_there in found]

    def missing(self, keys: Sequence[bytes], *, timeout_s: float) -> list[bool]:
        """What the service lacks: the others need it there. While the service fails, what the disk lacks."""
        until_s = self._clock_s() + timeout_s
        lacks = self._ask_far(until_s, lambda far, left_s: far.missing(keys, timeout_s=left_s))
        if lacks is None:
            lacks = self._check(self._disk.call(lambda disk: disk.missing(keys, timeout_s=timeout_s)))
        return lacks

    def get(self, blocks: Sequence[Block], *, timeout_s: float) -> list[Result]:
        """Read from the disk, and the rest from the service."""
        until_s, epoch = self._clock_s() + timeout_s, self.refills.epoch()
        on_disk = self._disk.carry_out(lambda disk: disk.get(blocks, timeout_s=timeout_s))
        results = [ABSENT] * len(blocks) if on_disk is None else list(on_disk)
        lacking = [number for number, result in enumerate(results) if result.outcome is not Outcome.DONE]
        if blocks and not lacking:
            return results
        asked = [blocks[number] for number in lacking]
        beyond = self._carry_out_far(until_s, lambda far, left_s: far.get(asked, timeout_s=left_s))
        if beyond is None:
            self._check(on_disk)
            return results
        for number, result in zip(lacking, beyond, strict=True):
            results[number] = result
        came = [block for block, result in zip(asked, beyond, strict=True) if result.outcome is Outcome.DONE]
        self.refills.add(came, epoch)
        return results

    def put(self, blocks: Sequence[Block], *, timeout_s: float) -> list[Result]:
        """Write to both. A block is as good as the service says; while that fails, as the disk says."""
        until_s = self._clock_s() + timeout_s
        on_disk = self._disk.carry_out(lambda disk: disk.put(blocks, timeout_s=timeout_s))
        beyond = self._carry_out_far(until_s, lambda far, left_s: far.put(blocks, timeout_s=left_s))
        if beyond is None:
            return self._check(on_disk)
        if on_disk is None:
            return beyond
        pairs = zip(on_disk, beyond, strict=True)
        return [here if there.outcome is Outcome.FAILED else there for here, there in pairs]

    def delete(self, keys: Sequence[bytes], *, timeout_s: float) -> int:
        """Delete in both; returns how many the one had that had more."""
        return self._delete(lambda storage: storage.delete(keys, timeout_s=timeout_s))

    def clear(self, prefix: bytes, *, timeout_s: float) -> int:
        """Clear both; returns how many the one had that had more. What one of them fails to do is an error."""
        return self._delete(lambda storage: storage.clear(prefix, timeout_s=timeout_s))

    def usage(self) -> Usage:
        """Of the service."""
        return self._far.backend.usage()

    def trouble(self) -> str:
        """Which of the two is left out, and why."""
        return "; ".join(side.words() for side in (self._disk, self._far) if side.is_out)

    def read_record(self, *, timeout_s: float) -> VersionedRecord | None:
        """Of the service."""
        return self._far.backend.read_record(timeout_s=timeout_s)

    def write_record(self, data: bytes, after: bytes, *, timeout_s: float) -> bytes | None:
        """Of the service."""
        return self._far.backend.write_record(data, after, timeout_s=timeout_s)

    def close(self) -> None:
        """Close both. Blocks on their way to the disk are left out."""
        self.refills.close()
        try:
            self._disk.backend.close()
        finally:
            self._far.backend.close()

    def _delete(self, delete: Callable[[Storage], int]) -> int:
        """Call it for both, also where the first one fails."""
        try:
            here = self.refills.without(lambda: delete(self._disk.backend))
        finally:
            there = delete(self._far.backend)
        return max(here, there)

    def _ask_far(self, until_s: float, ask: Callable[[Storage, float], T]) -> T | None:
        left_s = until_s - self._clock_s()
        return self._far.call(lambda far: ask(far, left_s)) if left_s > 0 else None

    def _carry_out_far(self, until_s: float, ask: Callable[[Storage, float], list[Result]]) -> list[Result] | None:
        left_s = until_s - self._clock_s()
        return self._far.carry_out(lambda far: ask(far, left_s)) if left_s > 0 else None

    def _check(self, on_disk: T | None) -> T:
        """What the disk has answered where the service has not.

        Raises:
            OSError: neither has.
        """
        if on_disk is None:
            troubles = [f"{side.name}: {side.trouble or 'no time was left for it'}" for side in (self._disk, self._far)]
            raise OSError("; ".join(troubles))
        return on_disk

    def _refill(self, blocks: Sequence[Block]) -> None:
        """Write to the disk what came from the service: a hint, so nobody hears of failures but the log."""
        size = self.capabilities.batch_blocks
        for first in range(0, len(blocks), size):
            put = partial(_put, blocks[first : first + size])
            self._disk.carry_out(put)


def _put(blocks: Sequence[Block], storage: Storage) -> list[Result]:
    return storage.put(blocks, timeout_s=_REFILL_TIMEOUT_S)
