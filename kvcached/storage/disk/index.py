"""The index of a directory: which block each slot holds and when it was last used, in SQLite.

The index is the only record of what is stored: a slot without an entry is free. An entry is removed before its slot is
given away, and added when the value is written. A killed process loses nothing that was committed. SQLite syncs the log
before it changes the database (`synchronous = NORMAL`), so after a loss of power the index is whole, and at most some
seconds old: the frames of values tell which of its entries are still right.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

#: Size of a block's entries in the table and its two indexes, at most: 135 bytes where pages are full.
INDEX_BYTES_PER_BLOCK: Final = 320

_FORMAT: Final = 2
_APPLICATION: Final = 0x4B564353  # "KVCS"
_CACHE_KIB: Final = 16 << 10
_LOG_PAGES: Final = 256
#: Size of the index without a block in it. Most of this is its log, which is written back every MiB.
INDEX_BYTES: Final = 2 << 20
_SETTINGS: Final = (
    "PRAGMA locking_mode = EXCLUSIVE",  # no other process opens it: no shared memory beside the file
    "PRAGMA synchronous = NORMAL",
    "PRAGMA cell_size_check = ON",
    f"PRAGMA cache_size = -{_CACHE_KIB}",
    f"PRAGMA wal_autocheckpoint = {_LOG_PAGES}",
    "PRAGMA journal_size_limit = 1048576",
    "PRAGMA journal_mode = WAL",
)
_SCHEMA: Final = (
    """
    CREATE TABLE block (
        place INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE, slot_bytes INTEGER NOT NULL, size INTEGER NOT NULL,
        stored INTEGER NOT NULL, used INTEGER NOT NULL
    )
    """,
    "CREATE INDEX block_use ON block (slot_bytes, used)",
    f"PRAGMA application_id = {_APPLICATION}",
    f"PRAGMA user_version = {_FORMAT}",
)
_ENTRY: Final = "SELECT key, place, slot_bytes, size, stored FROM block"
_PLACE_BITS: Final = 32
#: Errors that are not caused by the file's content. All others are damage: the statements are always the same.
_OF_THE_SYSTEM: Final = {
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN,
}
#: Errors of the file's content, which SQLite also reports where the device fails to read (EIO, ENXIO).
_OF_THE_CONTENT: Final = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
_READ_BYTES: Final = 1 << 20
_USES_AT_A_TIME: Final = 1 << 16
#: An entry's place and last use, for many entries at a time.
_USE: Final = np.dtype([("place", "<i8"), ("used", "<i8")])


class Entry(NamedTuple):
    """One block.

    Attributes:
        place: number of its file, and slot in it (`place_of`).
        slot_bytes: size of the file's slots.
        size_bytes: size of the value.
        stored_ns: when it was stored; no two entries of one process have the same.
    """

    key: bytes
    place: int
    slot_bytes: int
    size_bytes: int
    stored_ns: int

    @property
    def file(self) -> int:
        """Number of its file."""
        return self.place >> _PLACE_BITS

    @property
    def slot(self) -> int:
        """Its slot in the file."""
        return self.place & ((1 << _PLACE_BITS) - 1)


def sync_log(path: Path) -> None:
    """Whatever an index at this path has committed outlives a loss of power from now on.

    Its log has what the database has not: SQLite syncs the database before it begins the log anew. No lock of SQLite's
    is on the log, so that closing a descriptor of it takes none away.
    """
    try:
        log = os.open(path.with_name(f"{path.name}-wal"), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:  # nothing was written since the index was opened
        return
    try:
        os.fsync(log)
    finally:
        os.close(log)


def place_of(file: int, slot: int) -> int:
    """A file's number and a slot in it, in one number."""
    return file << _PLACE_BITS | slot


class IndexDamaged(Exception):
    """The index is missing, or is not what was written.

    Args:
        why: in words.
        is_certain: the content was read and is wrong. Else SQLite says so, which it also does where a read has failed:
            `reopen_index` tells one from the other.
    """

    def __init__(self, why: str, *, is_certain: bool = True) -> None:
        super().__init__(why)
        self.is_certain = is_certain


