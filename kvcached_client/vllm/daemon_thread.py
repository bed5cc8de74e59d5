"""The scheduler's line to the daemon: a thread of its own that owns the session, so that the scheduler never waits.

The scheduler puts commands in and takes events out. Rules:

* Seeks that a request waits for are carried out before other commands; all commands of a turn are sent before the first
  answer is waited for. Answers to different tickets come in any order.
* Every `Seek` and every `Offer` that was accepted is answered by one event, also when the session is lost, the daemon
  does not answer, or the link closes.
* A session is announced before anything that belongs to it, and its loss before anything of the next one. What was
  commanded for a lost session is dropped, its offers are answered; a seek is carried out on the next one.
* After a session that worked the next one is tried for at once, else after a pause that grows.
* A daemon that misses a deadline keeps the session, but is not asked for anything new until a pause is over.
* A seek that waits for blocks from storage holds up no other command. While seeks wait, a daemon that says nothing is
  asked whether it answers.
* A clear that could not be made is made before the next seek.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeAlias, TypeVar

from kvcached_client.errors import DaemonUnreachable, DeadlineExceeded, KvcachedError, RequestError
from kvcached_client.offload import Hold, PreparedLoad, PreparedStore
from kvcached_client.protocol.storage import StopPolicy
from kvcached_client.vllm.commands import (
    Command,
    CommandQueue,
    Connected,
    DropLoad,
    DropStore,
    Event,
    EventQueue,
    Fetching,
    Found,
    Lost,
    MakeUpClear,
    NotFound,
    Offer,
    Planned,
    Release,
    Seek,
    TypicalTime,
    Unplanned,
)
from kvcached_client.vllm.daemon_client import FETCH_MS_MAX, Asked, Client, Fetches, PrefetchMode
from kvcached_client.vllm.orders import SessionNote

#: Seeks and offers that wait. More than vLLM admits in a step; whoever comes later goes without the cache.
COMMANDS_MAX: Final = 1024
#: Between tries to get a session, and after a missed deadline.
PAUSE_S_MIN: Final = 0.2
PAUSE_S_MAX: Final = 5.0
#: How long `close` waits: for the call under way, and for a farewell.
CLOSE_S_MAX: Final = 5.0
#: How long the daemon may say nothing while seeks wait for storage.
SILENCE_S_MAX: Final = 1.0

_T = TypeVar("_T")
_Acquiring: TypeAlias = list[tuple[Seek, Asked[Hold] | None]]

#: Below vLLM's own logger, for its handlers and format.
log = logging.getLogger("vllm.kvcached")


class DaemonThread:
    """One engine's session, kept up by a thread between `start` and `close`. Other methods: by any thread.

    Args:
        prefetch: how long seeks wait for blocks from storage.
        clock: in seconds.
    """

    def __init__(self, *, prefetch: PrefetchMode = "off", clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        # Guarded by `_changed`:
        self._commands = CommandQueue()
        self._is_open = False  #: commands are accepted
        self._is_closing = False
        self._owes_clear = False
        self._quiet_until = 0.0  #: no seeks and offers before that
        self._is_listening = False  #: the thread waits for the daemon, or for `_wake`
        self._wake: int | None = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  #: for a thread that listens
        # Appended by the thread, taken by the scheduler:
        self._events = EventQueue()
        self._answers = TypicalTime()  #: of seeks; changed by the thread
        # The thread's own:
        self._client: Client | None = None
        self._number = 0
        self._pause_s = 0.0  #: before the next try; 0 once something worked
        self._quiet_s = 0.0
        self._asked_at = 0.0  #: when the last seeks were sent
        self._unanswered: dict[int, Seek | Offer] = {}  #: questions of this turn, by ticket
        self._is_settled = True  #: nothing was granted, as far as is known, that came too late
        self._told: set[str] = set()
        self._fetches = Fetches(prefetch, clock)

    def start(self, connect: Callable[[], Client]) -> None:
        """Begin. `connect` opens a session, or raises `KvcachedError`."""
        self._thread = threading.Thread(target=self._run, args=(connect,), name="kvcached-link", daemon=True)
        self._thread.start()

    @property
    def is_taking(self) -> bool:
        """Whether seeks and offers are accepted: there is a session, and the daemon is not behind."""
        is_behind = len(self._commands) >= COMMANDS_MAX or self._is_quiet
        return self._is_open and not is_behind

    def submit(self, command: Command) -> bool:
        """Have a command carried out; whether it was accepted. Without a session nothing is."""
        with self._changed:
            if not (self.is_taking if isinstance(command, (Seek, Offer)) else self._is_open):
                return False
            self._commands.put(command)
            self._notify()
            return True

    def take(self) -> list[Event]:
        """The events since the last call."""
        return self._events.take()

    def wait(self, timeout_s: float) -> bool:
        """Wait until there are events, no longer than so many seconds; whether there are."""
        return self._events.wait(timeout_s)

    @property
    def answer_s(self) -> float:
        """How long the daemon typically takes to answer a seek."""
        return self._answers.seconds

    def clear(self, timeout_s: float) -> bool:
        """Begin a new generation of the namespace; whether it began within the time. If not, it is still owed."""
        with self._changed:
            self._owes_clear = True
            if self._is_open:
                self._commands.put(MakeUpClear())
                self._notify()
                self._changed.wait_for(lambda: not (self._owes_clear and self._is_open), timeout_s)
            return not self._owes_clear

    def wake(self) -> None:
        """Have the thread look whether its session still lives. Any thread may call this."""
        with self._changed:
            self._notify()

    def close(self) -> None:
        """End the session and the thread, within a bounded time. May be repeated."""
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

    def _notify(self) -> None:
        """Wake the thread; `_changed` is held."""
        self._changed.notify_all()
        if self._is_listening and self._wake is not None:
            self._is_listening = False
            os.eventfd_write(self._wake, 1)

    # --- the thread: its loop ---------------------------------------------------------------------------------------

    def _run(self, connect: Callable[[], Client]) -> None:
        try:
            while not self._is_closing:
                if self._client is not None:
                    self._serve_next()
                elif self._pause_s:
                    self._refuse_waiting((Seek, Offer, DropLoad, DropStore, Release, MakeUpClear), is_open=False)
                    self._rest()
                    self._open(connect)
                else:
                    self._open(connect)
        except Exception:
            log.exception("kvcached: no link to the daemon any more, a fault of kvcached; vLLM goes on without it")
        finally:
            for question in self._unanswered.copy().values():  # none, unless a fault ended the turn
                self._refuse(question)
            self._put_back_fetching()
            self._refuse_waiting((Seek, Offer, DropLoad, DropStore, Release, MakeUpClear), is_open=False)
            self._hang_up()

    def _rest(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closing, self._pause_s)

    def _open(self, connect: Callable[[], Client]) -> None:
        """Try once to get a session."""
        self._pause_s = _longer(self._pause_s)  # the session that comes has to prove itself
        try:
            client = connect()
        except KvcachedError as error:
            self._tell_once(f"no session, vLLM goes on without external cache, trying again: {error}")
            return
        self._client = client
        self._is_settled = True
        self._number += 1
        self._told.clear()
        self._fetches.new_session()
        grant = client.session
        log.info("kvcached: session %d of the daemon in %s", grant.id, grant.run_dir)
        self._events.append(Connected(SessionNote(self._number, grant.to_bytes())))
        with self._changed:
            self._is_open = not self._is_closing

    def _serve_next(self) -> None:
        if self._fetches:
            self._listen()
            self._acquire(self._take_fetched())
            if not self._fetches or self._client is None:
                return  # a deadline that was missed, or a session that was lost: begin anew
        with self._changed:
            patience_s = None if self._is_settled else max(self._quiet_until - self._clock(), 0.0)
            self._changed.wait_for(
                lambda: self._commands or self._is_closing or not self._is_alive() or self._fetches, patience_s
            )
            if self._is_closing:
                return
            commands = self._commands.take_turn()
        if not self._is_alive():
            self._lose("its heartbeats said so")
        if commands:
            self._carry_out(commands)
        elif not self._is_settled:
            self._settle()

    def _carry_out(self, commands: Sequence[Command]) -> None:
        """Send all questions, then wait for the answers."""
        self._unanswered = {command.ticket: command for command in commands if isinstance(command, (Seek, Offer))}
        seeks = [command for command in commands if isinstance(command, Seek)]
        acquiring = self._begin_acquire([seek for seek in seeks if not self._begin_fetch(seek)])
        offering = [(command, self._begin_offer(command)) for command in commands if isinstance(command, Offer)]
        self._end_acquire(acquiring)
        for command in commands:
            self._tell(command)
        for offer, asked in offering:
            plan = self._answer(asked)
            self._say(Unplanned(offer.ticket) if plan is None else Planned(offer.ticket, plan))

    def _tell(self, command: Command) -> None:
        """Carry out a command that has no event for an answer; nothing where it is of a session that is over."""
        match command:
            case MakeUpClear():
                self._make_up_clear()
            case DropLoad(transfer=transfer) if command.session == self._number:
                self._call(lambda client: client.cancel_load(transfer))
            case DropStore(transfer=transfer, why=why) if command.session == self._number:
                self._call(lambda client: client.cancel_store(transfer, why))
            case Release(lease=lease) if command.session == self._number:
                self._call(lambda client: client.post_release(lease), is_proof=False)
            case _:
                pass

    def _listen(self) -> None:
        """Wait for a command, or for what the daemon says; if it says nothing, ask whether it answers."""
        with self._changed:
            wake = self._wake
            if self._commands or self._is_closing or not self._is_alive() or wake is None:
                return
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(wake)  # of what came after the last time; under the lock none is lost
            self._is_listening = True
        if self._call(lambda client: client.listen(wake, SILENCE_S_MAX), is_proof=False) is False:
            self._call(lambda client: client.settle())

    def _is_alive(self) -> bool:
        return self._client is not None and self._client.is_alive

    def _refuse_waiting(self, kinds: tuple[type[Command], ...], *, is_open: bool) -> None:
        """Answer commands of these kinds without carrying them out."""
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

    def _say(self, answer: Found | NotFound | Planned | Unplanned) -> None:
        self._unanswered.pop(answer.ticket, None)
        self._events.append(answer)

    # --- the thread: commands ---------------------------------------------------------------------------------------

    def _begin_fetch(self, seek: Seek) -> bool:
        """Have storage asked before a seek, if it is to be; whether it is."""
        if not (self._fetches.are_wanted(seek) and self._make_up_clear()):
            return False
        stop: StopPolicy = "timeout" if self._fetches.mode == "off" else self._fetches.mode
        pending = self._call(
            lambda client: client.begin_prefetch(
                seek.keys,
                seek.tokens,
                stop=stop,
                deadline_ms=FETCH_MS_MAX,
                prefill_tokens_per_s=seek.prefill_tokens_per_s,
            ),
            is_proof=False,
        )
        if pending is None:
            return False
        self._fetches.add(seek, pending)
        del self._unanswered[seek.ticket]
        self._events.append(Fetching(seek.ticket, FETCH_MS_MAX / 1000))
        return True

    def _take_fetched(self) -> list[Seek]:
        """Seeks whose prefetch is over, to carry on with."""
        seeks = []
        while (fetch := self._call(lambda _: self._fetches.take_over(), is_proof=False)) is not None:
            result = self._answer(fetch.pending)
            if result is not None:
                self._fetches.note(result)
            if self._is_quiet:
                self._refuse(fetch.seek)
            else:
                seeks.append(fetch.seek)
        return seeks

    def _put_back_fetching(self) -> None:
        """Seeks that wait for storage are commands again."""
        with self._changed:
            self._commands.put_back(self._fetches.take_all())

    def _acquire(self, seeks: Sequence[Seek]) -> None:
        self._end_acquire(self._begin_acquire(seeks))

    def _begin_acquire(self, seeks: Sequence[Seek]) -> _Acquiring:
        """Send seeks to the daemon; None beside those that it could not be asked."""
        self._asked_at = self._clock()
        if not seeks or not self._make_up_clear():
            return [(seek, None) for seek in seeks]
        return [(seek, self._call(partial(_begin_acquire, seek), is_proof=False)) for seek in seeks]

    def _end_acquire(self, acquiring: _Acquiring) -> None:
        """Answer seeks that were sent. Where the session is lost, the next one gets those without an answer."""
        loading: list[tuple[Seek, Hold, Asked[PreparedLoad] | None]] = []
        unanswered = []
        for seek, asked in acquiring:
            hold = self._answer(asked)
            if seek is acquiring[0][0]:
                self._answers.observe(self._clock() - self._asked_at)
            if self._client is None:
                unanswered.append(seek)
            elif hold is None:
                self._refuse(seek)
            elif hold.hit and seek.load:
                loading.append((seek, hold, self._call(partial(_begin_load, hold), is_proof=False)))
            else:
                self._say(Found(seek.ticket, self._number, hold.lease, hold.hit, None))
        for seek, hold, asked_load in loading:
            load = self._answer(asked_load)
            if self._client is None:
                unanswered.append(seek)
            else:
                self._say(Found(seek.ticket, self._number, hold.lease, hold.hit, load))
        for seek in unanswered:
            self._unanswered.pop(seek.ticket, None)
        with self._changed:
            self._commands.put_back(unanswered)  # for the next session, or to be refused before a pause

    def _begin_offer(self, offer: Offer) -> Asked[PreparedStore] | None:
        if offer.session != self._number:
            return None
        return self._call(
            lambda client: client.begin_prepare_store(offer.lease, offer.start, offer.keys), is_proof=False
        )

    def _settle(self) -> None:
        """After a deadline, nobody else asks: have nothing held at the daemon that nobody knows here."""
        self._is_settled = True
        self._call(lambda client: client.settle())  # another deadline that passes unsettles again

    def _make_up_clear(self) -> bool:
        """Whether no clear is owed any more."""
        if self._owes_clear:
            generation = self._call(lambda client: client.clear())
            if generation is None:
                return False
            log.info("kvcached: the namespace was cleared, it is at generation %d", generation)
            with self._changed:
                self._owes_clear = False
                self._changed.notify_all()
        return True

    # --- the thread: calls and what may come of them ----------------------------------------------------------------

    def _call(self, call: Callable[[Client], _T], *, is_proof: bool = True) -> _T | None:
        """The result; None where it failed, or there is no session any more.

        What is no proof that the daemon answers shortens no pause.
        """
        if self._client is None:
            return None
        try:
            result = call(self._client)
        except DeadlineExceeded as error:
            self._tell_once(f"the daemon is slow, requests go on without external cache meanwhile: {error}")
            self._keep_quiet()
        except RequestError as error:
            if self._client.is_alive:
                self._tell_once(f"the daemon refused: {error}", kind=error.code)
            else:
                self._lose(str(error))
        except DaemonUnreachable as error:
            self._lose(str(error))
        else:
            if is_proof:
                self._pause_s = self._quiet_s = 0.0
            return result
        return None

    def _answer(self, asked: Asked[_T] | None) -> _T | None:
        """The answer to a request that was sent; as `_call`."""
        return None if asked is None else self._call(lambda _: asked.result())

    def _keep_quiet(self) -> None:
        self._is_settled = False
        if not self._is_quiet:  # else one more of the requests that were sent together
            self._quiet_s = _longer(self._quiet_s)
            with self._changed:
                self._quiet_until = self._clock() + self._quiet_s
        self._put_back_fetching()
        self._refuse_waiting((Seek, Offer), is_open=not self._is_closing)

    @property
    def _is_quiet(self) -> bool:
        """Whether the daemon missed a deadline, and the pause after that is not over."""
        return self._clock() < self._quiet_until

    def _lose(self, why: str) -> None:
        # No warning: vLLM's own stop ends the session, too. Where no other one is to be had, `_open` warns.
        log.info("kvcached: the session with the daemon is over: %s", why)
        self._events.append(Lost(self._number))
        self._put_back_fetching()
        self._hang_up()

    def _hang_up(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _tell_once(self, message: str, *, kind: str = "") -> None:
        """Log a warning, once for each kind of message since there is a session."""
        level = logging.DEBUG if (kind or message) in self._told else logging.WARNING
        self._told.add(kind or message)
        log.log(level, "kvcached: %s", message)


def _begin_acquire(seek: Seek, client: Client) -> Asked[Hold]:
    return client.begin_acquire(seek.name, seek.keys, seek.tokens, full=not seek.load)


def _begin_load(hold: Hold, client: Client) -> Asked[PreparedLoad]:
    return client.begin_prepare_load(hold.lease, 0, hold.hit)


def _longer(pause_s: float) -> float:
    return min(max(2 * pause_s, PAUSE_S_MIN), PAUSE_S_MAX)
