"""Which blocks a directory holds, and where: labels, index and free slots kept in step, by one caller at a time.

The label decides. It is erased before a slot is given away and written when the next value is there; an entry of the
index that it does not bear out is dropped when somebody comes across it. So no failure in between needs undoing: the
worst that is left behind is an entry that leads nowhere, or a slot that stays unused until the index is made anew.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

from kvcached.storage.backend import DONE, Block, Outcome, Result, Usage
from kvcached.storage.disk.index import DiskIndex, Entry, IndexDamaged, create_index, place_of
from kvcached.storage.disk.opening import new_index, open_index
from kvcached.storage.disk.settings import DiskSettings
from kvcached.storage.disk.slots import Label, SlotFile
from kvcached.storage.disk.space import DiskSpace, has_no_room, slot_bytes_for

#: Reads whose time is noted in memory before it goes to the index.
_STAMPS_MAX: Final = 512
#: Blocks that are forgotten at a time while others wait: by their prefix; by their age, which takes a scan each time.
_CLEARED_AT_A_TIME: Final = 1 << 10
_EXPIRED_AT_A_TIME: Final = 1 << 12
#: How long opening a directory waits for the index. What takes longer goes on; nothing is found or stored meanwhile.
_PATIENCE_S: Final = 5.0
_NS_PER_S: Final = 10**9
#: No time of a use is above this, whatever damaged files say: there is always a later one.
_USE_MAX: Final = 1 << 62

_log: Final = logging.getLogger(__name__)

Slot = tuple[SlotFile, int]


class Place(NamedTuple):
    """A slot, and what its label has to say for it to hold the block."""

    file: SlotFile
    slot: int
    label: Label


class DiskCatalog:
    """Of one directory. Public methods take the lock; a damaged index is made anew, and the call in question raises.

    Raises:
        IndexDamaged, sqlite3.Error, OSError: from every method.
    """

    _index: DiskIndex  # when it is ready

    def __init__(self, settings: DiskSettings, clock_ns: Callable[[], int]) -> None:
        """Open what there is; what is more than the settings allow is given back."""
        self._settings = settings
        self._clock_ns = clock_ns
        self._lock = threading.Lock()
        self._used_ns: dict[bytes, int] = {}
        self._last_stored_ns = 0
        self._last_use_ns = 0
        self._swept_ns = 0
        self._index_path = settings.directory / "index.db"
        self._space = DiskSpace(settings)
        self._failure: Exception | None = None
        self._failing = threading.Lock()
        self._ready = threading.Event()
        self._start_opening("")
        self._ready.wait(_PATIENCE_S)
        if self._failure is not None:
            raise self._failure

    def is_ready(self) -> bool:
        """Whether the index is there. While it is checked or made anew nothing is known and nothing can be written.

        What kept it from being made is raised once, to whoever comes first; then it is tried again.
        """
        with self._failing:
            failure, self._failure = self._failure, None
            if failure is not None:
                self._start_opening(str(failure))
                raise failure
        return self._ready.is_set()

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait for the index.

        Raises:
            TimeoutError: it takes longer.
        """
        if not self._ready.wait(timeout_s):
            raise TimeoutError(f"{self._index_path} is still being made")
        self.is_ready()

    def places(self, keys: Iterable[bytes]) -> dict[bytes, Place]:
        """Where blocks are, as far as the index knows."""
        with self._locked():
            entries = self._index.find(keys).values()
            oldest_ns = self._oldest_ns()
            gone = [each for each in entries if each.stored_ns < oldest_ns or not self._has_slot(each)]
            self._forget_if_possible(gone)
            return {each.key: self._place(each) for each in entries if each not in gone}

    def _has_slot(self, entry: Entry) -> bool:
        file = self._space.files.get(entry.file)
        return file is not None and entry.slot < file.slots and 0 <= entry.size_bytes <= file.slot_bytes

    def _place(self, entry: Entry) -> Place:
        label = Label(entry.key, entry.size_bytes, entry.stored_ns)
        return Place(self._space.files[entry.file], entry.slot, label)

    def held(self, blocks: Sequence[Block]) -> set[bytes]:
        """Keys of those that are there. What only seems to be is forgotten."""
        found = self.places(block.key for block in blocks)
        sizes = {block.key: block.size_bytes for block in blocks}
        held = {key for key, place in found.items() if place.label.size_bytes == sizes[key] and _is_labelled(place)}
        with self._locked():
            for key in held:
                self._touch(found[key])
            self._forget_if_possible([_entry(place) for key, place in found.items() if key not in held])
        return held

    def settle(self, read: Iterable[tuple[Place, bool]]) -> None:
        """After reading: whether each place had its block. One that had not is forgotten."""
        read = list(read)
        with self._locked():
            for place in (place for place, is_there in read if is_there):
                self._touch(place)
            self._forget_if_possible([_entry(place) for place, is_there in read if not is_there])
            if len(self._used_ns) >= _STAMPS_MAX:
                self._note_uses()

    def reserve(self, sizes: Sequence[int]) -> list[Slot | None]:
        """A slot for each value, or None where there is no room."""
        classes = [slot_bytes_for(size) for size in sizes]
        taken: dict[int, list[Slot]] = {each: [] for each in classes}
        try:
            self._sweep()
            with self._locked():
                self._note_uses()
                with self._index.changes():
                    if self._give_back_excess():
                        for slot_bytes, slots in taken.items():
                            self._take(slot_bytes, classes.count(slot_bytes), slots)
                    else:
                        self._space.refuse_for_others()
        except (IndexDamaged, sqlite3.OperationalError, OSError) as error:
            self._undo(slot for slots in taken.values() for slot in slots)
            if not has_no_room(error):
                raise
            self._space.refusal = str(error)
            return [None] * len(sizes)
        return [taken[each].pop(0) if taken[each] else None for each in classes]

    @property
    def refusal(self) -> str:
        """Why there was no slot when one was wanted last; empty where there was."""
        return self._space.refusal

    def record(self, blocks: Sequence[Block], slots: Sequence[Slot | None], results: Sequence[Result]) -> list[Result]:
        """What was written gets its label and its entry; other slots are free again."""
        ours = {slot for slot in slots if slot is not None}
        try:
            with self._locked(), self._index.changes():
                return [
                    result if slot is None else self._record_one(block, slot, result, ours)
                    for block, slot, result in zip(blocks, slots, results, strict=True)
                ]
        except (IndexDamaged, sqlite3.OperationalError, OSError) as error:
            self._undo(ours)
            if not has_no_room(error):
                raise
            return [Result(Outcome.FULL, str(error))] * len(blocks)

    def _undo(self, slots: Iterable[Slot]) -> None:
        """Slots that the caller has reserved are free again."""
        with self._lock:
            for file, slot in slots:
                if not file.is_retired:
                    try:
                        file.release(slot)
                    except OSError as error:
                        _log.warning("slot %d of file %d stays unused: %s", slot, file.number, error)

    def delete(self, keys: Sequence[bytes]) -> int:
        """Forget blocks; returns how many there were."""
        with self._locked(), self._index.changes():
            return self._forget(self._index.find(keys).values())

    def clear(self, prefix: bytes) -> int:
        """Forget all blocks whose key begins so; files with nothing in them any more go back to the file system."""
        if not prefix:
            return self._clear_all()
        count = 0
        while forgotten := self._forget_some(lambda index: index.under(prefix, _CLEARED_AT_A_TIME)):
            count += forgotten
        with self._locked():
            for file in [each for each in self._space.files.values() if len(each.free) == each.slots]:
                self._space.retire(file)
        return count

    def usage(self) -> Usage:
        """Blocks being written count."""
        with self._lock:
            return Usage(self._space.blocks, self._space.used_bytes, self._settings.capacity_bytes)

    def close(self) -> None:
        """Note what was used last, and close all files."""
        self._opener.join()
        with self._lock:
            if self._failure is None:
                try:
                    self._note_uses()
                    self._index.close()
                except IndexDamaged as damage:
                    _log.warning("the next start rebuilds %s: %s", self._index_path, damage)
                    self._index.close()
                    self._index_path.unlink(missing_ok=True)
            self._space.files.clear()

    def _clear_all(self) -> int:
        with self._locked():
            count = self._index.count()
            for file in list(self._space.files.values()):
                self._space.retire(file)
            self._index.close()
            self._index = create_index(self._index_path, ())
            self._used_ns.clear()
            return count

    def _forget_some(self, choose: Callable[[DiskIndex], list[Entry]]) -> int:
        """Forget what is chosen. The lock is held for a moment only: others wait for it."""
        with self._locked(), self._index.changes():
            return self._forget(choose(self._index))

    def _sweep(self) -> None:
        """Forget some of what has expired; when nothing is left of it, again after a 16th of that time."""
        oldest_ns, now_ns, ttl_s = self._oldest_ns(), self._clock_ns(), self._settings.ttl_s
        if ttl_s is None or now_ns - self._swept_ns < ttl_s * _NS_PER_S // 16:
            return
        if not self._forget_some(lambda index: index.stored_before(oldest_ns, _EXPIRED_AT_A_TIME)):
            self._swept_ns = now_ns

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock. An index that turns out to be damaged is made anew, and this call has failed."""
        with self._lock:
            if not self.is_ready():
                raise IndexDamaged(f"{self._index_path} is being made anew")
            try:
                yield
            except IndexDamaged as damage:
                self._index.close()
                self._start_opening(str(damage))
                raise

    def _start_opening(self, damage: str) -> None:
        """Open the index, or make it anew if damage is known. In a thread: that may take longer than callers wait."""
        self._ready.clear()
        self._opener = threading.Thread(target=self._open, args=(damage,), name="disk index", daemon=True)
        self._opener.start()

    def _open(self, damage: str) -> None:
        index, failure = None, None
        try:
            index = self._index = (
                new_index(self._index_path, self._space, damage)
                if damage
                else open_index(self._index_path, self._space)
            )
            with self._lock, index.changes():
                self._last_use_ns = min(max([self._last_use_ns, *self._space.use_times()]), _USE_MAX)
                self._give_back_excess()
        except Exception as error:  # noqa: BLE001 - whoever calls next is told
            _log.error("the index %s can neither be opened nor rebuilt: %s", self._index_path, error)
            if index is not None:
                index.close()
            failure = error
        with self._failing:
            self._failure = failure
            self._ready.set()

    # --- what follows is called with the lock held

    def _use_ns(self) -> int:
        """Now, and later than every use before: a clock that is set back does not make new blocks old ones."""
        self._last_use_ns = max(self._last_use_ns + 1, self._clock_ns())
        return self._last_use_ns

    def _touch(self, place: Place) -> None:
        place.file.used_ns = self._used_ns[place.label.key] = self._use_ns()

    def _forget(self, entries: Iterable[Entry]) -> int:
        """Entries leave the index, and their slots are free if they are still theirs. Returns how many there were."""
        entries = list(entries)
        count = self._index.remove((each.key, each.stored_ns) for each in entries)
        for place in (self._place(each) for each in entries if self._has_slot(each)):
            try:
                if place.file.label(place.slot) == place.label:
                    place.file.release(place.slot)
            except OSError as error:
                _log.warning("slot %d of file %d stays unused: %s", place.slot, place.file.number, error)
        return count

    def _forget_if_possible(self, entries: Sequence[Entry]) -> None:
        """The same for entries that nothing bears out: they do no harm, should the index have no room to change."""
        if entries:
            try:
                with self._index.changes():
                    self._forget(entries)
            except sqlite3.OperationalError as error:
                _log.warning("%d entries of blocks that are gone stay in %s: %s", len(entries), self._index_path, error)

    def _note_uses(self) -> None:
        """Let the index know what was used lately; where it cannot, other blocks go first than should."""
        try:
            with self._index.changes():
                self._index.touch(self._used_ns.items())
        except sqlite3.OperationalError as error:
            _log.warning("the last use of blocks is not recorded in %s: %s", self._index_path, error)
        self._used_ns.clear()

    def _oldest_ns(self) -> int:
        """Blocks stored before have expired."""
        return 0 if self._settings.ttl_s is None else self._clock_ns() - self._settings.ttl_s * _NS_PER_S

    def _take(self, slot_bytes: int, count: int, taken: list[Slot]) -> None:
        """Take free slots; least recently used blocks make room, or a file of other sizes that is older.

        What was taken is in `taken`, also where this raises. There are fewer if there is no more room.
        """
        while len(taken) < count and self._space.could_hold(slot_bytes):
            slot = self._space.take(slot_bytes)
            if slot is not None:
                slot[0].used_ns = self._use_ns()  # a new file is not the one that was not used for longest
                taken.append(slot)
                continue
            cold = self._space.coldest()
            if cold is not None and cold.slot_bytes != slot_bytes:
                self._retire(cold)
            elif victims := self._index.oldest(slot_bytes, count - len(taken)):
                self._forget(victims)
            else:
                break

    def _retire(self, file: SlotFile) -> None:
        """Give a file back, and forget what it holds."""
        try:
            for found in file.labelled():
                self._index.remove(zip(found.labels["key"].tolist(), found.labels["stored"].tolist(), strict=True))
        except OSError as error:
            _log.warning("entries of file %d stay until they are next looked up: %s", file.number, error)
        self._space.retire(file)

    def _give_back_excess(self) -> bool:
        """Give files back while they take more than they may; returns whether that was enough."""
        excess = self._space.excess_bytes()
        while excess > 0 and (cold := self._space.coldest()) is not None:
            self._retire(cold)
            excess -= cold.size_bytes
        return self._space.excess_bytes() == 0

    def _record_one(self, block: Block, slot: Slot, result: Result, ours: set[Slot]) -> Result:
        """`ours` are slots that nobody else may have; this one leaves them when it is given back."""
        file, number = slot
        if file.is_retired:
            return Result(Outcome.FULL)
        if result.outcome is not Outcome.DONE:
            ours.discard(slot)
            file.free.insert(0, number)  # the last to be tried again
            return result
        self._last_stored_ns, file.used_ns = max(self._last_stored_ns + 1, self._clock_ns()), self._use_ns()
        place = Place(file, number, Label(block.key, block.size_bytes, self._last_stored_ns))
        file.set_label(number, place.label)
        if not self._index.add(_entry(place), file.used_ns):  # another thread was faster
            ours.discard(slot)
            file.release(number)
        return DONE


def _entry(place: Place) -> Entry:
    key, size_bytes, stored_ns = place.label
    return Entry(key, place_of(place.file.number, place.slot), place.file.slot_bytes, size_bytes, stored_ns)


def _is_labelled(place: Place) -> bool:
    try:
        return place.file.label(place.slot) == place.label
    except OSError:
        return False
