"""Keeps the record of generations up to date: what is cleared has to outlive the machine's restart, as storage does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final, NamedTuple

from kvcached.config.tables import StorageLayout
from kvcached.core.generations import Edition, Generations
from kvcached.recovery.generations import EditionRecord, Record, RecordWriter, recorded_layout
from kvcached.service.pending import Later, Timer
from kvcached_client.errors import ErrorCode, request_error

#: A write of the record of generations that takes longer has failed for the clears that wait for it, though it may
#: still succeed. Shorter than a client's deadline, so that the client gets the reason.
WRITE_DEADLINE_S: Final = 5.0

_NOT_OPEN: Final = "storage is not open"

_log: Final = logging.getLogger(__name__)


class _Contents(NamedTuple):
    """The versions of a record's contents."""

    version: int
    forgets: tuple[bytes, ...]


class Recorder:
    """Writes the record whenever it has changed, one write at a time.

    Args:
        generations: of all namespaces.
        later: sets timers.

    Attributes:
        forgets: how keys in storage begin that are to be forgotten yet.
        why: why the last write failed, or nothing is written now; empty = it did not fail.
        settled: called when a write is over, whatever came of it.
    """

    def __init__(self, generations: Generations, later: Later) -> None:
        self.forgets: Callable[[], Iterable[bytes]] = tuple
        self.why = ""
        self.settled: Callable[[], None] = lambda: None
        self._generations = generations
        self._later = later
        self._writer: RecordWriter | None = None
        self._layout: StorageLayout = "engine"
        self._is_shared = False
        self._is_open = False
        self._is_writing = False
        self._is_late = False
        self._timer: Timer | None = None
        self._tried: _Contents | None = None
        self._written_version = -1
        self._offered: Mapping[bytes, Edition] = {}
        self._recorded: Mapping[bytes, Edition] = {}
        self._shown = set(generations.editions.items())

    def use(self, writer: RecordWriter, layout: StorageLayout = "engine", *, is_shared: bool = False) -> None:
        """There is storage: nothing that it may remember is written down before `open`, when it is there."""
        self._writer, self._layout, self._is_shared, self.why = writer, layout, is_shared, _NOT_OPEN

    def withdraw(self) -> None:
        """Storage turns out to keep no record: no clear waits for one."""
        self._writer, self.why = None, ""
        self.settled()

    @property
    def is_canonical(self) -> bool:
        """Whether namespaces may have another root in storage."""
        return self._layout == "canonical"

    def found(self, record: Record) -> None:
        """What the record was when it was read."""
        self._recorded = record.by_root()
        self._shown.update(self._recorded.items())

    def has_recorded(self, root: bytes, edition: Edition) -> bool:
        """Whether the record had this edition of a namespace when this daemon last read or wrote it."""
        return self._recorded.get(root) == edition

    def may_be_known(self, root: bytes, edition: Edition) -> bool:
        """Whether another daemon, or an earlier life of this one, may have stored blocks of an edition.

        Every write counts that was begun: a failed one may have replaced the record all the same.
        """
        return (root, edition) in self._shown

    def open(self) -> None:
        """Storage is there, maybe on another device than before: the record is written to it."""
        self._is_open, self._tried = True, None
        self.keep()

    def close(self) -> None:
        """Storage is away, and another daemon may have its directory: nothing is written until `open`."""
        self._is_open, self.why = False, _NOT_OPEN

    def keep(self) -> None:
        """Begin to write what has changed since the last time. Nothing waits here, and nothing is raised."""
        if self._writer is None or not self._is_open or self._is_writing:
            return
        contents = _Contents(self._generations.version, tuple(self.forgets()))
        if contents == self._tried:
            return
        self._tried, self._is_writing, self._offered = contents, True, dict(self._generations.editions)
        self._shown = set(self._offered.items())
        self._timer = self._later(WRITE_DEADLINE_S, self._on_late)
        self._writer.write(self._record(contents), partial(self._over, contents))

    def overtaken(self) -> None:
        """Another daemon had replaced the record before the write that was begun, which did nothing: write again."""
        self._end_write()
        self._tried = None
        self.keep()
        self.settled()

    def again(self) -> None:
        """Try once more, where the last write failed."""
        if self.why:
            self._tried = None
            self.keep()

    @property
    def version(self) -> int:
        """Of the present editions."""
        return self._generations.version

    def holds(self, version: int) -> bool:
        """Whether the editions of a version, or later ones, outlive the machine's restart, as far as storage does."""
        return self._writer is None or self._written_version >= version

    def check(self, version: int) -> bool:
        """As `holds`, for whoever waits for it.

        Raises:
            RequestError: they were not written, and nothing is under way that may do so.
        """
        if self.failed(version):
            raise request_error(
                ErrorCode.INTERNAL,
                "the namespace is cleared, but a restart of the machine would bring back what storage had of it, and "
                f"daemons that share storage still have it: {self.why}"
                if self._is_shared
                else "the namespace is cleared, but a restart of the machine would bring back what storage had of it: "
                f"{self.why}",
                "see that storage can be written, and clear it again",
            )
        return self.holds(version)

    def failed(self, version: int) -> bool:
        """Whether those of a version were not written, and nothing is under way that may do so."""
        return not self.holds(version) and (self._is_late or not self._is_writing)

    def _over(self, contents: _Contents, why: str) -> None:
        self._end_write()
        if why and why != self.why:
            _log.error("the record of generations cannot be written, so clears are not answered: %s", why)
        self.why = why if self._is_open else _NOT_OPEN
        if not why:
            self._written_version, self._recorded = contents.version, self._offered
        self.keep()
        self.settled()

    def _end_write(self) -> None:
        self._is_writing = self._is_late = False
        if self._timer is not None:
            self._timer.cancel()

    def _on_late(self) -> None:
        self._is_late, self.why = True, f"its device has not answered for {WRITE_DEADLINE_S:g} s"
        _log.error("the record of generations is not written: %s", self.why)
        self.settled()

    def _record(self, contents: _Contents) -> Record:
        return Record(
            layout=recorded_layout(self._layout),
            editions=tuple(
                EditionRecord(namespace=root.hex(), generation=each.generation, weights_version=each.weights_version)
                for root, each in self._offered.items()
            ),
            forgets=tuple(prefix.hex() for prefix in contents.forgets),
        )
