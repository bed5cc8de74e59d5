"""The thread that owns the scheduler's session with the daemon, so that the scheduler never waits for the daemon.

The scheduler puts commands in and takes events out (`CommandInbox`). Rules:

* Seeks that a request waits for are carried out before other commands. All commands of a turn are sent before the
  thread waits for the first reply. Events for different tickets come in any order.
* Offers and releases are gathered for a short time, and sent in one message (`CommandQueue`).
* Every accepted `Seek`, `Offer` and `Pin` gets exactly one event, even if the session is lost, the daemon does not
  reply, or the thread ends.
* A session is announced before anything that belongs to it, and its loss before anything of the next session. Commands
  for a lost session are dropped, but its offers get their event; its seeks are carried out on the next session.
* After a session that worked, the thread connects again at once; otherwise after a pause that grows.
* A daemon that misses a deadline keeps the session, but gets no new seeks and offers until a pause is over.
* A seek that waits for blocks delays no other command. A daemon that is silent meanwhile is asked whether it replies.
* A clear that failed is repeated before the next seek.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeAlias, TypeVar, get_args

from kvcached_client.errors import DaemonUnreachable, DeadlineExceeded, KvcachedError, RequestError
from kvcached_client.offload import Hold, PreparedLoad, PreparedStore
from kvcached_client.transport.steps import Pending
from kvcached_client.vllm.daemon.branches import acquire_branch
from kvcached_client.vllm.daemon.client import FETCH_MS_MAX, Client, Fetches, begin_acquire, begin_fetch, begin_load
from kvcached_client.vllm.daemon.commands import (
    Command,
    Connected,
    DropLoad,
    DropStore,
    Fetching,
    Found,
    Lost,
    MakeUpClear,
    NotFound,
    Offer,
    Pin,
    Pinned,
    Planned,
    Release,
    Seek,
    Unplanned,
)
from kvcached_client.vllm.daemon.inbox import CommandInbox
from kvcached_client.vllm.daemon.offers import OfferBatch
from kvcached_client.vllm.daemon.warnings import Warnings
from kvcached_client.vllm.orders import SessionNote
from kvcached_client.vllm.settings import PrefetchMode

#: Pause between attempts to connect, and after a missed deadline.
PAUSE_S_MIN: Final = 0.2
PAUSE_S_MAX: Final = 5.0
#: How long `close` waits for the call in progress and for the goodbye.
CLOSE_S_MAX: Final = 5.0
#: How long the daemon may be silent while seeks wait for storage.
SILENCE_S_MAX: Final = 1.0

_T = TypeVar("_T")
_Acquiring: TypeAlias = list[tuple[Seek, Pending[Hold] | None]]

log = logging.getLogger("vllm.kvcached")


class DaemonThread(CommandInbox):
    """Keeps one engine's session open between `start` and `close`, and reconnects. Any thread may call the methods.

    Args:
        prefetch: how long seeks wait for blocks from storage.
        clock: in seconds.
    """

    def __init__(self, *, prefetch: PrefetchMode = "off", clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._thread: threading.Thread | None = None
        # The thread's own:
        self._client: Client | None = None
        self._number = 0
        self._pause_s = 0.0  #: before the next attempt; 0 once a call succeeded
        self._quiet_s = 0.0
        self._asked_at = 0.0  #: when the last seeks were sent
        self._unanswered: dict[int, Seek | Offer] = {}  #: seeks and offers of this turn, by ticket
        self._is_settled = True  #: False after a deadline: there may be late grants
        self._warnings = Warnings()
        self._fetches = Fetches(prefetch, clock)

    def start(self, connect: Callable[[], Client]) -> None:
        """Start the thread. `connect` opens a session, or raises `KvcachedError`."""
        self._thread = threading.Thread(target=self._run, args=(connect,), name="kvcached-link", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the session and the thread, within a bounded time. May be called again."""
        with self._changed:
            self._is_closing = True
            self._is_open = False
            self._notify()
        if self._thread is not None:
            self._thread.join(CLOSE_S_MAX)
        with self._changed:
            if self._wake is not None and (self._thread is None or not self._thread.is_alive()):
                os.close(self._wake)
                self._wake = None

    # --- the thread: its loop ---------------------------------------------------------------------------------------

    def _run(self, connect: Callable[[], Client]) -> None:
        try:
            while not self._is_closing:
                if self._client is not None:
                    self._serve_next()
                    continue
                if self._pause_s:
                    self._refuse_waiting(get_args(Command), is_open=False)
                    with self._changed:
                        self._changed.wait_for(lambda: self._is_closing, self._pause_s)
                self._open(connect)
        except Exception:
            log.exception("kvcached: internal error, the connection to the daemon is closed; vLLM continues without it")
        finally:
            for question in self._unanswered.copy().values():  # empty, unless an exception ended the turn
                self._refuse(question)
            self._put_back_fetching()
            self._refuse_waiting(get_args(Command), is_open=False)
            self._hang_up()

    def _open(self, connect: Callable[[], Client]) -> None:
        """Try once to open a session."""
        self._pause_s = _longer(self._pause_s)  # reset by the new session's first successful call
        try:
            client = connect()
        except KvcachedError as error:
            self._warnings.once(
                f"no session; vLLM continues without external cache, and kvcached keeps trying: {error}"
            )
            return
        self._client = client
        self._is_settled = True
        self._number += 1
        self._warnings.new_session()
        self._fetches.new_session()
        grant = client.session
        log.info("kvcached: opened session %d with the daemon in %s", grant.id, grant.run_dir)
        self._events.append(Connected(SessionNote(self._number, grant.to_bytes()), client.tells_tokens))
        with self._changed:
            self._is_open = not self._is_closing

    def _serve_next(self) -> None:
        if self._fetches:
            self._listen()
            self._end_acquire(self._begin_acquire(self._take_fetched()))
            if not self._fetches or self._client is None:
                return  # after a missed deadline or a lost session, start over
        with self._changed:
            self._await_turn(
                lambda: self._is_closing or bool(self._fetches) or not self._is_alive(),
                until=None if self._is_settled else self._quiet_until,
            )
            if self._is_closing:
                return
            commands = self._commands.take_turn(self._clock())
        if not self._is_alive():
            self._lose("a heartbeat said so")
        if commands:
            self._carry_out(commands)
        elif not self._is_settled:  # no other call gives back what the daemon granted after a deadline
            self._is_settled = True  # a missed deadline resets it
            self._call(lambda client: client.settle())

    def _carry_out(self, commands: Sequence[Command]) -> None:
        """Send all seeks and offers, then wait for the replies."""
        self._unanswered = {command.ticket: command for command in commands if isinstance(command, (Seek, Offer))}
        seeks = [command for command in commands if isinstance(command, Seek)]
        acquiring = self._begin_acquire([seek for seek in seeks if not self._begin_fetch(seek)])
        batch = OfferBatch(commands, self._number)
        asked = self._call(batch.begin, is_proof=False) if batch.offered else None
        self._end_acquire(acquiring)
        for command in commands:
            if not isinstance(command, Release):
                self._tell(command)
        self._end_offers(batch, asked)

    def _tell(self, command: Command) -> None:
        """Carry out a command that nothing waits for. Commands of an earlier session are dropped."""
        match command:
            case MakeUpClear():
                self._make_up_clear()
            case DropLoad(transfer=transfer) if command.session == self._number:
                self._call(lambda client: client.cancel_load(transfer))
            case DropStore(transfer=transfer, why=why) if command.session == self._number:
                self._call(lambda client: client.cancel_store(transfer, why))
            case Release(lease=lease) if command.session == self._number:
                self._call(lambda client: client.post_release(lease), is_proof=False)
            case Pin(keys=keys, ttl_ms=ttl_ms) if command.session == self._number:
                self._events.append(Pinned(self._call(lambda client: client.pin(keys, ttl_ms=ttl_ms))))
            case Pin():
                self._refuse(command)

    def _listen(self) -> None:
        """Wait for a command or a message; if the daemon is silent, check that it still replies."""
        with self._changed:
            wake, due_in = self._wake, self._commands.due_in(self._clock())
            if due_in == 0 or self._is_closing or not self._is_alive() or wake is None:
                return
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(wake)  # left from earlier commands; under the lock no wake-up is lost
            self._is_listening = True
        most_s = SILENCE_S_MAX if due_in is None else due_in
        has_news = self._call(lambda client: client.listen(wake, most_s), is_proof=False)
        if has_news is False and due_in is None:
            self._call(lambda client: client.settle())

    def _is_alive(self) -> bool:
        return self._client is not None and self._client.is_alive

    def _refuse_waiting(self, kinds: tuple[type[Command], ...], *, is_open: bool) -> None:
        """Remove commands of these kinds, and refuse them."""
        with self._changed:
            self._is_open = is_open
            refused = self._commands.remove(kinds)
            self._changed.notify_all()
        for command in refused:
            self._refuse(command)

    def _refuse(self, command: Command) -> None:
        if isinstance(command, Seek):
            self._say(NotFound(command.ticket, is_late=self._is_quiet))
        elif isinstance(command, Offer):
            self._say(Unplanned(command.ticket))
        elif isinstance(command, Pin):
            self._events.append(Pinned(None))

    def _say(self, answer: Found | NotFound | Planned | Unplanned) -> None:
        self._unanswered.pop(answer.ticket, None)
        self._fetches.answered(answer.ticket)
        self._events.append(answer)

    # --- the thread: commands ---------------------------------------------------------------------------------------

    def _begin_fetch(self, seek: Seek, hold: Hold | None = None, *, states: bool = False) -> bool:
        """Let a seek wait, if wanted: for storage, behind its hit, or for states; its lease ends then."""
        if not ((states or self._fetches.are_wanted(seek, hold)) and self._make_up_clear()):
            return False
        ask = partial(begin_fetch, seek, stop=self._fetches.stop_of(seek), behind=hold if states else None)
        if (pending := self._call(ask, is_proof=False)) is None:
            return False
        self._fetches.add(seek, pending, hold)
        self._unanswered.pop(seek.ticket, None)
        self._events.append(Fetching(seek.ticket, FETCH_MS_MAX / 1000))
        if hold is not None:  # only now, because the prefetch locks the hit
            self._call(lambda client: client.post_release(hold.lease), is_proof=False)
        return True

    def _take_fetched(self) -> list[Seek]:
        """Seeks whose prefetch is over, to be acquired next."""
        seeks = []
        while (fetch := self._call(lambda _: self._fetches.take_over(), is_proof=False)) is not None:
            if (result := self._answer(fetch.pending)) is not None:
                self._fetches.note(result)
            if self._is_quiet:
                self._refuse(fetch.seek)
            else:
                seeks.append(fetch.seek)
        return seeks

    def _put_back_fetching(self) -> None:
        """Turn seeks that wait for storage back into commands."""
        with self._changed:
            self._commands.put_back(self._fetches.take_all())

    def _begin_acquire(self, seeks: Sequence[Seek]) -> _Acquiring:
        """Send seeks to the daemon; a seek that could not be sent has None."""
        self._asked_at = self._clock()
        if not seeks or not self._make_up_clear():
            return [(seek, None) for seek in seeks]
        return [(seek, self._call(partial(begin_acquire, seek), is_proof=False)) for seek in seeks]

    def _end_acquire(self, acquiring: _Acquiring) -> None:
        """Finish seeks that were sent. If the session is lost, the next session gets those without a reply."""
        loading: list[tuple[Seek, Hold, Pending[PreparedLoad] | None]] = []
        unanswered = []
        for seek, asked in acquiring:
            hold = self._answer(asked)
            if seek is acquiring[0][0]:
                self._answers.observe(self._clock() - self._asked_at)
            if hold is not None and (self._begin_fetch(seek, hold) or self._end_at_branch(seek, hold)):
                continue
            if self._client is None:
                unanswered.append(seek)
            elif hold is None:
                self._refuse(seek)
            elif hold.hit and seek.load and hold.load is None and seek.branches is None:
                loading.append((seek, hold, self._call(partial(begin_load, hold), is_proof=False)))
            else:
                self._say(Found(seek.ticket, self._number, hold.lease, hold.hit, hold.load))
        for seek, hold, asked_load in loading:
            load = self._answer(asked_load)
            if self._client is None:
                unanswered.append(seek)
            else:
                self._say(Found(seek.ticket, self._number, hold.lease, hold.hit, load))
        for seek in unanswered:
            self._unanswered.pop(seek.ticket, None)
        with self._changed:
            self._commands.put_back(unanswered)  # for the next session; refused if there is a pause first

    def _end_at_branch(self, seek: Seek, hold: Hold) -> bool:
        """Let a hit end at a branch, or a seek wait for the states of one; False if it has none, or needs none."""
        if seek.branches is None:
            return False
        if (branch := self._call(partial(acquire_branch, seek, seek.branches, hold))) is None:
            return self._fetches.are_states_wanted(seek, hold) and self._begin_fetch(seek, hold, states=True)
        self._say(Found(seek.ticket, self._number, branch.lease, branch.hit, branch.load, len(seek.branches.groups)))
        return True

    def _end_offers(self, batch: OfferBatch, asked: Pending[list[PreparedStore | RequestError]] | None) -> None:
        """Fetch the replies to offers that were sent."""
        plans = self._answer(asked)
        if plans is None:  # the message was perhaps not served; a second release changes nothing
            for release in batch.releases:
                self._tell(release)
        for offer, plan in batch.outcomes(plans):
            if isinstance(plan, RequestError):
                self._warnings.refusal(plan)
            self._say(Planned(offer.ticket, plan) if isinstance(plan, PreparedStore) else Unplanned(offer.ticket))

    def _make_up_clear(self) -> bool:
        """Make a clear that is still owed; returns whether none is owed any more."""
        if self._owes_clear:
            generation = self._call(lambda client: client.clear())
            if generation is None:
                return False
            log.info("kvcached: the namespace was cleared and is now at generation %d", generation)
            with self._changed:
                self._owes_clear = False
                self._changed.notify_all()
        return True

    # --- the thread: calls and what may come of them ----------------------------------------------------------------

    def _call(self, call: Callable[[Client], _T], *, is_proof: bool = True) -> _T | None:
        """The result of a call; None if it failed, or if there is no session.

        Success ends the pauses, unless the call proves nothing about the daemon (`is_proof`).
        """
        if self._client is None:
            return None
        try:
            result = call(self._client)
        except DeadlineExceeded as error:
            self._warnings.once(f"the daemon is slow; requests continue without external cache meanwhile: {error}")
            self._keep_quiet()
        except RequestError as error:
            if self._client.is_alive:
                self._warnings.refusal(error)
            else:
                self._lose(str(error))
        except DaemonUnreachable as error:
            self._lose(str(error))
        else:
            if is_proof:
                self._pause_s = self._quiet_s = 0.0
            return result
        return None

    def _answer(self, asked: Pending[_T] | None) -> _T | None:
        """The reply to a request that was sent; as `_call`."""
        return None if asked is None else self._call(lambda _: asked.result())

    def _keep_quiet(self) -> None:
        self._is_settled = False
        if not self._is_quiet:  # otherwise one of several requests that were sent together
            self._quiet_s = _longer(self._quiet_s)
            with self._changed:
                self._quiet_until = self._clock() + self._quiet_s
        self._put_back_fetching()
        self._refuse_waiting((Seek, Offer), is_open=not self._is_closing)

    def _lose(self, why: str) -> None:
        # No warning, as the session also ends when vLLM stops; `_open` warns.
        log.info("kvcached: the session with the daemon is over: %s", why)
        self._events.append(Lost(self._number))
        self._put_back_fetching()
        self._hang_up()

    def _hang_up(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()


def _longer(pause_s: float) -> float:
    return min(max(2 * pause_s, PAUSE_S_MIN), PAUSE_S_MAX)
