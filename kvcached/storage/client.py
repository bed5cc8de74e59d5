"""The daemon's side of the storage process: sends the core's effects as requests, and reports replies as events."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
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
    StorageEmptied,
    StorageEvent,
    StorageLost,
    StorageReady,
    StorageSuspended,
)
from kvcached.core.slots.states import follow
from kvcached.process.backoff import BackOff
from kvcached.process.in_flight import InFlight
from kvcached.storage.backend import UNKNOWN_USAGE
from kvcached.storage.forgets import Forgets
from kvcached.storage.link_state import LINK_TRANSITIONS, LinkState
from kvcached.storage.messages import (
    PROGRESS_PER_TIMEOUT,
    AskedRequest,
    Backup,
    BlockFormat,
    Delete,
    Done,
    Fetch,
    Forget,
    NotOpened,
    Opened,
    Ping,
    Progress,
    Query,
    RecordRequest,
    Report,
    Request,
)
from kvcached.storage.messages import StorageConfig as ProcessConfig
from kvcached.storage.process import StorageProcess
from kvcached.storage.refused_writes import RefusedWrites

#: This many failures in a row suspend storage.
BREAKER_FAILURES: Final = 5
FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 30.0
#: A storage process that has worked on one request for this many timeouts is hung, and is killed.
HUNG_TIMEOUTS: Final = 6
#: When a request is late: its progress may be reported by so much later than a call of the backend ends.
LATE_TIMEOUTS: Final = 1 + 1 / PROGRESS_PER_TIMEOUT
#: How long a `Forget` may take without progress. It may be of millions of blocks, and no request waits for it.
FORGET_S_MAX: Final = 600.0

_log: Final = logging.getLogger(__name__)


class StorageLink:
    """Starts and restarts the storage process, and sends requests to it.

    Args:
        config: the configuration of the process.
        memory: descriptors of the host pool, and of memory for the record of generations.
        run_dir: the directory of its log and its lock.
        epoch: the daemon's, for the headers of fetched blocks.
        format_of: returns the format of a namespace's blocks; None for a namespace that no longer exists.
        tell: takes events.

    Attributes:
        state: see `LinkState`.
        why, trouble: the last failure, in words; what is wrong although it works, empty if nothing is.
        is_misconfigured: the last start failed because of settings that are wrong, or that the service refuses.
        usage: blocks, bytes and capacity in the backend's last report; -1 for an unknown figure.
        counters: counts of its work.
        is_shared: the backend keeps a record of generations for daemons of several machines.
        lives: how often a process was started.
        before_ready: called when the backend is open, and no other daemon's; its argument ends the start.
    """

    def __init__(
        self,
        config: ProcessConfig,
        memory: tuple[int, int],
        run_dir: Path,
        epoch: int,
        format_of: Callable[[bytes, int], BlockFormat | None],
        tell: Callable[[StorageEvent], None],
    ) -> None:
        self.state = LinkState.DETACHED
        self.why = self.trouble = ""
        self.is_misconfigured = False
        self.is_shared, self.lives = False, 0
        self.usage = UNKNOWN_USAGE
        self.counters: Counter[str] = Counter()
        self._refused = RefusedWrites(config.backend, self.counters)
        self.restarts = 0
        self.before_ready: Callable[[Callable[[], None]], None] = lambda go_on: go_on()
        self._config = config
        self._memory = memory
        self._run_dir = run_dir
        self._epoch = epoch
        self._format_of = format_of
        self._tell = tell
        self._loop = asyncio.get_running_loop()
        self._process: StorageProcess | None = None
        self._is_wanted = False  #: `attach` was called while the process before was ending
        self._in_flight: InFlight[Request, Done] = InFlight(self._on_late, turns=1)
        self._late_s = config.timeout_s * LATE_TIMEOUTS
        self._in_flight.watch(self._late_s)
        self._forgets = Forgets(self._in_flight, self._forget, lambda: self.state is LinkState.READY)
        self._failures = 0
        self._is_on_trial = False  #: it was suspended, and has carried out nothing since
        self._opened_s = math.inf  #: when the process was ready
        self._back_off = BackOff(first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S, healthy_after_s=LONGEST_PAUSE_S)
        self._timer: asyncio.TimerHandle | None = None
        self._changed: asyncio.Event = asyncio.Event()

    @property
    def write_refusal(self) -> str:
        """Why storage accepts no blocks although it works; empty if it has accepted the last ones."""
        return self._refused.why

    @property
    def due(self) -> Mapping[bytes, None]:
        """The prefixes of keys that are not forgotten yet, oldest first."""
        return self._forgets.due

    # --- life -------------------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Start the process once the one before is dead, and without a pause. Does nothing if it runs."""
        if self.state in {LinkState.DETACHED, LinkState.WAITING} and self._process is None:
            self._cancel_timer()
            self._start()
        elif self.state is LinkState.DETACHED:
            self._is_wanted = True

    async def detach(self, deadline_s: float, kill_deadline_s: float | None = None) -> None:
        """As `StorageProcess.stop`, and do not restart it. Requests under way fail when it is dead."""
        self._cancel_timer()
        process, self._is_wanted = self._process, False
        self._go(LinkState.DETACHED)
        if process is not None:
            await process.stop(deadline_s, kill_deadline_s)

    async def started(self, deadline_s: float) -> bool:
        """Wait until a start has ended; returns whether storage works."""
        try:
            async with asyncio.timeout(deadline_s):
                while self.state is LinkState.STARTING:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            late = f"it was not ready within {deadline_s:g} s"
            self.why = f"{late}; before that: {self.why}" if self.why else late
        return self.state is LinkState.READY

    # --- requests ---------------------------------------------------------------------------------------------------

    def carry_out(self, effect: QueryStorage | StartFetch | StartBackup) -> None:
        """Send the request of an effect. If that is not possible, a later event reports the failure to the core."""
        format_ = self._format_of(effect.namespace, effect.generation) if self._process is not None else None
        if format_ is None:
            self._loop.call_soon(self._refuse, effect)
            return
        sequence = self._in_flight.next_number
        request: Request
        match effect:
            case QueryStorage():
                request = Query(sequence=sequence, format=format_, keys=effect.keys)
                tell: Callable[[Done], None] = partial(self._answered, effect.query)
            case StartFetch():
                transfer = effect.transfer
                request = Fetch(
                    sequence=sequence, format=format_, span=effect.span, epoch=self._epoch, transfer=transfer
                )
                tell = partial(self._fetched, effect)
            case StartBackup():
                request = Backup(sequence=sequence, format=format_, spans=effect.spans)
                tell = partial(self._backed_up, effect)
        self._send(request, tell)

    def forget_all(self, tell: Callable[[Done], None]) -> bool:
        """Let storage forget all blocks; False if the process is not ready for the request."""
        if self.state not in {LinkState.READY, LinkState.SUSPENDED}:
            return False
        self._forget(b"", partial(self._emptied, tell))
        return True

    def forget(self, prefix: bytes, tell: Callable[[Done], None]) -> None:
        """Let storage forget all blocks whose keys have a prefix, as soon as it works; repeated until that succeeds."""
        self._forgets.add(prefix, tell)

    def ask(self, request: Callable[[int], AskedRequest | Forget], tell: Callable[[Done], None]) -> bool:
        """Send a request that the core has no part in; False if there is no process. `tell` is called at its end."""
        if self._process is not None:
            self._send(request(self._in_flight.next_number), tell)
        return self._process is not None

    def refuse(self, why: str) -> None:
        """The backend that is open cannot be used by this daemon: end the process, and try again later."""
        if self._process is not None:
            self._process.refuse(why)

    # --- steps ------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._timer = None
        self._go(LinkState.STARTING)
        self.lives += 1
        try:
            self._process = StorageProcess(
                self._config,
                self._memory,
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
            self.usage, self.is_shared = opened.usage, opened.is_shared
            self.before_ready(partial(self._on_ready, self._process, opened))

    def _on_ready(self, process: StorageProcess | None, opened: Opened) -> None:
        if process is not self._process or self.state is not LinkState.STARTING:
            return  # it died, or was detached, meanwhile
        _log.info("storage %s is ready, %d calls at a time", self._config.backend, opened.threads)
        self._go(LinkState.READY)
        self._failures, self._refused.why, self.trouble = 0, "", ""
        self._opened_s = self._loop.time()
        self._in_flight.turns = opened.threads
        self._watch()
        self._forgets.send_due()
        if not opened.usage.blocks:
            self._tell(StorageEmptied())
        self._tell(StorageReady())

    def _on_exit(self, why: str) -> None:
        self._process = None
        lost = self._in_flight.clear()
        if self.state is not LinkState.DETACHED:
            self._fall_back(f"the storage process {why}")
        elif self._is_wanted:
            self._is_wanted = False
            self._start()
        self._tell(StorageLost())  # after the next start is planned: there is a next start even if `tell` raises
        for each in lost:  # the core has been told of the end of all others
            if isinstance(each.request, Forget | AskedRequest):
                each.tell(Done(sequence=each.request.sequence, failed=True, error=f"the storage process {why}"))

    def _fall_back(self, why: str) -> None:
        self.why = why
        self.restarts += 1
        self._back_off.lived(self._loop.time() - self._opened_s)
        self._opened_s = math.inf
        pause_s = self._back_off.pause_s()
        _log.error("storage is lost, and started again in %g s: %s", pause_s, why)
        self._cancel_timer()
        self._go(LinkState.WAITING)
        self._timer = self._loop.call_later(pause_s, self._start)

    def _forget(self, prefix: bytes, tell: Callable[[Done], None]) -> None:
        self._send(Forget(sequence=self._in_flight.next_number, prefix=prefix), tell)

    def _send(self, request: Request, tell: Callable[[Done], None]) -> None:
        if self._process is None:
            return
        self._in_flight.add(request, tell, FORGET_S_MAX if isinstance(request, Forget) else 0.0)
        self._process.send(request)

    def _on_reply(self, reply: Report) -> None:
        if isinstance(reply, Progress):
            self._in_flight.progressed(reply.sequence)
        if not isinstance(reply, Done) or (pending := self._in_flight.done(reply.sequence)) is None:
            return
        self.usage, self.trouble = reply.usage, reply.trouble
        self.counters["wrong_blocks"] += reply.wrong
        self._judge(reply, pending.request)
        pending.tell(reply)
        if self._forgets:
            self._forgets.send_due()

    def _judge(self, reply: Done, request: Request) -> None:
        of_record = isinstance(request, RecordRequest)
        if of_record and not reply.failed:  # says nothing of blocks, and is sent in any case
            return
        if not reply.failed:
            self._failures = 0
            if self.state is LinkState.SUSPENDED and not self._is_late():
                self._resume()
            if self._is_on_trial and not isinstance(request, Ping):  # which only reads: a write may have failed
                self._is_on_trial = False
                self._back_off.reset()
            return
        self.counters["failures"] += 1
        self.why = reply.error
        _log.warning("storage %s failed: %s", self._config.backend, reply.error)
        # A disk in front of a service goes on without it, and one that failed at its part of a `Forget` still reads.
        if self._config.local_disk is None or not (of_record or isinstance(request, Forget | Delete)):
            self._failures += 1
        if self._failures >= BREAKER_FAILURES or self.state is LinkState.SUSPENDED:
            self._suspend(f"{self._failures} failures in a row, the last one: {reply.error}")

    def _suspend(self, why: str) -> None:
        if self.state is LinkState.READY:
            self.why = why
            _log.error("storage is suspended: %s", why)
            self._is_on_trial = True
            self._go(LinkState.SUSPENDED)
            self._watch()
            self._tell(StorageSuspended())
        if self.state is LinkState.SUSPENDED and self._timer is None:
            self._timer = self._loop.call_later(self._back_off.pause_s(), self._ping)

    def _ping(self) -> None:
        self._timer = None
        self._send(Ping(sequence=self._in_flight.next_number), lambda _: None)

    def _resume(self) -> None:
        _log.info("storage answers again")
        self._cancel_timer()
        self._go(LinkState.READY)
        self._watch()
        self._forgets.send_due()
        self._tell(StorageReady())

    def _is_late(self) -> bool:
        return bool(self._in_flight.late(self._late_s))

    def _watch(self) -> None:
        """Suspend a process that is late, and kill one that is still late after some more timeouts."""
        hung_s = self._config.timeout_s * HUNG_TIMEOUTS
        self._in_flight.watch(self._late_s if self.state is LinkState.READY else hung_s)

    def _on_late(self, _: list[int]) -> None:
        hung_s = self._config.timeout_s * HUNG_TIMEOUTS
        if self._in_flight.late(hung_s) and self._process is not None:
            self._process.kill(f"it has not answered for {hung_s:g} s")
            return  # no deadline is watched until it is dead, which may take as long as its device hangs
        if self._is_late():
            self.counters["timeouts"] += 1
            self._suspend(f"a call of the backend takes longer than {self._config.timeout_s:g} s")
        self._watch()

    def _now_us(self) -> int:
        return int(self._loop.time() * 1e6)

    def _answered(self, query: int, done: Done) -> None:
        self._tell(StorageAnswered(query, -1 if done.failed else done.count, self._now_us()))

    def _emptied(self, tell: Callable[[Done], None], done: Done) -> None:
        if not done.failed:
            self._tell(StorageEmptied())
        tell(done)

    def _fetched(self, effect: StartFetch, done: Done) -> None:
        self.counters["fetched_blocks"] += done.count
        self._tell(FetchSettled(effect.transfer, done.count, self._now_us()))

    def _backed_up(self, effect: StartBackup, done: Done) -> None:
        self.counters["written_blocks"] += done.written
        self._refused.note(done, self._loop.time())
        self._tell(BackupSettled(effect.transfer, done.count))

    def _refuse(self, effect: QueryStorage | StartFetch | StartBackup) -> None:
        if isinstance(effect, QueryStorage):
            self._tell(StorageAnswered(effect.query, -1, self._now_us()))
        elif isinstance(effect, StartFetch):
            self._tell(FetchSettled(effect.transfer, 0, self._now_us()))
        else:
            self._tell(BackupSettled(effect.transfer, 0))

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _go(self, state: LinkState) -> None:
        if state is not self.state:
            self.state = follow(LINK_TRANSITIONS, self.state, state, "storage")
            self._changed.set()
