"""A file of equal slots, and the file of labels beside it that says which block each slot holds.

A label is 64 bytes, little-endian::

      0   4s  magic     b"KVSL"
      4  u32  format    1
      8  u64  size      bytes of the value
     16  32s  key
     48  u64  stored    when, in nanoseconds; no two labels of a directory have the same
     56  u64  seal      xxh3_64 of the 56 bytes before

Zeros: the slot is free. A label is written after its value and erased before the slot is given away, so whoever knew of
a label and finds it after reading has read that one value. Nothing is ever synced: after a loss of power a label may be
there and its bytes not, which the value's own frame tells.
"""

from __future__ import annotations

import errno
import os
import re
import struct
import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

#: Of memory, sizes and offsets, for I/O past the page cache: no device asks for more.
ALIGNMENT: Final = 4096
LABEL_BYTES: Final = 64

_MAGIC: Final = b"KVSL"
_FORMAT: Final = 1
_BODY: Final = struct.Struct("<4sIQ32sQ")
_SEAL: Final = struct.Struct("<Q")
_LABEL: Final = np.dtype(
    [("magic", "S4"), ("format", "<u4"), ("size", "<i8"), ("key", "V32"), ("stored", "<i8"), ("seal", "<u8")]
)
_BLANK: Final = bytes(LABEL_BYTES)
_LABELS_READ: Final = 1 << 14
_MODE: Final = 0o600
_FLAGS: Final = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
_NAME: Final = re.compile(r"\d{8}-[1-9]\d{3,12}")
_IOV_MAX: Final = os.sysconf("SC_IOV_MAX")

_Vectored = Callable[[int, Sequence[memoryview], int], int]


class Label(NamedTuple):
    """Which value a slot holds."""

    key: bytes
    size_bytes: int
    stored_ns: int

    def pack(self) -> bytes:
        """As it stands in the file."""
        body = _BODY.pack(_MAGIC, _FORMAT, self.size_bytes, self.key, self.stored_ns)
        return body + _SEAL.pack(xxhash.xxh3_64_intdigest(body))


def unpack_label(data: bytes) -> Label | None:
    """The label, or None where this is no whole one."""
    if len(data) != LABEL_BYTES or _SEAL.unpack_from(data, _BODY.size)[0] != xxhash.xxh3_64_intdigest(
        data[: _BODY.size]
    ):
        return None
    magic, form, size_bytes, key, stored_ns = _BODY.unpack_from(data)
    return Label(key, size_bytes, stored_ns) if (magic, form) == (_MAGIC, _FORMAT) else None


class Labelled(NamedTuple):
    """Some of a file's slots that are not free.

    Attributes:
        slots: those that hold a value.
        labels: theirs; fields key, size, stored.
        damaged: slots whose label is none.
    """

    slots: NDArray[np.int64]
    labels: NDArray[np.void]
    damaged: list[int]


