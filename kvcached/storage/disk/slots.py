"""The files of a directory, each of equal slots: reads, writes, free slots, and the size limit of all files together.

What a slot holds is the index's business (`kvcached.storage.disk.index`). No value is ever synced: after a loss of
power an entry of the index may be there and its bytes not, which the value's own frame tells.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import re
import sqlite3
import weakref
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvcached.storage.disk.directory import INDEX_NAME, PROBE_NAME, DiskSettings
from kvcached.storage.disk.index import INDEX_BYTES, INDEX_BYTES_PER_BLOCK

#: I/O past the page cache needs memory, sizes and offsets that are multiples of this; no device asks for more.
ALIGNMENT: Final = 4096

_MODE: Final = 0o600
_FLAGS: Final = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
_NAME: Final = re.compile(r"\d{8}-[1-9]\d{3,12}")
_IOV_MAX: Final = os.sysconf("SC_IOV_MAX")
_NO_ROOM: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
#: As much as the index writes at once, at least: a quota may have less left than that.
_PROBE_BYTES: Final = 1 << 16
#: Size of a file, unless the capacity asks for another: large enough that few descriptors are open, small enough that
#: deleting one costs little of the cache.
_FILE_BYTES: Final = 256 << 20
#: Limits of the number of files of regular size, which have two descriptors each.
_FILES_MAX: Final = 128
_FILES_MIN: Final = 4
#: A new file has at least this part of its regular number of slots: many small ones would exhaust descriptors.
_LEAST_SHARE: Final = 8

_Vectored = Callable[[int, Sequence[memoryview], int], int]

_log: Final = logging.getLogger(__name__)


class SlotFile:
    """One open file of slots. Reading and writing need no lock; the caller guards everything else.

    Attributes:
        number: of the file, in its directory.
        slot_bytes: size of a slot, a multiple of 4096.
        slots: how many.
        free: slots that hold nothing and that nobody is about to write; all until `note_used` says which.
        used_ns: when one of its blocks was last used.
        is_retired: the file was deleted.
    """

    def __init__(self, path: Path, *, direct: bool) -> None:
        number, slot_bytes = path.stem.split("-")
        self.number, self.slot_bytes = int(number), int(slot_bytes)
        self._path = path
        self._buffered = self._open(0)
        self._direct = self._open(os.O_DIRECT) if direct else self._buffered
        self.slots = os.fstat(self._buffered).st_size // self.slot_bytes
        self.note_used(np.zeros(self.slots, np.bool_))
        self.used_ns = 0
        self.is_retired = False

    def _open(self, flags: int) -> int:
        """A descriptor that is closed with the last reference to this object: a reader may outlast the file."""
        descriptor = os.open(self._path, _FLAGS | flags, _MODE)
        weakref.finalize(self, os.close, descriptor)
        return descriptor

    @property
    def size_bytes(self) -> int:
        """Size of all slots."""
        return self.slots * self.slot_bytes

    def in_use(self) -> NDArray[np.bool_]:
        """Of all slots, which are not free."""
        is_used = np.ones(self.slots, np.bool_)
        is_used[np.array(self.free, np.uint32)] = False
        return is_used

    def note_used(self, is_used: NDArray[np.bool_]) -> None:
        """Free are the slots that this array, of all slots, says are not in use."""
        self.free = array("I", np.flatnonzero(~is_used)[::-1].astype(np.uint32).tobytes())  # first ones are taken first

    def release(self, slot: int, *, is_last: bool = False) -> None:
        """Free a slot; it is taken first, or after all others."""
        if not self.is_retired:
            self.free.insert(0 if is_last else len(self.free), slot)

    def read(self, slot: int, parts: Sequence[memoryview]) -> bool:
        """Read a value into its parts; False where the file ends before."""
        return self._transfer(os.preadv, slot, parts)

    def write(self, slot: int, parts: Sequence[memoryview]) -> None:
        """Write a value.

        Raises:
            OSError: of the device; also ENOSPC, where the file system does not keep reserved space.
        """
        if not self._transfer(os.pwritev, slot, parts):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def _transfer(self, call: _Vectored, slot: int, parts: Sequence[memoryview]) -> bool:
        """Transfer all parts in one call where the kernel takes them; what a short call leaves goes buffered."""
        size, offset = sum(part.nbytes for part in parts), slot * self.slot_bytes
        descriptor = self._direct if self._direct != self._buffered and _is_whole_pages(parts) else self._buffered
        done, count = 0, 1
        while done < size and count:
            try:
                count = call(descriptor, _after(parts, done)[:_IOV_MAX], offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL or descriptor == self._buffered:
                    raise  # else: memory that is not aligned, or that the device cannot reach
            else:
                done += count
            descriptor = self._buffered
        return done == size

    def retire(self) -> None:
        """Delete the file. A read under way then ends early; a write under way is lost.

        Raises:
            OSError: it is still there, and nobody's any more; call this again.
        """
        self.is_retired = True
        self.free = array("I")
        with suppress(OSError):  # first: where the file cannot be deleted, its space may be given back all the same
            os.ftruncate(self._buffered, 0)
        self._path.unlink(missing_ok=True)


class DiskSpace:
    """All files of a directory. One caller at a time.

    Attributes:
        files: by their numbers.
        refusal: why the last slot that was wanted could not be had, where a new file was needed for it.
        lacks_room: whether that was for lack of room, which deleting other files makes.
    """

    def __init__(self, settings: DiskSettings) -> None:
        """Open the files that there are.

        Raises:
            OSError: they cannot be read.
        """
        self._settings = settings
        self._room_bytes = settings.capacity_bytes - INDEX_BYTES
        self._direct = settings.direct_io == "auto" and _takes_direct_io(settings.directory)
        self.refusal = ""
        self.lacks_room = False
        self.files: dict[int, SlotFile] = {}
        self._undeleted: list[SlotFile] = []  #: retired files that are still there: they count, and hold nothing
        for path in sorted(settings.directory.glob("*.slots")):
            if _NAME.fullmatch(path.stem):
                file = SlotFile(path, direct=self._direct)
                self.files[file.number] = file
        self._last_number = max(self.files, default=0)

    @property
    def blocks(self) -> int:
        """Number of slots in use, including those being written."""
        return sum(file.slots - len(file.free) for file in self.files.values())

    @property
    def used_bytes(self) -> int:
        """Size of these slots."""
        return sum((file.slots - len(file.free)) * file.slot_bytes for file in self.files.values())

    @property
    def _taken_bytes(self) -> int:
        taken = [*self.files.values(), *self._undeleted]
        return sum(file.slots * (file.slot_bytes + INDEX_BYTES_PER_BLOCK) for file in taken)

    def could_hold(self, slot_bytes: int) -> bool:
        """Whether a slot of that size fits the capacity at all; notes the refusal where it does not."""
        fits = slot_bytes + INDEX_BYTES_PER_BLOCK <= self._room_bytes
        if not fits:
            capacity = f"capacity_bytes is {self._settings.capacity_bytes}, with {INDEX_BYTES} for the index"
            self.refusal = f"a block takes {slot_bytes} bytes, and {capacity}"
        return fits

    def take(self, slot_bytes: int) -> tuple[SlotFile, int] | None:
        """A free slot of that size, in a new file if need be; None where there is none and no room for a file."""
        file = next((each for each in self.files.values() if each.slot_bytes == slot_bytes and each.free), None)
        if file is None:
            file = self._new_file(slot_bytes)
        return None if file is None else (file, file.free.pop())

    def _new_file(self, slot_bytes: int) -> SlotFile | None:
        settings, cost = self._settings, slot_bytes + INDEX_BYTES_PER_BLOCK
        left_bytes, free_bytes = self._room_bytes - self._taken_bytes, self._free_space_bytes()
        room = min(left_bytes, free_bytes - settings.free_space_floor_bytes)
        regular = max(1, file_bytes_for(self._room_bytes) // cost)
        slots = min(regular, room // cost)
        self.lacks_room = True
        if slots < max(1, regular // _LEAST_SHARE):
            if room == left_bytes:
                self.refusal = "capacity_bytes is used up"
            else:
                self.refuse_for_others(free_bytes)
            return None
        self._last_number += 1  # never a number that was used before: entries of that file may be left
        try:
            file = create_slot_file(settings.directory, self._last_number, slot_bytes, slots, direct=self._direct)
        except OSError as error:
            refusal = f"no file of {slots * slot_bytes} bytes can be made in {settings.directory}: {error.strerror}"
            if refusal != self.refusal:  # once, not for each block
                _log.warning("%s", refusal)
            self.refusal, self.lacks_room = refusal, error.errno in {errno.ENOSPC, errno.EDQUOT}
            return None
        self.files[file.number], self.refusal = file, ""
        return file

    def coldest(self) -> SlotFile | None:
        """The least recently used file."""
        return min(self.files.values(), key=lambda file: file.used_ns, default=None)

    def excess_bytes(self) -> int:
        """What has to be freed: the capacity was made smaller, or other users need the file system."""
        lacking = self._settings.free_space_floor_bytes - self._free_space_bytes()
        return max(0, lacking, self._taken_bytes - self._room_bytes)

    def retire(self, file: SlotFile) -> None:
        """Delete a file. One that cannot be deleted counts until `delete_retired` has deleted it."""
        self._undeleted.append(self.files.pop(file.number))
        self.delete_retired()

    def delete_retired(self) -> None:
        """Delete the retired files that could not be deleted before."""
        left = []
        for file in self._undeleted:
            is_told = file.is_retired
            try:
                file.retire()
            except OSError as error:
                left.append(file)
                if not is_told:
                    _log.warning("file %d of %s cannot be deleted: %s", file.number, self._settings.directory, error)
        self._undeleted = left

    def refuse_for_others(self, free_bytes: int | None = None) -> None:
        """Note that the floor is the reason why there is no room."""
        free_bytes = self._free_space_bytes() if free_bytes is None else free_bytes
        floor = f"free_space_floor_bytes is {self._settings.free_space_floor_bytes}"
        self.refusal = f"{self._settings.directory}: {free_bytes} bytes are free, and {floor}"

    def _free_space_bytes(self) -> int:
        state = os.statvfs(self._settings.directory)
        return state.f_bavail * state.f_frsize


def create_slot_file(directory: Path, number: int, slot_bytes: int, slots: int, *, direct: bool) -> SlotFile:
    """A new file whose space is reserved.

    Raises:
        OSError: there is no room for it, or it cannot be opened; nothing is left of it.
    """
    path = directory / f"{number:08d}-{slot_bytes}.slots"
    descriptor = os.open(path, _FLAGS | os.O_CREAT | os.O_EXCL, _MODE)
    try:
        try:
            os.posix_fallocate(descriptor, 0, slots * slot_bytes)
        finally:
            os.close(descriptor)
        return SlotFile(path, direct=direct)
    except OSError:
        with suppress(OSError):  # where it cannot be deleted, it takes no space at least
            os.truncate(path, 0)
        path.unlink()
        raise


def file_bytes_for(room_bytes: int) -> int:
    """Size of a file of slots: between a quarter and 1/128 of all of them together."""
    return min(room_bytes // _FILES_MIN, max(_FILE_BYTES, room_bytes // _FILES_MAX))


def slot_bytes_for(size_bytes: int) -> int:
    """Size of the slots for values of a size."""
    return max(1, -(-size_bytes // ALIGNMENT)) * ALIGNMENT


def has_no_room(error: Exception) -> bool:
    """Whether the reason is a full or read-only file system, or a limit of the user's."""
    if isinstance(error, OSError):
        return error.errno in _NO_ROOM
    return _code(error) == sqlite3.SQLITE_FULL


