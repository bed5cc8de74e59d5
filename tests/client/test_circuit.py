"""Where failures are misses: a daemon that does not answer costs one deadline, and a lease says why it is none."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import pytest

from kvcached_client import CircuitOpen, Client, DaemonUnreachable, ErrorCode, FailureReason
from kvcached_client.errors import request_error
from kvcached_client.protocol.engine import (
    Acquire,
    Acquired,
    Bye,
    Commit,
    Header,
    Load,
    LoadTicket,
    Match,
    Release,
    Request,
    error_reply,
)
from kvcached_client.transport import misses
from kvcached_client.transport.misses import PAUSE_NS_MAX, PAUSE_NS_MIN, RELAPSE_NS, Circuit, CircuitState
from tests.client.fake_daemon import FakeDaemon
from tests.client.test_calls import failing, silent_on

Connect = Callable[..., Client]
DEADLINE_MS = 400
PATIENCE_S = 20
HUNG = silent_on(Header)


def test_hang_costs_one_deadline(daemon: FakeDaemon, connect: Connect) -> None:
    """After the first deadline every call of every request is a miss at once, and nothing is sent but releases."""
    client = connect(failures="miss", deadline_ms=DEADLINE_MS)
    chain = client.chain(range(8))
    held = [client.acquire(f"held{number}", chain) for number in range(3)]
    daemon.script = HUNG
    begun_s = time.monotonic()
    assert client.acquire("first", chain).reason == FailureReason.DEADLINE
    asked = len(daemon.requests)
    for number in range(100):
        assert client.acquire(f"r{number}", chain).reason == FailureReason.CIRCUIT_OPEN
        assert client.match(chain) == 0
        held[0].commit(8)
        held[1].allocate(1000)
    for lease in held:
        lease.finish(8)
    client.close()
    assert daemon.bye_came.wait(PATIENCE_S)

    assert time.monotonic() - begun_s < 5 * DEADLINE_MS / 1000  # of 404 calls
    assert isinstance(client.last_failure, CircuitOpen)
    assert held[1].reason == FailureReason.CIRCUIT_OPEN
    later = [type(request) for request, _ in daemon.requests[asked:] if not isinstance(request, Match)]
    assert later == [Release, Release, Release, Bye]


def test_answering_daemon_is_used_again(daemon: FakeDaemon, connect: Connect) -> None:
    """Once the daemon has answered what it was asked meanwhile, calls are served again, without any step for it."""
    client = connect(failures="miss", deadline_ms=DEADLINE_MS)
    chain = client.chain(range(8))
    goes_on = threading.Event()

    def hang(*_: object) -> None:
        goes_on.wait(PATIENCE_S)

    daemon.script = hang
    assert client.match(chain) == 0
    assert not client.acquire("meanwhile", chain).granted
    goes_on.set()

    lease = client.acquire("after", chain)
    while not lease.granted:  # until the answers have come
        assert lease.reason == FailureReason.CIRCUIT_OPEN
        lease = client.acquire("after", chain)

    assert (lease.reason, client.is_alive) == (None, True)
    lease.finish(8)
    assert isinstance(daemon.requests[-1][0], Release)


def test_release_while_the_daemon_hangs_is_not_lost(daemon: FakeDaemon, connect: Connect) -> None:
    """A lease that is given back while the daemon hangs is known to it later, also after a commit that hung."""
    client = connect(failures="miss", deadline_ms=DEADLINE_MS)
    lease = client.acquire("a", client.chain(range(8)))
    daemon.script = silent_on(Commit, Match)
    lease.commit(8)
    assert lease.reason == FailureReason.DEADLINE
    lease.finish(8)
    client.close()

    assert daemon.bye_came.wait(PATIENCE_S)
    assert len(daemon.of(Release)) == 1


def test_dead_daemon_is_unreachable_with_an_open_circuit(daemon: FakeDaemon, connect: Connect) -> None:
    """A daemon that is killed while it hangs is known to be gone at the next call: the engine may rejoin."""
    client = connect(failures="miss", deadline_ms=DEADLINE_MS)
    daemon.script = HUNG
    client.match(client.chain(range(8)))
    assert client.is_alive
    daemon.stop()

    assert client.acquire("a", client.chain(range(8))).reason == FailureReason.UNREACHABLE
    assert not client.is_alive
    assert isinstance(client.last_failure, DaemonUnreachable)


def test_long_wait_for_a_load_is_no_hang(
    daemon: FakeDaemon, connect: Connect, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load that takes longer than the deadline keeps no other call from being served, and is not called an outage."""
    # The fake daemon is a thread, which a busy machine may not run for longer than the usual grace.
    monkeypatch.setattr(misses, "PROBE_GRACE_NS", PATIENCE_S * 1_000_000_000)
    client = connect(failures="miss", deadline_ms=DEADLINE_MS)

    def script(request: Request, frames: list[bytes]) -> tuple[Header, list[bytes]] | None:
        if isinstance(request, Acquire) and request.request == "loading":
            reply = Acquired(id=request.id, lease=9, hit=1, ready=0, loads=(LoadTicket(1, 0),))
            return reply, [b"\x00\x00\x00\x00\x01\x00\x00\x00", b"\x01\x00\x00\x00\x01\x00\x00\x00"]
        return silent_on(Load)(request, frames)

    daemon.script = script
    lease = client.acquire("loading", client.chain(range(8)))
    with caplog.at_level(logging.WARNING, "kvcached_client"):
        lease.wait_loaded()
        assert lease.reason == FailureReason.DEADLINE
        other = client.acquire("other", client.chain(range(8)))

    assert other.granted
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (ErrorCode.NO_CAPACITY, FailureReason.NO_CAPACITY),
        (ErrorCode.DRAINING, FailureReason.UNAVAILABLE),
        (ErrorCode.STALE_EPOCH, FailureReason.STALE),
        (ErrorCode.LIMIT, FailureReason.REFUSED),
    ],
)
def test_lease_says_why_nothing_was_granted(
    daemon: FakeDaemon, connect: Connect, code: ErrorCode, reason: FailureReason
) -> None:
    """Each way in which an acquire comes to nothing has its reason."""
    client = connect(failures="miss")
    daemon.script = failing(code, Acquire)

    lease = client.acquire("a", client.chain(range(8)))

    assert (lease.granted, lease.reason) == (False, reason)


