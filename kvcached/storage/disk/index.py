"""Where each block is on disk, and when it was last used: a table in SQLite.

The index is a convenience: labels say what slots hold. An entry that no label bears out is a miss, and an index that is
missing, damaged or of another format is made anew from the labels. So it is never synced, not even at checkpoints: a
commit costs no wait for the device, and what a loss of power tears is made anew.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

#: What a block's entries in table and second index take at most: 130 bytes where pages are full.
INDEX_BYTES_PER_BLOCK: Final = 320

_FORMAT: Final = 1
_APPLICATION: Final = 0x4B564353  # "KVCS"
_CACHE_KIB: Final = 16 << 10
_LOG_PAGES: Final = 256
#: What the index takes without a block in it: most of that for its log, which is written back every MiB.
INDEX_BYTES: Final = 2 << 20
_SETTINGS: Final = (
    "PRAGMA locking_mode = EXCLUSIVE",  # nobody else opens it: no shared memory beside the file
    "PRAGMA synchronous = OFF",
    f"PRAGMA cache_size = -{_CACHE_KIB}",
    f"PRAGMA wal_autocheckpoint = {_LOG_PAGES}",
    "PRAGMA journal_size_limit = 1048576",
)
_TABLE: Final = """
    CREATE TABLE block (
        key BLOB PRIMARY KEY, place INTEGER NOT NULL, slot_bytes INTEGER NOT NULL, size INTEGER NOT NULL,
        stored INTEGER NOT NULL, used INTEGER NOT NULL
    ) WITHOUT ROWID
"""
_BY_USE: Final = "CREATE INDEX block_use ON block (slot_bytes, used)"
_ENTRY: Final = "SELECT key, place, slot_bytes, size, stored FROM block"
_PLACE_BITS: Final = 32
#: Errors that the file is not to blame for. All others are damage: what is asked of SQLite is always the same.
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
_ROWS_AT_A_TIME: Final = 1 << 14
_STAMPS_AT_A_TIME: Final = 1 << 16

#: What an entry and a label have in common that no other two have, and when the block was last used; of many entries.
STAMP: Final = np.dtype([("place", "<i8"), ("stored", "<i8"), ("used", "<i8")])
#: A block, for many at a time: the columns of the table.
ROW: Final = np.dtype(
    [("key", "V32"), ("place", "<i8"), ("slot_bytes", "<i8"), ("size", "<i8"), ("stored", "<i8"), ("used", "<i8")]
)


class Entry(NamedTuple):
    """One block.

    Attributes:
        place: number of its file, and slot in it (`place_of`).
        slot_bytes: of the file's slots.
        size_bytes: of the value.
        stored_ns: as its label says.
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
        """Its slot in it."""
        return self.place & ((1 << _PLACE_BITS) - 1)


def place_of(file: int, slot: int) -> int:
    """A file's number and a slot in it, in one number."""
    return file << _PLACE_BITS | slot


