"""Two threads with one client: the one that comes second is told so, and harms nobody."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from kvcached_client import Admin, Client
from kvcached_client.protocol.engine import Bye, Match, Release, Request
from kvcached_client.types import FenceSequence, LeaseId
from tests.client.fake_daemon import FakeDaemon
from tests.client.test_interrupts import connect_offload

Connect = Callable[..., Client]

WAIT_S = 20


@contextmanager
def another_inside(daemon: FakeDaemon, client: Any, call: Callable[[], Any]) -> Iterator[Future[Any]]:
    """Another thread is inside `call`, a match; at the end it gets its reply."""
    reply, came, answer = threading.Event(), threading.Event(), daemon.script

    def script(request: Request, frames: list[bytes]) -> Any:
        if isinstance(request, Match):
            came.set()
            assert reply.wait(WAIT_S)
        return answer(request, frames) if answer else None

    def waiting(*request: Any) -> Any:
        inside.set()
        return wait(*request)

    daemon.script = script
    inside, wait = threading.Event(), client._channel._wait_for_reply
    client._channel._wait_for_reply = waiting
    with ThreadPoolExecutor(1, thread_name_prefix="engine") as thread:
        result = thread.submit(call)
        try:
            assert came.wait(WAIT_S)
            assert inside.wait(WAIT_S)
            yield result
        finally:
            del client._channel._wait_for_reply
            reply.set()
            result.result(WAIT_S)


def test_second_thread_is_refused_and_the_session_goes_on(daemon: FakeDaemon, connect: Connect) -> None:
    """Every call says that two threads are inside, and sends and changes nothing; afterwards each may go on."""
    client = connect()
    chain = client.chain(range(8))
    lease = client.acquire("a", chain)
    client.acquire("posted", chain).commit(4, wait=False)
    calls: list[Callable[[], object]] = [
        lambda: client.match(chain),
        lambda: client.acquire("b", chain),
        lambda: client.prefetch(chain),
        lambda: client.signal_fence(FenceSequence(1)),
        lambda: lease.allocate(12),
        lambda: lease.commit(8),
        lambda: lease.finish(8),
        lease.release,
        client.settle,
        client.stats,
        client.rejoin,
        client.close,
        client.hang_up,
    ]
    with another_inside(daemon, client, lambda: client.match(chain)) as first:
        sent = len(daemon.requests)
        for call in calls:
            with pytest.raises(RuntimeError, match=r"two threads at once: thread 'engine_0' is inside .* hold a lock"):
                call()
        assert lease.is_held
        assert not first.done()
    assert len(daemon.requests) == sent
    assert first.result() == 2
    assert client.is_alive
    client.settle()
    lease.finish(8)
    assert daemon.of(Release) != []


def test_second_thread_of_other_clients_is_refused(daemon: FakeDaemon) -> None:
    """The client of offload mode and that of an administrator notice it as well."""
    with connect_offload(daemon) as client:
        with another_inside(daemon, client, lambda: client.match(bytes(16), 16)):
            for call in (lambda: client.match(bytes(16), 16), lambda: client.post_release(LeaseId(1)), client.close):
                with pytest.raises(RuntimeError, match="two threads at once"):
                    call()
        assert client.match(bytes(16), 16) == 0
    with Admin.connect(daemon.run_dir) as admin:
        admin._channel._user = threading.main_thread().ident or 0
        with ThreadPoolExecutor(1) as thread:
            refused = thread.submit(admin.stats).exception(WAIT_S)
        admin._channel._user = 0
        assert "two threads at once" in str(refused)


def test_interrupted_call_leaves_the_client_to_other_threads(
    daemon: FakeDaemon, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that an exception of a signal handler has ended is over, so that another thread may go on."""
    client = connect()
    chain = client.chain(range(8))

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for place in ("_poll", "_check_usable"):
        monkeypatch.setattr(client._channel, place, interrupt)
        with pytest.raises(KeyboardInterrupt):
            client.match(chain)
        monkeypatch.undo()
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(client.match, chain).result(WAIT_S) == 2
    assert client.match(chain) == 2


def test_close_is_not_interrupted_by_another_threads_call(daemon: FakeDaemon, connect: Connect) -> None:
    """A call that begins while `close` waits for the heartbeat is refused; the session ends with one goodbye."""
    client = connect(heartbeat=True)
    chain = client.chain(range(8))
    heartbeat: Any = client._heartbeat
    ending, goes_on, end = threading.Event(), threading.Event(), heartbeat.close

    def end_slowly() -> None:
        ending.set()
        assert goes_on.wait(WAIT_S)
        end()

    heartbeat.close = end_slowly
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(client.close)
        assert ending.wait(WAIT_S)
        with pytest.raises(RuntimeError, match="used by two threads at once"):
            client.match(chain)
        goes_on.set()
        closing.result(WAIT_S)

    assert len(daemon.of(Bye)) == 1
    assert not client.is_alive
