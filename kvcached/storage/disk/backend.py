"""Blocks on a local disk: files of equal slots, and an index of which block is in which slot.

One lock guards index and free slots; values are read and written without it. A slot may be given to another block while
it is read, so an entry is compared after the read with what it was before: if it has changed, the block is absent. The
value's own frame tells of bytes that never reached the disk, or that are not what was written.

If the index is missing or damaged, all files are deleted, and an empty index takes its place.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from kvcached.storage.backend import (
    ABSENT,
    DONE,
    Block,
    Capabilities,
    Outcome,
    Result,
    Storage,
    StorageGone,
    StorageUnusable,
    Usage,
    no_progress,
)
from kvcached.storage.disk.catalog import DiskCatalog, Place, Slot
from kvcached.storage.disk.directory import INDEX_NAME, DiskSettings, can_take, take_directory, validated
from kvcached.storage.disk.index import IndexDamaged, sync_log
from kvcached.storage.disk.slots import has_no_room, lack_of_room, slot_bytes_for


class DiskStorage(Storage):
    """One directory of blocks.

    Raises:
        IndexDamaged: from every method that comes across damage; the next call finds an empty index.
        sqlite3.Error, OSError: from every method, where the file system fails.
    """

    def __init__(self, settings: DiskSettings, *, clock_ns: Callable[[], int] = time.time_ns) -> None:
        """Open the directory.

        Raises:
            StorageUnusable: another process uses the directory, or it was not created by this backend.
            OSError, sqlite3.Error: the file system refuses.
        """
        self.capabilities = Capabilities(threads=settings.threads)
        self._directory = settings.directory
        self._lock = threading.Lock()
        with ExitStack() as undo:
            self._claim = take_directory(settings.directory)
            undo.callback(self._claim.close)
            self._catalog = DiskCatalog(settings, clock_ns)
            undo.pop_all()

    def exists(self, keys: Sequence[bytes], *, timeout_s: float) -> list[bool]:
        """As the index says, if that is still in the directory of the settings."""
        if not self._claim.is_there():
            raise StorageGone(self._gone(), can_open=can_take(self._directory))
        with self._locked() as catalog:
            found = catalog.find(keys)
        return [key in found for key in keys]

    def get(self, blocks: Sequence[Block], *, timeout_s: float) -> list[Result]:
        """Read blocks; a block that cannot be read is forgotten."""
        with self._locked() as catalog:
            places = catalog.places(blocks)
        results = [
            ABSENT if place is None else _read(place, block) for place, block in zip(places, blocks, strict=True)
        ]
        with self._locked() as catalog:
            return catalog.settle(places, results)

    def put(self, blocks: Sequence[Block], *, timeout_s: float) -> list[Result]:
        """Write what is not there yet, and nothing into another directory that has come into the place of this one."""
        if not self._claim.is_there():
            raise OSError(self._gone())
        with self._locked() as catalog:
            held = catalog.held(blocks)
        wanted = [block for block in blocks if block.key not in held]
        classes = [slot_bytes_for(block.size_bytes) for block in wanted]
        slots, refusals = self._reserve(classes)
        written = [
            Result(Outcome.FULL, refusals.get(size, "")) if slot is None else _write(slot, block)
            for size, slot, block in zip(classes, slots, wanted, strict=True)
        ]
        results = iter(self._record(wanted, slots, written))
        return [DONE if block.key in held else next(results) for block in blocks]

    def delete(self, keys: Sequence[bytes], *, timeout_s: float) -> int:
        """Forget blocks, for good once this returns. Their bytes stay on the disk until the slots are used again."""
        with self._locked() as catalog:
            count = catalog.delete(keys)
        sync_log(self._directory / INDEX_NAME)
        return count

    def discard(self, keys: Sequence[bytes], *, timeout_s: float) -> None:
        """Forget wrong blocks. One that is there again after a loss of power is found wrong again."""
        with self._locked() as catalog:
            catalog.delete(keys)

    def clear(self, prefix: bytes, *, timeout_s: float, progress: Callable[[], None] = no_progress) -> int:
        """Forget all such blocks, and delete the files that have no block left. Without a prefix all files go."""
        if not prefix:
            with self._locked() as catalog:
                return catalog.clear_all()
        count = 0
        while cleared := self._clear_some(prefix):
            count += cleared
            progress()
        with self._locked() as catalog:
            catalog.delete_empty_files()
        return count

    def usage(self) -> Usage:
        """How full it is; blocks being written count."""
        with self._lock:
            return self._catalog.usage()

    def close(self) -> None:
        """Let the next process use the directory."""
        try:
            with self._lock:
                self._catalog.close()
        finally:
            self._claim.close()

    def _gone(self) -> str:
        return f"disk storage: {self._directory} was removed or replaced while it was used"

    @contextmanager
    def _locked(self) -> Iterator[DiskCatalog]:
        """Hold the lock. A call that finds the index damaged fails, and the next one finds an empty index."""
        with self._lock:
            try:
                yield self._catalog
            except IndexDamaged as damage:
                self._catalog.replace_index(damage)
                raise

    def _clear_some(self, prefix: bytes) -> int:
        """Hold the lock for a moment only, because others wait for it."""
        with self._locked() as catalog:
            return catalog.clear_some(prefix)

    def _reserve(self, classes: Sequence[int]) -> tuple[list[Slot | None], dict[int, str]]:
        """A slot of each of these sizes, or None where there is no room; and for each size that lacks some, why."""
        taken: dict[int, list[Slot]] = {}
        try:
            with self._locked() as catalog:
                catalog.sweep()
                refusals = catalog.take(classes, taken)
        except (IndexDamaged, sqlite3.OperationalError, OSError) as error:
            self._release(slot for slots in taken.values() for slot in slots)
            why = lack_of_room(error, self._directory)
            if not why:
                raise
            return [None] * len(classes), dict.fromkeys(classes, why)
        return [taken[each].pop(0) if taken.get(each) else None for each in classes], refusals

    def _record(self, blocks: Sequence[Block], slots: Sequence[Slot | None], results: Sequence[Result]) -> list[Result]:
        """Add the entries of what was written. Slots that get none are free again."""
        entered: set[Slot] = set()
        try:
            with self._locked() as catalog:
                return catalog.record(blocks, slots, results, entered)
        except (sqlite3.OperationalError, OSError) as error:
            why = lack_of_room(error, self._directory)
            if not why:
                raise
            return [Result(Outcome.FULL, why)] * len(blocks)
        finally:
            self._release(slot for slot in slots if slot is not None and slot not in entered)

    def _release(self, slots: Iterable[Slot]) -> None:
        with self._lock:
            for file, slot in slots:
                file.release(slot, is_last=True)  # it may be the one that cannot be written


def open_disk(settings: dict[str, object]) -> Storage:
    """The backend `disk`.

    Raises:
        StorageUnusable: it cannot be opened with these settings.
    """
    checked = validated(settings)
    try:
        return DiskStorage(checked)
    except (OSError, sqlite3.Error, IndexDamaged) as error:
        raise StorageUnusable(f"disk storage: {checked.directory}: {error}") from error


def _read(place: Place, block: Block) -> Result:
    file, entry = place
    try:
        return DONE if file.read(entry.slot, block.parts) else ABSENT
    except OSError as error:
        return Result(Outcome.FAILED, str(error))


def _write(slot: Slot, block: Block) -> Result:
    file, number = slot
    try:
        file.write(number, block.parts)
    except OSError as error:
        return Result(Outcome.FULL if has_no_room(error) else Outcome.FAILED, str(error))
    return DONE