def split_places(places: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The contrary, for many: files, and slots in them."""
    return places >> _PLACE_BITS, places & ((1 << _PLACE_BITS) - 1)


class IndexDamaged(Exception):
    """The index is not what was written: make it anew."""


class DiskIndex:
    """The open index. One caller at a time; every method raises `IndexDamaged`, or sqlite3.Error where I/O fails."""

    def __init__(self, path: Path) -> None:
        """Open what is there.

        Raises:
            IndexDamaged: nothing, or nothing that can be used.
        """
        if not path.exists():
            raise IndexDamaged("there is none")
        _read_ahead(path)
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
        verdict = self._database.execute("PRAGMA quick_check(1)").fetchone()[0]
        if verdict != "ok":
            raise IndexDamaged(verdict)
        self._database.execute(f"{_ENTRY} LIMIT 0")

    def _number(self, query: str) -> int:
        return cast("int", self._database.execute(query).fetchone()[0])

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
        """The entries of those that there are."""
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
        """Of blocks in slots of that size, those that were not used for longest."""
        return self._entries("WHERE slot_bytes = ? ORDER BY used LIMIT ?", slot_bytes, count)

    def under(self, prefix: bytes, count: int) -> list[Entry]:
        """Some of the blocks whose key begins so."""
        return self._entries("WHERE key BETWEEN ? AND ? LIMIT ?", prefix, prefix.ljust(64, b"\xff"), count)

    def stored_before(self, moment_ns: int, count: int) -> list[Entry]:
        """Some of the blocks that are older."""
        return self._entries("WHERE stored < ? LIMIT ?", moment_ns, count)

    def _entries(self, condition: str, *values: object) -> list[Entry]:
        with _DAMAGE:
            return [_entry(row) for row in self._database.execute(f"{_ENTRY} {condition}", values)]

    def count(self) -> int:
        """Entries."""
        with _DAMAGE:
            return self._number("SELECT count(*) FROM block")

    def stamps(self) -> Iterator[NDArray[np.void]]:
        """Every entry's place and times, of the type `STAMP`, many at a time."""
        with _DAMAGE:
            rows = self._database.execute("SELECT place, stored, used FROM block")
            try:
                while len(some := np.fromiter(islice(rows, _STAMPS_AT_A_TIME), STAMP)):
                    yield some
            except (TypeError, ValueError, OverflowError) as error:
                raise IndexDamaged("an entry of other types") from error

    def add(self, entry: Entry, used_ns: int) -> bool:
        """Note a block; False where its key is there already."""
        with _DAMAGE:
            values = (*entry, used_ns)
            return self._database.execute("INSERT OR IGNORE INTO block VALUES (?, ?, ?, ?, ?, ?)", values).rowcount > 0

    def remove(self, blocks: Iterable[tuple[bytes, int]]) -> int:
        """Forget blocks, by key and time, unless they were stored anew meanwhile; returns how many there were."""
        with _DAMAGE:
            query = "DELETE FROM block WHERE key = ? AND stored = ?"
            return self._database.executemany(query, blocks).rowcount

    def touch(self, used_ns: Iterable[tuple[bytes, int]]) -> None:
        """Note when blocks were used last."""
        with _DAMAGE:
            query = "UPDATE block SET used = ? WHERE key = ?"
            self._database.executemany(query, ((moment, key) for key, moment in used_ns))

    def close(self) -> None:
        """Write the log back and close."""
        with _DAMAGE:
            self._database.close()


def create_index(path: Path, rows: Iterable[NDArray[np.void]]) -> DiskIndex:
    """A new index in the place of what there is, of rows of the type `ROW`. Of those with one key any one counts."""
    draft = path.with_name(f"{path.name}.new")
    for each in (*index_files(draft), *index_files(path)):
        each.unlink(missing_ok=True)
    os.close(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    database = _connect(draft, journal="OFF")
    try:
        database.execute("BEGIN")
        database.execute(f"PRAGMA application_id = {_APPLICATION}")
        database.execute(_TABLE)
        # In the order of the table, and the second index from all of them at once: pages are written one after another.
        database.executemany("INSERT OR IGNORE INTO block VALUES (?, ?, ?, ?, ?, ?)", _sorted_rows(rows))
        database.execute(_BY_USE)
        database.execute(f"PRAGMA user_version = {_FORMAT}")
        database.execute("COMMIT")
    finally:
        database.close()
    draft.replace(path)
    return DiskIndex(path)


def _sorted_rows(rows: Iterable[NDArray[np.void]]) -> Iterator[tuple[object, ...]]:
    """All rows by their keys."""
    table = np.concatenate([np.empty(0, ROW), *rows])
    order = np.argsort(np.ascontiguousarray(table["key"]).view("S32"))
    for first in range(0, len(order), _ROWS_AT_A_TIME):
        yield from table[order[first : first + _ROWS_AT_A_TIME]].tolist()


def index_files(path: Path) -> list[Path]:
    """What an index consists of, whether it is there or not."""
    return [path, *(path.with_name(f"{path.name}-{suffix}") for suffix in ("wal", "shm", "journal"))]


def _read_ahead(path: Path) -> None:
    """All of it is about to be read, page by page: let the device begin with that in order."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
    finally:
        os.close(descriptor)


def _connect(path: Path, *, journal: str = "WAL") -> sqlite3.Connection:
    database = sqlite3.connect(path, isolation_level=None, check_same_thread=False, cached_statements=32)
    try:
        for setting in (*_SETTINGS, f"PRAGMA journal_mode = {journal}"):
            database.execute(setting)
    except BaseException:
        database.close()
        raise
    return database


def _entry(row: tuple[object, ...]) -> Entry:
    """What a row says, if a row of that kind was ever written: SQLite has no checksums."""
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
    """Errors of SQLite that tell of damage become `IndexDamaged`. A class, for it is entered for each block."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, UnicodeDecodeError):  # a message that quotes damaged text
            raise IndexDamaged(str(error)) from error
        if isinstance(error, sqlite3.DatabaseError):
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
            if code not in _OF_THE_SYSTEM:
                raise IndexDamaged(str(error)) from error


_DAMAGE: Final = _Damage()