def lack_of_room(error: Exception, directory: Path) -> str:
    """Why there is no room, where that is the reason of an error, and else nothing.

    SQLite says ENOSPC, but of a quota or a read-only file system only that writing has failed: so write something here.
    """
    if has_no_room(error):
        return str(error)
    if _code(error) in {sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN}:
        try:
            _write_probe(directory)
        except OSError as refused:
            return f"{directory}: {refused.strerror}" if has_no_room(refused) else ""
    return ""


def _code(error: Exception) -> int:
    return error.sqlite_errorcode & 0xFF if isinstance(error, sqlite3.OperationalError) else sqlite3.SQLITE_OK


def _write_probe(directory: Path) -> None:
    """Write behind the end of the index, in another file: a limit of file sizes is met there, too."""
    path, log = directory / PROBE_NAME, directory / f"{INDEX_NAME}-wal"
    end = max(each.stat().st_size if each.exists() else 0 for each in (directory / INDEX_NAME, log))
    try:
        with path.open("wb", buffering=0) as file:
            os.pwrite(file.fileno(), bytes(_PROBE_BYTES), end)
    finally:
        with suppress(OSError):
            path.unlink()


def _takes_direct_io(directory: Path) -> bool:
    """Whether the file system reads and writes past the page cache: some refuse to open, some to write.

    A file system without room says nothing about that; it may have room later, when nobody asks again.
    """
    path = directory / PROBE_NAME
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        path.unlink(missing_ok=True)
        return False
    try:
        page = mmap.mmap(-1, ALIGNMENT)
        return os.pwritev(descriptor, [page], 0) == ALIGNMENT and os.preadv(descriptor, [page], 0) == ALIGNMENT
    except OSError as error:
        return has_no_room(error)
    finally:
        os.close(descriptor)
        path.unlink(missing_ok=True)


def _is_whole_pages(parts: Sequence[memoryview]) -> bool:
    return not any(part.nbytes % ALIGNMENT for part in parts)


def _after(parts: Sequence[memoryview], done: int) -> Sequence[memoryview]:
    """The parts behind the first `done` bytes."""
    if not done:
        return parts
    rest = []
    for part in parts:
        if done < part.nbytes:
            rest.append(part[done:])
        done = max(0, done - part.nbytes)
    return rest
