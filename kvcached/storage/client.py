"""Between the core and the storage process: effects become orders, replies become events, failures become pauses.

::

    detached ─▶ starting ─▶ ready ⇄ suspended        failing, or slow: nothing is begun until it answers again
        ▲          ▲          │
        │          │          ▼
        └───────── waiting ◀──┘                      dead: started again, after longer and longer pauses
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Final

from kvcached.core.messages import (
    BackupSettled,
    FetchSettled,
    QueryStorage,
    StartBackup,
    StartFetch,
    StorageAnswered,
    StorageEvent,
    StorageLost,
    StorageReady,
    StorageSpan,
    StorageSuspended,
)
from kvcached.storage.messages import (
    Backup,
    Fetch,
    Forget,
    Kind,
    Look,
    NotOpened,
    Opened,
    Order,
    Over,
    Query,
    Reply,
    Span,
)
from kvcached.storage.messages import StorageConfig as ProcessConfig
from kvcached.storage.order_book import OrderBook
from kvcached.storage.process import StorageProcess

#: So many failures in a row are no chance any more.
BREAKER_FAILURES: Final = 5
FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 30.0
#: A storage process that has not answered an order that it has begun for so many timeouts is hung, and is killed.
HUNG_TIMEOUTS: Final = 6
#: That storage takes no blocks is logged again so much later at the earliest.
REFUSAL_LOG_S: Final = 60.0
#: What could not be forgotten is tried again so much later.
FORGET_PAUSE_S: Final = 1.0
#: Generations that wait to be forgotten: clears while storage is away. Each is in the record of generations.
FORGETS_DUE_MAX: Final = 1024

_log: Final = logging.getLogger(__name__)


class LinkState(StrEnum):
    """What the storage process does."""

    DETACHED = "detached"  #: it was not started, or somebody has taken it off
    STARTING = "starting"
    READY = "ready"
    SUSPENDED = "suspended"
    WAITING = "waiting"


_NEXT: Final[dict[LinkState, frozenset[LinkState]]] = {
    LinkState.DETACHED: frozenset({LinkState.STARTING}),
    LinkState.STARTING: frozenset({LinkState.READY, LinkState.WAITING, LinkState.DETACHED}),
    LinkState.READY: frozenset({LinkState.SUSPENDED, LinkState.WAITING, LinkState.DETACHED}),
    LinkState.SUSPENDED: frozenset({LinkState.READY, LinkState.WAITING, LinkState.DETACHED}),
    LinkState.WAITING: frozenset({LinkState.STARTING, LinkState.DETACHED}),
}


class StorageLink:
    """The storage process, started and started again.

    Args:
        config: what it is told.
        host_memory: descriptor of the host pool.
        run_dir: where its log and its lock are.
        epoch: of this daemon, for the headers of what is fetched.
        kind_of: whose blocks a namespace's are, and where they lie; None for one that is not known any more.
        tell: takes events.

    Attributes:
        state: see `LinkState`.
        why: the last failure, in words.
        write_refusal: why storage takes no blocks, though it works; empty where it has taken the last ones.
        is_misconfigured: the last start failed, and any other will: the settings are wrong.
        usage: blocks, bytes and capacity as the backend told last; -1 where it cannot.
        counters: what it did.
        due: how the keys begin that are to be forgotten, and are not yet; the oldest first.
    """

    def __init__(
        self,
        config: ProcessConfig,
        host_memory: int,
        run_dir: Path,
        epoch: int,
        kind_of: Callable[[bytes, int], Kind | None],
        tell: Callable[[StorageEvent], None],
    ) -> None:
        self.state = LinkState.DETACHED
        self.why = ""
        self.write_refusal = ""
        self.is_misconfigured = False
        self.usage = (-1, -1, -1)
        self.counters: Counter[str] = Counter()
        self.restarts = 0
        self._config = config
        self._host_memory = host_memory
        self._run_dir = run_dir
        self._epoch = epoch
        self._kind_of = kind_of
        self._tell = tell
        self._loop = asyncio.get_running_loop()
        self._process: StorageProcess | None = None
        self._is_wanted = False  #: somebody has asked for it while the one before was ending
        self._pending = OrderBook()
        self.due: dict[bytes, None] = {}
        self._forgets: list[tuple[bytes, set[int], Callable[[Over], None]]] = []
        self._last_sequence = 0
        self._failures = 0
        self._refusal_told_s = -math.inf
        self._opened_s = math.inf  #: when the process was ready
        self._pause_s = FIRST_PAUSE_S
        self._timer: asyncio.TimerHandle | None = None
        self._watchdog: asyncio.TimerHandle | None = None
        self._changed: asyncio.Event = asyncio.Event()

    # --- life -------------------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Start it, when the one before is dead. Does nothing where it runs or is about to."""
        if self.state is not LinkState.DETACHED:
            return
        if self._process is None:
            self._start()
        else:
            self._is_wanted = True

    async def detach(self, deadline_s: float) -> None:
        """End it, and start it no more. What is under way fails when it is dead."""
        self._cancel_timer()
        process, self._is_wanted = self._process, False
        self._go(LinkState.DETACHED)
        if process is not None:
            await process.stop(deadline_s)

    async def started(self, deadline_s: float) -> bool:
        """Wait for the outcome of a start: whether it works."""
        try:
            async with asyncio.timeout(deadline_s):
                while self.state is LinkState.STARTING:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            late = f"it was not ready within {deadline_s:g} s"
            self.why = f"{late}; before that: {self.why}" if self.why else late
        return self.state is LinkState.READY

    # --- orders -----------------------------------------------------------------------------------------------------

    def carry_out(self, effect: QueryStorage | StartFetch | StartBackup) -> None:
        """Order what the core asks for; where that is not possible it hears so, later."""
        kind = self._kind_of(effect.namespace, effect.generation) if self._process is not None else None
        if kind is None:
            self._loop.call_soon(self._refuse, effect)
            return
        sequence = self._next_sequence()
        order: Order
        match effect:
            case QueryStorage():
                order = Query(sequence=sequence, kind=kind, keys=effect.keys)
                tell: Callable[[Over], None] = partial(self._answered, effect.query)
            case StartFetch():
                transfer = effect.transfer
                order = Fetch(
                    sequence=sequence, kind=kind, span=_span(effect.span), epoch=self._epoch, transfer=transfer
                )
                tell = partial(self._fetched, effect)
            case StartBackup():
                order = Backup(sequence=sequence, kind=kind, spans=tuple(map(_span, effect.spans)))
                tell = partial(self._backed_up, effect)
        self._order(order, tell)

    def forget_all(self, tell: Callable[[Over], None]) -> bool:
        """Have all blocks forgotten; False where nobody is there to be told."""
        if self.state not in {LinkState.READY, LinkState.SUSPENDED}:
            return False
        self._order(Forget(sequence=self._next_sequence(), prefix=b""), tell)
        return True

    def forget(self, prefix: bytes, tell: Callable[[Over], None]) -> None:
        """Have all blocks forgotten whose keys begin so, when storage works, and again until that has succeeded.

        After what is being written now: that may be one of them. Where too many wait already the oldest is given up:
        its blocks are found under no name, and go when storage needs their room.
        """
        while len(self.due) >= FORGETS_DUE_MAX:
            self._give_up(next(iter(self.due)))
        self.due[prefix] = None
        self._file_forget(prefix, tell)

    def _give_up(self, prefix: bytes) -> None:
        del self.due[prefix]
        self._forgets = [each for each in self._forgets if each[0] != prefix]

    def _file_forget(self, prefix: bytes, tell: Callable[[Over], None]) -> None:
        if prefix in self.due:
            self._forgets.append((prefix, self._pending.writes(), tell))
            self._forget_due()

    def _forget_due(self) -> None:
        if self.state is not LinkState.READY:
            return
        due = [each for each in self._forgets if not any(write in self._pending for write in each[1])]
        self._forgets = [each for each in self._forgets if each not in due]
        for prefix, _, tell in due:
            self._order(Forget(sequence=self._next_sequence(), prefix=prefix), partial(self._forgot, prefix, tell))

    def _forgot(self, prefix: bytes, tell: Callable[[Over], None], over: Over) -> None:
        if over.failed:
            self._loop.call_later(FORGET_PAUSE_S, self._file_forget, prefix, tell)
            return
        self.due.pop(prefix, None)
        tell(over)

    # --- steps ------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._timer = None
        self._go(LinkState.STARTING)
        try:
            self._process = StorageProcess(
                self._config,
                self._host_memory,
                self._run_dir,
                on_opened=self._on_opened,
                on_reply=self._on_reply,
                on_exit=self._on_exit,
            )
        except OSError as error:
            self._process = None
            self._fall_back(f"it cannot be started: {error}")

    def _on_opened(self, opened: Opened | NotOpened) -> None:
        self.is_misconfigured = isinstance(opened, NotOpened) and opened.is_misconfigured
        if isinstance(opened, Opened) and self.state is LinkState.STARTING:
            _log.info("storage %s is ready, %d calls at a time", self._config.backend, opened.threads)
            self._go(LinkState.READY)
            self._failures, self.write_refusal = 0, ""
            self._opened_s = self._loop.time()
            self._pending.threads = opened.threads
            self._forget_due()
            self._tell(StorageReady())

    def _on_exit(self, why: str) -> None:
        self._process = None
        lost = self._pending.clear()
        self._set_watchdog()
        if self.state is not LinkState.DETACHED:
            self._fall_back(f"the storage process {why}")
        elif self._is_wanted:
            self._is_wanted = False
            self._start()
        self._tell(StorageLost())  # after the next start is planned: whatever comes of telling, there is one
        for each in lost:
            if isinstance(each.order, Forget):  # the core has been told of the end of all others
                each.tell(Over(sequence=each.order.sequence, failed=True, error=f"the storage process {why}"))

    def _fall_back(self, why: str) -> None:
        self.why = why
        self.restarts += 1
        if self._loop.time() - self._opened_s > LONGEST_PAUSE_S:
            self._pause_s = FIRST_PAUSE_S
        self._opened_s = math.inf
        _log.error("storage is lost, and started again in %g s: %s", self._pause_s, why)
        self._cancel_timer()
        self._go(LinkState.WAITING)
        self._timer = self._loop.call_later(self._pause_s, self._start)
        self._pause_s = min(self._pause_s * 2, LONGEST_PAUSE_S)

    def _order(self, order: Order, tell: Callable[[Over], None]) -> None:
        if self._process is None:
            return
        self._pending.add(order, tell, self._loop.time())
        self._process.send(order)
        if self._watchdog is None:
            self._set_watchdog()

    def _on_reply(self, reply: Reply) -> None:
        if not isinstance(reply, Over):
            return
        pending = self._pending.answered(reply.sequence, self._loop.time())
        if pending is None:
            return
        self.usage = (reply.blocks, reply.size_bytes, reply.capacity_bytes)
        self.counters["wrong_blocks"] += reply.wrong
        self._judge(reply)
        pending.tell(reply)
        if self._forgets:
            self._forget_due()

    def _judge(self, reply: Over) -> None:
        if not reply.failed:
            self._failures = 0
            if self.state is LinkState.SUSPENDED and not self._is_late():
                self._resume()
            return
        self.counters["failures"] += 1
        self._failures += 1
        self.why = reply.error
        _log.warning("storage %s failed: %s", self._config.backend, reply.error)
        if self._failures >= BREAKER_FAILURES or self.state is LinkState.SUSPENDED:
            self._suspend(f"{self._failures} failures in a row, the last one: {reply.error}")

    def _suspend(self, why: str) -> None:
        if self.state is LinkState.READY:
            self.why = why
            _log.error("storage is suspended: %s", why)
            self._go(LinkState.SUSPENDED)
            self._tell(StorageSuspended())
        if self.state is LinkState.SUSPENDED and self._timer is None:
            self._timer = self._loop.call_later(self._pause_s, self._look)
            self._pause_s = min(self._pause_s * 2, LONGEST_PAUSE_S)

    def _look(self) -> None:
        self._timer = None
        self._order(Look(sequence=self._next_sequence()), lambda _: None)

    def _resume(self) -> None:
        _log.info("storage answers again")
        self._cancel_timer()
        self._pause_s = FIRST_PAUSE_S
        self._go(LinkState.READY)
        self._set_watchdog()
        self._forget_due()
        self._tell(StorageReady())

    # --- deadlines --------------------------------------------------------------------------------------------------

    def _is_late(self, timeouts: int = 1) -> bool:
        at_s = self._pending.late_at(self._config.timeout_s * timeouts)
        return at_s is not None and at_s <= self._loop.time()

    def _set_watchdog(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None
        at_s = self._pending.late_at(self._config.timeout_s * (1 if self.state is LinkState.READY else HUNG_TIMEOUTS))
        if at_s is not None:
            self._watchdog = self._loop.call_at(at_s, self._on_late)

    def _on_late(self) -> None:
        self._watchdog = None
        if self._is_late(HUNG_TIMEOUTS) and self._process is not None:
            self._process.kill(f"it has not answered for {self._config.timeout_s * HUNG_TIMEOUTS:g} s")
            return  # nothing is watched until it is dead, which may take as long as its device pleases
        if self._is_late():
            self.counters["timeouts"] += 1
            self._suspend(f"no answer within {self._config.timeout_s:g} s")
        self._set_watchdog()

    # --- what the core hears ----------------------------------------------------------------------------------------

    def _now_us(self) -> int:
        return int(self._loop.time() * 1e6)

    def _answered(self, query: int, over: Over) -> None:
        self._tell(StorageAnswered(query, -1 if over.failed else over.count, self._now_us()))

    def _fetched(self, effect: StartFetch, over: Over) -> None:
        self.counters["fetched_blocks"] += over.count
        self._tell(FetchSettled(effect.transfer, over.count, self._now_us()))

    def _backed_up(self, effect: StartBackup, over: Over) -> None:
        self.counters["written_blocks"] += over.written
        self._note_refusal(over)
        self._tell(BackupSettled(effect.transfer, over.count))

    def _note_refusal(self, over: Over) -> None:
        """Storage that takes no blocks works, and yet is of no use: say so, but not for each block."""
        if over.failed or (not over.error and not over.written):
            return
        if over.error:
            self.counters["refused_writes"] += 1
            if self._loop.time() - self._refusal_told_s >= REFUSAL_LOG_S:
                self._refusal_told_s = self._loop.time()
                _log.warning("storage %s accepts no blocks: %s", self._config.backend, over.error)
        elif self.write_refusal:
            _log.info("storage %s accepts blocks again", self._config.backend)
        self.write_refusal = over.error

    def _refuse(self, effect: QueryStorage | StartFetch | StartBackup) -> None:
        match effect:
            case QueryStorage():
                self._tell(StorageAnswered(effect.query, -1, self._now_us()))
            case StartFetch():
                self._tell(FetchSettled(effect.transfer, 0, self._now_us()))
            case StartBackup():
                self._tell(BackupSettled(effect.transfer, 0))

    def _next_sequence(self) -> int:
        self._last_sequence += 1
        return self._last_sequence

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _go(self, state: LinkState) -> None:
        if state is not self.state:
            if state not in _NEXT[self.state]:
                raise RuntimeError(f"storage cannot go from {self.state} to {state}")
            self.state = state
            self._changed.set()


def _span(span: StorageSpan) -> Span:
    return Span(span.depth, span.parent, span.keys, span.slots.tobytes())
