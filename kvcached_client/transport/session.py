"""A session over a channel: what a managed engine's client and an offload engine's client do alike.

`SessionChannel` adds to a channel what belongs to a session: the pool's epoch, stale sessions, and what to do while the
daemon does not answer. `EngineSession` is the common base of `Client` and `OffloadClient`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Final, Self, TypeVar

from kvcached_client.errors import (
    CircuitOpen,
    DaemonSilent,
    DaemonUnreachable,
    DeadlineExceeded,
    ErrorCode,
    KvcachedError,
    NoCapacity,
    RequestError,
    Stale,
)
from kvcached_client.protocol.engine import (
    BLOCKS_PER_MESSAGE_MAX,
    Acquire,
    Allocate,
    Bye,
    Commit,
    Goodbye,
    Header,
    Load,
    Match,
    Matched,
    Prefetch,
    Release,
    Request,
    SlotsAvailable,
    WaitForSlots,
    Welcome,
    WelcomeOffload,
    encode,
)
from kvcached_client.protocol.welcome import check_version, tells_tokens
from kvcached_client.transport.attach import AttachConnection, SessionGrant, identify
from kvcached_client.transport.channel import Channel
from kvcached_client.transport.connection import by_one_thread
from kvcached_client.transport.heartbeat import Heartbeat
from kvcached_client.transport.misses import Circuit, CircuitState, Failures, MissPolicy
from kvcached_client.transport.prompts import AcquiredPrompts
from kvcached_client.transport.run_dir import default_run_dir
from kvcached_client.transport.steps import PostedCalls, Steps, complete
from kvcached_client.types import NO_FENCE, RequestId

R = TypeVar("R", bound=Header)
T = TypeVar("T")

#: How long a goodbye whose reply nobody awaits may take to reach the daemon's socket.
FAREWELL_MS: Final = 100
#: Requests that the daemon answers at once: if it does not, it hangs.
_ANSWERED_SOON: Final = (Match, Acquire, Allocate, Commit, Release)
#: Requests that the daemon answers when something has happened, such as the end of a load.
_ANSWERED_LATE: Final = (Load, WaitForSlots, Prefetch)
_NEVER_NS: Final = 1 << 62  #: a deadline that never passes

_log: Final = logging.getLogger("kvcached_client")


class SessionChannel(Channel):
    """A channel whose connection owns a session: it knows the pool's epoch and how to treat failures."""

    def __init__(
        self, endpoint: str, run_dir: str, *, deadline_ms: int, attached: AttachConnection, failures: Failures
    ) -> None:
        super().__init__(endpoint, deadline_ms=deadline_ms, attached=attached)
        self.run_dir = run_dir
        self.epoch = 0
        self.tells_tokens = False  #: routers may know the tokens of the session's blocks
        self.is_stale = False  #: the daemon said that the session or the pool's epoch is over
        self.named_fence = NO_FENCE  #: the highest that any lease of the session has named
        self.misses = MissPolicy(failures)
        self.posted = PostedCalls()
        self._circuit = Circuit()
        self.prompts = AcquiredPrompts()
        self._probe: Match | None = None  #: sent when the circuit left the state closed

    @property
    def is_waiting_in_vain(self) -> bool:
        """Whether the daemon has not replied since a missed deadline: until it does, no call waits."""
        return self._circuit.state is CircuitState.OPEN

    def _send_request(self, request: Request, frames: Sequence[bytes], deadline_ns: int | None) -> None:
        """As every channel; first takes replies that nobody waits for, and releases leases that were granted too late.

        Raises:
            CircuitOpen: the daemon has not replied since a missed deadline; nothing was sent. Releases and goodbyes are
                sent anyway, or queued, for the daemon to read when it continues; for these, only `receive` raises.
        """
        if self._circuit.state is not CircuitState.CLOSED and not self._answers_again():
            self._circuit.note_miss()
            if not isinstance(request, (Release, Bye)):
                raise self._circuit_open()
        if self._calls.may_grant_late:
            self._check_usable()
            self._poll(0)  # a lease that has come is given back now: it is in the way of an acquire of its name
        if self._calls.has_orphans:
            self.give_back_late()
        self.posted.collect(self.has_come)
        try:
            super()._send_request(request, frames, deadline_ns)
        except DaemonSilent as error:
            self._note_silence(request, error)
            if not self._is_queueing or not isinstance(request, Release):
                raise
            super()._send_request(request, frames, deadline_ns)

    @property
    def _is_queueing(self) -> bool:
        """As for every channel; and while the daemon does not reply, so that no release costs a deadline, too."""
        return self._never_waits or self._circuit.state is not CircuitState.CLOSED

    @by_one_thread
    def settle(self) -> None:
        """`PostedCalls.settle`."""
        self.posted.settle()

    @by_one_thread
    def give_back_late(self) -> None:
        """Release leases that were granted after the caller had stopped waiting, as far as their replies were read."""
        for lease, load in self._calls.orphans():
            if not self.post(Release(id=self.next_id(), epoch=self.epoch, lease=lease, call_off=load, reply=False)):
                break
            self._calls.drop_orphan(lease)

    def asking(
        self, request: Request, expected: type[R], frames: Sequence[bytes] = (), *, deadline_ns: int
    ) -> Steps[tuple[R, list[bytes]]]:
        """As `ask`, in steps: send the request, then wait for the reply."""
        self.send(request, frames, deadline_ns=deadline_ns)
        try:
            yield request
        except GeneratorExit:  # nobody will ask for the result
            self.abandon(request)
            raise
        return self.receive(request, expected)

    def retry_when_freed(self, attempt: Callable[[int], Steps[T]]) -> Steps[T]:
        """Carry out ``attempt(deadline_ns)``; if copies in flight are about to free slots, wait for them and try again.

        The client does not know how many slots a failed attempt lacks, because it does not know the hit. So each wait
        is for one slot more than were available: it ends with the first copy that frees any. All attempts and waits
        together take at most as long as one call.

        Args:
            attempt: sends a request, each time with a new id.

        Raises:
            NoCapacity: no copy in flight frees enough slots, or not in time. Nothing was granted.
        """
        deadline_ns = self.deadline_ns()
        available, is_last = 0, False
        while True:
            try:
                return (yield from attempt(deadline_ns))
            except NoCapacity as error:
                if error.code != ErrorCode.CAPACITY_PENDING or is_last or available >= BLOCKS_PER_MESSAGE_MAX:
                    raise
                shortage = error
            wanted = available + 1
            request = WaitForSlots(id=self.next_id(), epoch=self.epoch, blocks=wanted)
            try:
                reply, _ = yield from self.asking(request, SlotsAvailable, deadline_ns=deadline_ns)
            except DeadlineExceeded:
                raise shortage from None
            available = reply.available
            is_last = available < wanted  # no copy in flight will free any more

    def _receive_reply(self, request: Request, expected: type[R]) -> tuple[R, list[bytes]]:
        """As every channel; notes when the session is over, and when the daemon does not reply.

        Raises:
            CircuitOpen: the daemon has not replied since a missed deadline; this reply is not awaited.
        """
        if self.is_waiting_in_vain and not self._calls.is_answered(RequestId(request.id)):
            self.abandon(request)
            raise self._circuit_open()
        try:
            return super()._receive_reply(request, expected)
        except Stale:
            self.is_stale = True
            raise
        except DeadlineExceeded as error:
            self._note_silence(request, error)
            raise

    def _note_silence(self, request: Request, error: DaemonSilent | DeadlineExceeded) -> None:
        if not self.misses.is_on or self._circuit.state is not CircuitState.CLOSED:
            return
        is_late = isinstance(request, _ANSWERED_LATE)
        if is_late and isinstance(error, DeadlineExceeded):
            self._circuit.doubt(time.monotonic_ns())
        elif is_late or isinstance(request, _ANSWERED_SOON):
            self._circuit.open(time.monotonic_ns(), str(error))
        else:
            return
        self._send_probe()

    def _send_probe(self) -> None:
        """Send a request that changes nothing and is answered at once, if it can be sent without waiting."""
        probe = Match(id=self.next_id(), epoch=self.epoch, tokens=0)
        try:
            parts = self._calls.send(probe, (b"",), deadline_ns=_NEVER_NS)
        except RequestError as error:
            _log.debug("no probe was sent: %s", error)
            return
        if self._connection.send(parts, queued=True):
            self._probe = probe
        else:
            self.abandon(probe)

    def _answers_again(self) -> bool:
        """Whether the probe was answered, so that requests may be sent again. Waits only briefly, if at all."""
        probe = self._probe
        if probe is None:
            self._send_probe()
            return False
        is_answered = self.is_over(probe)
        while not (is_answered or self._never_waits) and self._poll(self._circuit.probe_grace_end_ns):
            self._check_daemon()
            is_answered = self.is_over(probe)
        now_ns = time.monotonic_ns()
        if is_answered and not self._circuit.is_resting(now_ns):
            self._circuit.close(now_ns)
            self._probe = None
            with contextlib.suppress(RequestError):  # a stale session is noted; the next reply says it, too
                self.receive(probe, Matched)
            return True
        if self._circuit.state is CircuitState.DOUBTED:
            if self._never_waits and now_ns < self._circuit.probe_grace_end_ns:
                return True  # an event loop waits for the reply to the request as well as for that to the probe
            self._circuit.open(now_ns, f"no reply from {self.endpoint} to a probe either")
        return False

    def _circuit_open(self) -> CircuitOpen:
        return CircuitOpen(f"not sent to {self.endpoint}, which has not replied since a missed deadline")

    @by_one_thread
    def hang_up(self) -> None:
        """Close, and end the session without waiting for any reply, not even to a hello."""
        try:
            self.say_bye()
        finally:
            self.close(linger_ms=FAREWELL_MS)

    def say_bye(self) -> None:
        """Send a goodbye whose reply nobody reads, if the daemon takes it; also after a signal interrupted a reading.

        Without it the daemon keeps the pool for a session that this process has given up, until that expires.
        """
        if not (self.is_closed or self.is_forked):
            self._connection.send_last([encode(Bye(id=self.next_id()))])