def test_full_pool_is_no_failure(daemon: FakeDaemon, connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
    """Where the pool is full the lease says so; nothing is logged and nothing counted as a failure."""
    client = connect(failures="miss")
    lease = client.acquire("a", client.chain(range(8)))
    full = request_error(ErrorCode.NO_CAPACITY, "full", "wait")
    daemon.script = lambda request, _: (error_reply(request.id, full), []) if not isinstance(request, Release) else None

    with caplog.at_level(logging.INFO, "kvcached_client"):
        lease.allocate(1000)
        other = client.acquire("b", client.chain(range(8)))

    assert (lease.reason, other.reason) == (FailureReason.NO_CAPACITY, FailureReason.NO_CAPACITY)
    assert (client.failure_count, client.last_failure, caplog.messages) == (0, None, [])
    daemon.script = None
    lease.allocate(9)
    assert lease.reason is None


def test_relapses_are_waited_out() -> None:
    """A daemon that answers only when nobody waits is asked ever more rarely, down to once in half a minute."""
    circuit, now_ns, pauses = Circuit(), 0, []
    for _ in range(8):
        circuit.open(now_ns, "late")
        opened_ns = now_ns
        while circuit.is_resting(now_ns):
            now_ns += PAUSE_NS_MIN // 2
        pauses.append((now_ns - opened_ns) / PAUSE_NS_MIN)
        circuit.close(now_ns)
        now_ns += RELAPSE_NS // 2

    assert pauses == [0, 1, 2, 4, 8, 16, 30, 30]
    assert PAUSE_NS_MAX == 30 * PAUSE_NS_MIN
    circuit.open(now_ns + RELAPSE_NS, "late")
    assert not circuit.is_resting(now_ns + RELAPSE_NS)


def test_circuit_takes_no_other_way() -> None:
    """A circuit that is open is not doubted, and one that is closed not closed: that would be a mistake here."""
    circuit = Circuit()
    with pytest.raises(RuntimeError, match="closed to closed"):
        circuit.close(0)
    circuit.doubt(0)
    circuit.open(0, "silent")
    assert circuit.state is CircuitState.OPEN
    with pytest.raises(RuntimeError, match="open to doubted"):
        circuit.doubt(0)
