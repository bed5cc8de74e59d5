"""Sessions whose answers a test writes, and a link over them."""

from __future__ import annotations

import os
import select
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvcached_client.errors import (
    DaemonUnreachable,
    DeadlineExceeded,
    ErrorCode,
    KvcachedError,
    RequestError,
    request_error,
)
from kvcached_client.offload import Hold, Offered, Piece, PreparedLoad, PreparedStore
from kvcached_client.prefetch import PrefetchResult
from kvcached_client.transport.attach import SessionGrant
from kvcached_client.types import LeaseId, TransferId
from kvcached_client.vllm.daemon import thread as link_module
from kvcached_client.vllm.daemon.commands import Command, Connected, Event, Offer, Seek
from kvcached_client.vllm.daemon.inbox import EventQueue
from kvcached_client.vllm.daemon.thread import DaemonThread
from kvcached_client.vllm.settings import PrefetchMode

PLAN = PreparedStore(TransferId(9), 2, 1, (Piece(0, 2),), np.arange(2, dtype=np.int32))
LOAD = PreparedLoad(TransferId(8), 1, np.arange(2, dtype=np.int32), 0)
REFUSED = request_error(ErrorCode.LIMIT, "too many", "fewer")
CLEARED = request_error(ErrorCode.STALE_EPOCH, "the namespace was cleared", "compute")
PAUSED = request_error(ErrorCode.PAUSED, "copies are paused", "compute")
DRAINING = request_error(ErrorCode.DRAINING, "the daemon is draining", "wait")
EXPIRED = request_error(ErrorCode.SESSION_EXPIRED, "the session is over", "connect again")
GONE = DaemonUnreachable("gone")
SLOW = DeadlineExceeded("slow")
FETCHED = PrefetchResult(2, 2, is_over=True, reason="fetched")
UNAVAILABLE = PrefetchResult(0, 0, is_over=True, reason="unavailable")


class FakePending:
    """A prefetch whose end a test says; then it is over for a reason, or fails."""

    def __init__(self, client: ScriptedClient) -> None:
        self.is_over = False
        self.is_abandoned = False
        self._client = client
        self._end: PrefetchResult | KvcachedError = FETCHED

    def end(self, end: PrefetchResult | KvcachedError = FETCHED) -> None:
        self._end = end
        self.is_over = True
        self._client.say()

    def result(self) -> PrefetchResult:
        if isinstance(self._end, KvcachedError):
            raise self._end
        return self._end

    def abandon(self) -> None:
        self.is_abandoned = True


class FakeAsked:
    """A request that was sent: its answer is said when it is fetched, as that of a daemon that is asked in time."""

    def __init__(self, answer: Callable[[], Any]) -> None:
        self._answer = answer

    def result(self) -> Any:
        return self._answer()