class SlotFile:
    """One such pair of files, open. Reading and writing need no lock; what is free is the caller's to guard.

    Attributes:
        number: of the file, in its directory.
        slot_bytes: of a slot, a multiple of 4096.
        slots: how many.
        free: slots that hold nothing and that nobody is about to write.
        used_ns: when one of its blocks was last used.
        is_retired: it was given back to the file system.
    """

    def __init__(self, path: Path, *, direct: bool) -> None:
        number, slot_bytes = path.stem.split("-")
        self.number, self.slot_bytes = int(number), int(slot_bytes)
        self._paths = (path, path.with_suffix(".labels"))
        self._buffered = self._open(path, 0)
        self._direct = self._open(path, os.O_DIRECT) if direct else self._buffered
        self._labels = self._open(self._paths[1], os.O_CREAT)
        self.slots = os.fstat(self._buffered).st_size // self.slot_bytes
        os.ftruncate(self._labels, self.slots * LABEL_BYTES)
        self.free = array("I")
        self.used_ns = 0
        self.is_retired = False
        self._survey()

    def _open(self, path: Path, flags: int) -> int:
        """A descriptor that is closed with the last reference to this object: a reader may outlast the file."""
        descriptor = os.open(path, _FLAGS | flags, _MODE)
        weakref.finalize(self, os.close, descriptor)
        return descriptor

    @property
    def size_bytes(self) -> int:
        """Of its slots."""
        return self.slots * self.slot_bytes

    def _survey(self) -> None:
        """Note the free slots, and when the newest block was stored."""
        for first, chunk in self._chunks():
            blank = ~chunk.view(np.uint64).reshape(-1, LABEL_BYTES // 8).any(axis=1)
            self.free.frombytes((np.flatnonzero(blank).astype(np.uint32) + np.uint32(first)).tobytes())
            stored = chunk.reshape(-1, LABEL_BYTES)[~blank, 48:56].copy().view(np.uint64)
            self.used_ns = max(self.used_ns, int(stored.max(initial=0)) & ((1 << 63) - 1))
        self.free.reverse()  # slots are taken from the end: the first ones first

    def stamps(self) -> NDArray[np.int64]:
        """For each slot when its value was stored, as its label says, sound or not; 0 where it is free."""
        stamps = np.zeros(self.slots, np.int64)
        for first, chunk in self._chunks():
            labels = chunk.reshape(-1, LABEL_BYTES)
            stored = chunk.view(_LABEL)["stored"]
            stamps[first : first + len(stored)] = np.where(labels.any(axis=1) & (stored == 0), -1, stored)
        return stamps

    def _chunks(self) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """All labels, many at a time: the first one's slot, and their bytes."""
        for first in range(0, self.slots, _LABELS_READ):
            count = min(_LABELS_READ, self.slots - first)
            data = os.pread(self._labels, count * LABEL_BYTES, first * LABEL_BYTES).ljust(count * LABEL_BYTES, b"\0")
            yield first, np.frombuffer(data, np.uint8)

    def labelled(self) -> Iterator[Labelled]:
        """Every slot that is not free, many at a time: a million labels are no million objects."""
        for first, chunk in self._chunks():
            labels = chunk.view(_LABEL)
            data = chunk.data
            seals = [xxhash.xxh3_64_intdigest(data[at : at + _BODY.size]) for at in range(0, len(data), LABEL_BYTES)]
            is_held = chunk.view(np.uint64).reshape(-1, LABEL_BYTES // 8).any(axis=1)
            is_sound = (
                (labels["seal"] == np.array(seals, np.uint64))
                & (labels["magic"] == _MAGIC)
                & (labels["format"] == _FORMAT)
            )
            slots = np.arange(first, first + len(labels))
            yield Labelled(slots[is_sound], labels[is_sound], slots[is_held & ~is_sound].tolist())

    def label(self, slot: int) -> Label | None:
        """Of one slot; None where it is free, damaged, or there is no such slot."""
        return unpack_label(os.pread(self._labels, LABEL_BYTES, slot * LABEL_BYTES))

    def set_label(self, slot: int, label: Label | None) -> None:
        """Say what a slot holds: a value that is written, or nothing."""
        os.pwrite(self._labels, _BLANK if label is None else label.pack(), slot * LABEL_BYTES)

    def release(self, slot: int) -> None:
        """A slot becomes free. Whoever reads it now finds no label afterwards."""
        self.set_label(slot, None)
        self.free.append(slot)

    def read(self, slot: int, parts: Sequence[memoryview]) -> bool:
        """Read a value into its parts; False where the file ends before."""
        return self._transfer(os.preadv, slot, parts)

    def write(self, slot: int, parts: Sequence[memoryview]) -> None:
        """Write a value.

        Raises:
            OSError: of the device; ENOSPC is there, too, where the file system keeps no promise about reserved space.
        """
        if not self._transfer(os.pwritev, slot, parts):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def _transfer(self, call: _Vectored, slot: int, parts: Sequence[memoryview]) -> bool:
        """Frame and parts in one call where the kernel takes them all; what a short call left goes buffered."""
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
        """Give it back to the file system. Those in the middle of reading find an end, those writing write nowhere."""
        self.is_retired = True
        self.free = array("I")
        for path, descriptor in zip(self._paths, (self._buffered, self._labels), strict=True):
            path.unlink(missing_ok=True)
            os.ftruncate(descriptor, 0)


def slot_files(directory: Path) -> list[Path]:
    """The files of slots in a directory. Labels that a killed attempt to make one has left are removed."""
    found = sorted(path for path in directory.glob("*.slots") if _NAME.fullmatch(path.stem))
    for path in directory.glob("*.labels"):
        if path.with_suffix(".slots") not in found:
            path.unlink()
    return found


def create_slot_file(directory: Path, number: int, slot_bytes: int, slots: int, *, direct: bool) -> SlotFile:
    """A new file whose space is reserved.

    Raises:
        OSError: there is no room for it; nothing is left of it.
    """
    path = directory / f"{number:08d}-{slot_bytes}.slots"
    labels = path.with_suffix(".labels")
    try:
        _preallocate(labels, slots * LABEL_BYTES)
        _preallocate(path, slots * slot_bytes)
    except OSError:
        for each in (path, labels):
            each.unlink(missing_ok=True)
        raise
    return SlotFile(path, direct=direct)


def _preallocate(path: Path, size_bytes: int) -> None:
    descriptor = os.open(path, _FLAGS | os.O_CREAT | os.O_EXCL, _MODE)
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    finally:
        os.close(descriptor)


def _is_whole_pages(parts: Sequence[memoryview]) -> bool:
    return not any(part.nbytes % ALIGNMENT for part in parts)


def _after(parts: Sequence[memoryview], done: int) -> Sequence[memoryview]:
    """What is left of the parts behind the first `done` bytes."""
    if not done:
        return parts
    rest = []
    for part in parts:
        if done < part.nbytes:
            rest.append(part[done:])
        done = max(0, done - part.nbytes)
    return rest