def open_channel(
    run_dir: str | os.PathLike[str] | None, *, deadline_ms: int, failures: Failures
) -> tuple[SessionChannel, bytes]:
    """Connect to the daemon in `run_dir` (default: `default_run_dir`).

    Returns:
        The channel, and the token that names this process in a hello.

    Raises:
        DaemonUnreachable, DeadlineExceeded, RequestError: as `identify`.
    """
    directory = os.fspath(default_run_dir() if run_dir is None else run_dir)
    attached, identified = identify(directory, client="kvcached_client", deadline_ms=deadline_ms)
    try:
        channel = SessionChannel(
            identified.endpoint, directory, deadline_ms=deadline_ms, attached=attached, failures=failures
        )
    except BaseException:
        attached.close()
        raise
    return channel, identified.member


class EngineSession:
    """An open session with its heartbeats, until `close`.

    Attributes:
        session: what shard processes need to join.
        epoch: of the pool.
        namespace: 32 bytes, the root of every chain of keys.
    """

    def __init__(
        self,
        channel: SessionChannel,
        welcome: Welcome | WelcomeOffload,
        *,
        generation: int | None,
        heartbeat: bool = True,
        on_stale: Callable[[], None] | None = None,
    ) -> None:
        """Take over the channel on which the daemon has welcomed the session.

        `generation` is the only one in which the session is valid; None if the namespace may be cleared meanwhile.
        """
        check_version(welcome)
        self.session = SessionGrant(id=welcome.session, token=welcome.token, run_dir=channel.run_dir)
        self.epoch = welcome.epoch
        self.namespace = welcome.namespace
        self._channel = channel
        self._channel.epoch = welcome.epoch
        self._channel.tells_tokens = tells_tokens(welcome)
        self._process_id = os.getpid()
        self._is_closed = False
        self._on_stale = on_stale
        self._heartbeat = self._new_heartbeat(welcome, generation) if heartbeat else None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._described()}, {'alive' if self.is_alive else 'over'})"

    def _described(self) -> str:
        return f"session={self.session.id}, run_dir={self.session.run_dir!r}"

    @property
    def is_alive(self) -> bool:
        """Whether the session still exists, as far as this process knows. If not, close it and connect again."""
        heartbeat_stale = self._heartbeat is not None and self._heartbeat.is_stale
        return not (self._is_closed or self._channel.is_ended or self._channel.is_stale or heartbeat_stale)

    def close(self) -> None:
        """End the session. Does nothing the second time.

        In a forked child it only closes the child's copies of descriptors.

        Raises:
            RuntimeError: another thread is inside a call. The session goes on.
        """
        if self._channel.is_forked:
            self._end()
        else:
            self._channel.alone(self._end)

    def _end(self) -> None:
        try:
            complete(self.leaving())
        except BaseException:  # as of Ctrl-C, maybe before the heartbeats have stopped and the goodbye was sent
            if self._heartbeat is not None:
                self._heartbeat.stop()
            self._channel.say_bye()
            raise
        finally:
            self._channel.close(linger_ms=FAREWELL_MS)

    def hang_up(self) -> None:
        """End the session without waiting for the daemon's reply, as after one that did not come. Otherwise `close`."""
        if self._channel.is_forked:
            self._end()
        else:
            self._channel.alone(self._end_unheard)

    def _end_unheard(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            if self._heartbeat is not None:
                self._heartbeat.close()
            self._channel.hang_up()
        self._end()

    def start_heartbeats(self) -> None:
        """Send heartbeats from now on, where there are any. Not before: an interrupted constructor leaves no thread."""
        if self._heartbeat is not None:
            self._heartbeat.start()

    def leaving(self) -> Steps[None]:
        """Stop the heartbeats and say goodbye, in steps: the first part of `close`. Does nothing the second time."""
        if not self._is_closed and os.getpid() == self._process_id:
            self._is_closed = True
            if self._heartbeat is not None:
                self._heartbeat.close()
            yield from self._saying_goodbye()
        self._is_closed = True

    def _new_heartbeat(self, welcome: Welcome | WelcomeOffload, generation: int | None) -> Heartbeat:
        heartbeat = Heartbeat(
            self._channel.path,
            self.session,
            epoch=welcome.epoch,
            generation=generation,
            interval_ms=welcome.heartbeat_interval_ms,
            on_stale=self._on_stale,
        )
        # Not at exit: the thread dies with the process.
        weakref.finalize(self, heartbeat.stop).atexit = False
        return heartbeat

    def _saying_goodbye(self) -> Steps[None]:
        bye, deadline_ns = Bye(id=self._channel.next_id()), self._channel.deadline_ns()
        try:
            yield from self._channel.asking(bye, Goodbye, deadline_ns=deadline_ns)
        except KvcachedError as error:
            # The session ends anyway, at the latest when this process dies.
            _log.info("kvcached session %d closed without the daemon's reply: %s", self.session.id, error)
            if isinstance(error, DaemonUnreachable):  # then the goodbye was not sent
                self._channel.say_bye()


class BlockingSession(EngineSession):
    """A session whose calls block. A context manager: the end of a ``with`` statement closes it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