class DiskIndex:
    """The open index. One caller at a time; every method raises `IndexDamaged`, or sqlite3.Error where I/O fails."""

    def __init__(self, path: Path) -> None:
        """Open the index that is there.

        Raises:
            IndexDamaged: there is none, or it cannot be used.
            OSError, sqlite3.Error: it cannot be read.
        """
        if not path.exists():
            raise IndexDamaged("there is none")
        _read_through(path)
        with _DAMAGE:
            self._database = _connect(path)
            try:
                self._verify()
            except BaseException:
                self._database.close()
                raise

    def _verify(self) -> None:
        found = tuple(self._number(f"PRAGMA {each}") for each in ("application_id", "user_version"))
        if found != (_APPLICATION, _FORMAT):
            raise IndexDamaged(f"it is of another format: {found}")
        self._database.execute(f"{_ENTRY} LIMIT 0")

    def _number(self, query: str) -> int:
        return cast("int", self._database.execute(query).fetchone()[0])

    def check(self) -> None:
        """Read everything, and compare the table with its indexes."""
        with _DAMAGE:
            (found,) = self._database.execute("PRAGMA integrity_check(1)").fetchone()
        if found != "ok":
            raise IndexDamaged(found)

    @contextmanager
    def changes(self) -> Iterator[None]:
        """All changes within are made, or none."""
        with _DAMAGE:
            self._database.execute("BEGIN")
            try:
                yield
                self._database.execute("COMMIT")
            except BaseException:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                raise

    def find(self, keys: Iterable[bytes]) -> dict[bytes, Entry]:
        """The entries of these keys, as far as there are any."""
        found = {}
        with _DAMAGE:
            for key in keys:
                row = self._database.execute(f"{_ENTRY} WHERE key = ?", (key,)).fetchone()
                if row is not None:
                    found[key] = _entry(row)
                    if row[0] != key:
                        raise IndexDamaged("an entry under another key")
        return found

    def oldest(self, slot_bytes: int, count: int) -> list[Entry]:
        """The least recently used blocks in slots of that size."""
        return self._entries("WHERE slot_bytes = ? ORDER BY used LIMIT ?", slot_bytes, count)

    def under(self, prefix: bytes, count: int) -> list[Entry]:
        """Some of the blocks whose key begins with the prefix."""
        return self._entries("WHERE key BETWEEN ? AND ? LIMIT ?", prefix, prefix.ljust(64, b"\xff"), count)

    def stored_before(self, moment_ns: int, count: int) -> list[Entry]:
        """Some of the blocks that are older."""
        return self._entries("WHERE stored < ? LIMIT ?", moment_ns, count)

    def _entries(self, condition: str, *values: object) -> list[Entry]:
        with _DAMAGE:
            return [_entry(row) for row in self._database.execute(f"{_ENTRY} {condition}", values)]

    def count(self) -> int:
        """Number of entries."""
        with _DAMAGE:
            return self._number("SELECT count(*) FROM block")

    def uses(self) -> Iterator[tuple[int, NDArray[np.int64], int]]:
        """What all entries say of the slots in use: a file's number, some of its slots, and their last use."""
        with _DAMAGE:
            # By the index of uses, from which blocks are evicted: an entry that it lacks would never be.
            rows = self._database.execute("SELECT place, used FROM block INDEXED BY block_use")
            try:
                while len(some := np.fromiter(islice(rows, _USES_AT_A_TIME), _USE)):
                    files, slots = some["place"] >> _PLACE_BITS, some["place"] & ((1 << _PLACE_BITS) - 1)
                    for file in np.unique(files).tolist():
                        is_in_it = files == file
                        yield file, slots[is_in_it], int(some["used"][is_in_it].max())
            except (TypeError, ValueError, OverflowError) as error:
                raise IndexDamaged("an entry of other types") from error

    def add(self, entry: Entry, used_ns: int) -> bool:
        """Add a block; False where its key is there already."""
        with _DAMAGE:
            query = """
                INSERT INTO block (key, place, slot_bytes, size, stored, used) VALUES (?, ?, ?, ?, ?, ?)
                ON CONFLICT (key) DO NOTHING
            """
            return self._database.execute(query, (*entry, used_ns)).rowcount > 0

    def remove(self, entries: Iterable[Entry]) -> list[Entry]:
        """Remove entries, unless their slots hold other blocks by now; returns those that were there."""
        with _DAMAGE:
            query = "DELETE FROM block WHERE place = ? AND stored = ?"
            return [each for each in entries if self._database.execute(query, (each.place, each.stored_ns)).rowcount]

    def remove_slots(self, file: int, first: int = 0) -> None:
        """Remove the entries of a file's slots, from the first one on."""
        with _DAMAGE:
            last = place_of(file, (1 << _PLACE_BITS) - 1)
            self._database.execute("DELETE FROM block WHERE place BETWEEN ? AND ?", (place_of(file, first), last))

    def touch(self, used_ns: Iterable[tuple[bytes, int]]) -> None:
        """Record when blocks were last used."""
        with _DAMAGE:
            query = "UPDATE block SET used = ? WHERE key = ?"
            self._database.executemany(query, ((moment, key) for key, moment in used_ns))

    def close(self) -> None:
        """Write the log back and close."""
        with _DAMAGE:
            self._database.close()


