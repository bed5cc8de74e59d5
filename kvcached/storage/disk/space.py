"""The files of slots in a directory: which there are, where a free slot is, when one is given back."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import sqlite3
from pathlib import Path
from typing import Final

from kvcached.storage.disk.index import INDEX_BYTES, INDEX_BYTES_PER_BLOCK
from kvcached.storage.disk.settings import DiskSettings
from kvcached.storage.disk.slots import ALIGNMENT, LABEL_BYTES, SlotFile, create_slot_file, slot_files

_NO_ROOM: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

#: What a slot takes of the capacity besides its bytes.
_BESIDE_BYTES: Final = LABEL_BYTES + INDEX_BYTES_PER_BLOCK
#: A file is so large unless the capacity asks for other sizes: large enough that few descriptors are open, small enough
#: that giving one back to the file system costs little of the cache.
_FILE_BYTES: Final = 256 << 20
#: Files of regular size, three descriptors each.
_FILES_MAX: Final = 128
_FILES_MIN: Final = 4
#: A new file has at least this part of its regular number of slots: many small ones would exhaust descriptors.
_LEAST_SHARE: Final = 8

_log: Final = logging.getLogger(__name__)


class DiskSpace:
    """All files. One caller at a time.

    Attributes:
        files: by their numbers.
        refusal: why the last file that was wanted could not be made; empty where it was made.
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
        self.files: dict[int, SlotFile] = {}
        for path in slot_files(settings.directory):
            file = SlotFile(path, direct=self._direct)
            self.files[file.number] = file

    @property
    def blocks(self) -> int:
        """Slots in use, those being written included."""
        return sum(file.slots - len(file.free) for file in self.files.values())

    @property
    def used_bytes(self) -> int:
        """Of these slots."""
        return sum((file.slots - len(file.free)) * file.slot_bytes for file in self.files.values())

    @property
    def _taken_bytes(self) -> int:
        return sum(file.slots * (file.slot_bytes + _BESIDE_BYTES) for file in self.files.values())

    def could_hold(self, slot_bytes: int) -> bool:
        """Whether a slot of that size fits the capacity at all."""
        return slot_bytes + _BESIDE_BYTES <= self._room_bytes

    def take(self, slot_bytes: int) -> tuple[SlotFile, int] | None:
        """A free slot of that size, in a new file if need be; None where there is none and no room for a file."""
        file = next((each for each in self.files.values() if each.slot_bytes == slot_bytes and each.free), None)
        if file is None:
            file = self._new_file(slot_bytes)
        return None if file is None else (file, file.free.pop())

    def _new_file(self, slot_bytes: int) -> SlotFile | None:
        settings, cost = self._settings, slot_bytes + _BESIDE_BYTES
        left_bytes, free_bytes = self._room_bytes - self._taken_bytes, self._free_space_bytes()
        room = min(left_bytes, free_bytes - settings.free_space_floor_bytes)
        regular = max(1, file_bytes_for(self._room_bytes) // cost)
        slots = min(regular, room // cost)
        if slots < max(1, regular // _LEAST_SHARE):
            if room == left_bytes:
                self.refusal = "capacity_bytes is used up"
            else:
                self.refuse_for_others(free_bytes)
            return None
        number = max(self.files, default=0) + 1
        try:
            file = create_slot_file(settings.directory, number, slot_bytes, slots, direct=self._direct)
        except OSError as error:
            refusal = f"no file of {slots * slot_bytes} bytes can be made in {settings.directory}: {error.strerror}"
            if refusal != self.refusal:  # once, not for each block
                _log.warning("%s", refusal)
            self.refusal = refusal
            return None
        self.files[number], self.refusal = file, ""
        return file

    def use_times(self) -> list[int]:
        """When each file was used last, in nanoseconds."""
        return [file.used_ns for file in self.files.values()]

    def coldest(self) -> SlotFile | None:
        """The file of which no block was used for longest."""
        return min(self.files.values(), key=lambda file: file.used_ns, default=None)

    def excess_bytes(self) -> int:
        """What has to be given back: the capacity was made smaller, or others need the file system."""
        lacking = self._settings.free_space_floor_bytes - self._free_space_bytes()
        return max(0, lacking, self._taken_bytes - self._room_bytes)

    def retire(self, file: SlotFile) -> None:
        """Give a file back to the file system."""
        del self.files[file.number]
        file.retire()

    def refuse_for_others(self, free_bytes: int | None = None) -> None:
        """The floor is the reason why there is no room."""
        free_bytes = self._free_space_bytes() if free_bytes is None else free_bytes
        floor = f"free_space_floor_bytes is {self._settings.free_space_floor_bytes}"
        self.refusal = f"{self._settings.directory}: {free_bytes} bytes are free, and {floor}"

    def _free_space_bytes(self) -> int:
        state = os.statvfs(self._settings.directory)
        return state.f_bavail * state.f_frsize


def file_bytes_for(room_bytes: int) -> int:
    """The size of a file of slots: between a quarter and 1/128 of all of them together."""
    return min(room_bytes // _FILES_MIN, max(_FILE_BYTES, room_bytes // _FILES_MAX))


def slot_bytes_for(size_bytes: int) -> int:
    """The slots that values of a size go to."""
    return max(1, -(-size_bytes // ALIGNMENT)) * ALIGNMENT


def _takes_direct_io(directory: Path) -> bool:
    """Whether the file system reads and writes past the page cache: some refuse to open, some to write."""
    path = directory / "probe"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        path.unlink(missing_ok=True)
        return False
    try:
        page = mmap.mmap(-1, ALIGNMENT)
        return os.pwritev(descriptor, [page], 0) == ALIGNMENT and os.preadv(descriptor, [page], 0) == ALIGNMENT
    except OSError:
        return False
    finally:
        os.close(descriptor)
        path.unlink(missing_ok=True)


def has_no_room(error: Exception) -> bool:
    """Whether a full file system is the reason, or a limit of the user's."""
    if isinstance(error, OSError):
        return error.errno in _NO_ROOM
    return isinstance(error, sqlite3.OperationalError) and error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_FULL