class ScriptedClient:
    """A session whose answers a test writes: an error is raised, anything else returned."""

    def __init__(self, number: int, **answers: Any) -> None:
        self.session = SessionGrant(id=100 + number, token=bytes(32), run_dir="/run/kvcached")
        self.is_alive = True
        self.tells_tokens = False
        self.is_patient = True  #: listens for as long as it is told to
        self.calls: list[tuple[Any, ...]] = []
        self.entered = threading.Event()
        self.pending: list[FakePending] = []
        self.stored: set[bytes] = set()  #: branches, by their keys
        self.listened = threading.Event()
        self._said = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self._said)
        self._called = threading.Semaphore(0)
        self.go_on = threading.Event()
        self.go_on.set()
        self._answers = {
            "acquire": Hold(LeaseId(5), 0),
            "prepare_load": LOAD,
            "prepare_store": PLAN,
            "clear": 2,
        } | answers

    def _begin(self, name: str, *arguments: Any) -> FakeAsked:
        self.calls.append((name, *arguments))
        return FakeAsked(partial(self._finish, name))

    def _answer(self, name: str, *arguments: Any) -> Any:
        return self._begin(name, *arguments).result()

    def _finish(self, name: str) -> Any:
        self.entered.set()
        self._called.release()
        assert self.go_on.wait(10)
        answer = self._answers.get(name)
        if isinstance(answer, list):
            answer = answer.pop(0)
        if isinstance(answer, KvcachedError):
            if answer in {EXPIRED, GONE}:
                self.is_alive = False
            raise answer
        return answer

    def await_calls(self, count: int) -> None:
        for _ in range(count):
            assert self._called.acquire(timeout=10), f"only {self.calls}"

    def begin_acquire(
        self, request: str, keys: bytes, tokens: int, *, full: bool, priority: int, tenant: str, load_from: int | None
    ) -> Any:
        assert load_from == (None if full else 0)
        wishes = [each for each in (priority, tenant) if each]
        return self._begin("acquire", request, keys, tokens, full, *wishes)

    def begin_match(self, keys: bytes, tokens: int, *, full: bool) -> Any:
        assert full
        assert tokens % (len(keys) // 16) == 0
        self.calls.append(("match", keys))
        return FakeAsked(lambda: len(keys) // 16 if keys in self.stored else len(keys) // 16 - 1)

    def pin(self, keys: bytes, *, ttl_ms: int) -> Any:
        return self._answer("pin", keys, ttl_ms)

    def begin_prefetch(
        self,
        keys: bytes,
        tokens: int,
        *,
        stop: str = "timeout",
        deadline_ms: int | None = None,
        prefill_tokens_per_s: float = 0.0,
        tenant: str = "",
        token_ids: bytes | None = None,
    ) -> Any:
        self._answer("begin_prefetch", keys, tokens, stop, prefill_tokens_per_s, *([tenant] if tenant else []))
        self.pending.append(FakePending(self))
        return self.pending[-1]

    def listen(self, wake: int, timeout_s: float) -> bool:
        self.listened.set()
        poller = select.poll()  # it takes descriptors above 1023, which a process that runs all tests has
        for descriptor in (wake, self._said):
            poller.register(descriptor, select.POLLIN)
        ready = [descriptor for descriptor, _ in poller.poll(timeout_s * 1000 if self.is_patient else 0)]
        if self._said in ready:
            os.eventfd_read(self._said)
        return bool(ready)

    def say(self) -> None:
        """Wake a link that listens, as any message does."""
        os.eventfd_write(self._said, 1)

    def begin_prepare_load(self, lease: int, start: int, blocks: int) -> Any:
        return self._begin("prepare_load", lease, start, blocks)

    def cancel_load(self, transfer: int) -> Any:
        return self._answer("cancel_load", transfer)

    def begin_prepare_stores(self, offers: Sequence[Offered], releases: Sequence[int]) -> Any:
        self.calls.append(("prepare_stores", *offers, *releases))
        return FakeAsked(lambda: [self._plan() for _ in offers])

    def _plan(self) -> Any:
        try:
            return self._finish("prepare_store")
        except RequestError as error:
            if error is EXPIRED:
                raise
            return error

    def cancel_store(self, transfer: int, why: str) -> Any:
        return self._answer("cancel_store", transfer, why)

    def post_release(self, lease: int) -> Any:
        return self._answer("release", lease)

    def settle(self) -> Any:
        return self._answer("settle")

    def clear(self) -> Any:
        return self._answer("clear")

    def close(self) -> None:
        self.calls.append(("close",))


class Events(EventQueue):
    """Counts what is appended, so that a test can wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.arrived = threading.Semaphore(0)

    def append(self, event: Event) -> None:
        super().append(event)
        self.arrived.release()


class PromptThread(DaemonThread):
    """A link in which nothing waits for other commands."""

    def submit(self, command: Command) -> bool:
        is_accepted = super().submit(command)
        self.hurry()
        return is_accepted


class Rig:
    """A link over sessions that a test hands out one by one."""

    def __init__(self, prefetch: PrefetchMode = "off") -> None:
        self.now = 0.0
        self.link: DaemonThread = PromptThread(prefetch=prefetch, clock=lambda: self.now)
        self.events = self.link._events = Events()
        self.sessions: list[ScriptedClient | KvcachedError] = []
        self.tries = threading.Semaphore(0)

    def start(self, *sessions: ScriptedClient | KvcachedError) -> None:
        self.sessions = list(sessions)
        self.link.start(self._connect)

    def _connect(self) -> Any:
        self.tries.release()
        session = self.sessions.pop(0) if self.sessions else GONE
        if isinstance(session, KvcachedError):
            raise session
        return session

    def wait(self, count: int) -> list[Event]:
        """The next events, as many."""
        for _ in range(count):
            assert self.events.arrived.acquire(timeout=10), f"only {self.link.take()}"
        return self.link.take()

    def await_tries(self, count: int) -> None:
        for _ in range(count):
            assert self.tries.acquire(timeout=10)


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(link_module, "PAUSE_S_MIN", 0.001)
    rig = Rig()
    yield rig
    rig.link.close()


@pytest.fixture
def fetching_rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(link_module, "PAUSE_S_MIN", 0.001)
    rig = Rig("timeout")
    yield rig
    rig.link.close()


def seek(ticket: int = 1, *, load: bool = True, rate: float = 0.0) -> Seek:
    return Seek(ticket, f"r~{ticket}", bytes(32), 9, load, rate)


def offer(ticket: int = 1, session: int = 1) -> Offer:
    return Offer(ticket, session, LeaseId(5), 0, bytes(32))


def connected(rig: Rig, *sessions: ScriptedClient | KvcachedError) -> None:
    rig.start(*sessions)
    (event,) = rig.wait(1)
    assert isinstance(event, Connected)
