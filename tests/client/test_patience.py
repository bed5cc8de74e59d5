"""Engines that connect while the daemon is not there yet, or is not ready."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcached_client import Client, DaemonUnreachable
from kvcached_client.aio import AsyncClient
from kvcached_client.errors import DeadlineExceeded, ErrorCode, Fault, KvcachedError, LoadFailed, request_error
from kvcached_client.offload import OffloadClient, OffloadLayout
from kvcached_client.protocol.engine import Bye, ErrorReply, Header, Hello, HelloOffload, Request
from kvcached_client.transport.patience import Patience
from tests.client.fake_daemon import FakeDaemon
from tests.client.test_offload import Script

WAIT_S = 20
#: Longer than a test may take.
FOREVER_S = 3600.0
UNREACHABLE = DaemonUnreachable("no socket")


class StartedWhenMissed(logging.Handler):
    """Calls `start` when a client says that it waits."""

    def __init__(self, start: Callable[[], None]) -> None:
        super().__init__()
        self._start = start

    def emit(self, record: logging.LogRecord) -> None:
        if "is waited for" in record.getMessage():
            self._start()


@pytest.fixture
def when_missed() -> Iterator[Callable[[Callable[[], None]], None]]:
    """Has something done when a client begins to wait."""
    logger, handlers = logging.getLogger("kvcached_client"), list[logging.Handler]()
    level = logger.level

    def add(start: Callable[[], None]) -> None:
        handlers.append(StartedWhenMissed(start))
        logger.addHandler(handlers[-1])
        logger.setLevel(logging.INFO)

    yield add
    logger.setLevel(level)
    for handler in handlers:
        logger.removeHandler(handler)


@pytest.fixture
def late_daemon(run_dir: Path, when_missed: Callable[[Callable[[], None]], None]) -> Iterator[list[FakeDaemon]]:
    """A daemon that starts when a client has missed it."""
    started: list[FakeDaemon] = []

    def start() -> None:
        started.append(FakeDaemon(run_dir))
        started[-1].script = Script()

    when_missed(start)
    yield started
    for each in started:
        each.stop()


def refusing(daemon: FakeDaemon, code: ErrorCode, times: int) -> None:
    """Have the daemon refuse so many hellos."""
    left = iter(range(times))

    def script(request: Request, _: list[bytes]) -> tuple[Header, list[bytes]] | None:
        if isinstance(request, (Hello, HelloOffload)) and next(left, None) is not None:
            return ErrorReply(id=request.id, code=code, message="no", fix="none", fault=Fault.CALLER), []
        return None

    daemon.script = script


def connect_offload(run_dir: Path, **options: Any) -> OffloadClient:
    layout = OffloadLayout(block_size=16, shards=1, block_bytes=1024, fingerprint=bytes(16))
    return OffloadClient.connect(
        run_dir, engine="e", instance=bytes(16), keyspace=bytes(32), label="m", layout=layout, **options
    )


def test_engine_may_start_before_the_daemon(run_dir: Path, late_daemon: list[FakeDaemon]) -> None:
    """A client that waits has a session with a daemon that starts after it."""
    with Client.connect(run_dir, wait_s=FOREVER_S, heartbeat=False) as client:
        assert client.is_alive
    assert len(late_daemon) == 1


def test_offload_engine_may_start_before_the_daemon(run_dir: Path, late_daemon: list[FakeDaemon]) -> None:
    """An engine in offload mode waits for the daemon as well."""
    with connect_offload(run_dir, wait_s=FOREVER_S) as client:
        assert client.is_alive
    assert len(late_daemon) == 1


def test_event_loop_goes_on_while_a_client_waits(run_dir: Path) -> None:
    """The task that starts the daemon runs in the loop of the one that waits for it."""

    async def both() -> bool:
        connecting = asyncio.create_task(AsyncClient.connect(run_dir, wait_s=FOREVER_S, heartbeat=False))
        await asyncio.sleep(0)
        daemon = FakeDaemon(run_dir)
        try:
            async with await asyncio.wait_for(connecting, WAIT_S) as client:
                return client.is_alive
        finally:
            daemon.stop()

    assert asyncio.run(both())


def test_waiting_ends(run_dir: Path) -> None:
    """If no daemon comes, the error of the last attempt is raised."""
    with pytest.raises(DaemonUnreachable, match="start the daemon"):
        Client.connect(run_dir, wait_s=0.05)
    with pytest.raises(DaemonUnreachable):
        asyncio.run(AsyncClient.connect(run_dir, wait_s=0.05))


@pytest.mark.parametrize("code", [ErrorCode.DRAINING, ErrorCode.WORKER_LOST, ErrorCode.CLEARING, ErrorCode.POOL_BUSY])
def test_daemon_that_is_not_ready_is_asked_again(daemon: FakeDaemon, code: ErrorCode) -> None:
    """A daemon that refuses because of what passes by is asked until it serves."""
    refusing(daemon, code, times=2)
    with Client.connect(daemon.run_dir, wait_s=FOREVER_S, heartbeat=False):
        assert len(daemon.of(Hello)) == 3


@pytest.mark.parametrize("code", [ErrorCode.FORBIDDEN, ErrorCode.ASLEEP, ErrorCode.UNSUPPORTED_VERSION])
def test_what_waiting_does_not_mend_is_raised_at_once(daemon: FakeDaemon, code: ErrorCode) -> None:
    """A refusal that stays one is raised after the first attempt, whatever the patience."""
    refusing(daemon, code, times=2)
    with pytest.raises(KvcachedError, match=code):
        Client.connect(daemon.run_dir, wait_s=FOREVER_S, heartbeat=False)
    assert len(daemon.of(Hello)) == 1


@pytest.mark.parametrize("wait_s", [-1.0, math.nan])
def test_time_is_not_negative(daemon: FakeDaemon, wait_s: float) -> None:
    """A time that means nothing is refused, and nobody is asked."""
    with pytest.raises(ValueError, match="wait_s is"):
        Client.connect(daemon.run_dir, wait_s=wait_s)
    with pytest.raises(ValueError, match="wait_s is"):
        connect_offload(daemon.run_dir, wait_s=wait_s)
    assert not daemon.requests


def test_task_that_is_cancelled_while_it_waits_has_no_session(run_dir: Path) -> None:
    """A task that is cancelled between two attempts ends at once."""

    async def give_up() -> None:
        await asyncio.wait_for(AsyncClient.connect(run_dir, wait_s=FOREVER_S), 0.05)

    with pytest.raises(TimeoutError):
        asyncio.run(give_up())


def test_session_that_comes_after_a_cancellation_is_closed(daemon: FakeDaemon) -> None:
    """A task that is cancelled in an attempt leaves no session behind, even if the daemon opens one afterwards."""
    has_come, go_on = threading.Event(), threading.Event()

    def script(request: Request, _: list[bytes]) -> None:
        if isinstance(request, Hello):
            has_come.set()
            assert go_on.wait(WAIT_S)

    daemon.script = script

    async def give_up() -> None:
        connecting = asyncio.create_task(AsyncClient.connect(daemon.run_dir, deadline_ms=10_000, heartbeat=False))
        assert await asyncio.to_thread(has_come.wait, WAIT_S)
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting
        assert not daemon.of(Bye)
        go_on.set()
        assert await asyncio.to_thread(daemon.bye_came.wait, WAIT_S)

    asyncio.run(give_up())


def test_pauses_become_longer_and_end_in_time() -> None:
    """Pauses double up to a limit; the last one ends with the time, and after it there is none."""
    now_s = 0.0
    patience, pauses = Patience(2.0, lambda: now_s), []
    while (pause_s := patience.pause_s(UNREACHABLE)) is not None:
        pauses.append(pause_s)
        now_s += pause_s
    assert pauses[:6] == [0.01, 0.02, 0.04, 0.08, 0.16, 0.25]
    assert max(pauses) == 0.25
    assert sum(pauses) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("error", "is_mended"),
    [
        (UNREACHABLE, True),
        (DeadlineExceeded("no reply"), True),
        (LoadFailed("a load"), False),
        (request_error(ErrorCode.INTERNAL, "a fault", "report it"), False),
        (request_error(ErrorCode.NO_CAPACITY, "full", "release"), False),
    ],
)
def test_only_what_passes_by_is_waited_for(error: KvcachedError, is_mended: bool) -> None:
    """A daemon that does not reply may come; a fault, or a full pool, is told at once."""
    assert (Patience(1.0).pause_s(error) is not None) is is_mended
    assert Patience(0.0).pause_s(error) is None
