"""What a directory holds: index, files and free slots kept in step. One caller at a time, and no I/O of values.

The index decides. A slot becomes free when the removal of its entry is committed, and not before. An entry that leads
nowhere, because its file was deleted when the index could not be changed, is harmless: it counts as absent, and is
removed when somebody comes across it, or at the next start.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Final

from kvcached.storage.backend import ABSENT, DONE, Block, Outcome, Result, Usage
from kvcached.storage.disk.directory import INDEX_NAME, DiskSettings
from kvcached.storage.disk.index import DiskIndex, Entry, IndexDamaged, create_index, place_of, reopen_index
from kvcached.storage.disk.slots import DiskSpace, SlotFile

#: Reads whose time is kept in memory before it is written to the index.
_USES_MAX: Final = 512
#: Blocks that are forgotten at a time while others wait: by their prefix; by their age, which takes a scan each time.
_CLEARED_AT_A_TIME: Final = 1 << 10
_EXPIRED_AT_A_TIME: Final = 1 << 12
_NS_PER_S: Final = 10**9
#: No time of a use is above this, whatever a damaged index says: there is always a later one.
_USE_MAX: Final = 1 << 62

_log: Final = logging.getLogger(__name__)

Slot = tuple[SlotFile, int]
Place = tuple[SlotFile, Entry]


class DiskCatalog:
    """The index and the files of one directory.

    Raises:
        IndexDamaged: from every method that comes across damage. The caller then calls `replace_index`.
        sqlite3.Error, OSError: from every method, where the file system fails.
    """

    def __init__(self, settings: DiskSettings, clock_ns: Callable[[], int]) -> None:
        """Open what there is, and delete what exceeds the settings.

        Raises:
            OSError, sqlite3.Error: the file system refuses.
        """
        self._settings = settings
        self._clock_ns = clock_ns
        self._used_ns: dict[bytes, int] = {}
        self._last_stored_ns = 0
        self._last_use_ns = 0
        self._swept_ns = 0
        self._index_path = settings.directory / INDEX_NAME
        self._space = DiskSpace(settings)
        try:
            self._index = DiskIndex(self._index_path)
        except IndexDamaged as damage:
            self._renew_index(damage)
        try:
            self._note_slots()
            self._delete_excess()
        except IndexDamaged as damage:
            self.replace_index(damage)

    def find(self, keys: Iterable[bytes]) -> dict[bytes, Entry]:
        """Entries of the keys. Those that have expired, or whose slot is gone, are removed."""
        found, oldest_ns = self._index.find(keys), self._oldest_ns()
        gone = [each for each in found.values() if each.stored_ns < oldest_ns or not self._is_sane(each)]
        self._forget_if_possible(gone)
        for each in gone:
            del found[each.key]
        return found

    def places(self, blocks: Sequence[Block]) -> list[Place | None]:
        """Where each block is, if it is there. A value of another size is not that block, and is forgotten."""
        found = self.find(block.key for block in blocks)
        places = [self._place(found.get(block.key), block.size_bytes) for block in blocks]
        pairs = zip(places, blocks, strict=True)
        self._forget_if_possible([found[block.key] for place, block in pairs if place is None and block.key in found])
        return places

    def _place(self, entry: Entry | None, size_bytes: int) -> Place | None:
        return (self._space.files[entry.file], entry) if entry is not None and entry.size_bytes == size_bytes else None

    def settle(self, places: Sequence[Place | None], results: Sequence[Result]) -> list[Result]:
        """After reading: a block whose entry has changed meanwhile is absent; one that was not read is forgotten."""
        entries = [None if place is None else place[1] for place in places]
        after = self._index.find(entry.key for entry in entries if entry is not None)
        settled, unread = [], []
        for entry, result in zip(entries, results, strict=True):
            is_read = entry is not None and result.outcome is Outcome.DONE
            is_same = entry is not None and after.get(entry.key) == entry
            if entry is not None and not is_read:
                unread.append(entry)
            elif entry is not None and is_same:
                self._touch(entry)
            settled.append(ABSENT if is_read and not is_same else result)
        self._forget_if_possible(unread)
        if len(self._used_ns) >= _USES_MAX:
            self._write_uses()
        return settled

    def held(self, blocks: Sequence[Block]) -> set[bytes]:
        """Keys of the blocks that are there, which counts as a use. A value of another size is forgotten."""
        found = self.find(block.key for block in blocks)
        held = {block.key for block in blocks if self._place(found.get(block.key), block.size_bytes) is not None}
        for key in held:
            self._touch(found[key])
        self._forget_if_possible([entry for key, entry in found.items() if key not in held])
        return held

    def take(self, classes: Sequence[int], taken: dict[int, list[Slot]]) -> dict[int, str]:
        """Take a slot of each of these sizes, as far as there is room or can be made; adds them to `taken`.

        Returns:
            For each size of which there are fewer slots than wanted, why.
        """
        self._write_uses()
        if not self._delete_excess():
            self._space.refuse_for_others()
            return dict.fromkeys(classes, self._space.refusal)
        refusals = {}
        for slot_bytes in dict.fromkeys(classes):
            count, slots = classes.count(slot_bytes), taken.setdefault(slot_bytes, [])
            self._take(slot_bytes, count, slots)
            if len(slots) < count:
                refusals[slot_bytes] = self._space.refusal
        return refusals

    def record(
        self, blocks: Sequence[Block], slots: Sequence[Slot | None], results: Sequence[Result], entered: set[Slot]
    ) -> list[Result]:
        """Add the entries of what was written, all or none; slots that have one then are added to `entered`."""
        with self._index.changes():
            recorded = [
                self._record(block, slot, result) for block, slot, result in zip(blocks, slots, results, strict=True)
            ]
        entered.update(
            slot for slot, (_, has_entry) in zip(slots, recorded, strict=True) if slot is not None and has_entry
        )
        return [result for result, _ in recorded]

    def delete(self, keys: Sequence[bytes]) -> int:
        """Forget blocks; returns how many there were."""
        return self._forget(self._index.find(keys).values())

    def clear_some(self, prefix: bytes) -> int:
        """Forget some of the blocks whose key begins with the prefix; returns how many, 0 if there are no more."""
        return self._forget(self._index.under(prefix, _CLEARED_AT_A_TIME))

    def delete_empty_files(self) -> None:
        """Delete the files that hold no block."""
        for file in [each for each in self._space.files.values() if len(each.free) == each.slots]:
            self._space.retire(file)

    def clear_all(self) -> int:
        """Forget everything; returns how many blocks there were."""
        count = self._index.count()
        self._index.close()
        self._start_empty()
        return count

    def sweep(self) -> None:
        """Forget some of the expired blocks; if these are all, look again after a 16th of the time to live."""
        now_ns, ttl_s = self._clock_ns(), self._settings.ttl_s
        if ttl_s is None or now_ns - self._swept_ns < ttl_s * _NS_PER_S // 16:
            return
        expired = self._index.stored_before(self._oldest_ns(), _EXPIRED_AT_A_TIME)
        self._forget(expired)
        if len(expired) < _EXPIRED_AT_A_TIME:
            self._swept_ns = now_ns

    def usage(self) -> Usage:
        """How full it is; slots that are being written count."""
        return Usage(self._space.blocks, self._space.used_bytes, self._settings.capacity_bytes)

    def replace_index(self, damage: IndexDamaged) -> None:
        """Go on with the index if it is whole, and else start empty.

        If neither is possible, the closed index counts as damaged, so the next call comes here again.
        """
        with suppress(IndexDamaged):
            self._index.close()
        self._renew_index(damage)
        self._note_slots()

    def close(self) -> None:
        """Write what only memory has to the index, and close everything."""
        try:
            self._write_uses()
        except IndexDamaged as damage:
            _log.warning("the index %s is damaged, which the next start will find: %s", self._index_path, damage)
        finally:
            self._index.close()
            self._space.files.clear()

    def _renew_index(self, damage: IndexDamaged) -> None:
        """Open the index again where only reading it has failed: one failed read is not to cost all blocks."""
        if not damage.is_certain:
            try:
                self._index = reopen_index(self._index_path)
            except IndexDamaged as still:
                damage = still
            else:
                _log.warning("reading the index %s has failed, and it is whole: %s", self._index_path, damage)
                return
        self._start_empty(damage)

    def _note_slots(self) -> None:
        """Slots without an entry stay free; entries without a slot are removed."""
        files = self._space.files
        is_used = {number: file.in_use() for number, file in files.items()}
        ends: dict[int, int] = {}
        for number, slots, used_ns in self._index.uses():
            end = files[number].slots if number in files else 0
            if number in files:
                is_used[number][slots[slots < end]] = True
                files[number].used_ns = max(files[number].used_ns, used_ns)
            if slots.max() >= end:
                ends[number] = end
        with self._index.changes():
            for number, end in ends.items():
                self._index.remove_slots(number, end)
        for number, file in files.items():
            file.note_used(is_used[number])
        latest_ns = max((each.used_ns for each in files.values()), default=0)
        self._last_use_ns = max(self._last_use_ns, min(latest_ns, _USE_MAX))

    def _start_empty(self, damage: IndexDamaged | None = None) -> None:
        """Delete all files, and create an empty index. After a loss of power they do not come back."""
        if damage is not None and self._space.files:
            _log.warning("all blocks are forgotten, because the index %s is damaged: %s", self._index_path, damage)
        for file in list(self._space.files.values()):
            self._space.retire(file)
        self._used_ns.clear()
        self._index = create_index(self._index_path)
        directory = os.open(self._settings.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def _has_slot(self, entry: Entry) -> bool:
        file = self._space.files.get(entry.file)
        return file is not None and entry.slot < file.slots

    def _is_sane(self, entry: Entry) -> bool:
        """Whether it is as its file says: a damaged one is not."""
        return (
            self._has_slot(entry)
            and entry.slot_bytes == self._space.files[entry.file].slot_bytes
            and 0 <= entry.size_bytes <= entry.slot_bytes
        )

    def _forget(self, entries: Iterable[Entry]) -> int:
        """Remove entries, and free their slots; returns how many entries there were."""
        with self._index.changes():
            removed = self._index.remove(entries)
        for each in removed:
            if self._has_slot(each):
                self._space.files[each.file].release(each.slot)
        return len(removed)

    def _forget_if_possible(self, entries: Sequence[Entry]) -> None:
        """The same for entries that lead to no block: they do no harm if the index has no room for changes."""
        if entries:
            try:
                self._forget(entries)
            except sqlite3.OperationalError as error:
                _log.warning("%d entries of blocks that are gone stay in %s: %s", len(entries), self._index_path, error)

    def _touch(self, entry: Entry) -> None:
        self._used_ns[entry.key] = used_ns = self._use_ns()
        if entry.file in self._space.files:  # else it was deleted while the block was read
            self._space.files[entry.file].used_ns = used_ns

    def _use_ns(self) -> int:
        """Now, and later than every use before: a clock that is set back does not make new blocks old ones."""
        self._last_use_ns = max(self._last_use_ns + 1, self._clock_ns())
        return self._last_use_ns

    def _write_uses(self) -> None:
        """Write the latest uses to the index; if that fails, other blocks are evicted than should be."""
        if not self._used_ns:
            return
        try:
            with self._index.changes():
                self._index.touch(self._used_ns.items())
        except sqlite3.OperationalError as error:
            _log.warning("the last use of blocks is not recorded in %s: %s", self._index_path, error)
        self._used_ns.clear()

    def _oldest_ns(self) -> int:
        """Blocks stored before this time have expired."""
        return 0 if self._settings.ttl_s is None else self._clock_ns() - self._settings.ttl_s * _NS_PER_S

    def _take(self, slot_bytes: int, count: int, taken: list[Slot]) -> None:
        """Take slots of one size; least recently used blocks make room, or a file of another size that is older."""
        if not self._space.could_hold(slot_bytes):
            return
        while len(taken) < count:
            slot = self._space.take(slot_bytes)
            if slot is not None:
                slot[0].used_ns = self._use_ns()  # a new file is not the least recently used one
                taken.append(slot)
                continue
            cold = self._space.coldest() if self._space.lacks_room else None
            if cold is not None and cold.slot_bytes != slot_bytes:
                self._delete_file(cold)
            elif victims := self._index.oldest(slot_bytes, count - len(taken)):
                if not self._forget(victims):
                    raise IndexDamaged("blocks that it lists cannot be removed")
            else:
                break

    def _delete_file(self, file: SlotFile) -> None:
        """Delete a file, and forget what it holds. The file goes first: a full file system has no room for the rest."""
        self._space.retire(file)
        try:
            with self._index.changes():
                self._index.remove_slots(file.number)
        except sqlite3.OperationalError as error:
            _log.warning("entries of file %d stay in %s: %s", file.number, self._index_path, error)

    def _delete_excess(self) -> bool:
        """Delete files while they take more than they may; returns whether that was enough."""
        self._space.delete_retired()
        excess = self._space.excess_bytes()
        while excess > 0 and (cold := self._space.coldest()) is not None:
            self._delete_file(cold)
            excess -= cold.size_bytes
        return self._space.excess_bytes() == 0

    def _record(self, block: Block, slot: Slot | None, result: Result) -> tuple[Result, bool]:
        """Add one entry; returns what became of the block, and whether its slot has the entry."""
        if slot is None or result.outcome is not Outcome.DONE:
            return result, False
        file, number = slot
        if file.is_retired:
            return Result(Outcome.FULL, "its file was deleted while it was written, to make room"), False
        self._last_stored_ns, file.used_ns = max(self._last_stored_ns + 1, self._clock_ns()), self._use_ns()
        place = place_of(file.number, number)
        entry = Entry(block.key, place, file.slot_bytes, block.size_bytes, self._last_stored_ns)
        return DONE, self._index.add(entry, file.used_ns)  # another thread may have been faster
