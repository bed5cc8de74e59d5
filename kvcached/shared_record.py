"""The record of generations of storage that daemons of several machines share.

The service keeps the record, and replaces it only by a record that was made from the one that is there. So two clears
at the same time are both recorded. Each daemon looks at the record every few seconds, and clears what another one has
cleared.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine
from functools import partial
from typing import Final

import msgspec

from kvcached.config.tables import StorageLayout
from kvcached.core.messages import StorageEmptied
from kvcached.recovery.generations import Record, recorded_layout
from kvcached.service.service import Service
from kvcached.storage.client import FORGET_S_MAX, StorageLink
from kvcached.storage.forgets import FORGETS_DUE_MAX
from kvcached.storage.link_state import LinkState
from kvcached.storage.messages import Done, Forget
from kvcached.storage.record_exchange import RecordExchange

#: So long after a clear, other daemons may still be in the generation before it.
FOLLOW_INTERVAL_S: Final = 5.0

_log: Final = logging.getLogger(__name__)


class SharedRecord:
    """Follows the record while storage is open, and writes it: a `RecordWriter`.

    Args:
        service: what it clears, and where its record is kept up to date.
        link: to the storage process.
        exchange: reads and writes the record there.
        layout: of storage, which all daemons that share it must have.
        take_in: goes on where a record that was found ends: clears and forgets what it says.
    """

    def __init__(
        self,
        service: Service,
        link: StorageLink,
        exchange: RecordExchange,
        layout: StorageLayout,
        take_in: Callable[[Record], None],
    ) -> None:
        self._service = service
        self._recorder = service.state_writer.recorder
        self._link = link
        self._exchange = exchange
        self._layout = layout
        self._take_in = take_in
        self._version = b""  #: of the record that was last read or written; empty = there was none
        self._record = Record()  #: that one
        self._ours: set[bytes] = set()  #: prefixes of it that this daemon has to forget, or has forgotten
        self._elsewhere: set[bytes] = set()  #: prefixes that another daemon has forgotten, and this one not yet
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._seen_s: float | None = None  #: when the record was last known to be that of the service
        self._is_foreign = False  #: the record that is there is none that this daemon can follow
        self._is_replacing = False  #: somebody has confirmed that it is to be replaced
        self._cleared_count = 0  #: how often everything was deleted for that

    def age_ms(self) -> int:
        """How long ago the service's record was seen: others may have cleared since. -1 = it is shared with nobody."""
        return -1 if self._seen_s is None else int((self._loop.time() - self._seen_s) * 1000)

    def expect(self) -> None:
        """Storage may turn out to be shared: no clear is answered before it is recorded there."""
        self._recorder.forgets = self._forgets
        self._recorder.use(self, self._layout, is_shared=True)

    def begin(self, go_on: Callable[[], None]) -> None:
        """Storage is open: follow its record, if it keeps one, and call `go_on`. If it cannot be followed, end it."""
        if not self._link.is_shared:
            self._recorder.withdraw()
            go_on()
            return
        self._exchange.read(b"", partial(self._opened, self._link.lives, go_on))

    def write(self, record: Record, done: Callable[[str], None]) -> None:
        """Replace the record, if no other daemon has replaced it since it was read; else follow that one first."""
        self._ours.update(self._link.due)
        if self._version and not self._is_foreign and _same(record, self._record):
            self._loop.call_soon(done, "")
            return
        self._exchange.write(msgspec.json.encode(record), self._version, partial(self._written, record, done))

    def begin_anew(self) -> Coroutine[None, None, bool] | None:
        """Delete all that storage has, and replace a record that cannot be followed; None if that is not the trouble.

        For who has confirmed it: daemons that can follow the record cannot do so afterwards. What others have cleared
        is not known any more, so that all namespaces begin new generations.

        Returns:
            Whether everything was deleted, and storage works then. It may also work without: the trouble has passed.
        """
        is_away = self._link.state in {LinkState.STARTING, LinkState.WAITING}
        return self._begin_anew() if self._is_foreign and is_away else None

    def close(self) -> None:
        """Follow it no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _opened(self, life: int, go_on: Callable[[], None], done: Done, data: bytes) -> None:
        if life != self._link.lives:
            return  # the process has died, and another one will ask
        if done.failed:
            self._link.refuse(f"the record of generations cannot be read: {done.error}")
        elif self._is_replacing and _why_foreign(done, data, self._layout):
            cleared = partial(self._cleared, life, done.version, go_on)
            self._link.ask(lambda number: Forget(sequence=number, prefix=b""), cleared)
        elif self._follow(done, data, self._take_in):
            _log.info("storage is shared: its record names %d namespaces", len(self._record.editions))
            self._look_later()
            go_on()

    async def _begin_anew(self) -> bool:
        before = self._cleared_count  # several may ask at once, and one deletion is for all of them
        await self._link.started(FORGET_S_MAX)  # a start that is under way may have read the record before
        self._is_replacing = True
        try:
            self._link.attach()
            is_ready = await self._link.started(FORGET_S_MAX)
            return is_ready and self._cleared_count > before
        finally:
            self._is_replacing = False

    def _cleared(self, life: int, version: bytes, go_on: Callable[[], None], done: Done) -> None:
        """There are no blocks beside the record of this version, which the next write replaces."""
        if life != self._link.lives:
            return
        if done.failed:
            self._link.refuse(f"storage did not forget everything: {done.error}")
            return
        self._cleared_count += 1
        self._version, self._record, self._seen_s = version, Record(), self._loop.time()
        self._service.clears.lose_record(is_shared=True)
        self._look_later()
        go_on()

    def _look_later(self) -> None:
        self.close()
        self._timer = self._loop.call_later(FOLLOW_INTERVAL_S, self._look)

    def _look(self) -> None:
        if self._link.state in {LinkState.DETACHED, LinkState.STARTING, LinkState.WAITING}:
            return  # it is read when storage is open again
        self._exchange.read(self._version, self._seen)

    def _seen(self, done: Done, data: bytes) -> None:
        self._look_later()
        if done.failed:
            return
        if done.version == self._version and not (done.count or done.error):
            self._seen_s = self._loop.time()
            self._recorder.again()  # if the last write has failed
        elif self._follow(done, data, self._recorder.found):
            self._recorder.open()  # what this daemon knows and the record lacks is written

    def _written(self, record: Record, done: Callable[[str], None], end: Done, data: bytes) -> None:
        if end.failed:
            done(end.error)
        elif end.written:
            self._is_foreign = False
            self._version, self._record, self._seen_s = end.version, record, self._loop.time()
            done("")
        elif self._follow(end, data, self._recorder.found):
            self._recorder.overtaken()
        else:
            done("the record that is there cannot be followed")

    def _follow(self, done: Done, data: bytes, take_in: Callable[[Record], None]) -> bool:
        """Clear what the record that is there says, which is of a version of its own; False if it cannot be read."""
        why = _why_foreign(done, data, self._layout)
        self._is_foreign = bool(why)
        if why:
            fix = "kvcached storage clear replaces it, and deletes the blocks of all daemons"
            self._link.refuse(f"the record of generations cannot be followed: {why}; {fix}")
            return False
        if not done.version:
            self._version, self._record, self._seen_s = b"", Record(), self._loop.time()
            if self._link.usage.blocks:  # what other daemons have cleared is not known, and blocks may be there
                self._service.clears.lose_record(is_shared=True)
            else:
                self._service.on_event(StorageEmptied())
            return True
        record = _decoded(data)
        if _is_before(record, self._record):
            # It was lost, and another daemon, which did not know it, has begun a new one.
            self._service.clears.lose_record(is_shared=True)
        before, self._version, self._record = self._record, done.version, record
        self._seen_s = self._loop.time()
        self._service.clears.follow(record.by_root(), is_shared=True)
        self._service.state_writer.forget_editions(before.by_root().keys() - record.by_root().keys())
        take_in(record)
        forgets = set(map(bytes.fromhex, record.forgets))
        self._elsewhere = (self._elsewhere | (set(map(bytes.fromhex, before.forgets)) - forgets)) & set(self._link.due)
        self._ours &= {*self._link.due, *forgets}
        return True

    def _forgets(self) -> Collection[bytes]:
        """What this daemon has to forget, behind what others have: they forget it, unless they end before that."""
        others = (bytes.fromhex(each) for each in self._record.forgets)
        due = self._link.due
        kept = [each for each in others if each not in self._ours and each not in due][-FORGETS_DUE_MAX:]
        return kept + [each for each in due if each not in self._elsewhere]


def _decoded(data: bytes) -> Record:
    return msgspec.json.decode(data, type=Record)


def _why_foreign(done: Done, data: bytes, layout: StorageLayout) -> str:
    """Why what is in the place of the record cannot be followed; empty if it can, or there is nothing."""
    if done.error or not done.version:
        return done.error
    try:
        is_right = _decoded(data).layout == recorded_layout(layout)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        return str(error)
    what = "blocks there have another layout; give all daemons that share it the same [storage] layout"
    return "" if is_right else what


def _is_before(record: Record, known: Record) -> bool:
    """Whether a record has an earlier generation of a namespace than one that was there before it."""
    editions = record.by_root()
    return any(
        root in editions and editions[root].generation < each.generation for root, each in known.by_root().items()
    )


def _same(record: Record, other: Record) -> bool:
    return record.by_root() == other.by_root() and set(record.forgets) == set(other.forgets)