def reopen_index(path: Path) -> DiskIndex:
    """The index that is there, where it is whole: SQLite has called it damaged because a read has failed.

    Raises:
        IndexDamaged: it is still not what was written.
        OSError, sqlite3.Error: it cannot be read, so nobody knows.
    """
    index = DiskIndex(path)
    try:
        index.check()
    except BaseException:
        with suppress(IndexDamaged):
            index.close()
        raise
    return index


def create_index(path: Path) -> DiskIndex:
    """An empty index in the place of the one that is there."""
    for suffix in ("", "-wal", "-shm", "-journal"):
        path.with_name(f"{path.name}{suffix}").unlink(missing_ok=True)
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    database = _connect(path)
    try:
        database.execute("BEGIN")
        for statement in _SCHEMA:
            database.execute(statement)
        database.execute("COMMIT")
    finally:
        database.close()
    return DiskIndex(path)


def _read_through(path: Path) -> None:
    """Read the file and its log in order, before SQLite reads them page by page from the page cache.

    Raises:
        OSError: they cannot be read. SQLite would call some of these errors damage.
    """
    buffer = bytearray(_READ_BYTES)
    for each in (path, path.with_name(f"{path.name}-wal")):
        with suppress(FileNotFoundError), each.open("rb", buffering=0) as file:
            while os.readv(file.fileno(), [buffer]):
                pass


def _connect(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, isolation_level=None, check_same_thread=False, cached_statements=32)
    try:
        for setting in _SETTINGS:
            database.execute(setting)
    except BaseException:
        database.close()
        raise
    return database


def _entry(row: tuple[object, ...]) -> Entry:
    """A row's content, checked for its types: SQLite has no checksums."""
    key, place, slot_bytes, size_bytes, stored_ns = row
    if (
        isinstance(key, bytes)
        and isinstance(place, int)
        and isinstance(slot_bytes, int)
        and isinstance(size_bytes, int)
        and isinstance(stored_ns, int)
    ):
        return Entry(key, place, slot_bytes, size_bytes, stored_ns)
    raise IndexDamaged("an entry of other types")


class _Damage:
    """Turns SQLite's errors that mean damage into `IndexDamaged`. A class, because it is entered for each block."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, UnicodeDecodeError):  # a message that quotes damaged text
            raise IndexDamaged(str(error)) from error
        if isinstance(error, sqlite3.DatabaseError):
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
            if code not in _OF_THE_SYSTEM:
                raise IndexDamaged(str(error), is_certain=code not in _OF_THE_CONTENT) from error


_DAMAGE: Final = _Damage()
