"""Blocks on a local disk: files of equal slots, a label beside each slot, and an index of where each block is.

Reads and writes hold no lock. What keeps a reader from another block's bytes is the slot's label, which is compared
after reading (`kvcached.storage.disk.slots`). What keeps anybody from bytes that never reached the disk is the value's
own frame, which is not this module's business.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from kvcached.storage.backend import (
    ABSENT,
    DONE,
    Block,
    Capabilities,
    Outcome,
    Result,
    Storage,
    StorageUnusable,
    Usage,
)
from kvcached.storage.disk.catalog import DiskCatalog, Place, Slot
from kvcached.storage.disk.directory import take_directory
from kvcached.storage.disk.settings import DiskSettings, validated
from kvcached.storage.disk.space import has_no_room


class DiskStorage(Storage):
    """One directory of blocks."""

    def __init__(self, settings: DiskSettings, *, clock_ns: Callable[[], int] = time.time_ns) -> None:
        """Open the directory. While a damaged index is made anew nothing is found and nothing stored.

        Raises:
            StorageUnusable: another process has the directory, or it is none of ours.
            OSError, sqlite3.Error: the file system refuses.
        """
        self.capabilities = Capabilities(threads=settings.threads)
        with ExitStack() as undo:
            self._claim = take_directory(settings.directory)
            undo.callback(os.close, self._claim)
            self._catalog = DiskCatalog(settings, clock_ns)
            undo.pop_all()

    def exists(self, keys: Sequence[bytes], *, timeout_s: float) -> list[bool]:
        """As the index says."""
        if not self._catalog.is_ready():
            return [False] * len(keys)
        found = self._catalog.places(keys)
        return [key in found for key in keys]

    def get(self, blocks: Sequence[Block], *, timeout_s: float) -> list[Result]:
        """Read; what cannot be read, or is not what the index says, is forgotten."""
        if not self._catalog.is_ready():
            return [ABSENT] * len(blocks)
        found = self._catalog.places([block.key for block in blocks])
        places = [_of_size(found.get(block.key), block.size_bytes) for block in blocks]
        results = [
            ABSENT if place is None else _read(place, block) for place, block in zip(places, blocks, strict=True)
        ]
        self._catalog.settle(
            (place, result.outcome is Outcome.DONE)
            for place, result in zip(places, results, strict=True)
            if place is not None
        )
        return results

    def put(self, blocks: Sequence[Block], *, timeout_s: float) -> list[Result]:
        """Write what is not there yet."""
        if not self._catalog.is_ready():
            return [Result(Outcome.FULL, "the index is being made anew")] * len(blocks)
        held = self._catalog.held(blocks)
        wanted = [block for block in blocks if block.key not in held]
        slots = self._catalog.reserve([block.size_bytes for block in wanted])
        full = Result(Outcome.FULL, self._catalog.refusal)
        written = [full if slot is None else _write(slot, block) for slot, block in zip(slots, wanted, strict=True)]
        results = iter(self._catalog.record(wanted, slots, written))
        return [DONE if block.key in held else next(results) for block in blocks]

    def delete(self, keys: Sequence[bytes], *, timeout_s: float) -> int:
        """Forget blocks. Their bytes stay on the disk until the slots are used again."""
        self._catalog.wait_until_ready(timeout_s)
        return self._catalog.delete(keys)

    def clear(self, prefix: bytes, *, timeout_s: float) -> int:
        """Forget all such blocks. Without a prefix all files go."""
        self._catalog.wait_until_ready(timeout_s)
        return self._catalog.clear(prefix)

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait for an index that is being made anew; TimeoutError where that takes longer."""
        self._catalog.wait_until_ready(timeout_s)

    def usage(self) -> Usage:
        """Blocks being written count."""
        return self._catalog.usage()

    def close(self) -> None:
        """Let the next process have the directory."""
        try:
            self._catalog.close()
        finally:
            os.close(self._claim)


def open_disk(settings: dict[str, object]) -> Storage:
    """The backend `disk`.

    Raises:
        StorageUnusable: with these settings it cannot be opened.
    """
    checked = validated(settings)
    try:
        return DiskStorage(checked)
    except (OSError, sqlite3.Error) as error:
        raise StorageUnusable(f"disk storage: {checked.directory}: {error}") from error


def _of_size(place: Place | None, size_bytes: int) -> Place | None:
    return place if place is not None and place.label.size_bytes == size_bytes else None


def _read(place: Place, block: Block) -> Result:
    """The label is compared last: then what was read is what it names."""
    try:
        is_whole = place.file.read(place.slot, block.parts)
        return DONE if is_whole and place.file.label(place.slot) == place.label else ABSENT
    except OSError as error:
        return Result(Outcome.FAILED, str(error))


def _write(slot: Slot, block: Block) -> Result:
    file, number = slot
    try:
        file.write(number, block.parts)
    except OSError as error:
        return Result(Outcome.FULL if has_no_room(error) else Outcome.FAILED, str(error))
    return DONE
