"""What `Admin` has a daemon do, and what engines make of a daemon that is drained."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvcached_client import Admin, DaemonFailure, DaemonUnreachable, DeadlineExceeded, ErrorCode
from kvcached_client.protocol.engine import (
    Acquire,
    ClearNamespace,
    Drain,
    Drained,
    ForgetPrefix,
    Header,
    LogLevelSet,
    NamespaceCleared,
    Pause,
    Paused,
    Pin,
    Pinned,
    PolicySet,
    PrefixForgotten,
    Request,
    Resume,
    Resumed,
    SetLogLevel,
    SetPolicy,
    SetWeights,
    Sleep,
    Slept,
    Unpin,
    Unpinned,
    Wake,
    Woken,
)
from kvcached_client.types import WritePolicy
from tests.client.fake_daemon import SILENCE, FakeDaemon
from tests.client.test_calls import Connect, failing, silent_on


def test_admin_says_what_is_to_be_done(daemon: FakeDaemon) -> None:
    """Each call is one request with what was given, and returns the daemon's answer."""
    cleared = NamespaceCleared(
        id=4, replicas=("default",), generation=1, namespace=bytes(32), label="", weights_version="", blocks=3
    )
    replies: list[Header] = [
        Paused(id=1, under_way=2, holds=True),
        Resumed(id=2, state="serving"),
        Drained(id=3, leases=1, copies=0, requests=0, holds=True),
        cleared,
        NamespaceCleared(id=5, replicas=(), generation=2, namespace=bytes(32), label="", weights_version="v", blocks=0),
        PolicySet(
            id=6,
            replicas=(),
            namespace="00112233",
            label="m",
            policy=WritePolicy.NEVER,
            before=WritePolicy.WRITE_THROUGH,
        ),
        Slept(id=7, replicas=("default",), blocks=3, dropped=1),
        Woken(id=8, replicas=("default",)),
        LogLevelSet(id=9, level="debug", before="info"),
    ]
    daemon.script = lambda request, _: (replies[request.id - 1], [])
    with Admin.connect(daemon.run_dir) as admin:
        done = [
            admin.pause("default", deadline_ms=70),
            admin.resume("default"),
            admin.drain(deadline_ms=80),
            admin.clear("default"),
            admin.set_weights("default", "v"),
            admin.set_policy("00112233", WritePolicy.NEVER),
            admin.sleep("default", deadline_ms=90),
            admin.wake("default"),
            admin.set_log_level("debug"),
        ]

    assert done == replies
    assert [request for request, _ in daemon.requests] == [
        Pause(id=1, replica="default", deadline_ms=70),
        Resume(id=2, replica="default"),
        Drain(id=3, deadline_ms=80),
        ClearNamespace(id=4, target="default"),
        SetWeights(id=5, target="default", version="v"),
        SetPolicy(id=6, target="00112233", policy=WritePolicy.NEVER),
        Sleep(id=7, target="default", deadline_ms=90),
        Wake(id=8, target="default"),
        SetLogLevel(id=9, level="debug"),
    ]


def test_admin_pins_and_unpins_by_keys(daemon: FakeDaemon) -> None:
    """The keys of a prefix are the frame; what is kept of it is the answer."""
    replies: list[Header] = [Pinned(id=1, device=2, host=1), Unpinned(id=2, was_pinned=True)]
    daemon.script = lambda request, _: (replies[request.id - 1], [])
    with Admin.connect(daemon.run_dir) as admin:
        assert admin.pin("default", bytes(32), ttl_ms=9) == replies[0]
        assert admin.unpin("default", bytes(32))

    assert daemon.requests == [
        (Pin(id=1, target="default", ttl_ms=9), [bytes(32)]),
        (Unpin(id=2, target="default"), [bytes(32)]),
    ]


def test_admin_forgets_by_keys(daemon: FakeDaemon) -> None:
    """The keys of a prompt are the frame; what has left, and what is left, is the answer."""
    reply = PrefixForgotten(id=1, device=2, host=3, stored=4, in_use=1, left_in_storage="")
    daemon.script = lambda *_: (reply, [])
    with Admin.connect(daemon.run_dir) as admin:
        assert admin.forget("default", bytes(32), from_block=1, deadline_ms=70) == reply

    assert daemon.requests == [
        (ForgetPrefix(id=1, target="default", from_block=1, deadline_ms=70), [bytes(32)]),
    ]


def test_admin_waits_for_longer_than_the_daemon(daemon: FakeDaemon) -> None:
    """What the daemon may take for its answer comes on top of what a call may take, so its answer is heard."""
    daemon.script = silent_on(Pause)
    start_s = time.monotonic()
    with Admin.connect(daemon.run_dir, deadline_ms=100) as admin, pytest.raises(DeadlineExceeded):
        admin.pause(deadline_ms=300)

    assert time.monotonic() - start_s >= 0.4


def test_admin_notices_that_the_daemon_dies(daemon: FakeDaemon) -> None:
    """A call that may wait for a minute ends when the daemon does, and the next one finds the next daemon."""
    came = threading.Event()

    def script(request: Request, _: list[bytes]) -> tuple[Header, list[bytes]] | None:
        came.set()
        return SILENCE, []

    daemon.script = script
    with Admin.connect(daemon.run_dir, deadline_ms=10_000) as admin, ThreadPoolExecutor(1) as caller:
        call = caller.submit(admin.clear, "default")
        assert came.wait(10)
        daemon.stop()
        with pytest.raises(DaemonUnreachable, match="was gone before it replied"):
            call.result(timeout=10)
        (daemon.run_dir / "attach.sock").unlink()
        successor = FakeDaemon(daemon.run_dir)
        try:
            successor.script = lambda request, _: (Resumed(id=request.id, state="serving"), [])
            assert admin.resume().state == "serving"
        finally:
            successor.stop()


def test_admin_waits_for_a_daemon_no_longer_than_for_a_call(daemon: FakeDaemon) -> None:
    """A daemon that died before the call is noticed within the client's own deadline, however long a clear may take."""
    with Admin.connect(daemon.run_dir, deadline_ms=100) as admin:
        daemon.stop()
        start_s = time.monotonic()
        with pytest.raises(DaemonUnreachable):
            admin.clear("default")

    assert time.monotonic() - start_s < 10


def test_draining_daemon_is_a_miss_and_keeps_the_session(daemon: FakeDaemon, connect: Connect) -> None:
    """A refused acquire is an error, or a lease that is not granted; the session lives on either way."""
    daemon.script = failing(ErrorCode.DRAINING, Acquire)
    strict, lenient = connect(), connect(failures="miss")
    with pytest.raises(DaemonFailure):
        strict.acquire("r", strict.chain(range(40)))
    lease = lenient.acquire("r", lenient.chain(range(40)))

    assert (lease.hit_blocks, lenient.failure_count) == (0, 1)
    assert strict.is_alive
    assert lenient.is_alive
