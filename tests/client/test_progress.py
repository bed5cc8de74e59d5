"""Waiting for layers of a load: the page decides, the eventfds wake, and the deadline and the daemon's death end it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvcached_client import (
    DaemonFailure,
    DaemonUnreachable,
    DeadlineExceeded,
    KvcachedError,
    LoadFailed,
    LoadTicket,
    MappedPool,
    RequestError,
    TransportError,
    map_pool,
)
from kvcached_client.blocks.progress import PAGE_SIZE_BYTES, ProgressReader
from kvcached_client.transport.attach import AttachConnection
from kvcached_client.types import PROGRESS_SLOTS
from tests.client.fake_daemon import FakeDaemon
from tests.client.pools import LAYOUTS, SLOTS, mapped, offer
from tests.client.progress_page import SEALS, ProgressPage, sealed_memory

ROOT = Path(__file__).parents[2]
SMAPS = Path("/proc/self/smaps")
WAIT_MS = 20_000
ENTRY = 5
TICKET = LoadTicket(41, ENTRY)


@pytest.fixture
def pool(daemon: FakeDaemon, memory: list[int]) -> Iterator[MappedPool]:
    """A mapped pool of three layers, whose progress page is the fake daemon's."""
    with mapped(daemon, LAYOUTS["attention-layer_first"], memory) as mapped_pool:
        yield mapped_pool


@contextlib.contextmanager
def waiting(call: Callable[[], None]) -> Iterator[list[KvcachedError | None]]:
    """Runs a call in a thread; its outcome is in the list once the context is left."""
    outcomes: list[KvcachedError | None] = []

    def run() -> None:
        try:
            call()
        except KvcachedError as error:
            outcomes.append(error)
        else:
            outcomes.append(None)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield outcomes
    finally:
        thread.join()


def test_without_tickets_nothing_waits(pool: MappedPool) -> None:
    """A lease that waits for no load reads at once, with any deadline."""
    pool.wait_layer((), 0, deadline_ms=0)


def test_layers_are_there_in_their_order(daemon: FakeDaemon, pool: MappedPool) -> None:
    """A layer below the count may be read; the next one may not, until it is counted."""
    daemon.progress.start(ENTRY, 41)
    for layer in range(3):
        with pytest.raises(DeadlineExceeded):
            pool.wait_layer([TICKET], layer, deadline_ms=0)
        daemon.progress.finish_layers(ENTRY)
        for before in range(layer + 1):
            pool.wait_layer([TICKET], before, deadline_ms=0)


def test_layers_of_later_groups_follow_those_of_earlier_ones(daemon: FakeDaemon, memory: list[int]) -> None:
    """The count runs through all groups of the layout: the second group's first layer is the fourth of all."""
    with mapped(daemon, LAYOUTS["both-layer_first"], memory) as pool:
        daemon.progress.start(ENTRY, 41)
        daemon.progress.finish_layers(ENTRY, 3)
        pool.wait_layer([TICKET], 2, deadline_ms=0)
        with pytest.raises(DeadlineExceeded):
            pool.wait_layer([TICKET], 0, 1, deadline_ms=0)
        daemon.progress.finish_layers(ENTRY)
        pool.wait_layer([TICKET], 0, 1, deadline_ms=0)
        for layer, group in ((3, 0), (2, 1), (0, 2), (-1, 0)):
            with pytest.raises(IndexError):
                pool.wait_layer([TICKET], layer, group, deadline_ms=0)


def test_load_that_is_done_has_every_layer(daemon: FakeDaemon, pool: MappedPool) -> None:
    """A worker that copies whole blocks counts no layers and says at the end that they are all there."""
    daemon.progress.start(ENTRY, 41)
    daemon.progress.succeed(ENTRY)
    pool.wait_layer([TICKET], 2, deadline_ms=0)


@pytest.mark.parametrize("layers", [0, 2])
def test_failed_load_raises_even_for_layers_that_were_there(daemon: FakeDaemon, pool: MappedPool, layers: int) -> None:
    """After a failure no layer counts, for some of the blocks never came."""
    daemon.progress.start(ENTRY, 41)
    daemon.progress.finish_layers(ENTRY, layers)
    daemon.progress.fail(ENTRY)
    with pytest.raises(LoadFailed, match="load 41"):
        pool.wait_layer([TICKET], 0, deadline_ms=WAIT_MS)


def test_load_that_was_never_started_fails_for_those_who_wait(daemon: FakeDaemon, pool: MappedPool) -> None:
    """A load that is given up while it is queued ends the wait for it."""
    with waiting(lambda: pool.wait_layer([TICKET], 0, deadline_ms=WAIT_MS)) as outcomes:
        daemon.progress.abandon(ENTRY, 41)
    assert isinstance(outcomes[0], LoadFailed)


def test_load_failure_is_no_answer_of_the_daemon() -> None:
    """Whoever catches refusals or a dead daemon does not catch it by accident."""
    assert issubclass(LoadFailed, KvcachedError)
    assert not issubclass(LoadFailed, RequestError | TransportError)


def test_queued_load_is_waited_for(daemon: FakeDaemon, pool: MappedPool) -> None:
    """While the entry tells of an earlier load, done or failed, the later one has not begun."""
    for end in (daemon.progress.succeed, daemon.progress.fail):
        daemon.progress.start(ENTRY, 40)
        daemon.progress.finish_layers(ENTRY, 3)
        end(ENTRY)
        with pytest.raises(DeadlineExceeded):
            pool.wait_layer([TICKET], 0, deadline_ms=0)
    with waiting(lambda: pool.wait_layer([TICKET], 0, deadline_ms=WAIT_MS)) as outcomes:
        daemon.progress.start(ENTRY, 41)
        daemon.progress.finish_layers(ENTRY)
    assert outcomes == [None]


def test_load_whose_entry_went_to_a_later_one_is_over(daemon: FakeDaemon, pool: MappedPool) -> None:
    """An entry is given on only after its load has ended, so nobody waits, nor fails with the later load."""
    daemon.progress.start(ENTRY, 42)
    pool.wait_layer([TICKET], 2, deadline_ms=0)
    daemon.progress.fail(ENTRY)
    pool.wait_layer([TICKET], 2, deadline_ms=0)


def test_stale_events_do_not_count_as_layers(daemon: FakeDaemon, pool: MappedPool) -> None:
    """What the eventfd says about loads that nobody waited for only causes another look at the page."""
    daemon.progress.start(ENTRY, 40)
    daemon.progress.finish_layers(ENTRY, 3)
    daemon.progress.start(ENTRY, 41)
    with pytest.raises(DeadlineExceeded):
        pool.wait_layer([TICKET], 0, deadline_ms=50)
    with pytest.raises(BlockingIOError):
        os.eventfd_read(daemon.progress.events[ENTRY])


def test_layers_counted_before_the_wait_need_no_event(daemon: FakeDaemon, pool: MappedPool) -> None:
    """The page alone decides: a count whose event another look has taken already still counts."""
    daemon.progress.start(ENTRY, 41)
    daemon.progress.finish_layers(ENTRY, 2, tell=False)
    pool.wait_layer([TICKET], 1, deadline_ms=0)


def test_every_ticket_is_waited_for(daemon: FakeDaemon, pool: MappedPool) -> None:
    """A hit that comes by several loads is there with the last of them."""
    tickets = [LoadTicket(41, 0), LoadTicket(43, PROGRESS_SLOTS - 1)]
    for ticket in tickets:
        with pytest.raises(DeadlineExceeded):
            pool.wait_layer(tickets, 0, deadline_ms=0)
        daemon.progress.start(ticket.progress, ticket.transfer)
        daemon.progress.finish_layers(ticket.progress)
    pool.wait_layer(tickets, 0, deadline_ms=0)


def test_waiting_uses_no_processor_time(daemon: FakeDaemon, pool: MappedPool) -> None:
    """A wait of which most passes without news is spent asleep."""
    daemon.progress.start(ENTRY, 41)
    wall, busy = time.monotonic(), time.thread_time()
    with pytest.raises(DeadlineExceeded):
        pool.wait_layer([TICKET], 0, deadline_ms=300)
    assert time.thread_time() - busy < (time.monotonic() - wall) / 4


def test_wait_ends_when_the_daemon_dies(daemon: FakeDaemon, pool: MappedPool) -> None:
    """A shard process in the middle of a wait learns of the daemon's death, whatever its deadline."""
    daemon.progress.start(ENTRY, 41)
    daemon.progress.finish_layers(ENTRY)
    with waiting(lambda: pool.wait_layer([TICKET], 1, deadline_ms=3_600_000)) as outcomes:
        daemon.stop()
    assert isinstance(outcomes[0], DaemonUnreachable)
    pool.wait_layer([TICKET], 0, deadline_ms=0)
    with pytest.raises(DaemonUnreachable):
        pool.wait_layer([TICKET], 1, deadline_ms=3_600_000)


def test_closed_pool_waits_for_nothing(pool: MappedPool) -> None:
    """After close there are no eventfds to wait on."""
    pool.close()
    pool.close()
    with pytest.raises(ValueError, match="closed"):
        pool.wait_layer([TICKET], 0, deadline_ms=0)


#: A worker in a process of its own: a load for each byte that it reads, whose bytes it writes before it counts a layer.
WRITER = """
import mmap, os, sys
from tests.client.progress_page import ProgressPage
memory, slot_bytes, layers, page, *events = map(int, sys.argv[1:])
pool = mmap.mmap(memory, 0)
progress = ProgressPage(page, events)
transfer = 0
while sys.stdin.buffer.read(1):
    transfer += 1
    entry = transfer % 3
    if transfer % 7 == 3:
        progress.abandon(entry, transfer)
        continue
    progress.start(entry, transfer)
    for layer in range(1 if transfer % 5 == 2 else layers):
        pool[layer * slot_bytes] = transfer % 256
        progress.finish_layers(entry)
    (progress.fail if transfer % 5 == 2 else progress.succeed)(entry)
"""


def test_layers_that_were_waited_for_hold_what_the_worker_copied(daemon: FakeDaemon, memory: list[int]) -> None:
    """Against a worker in another process, a wait that returns finds the layer's bytes, and one that fails is right."""
    daemon.progress.close()
    daemon.progress = ProgressPage.create(SEALS)  # another process writes it
    pool = mapped(daemon, LAYOUTS["attention-layer_first"], memory)
    stride = pool.pages(1).ctypes.data - pool.pages(0).ctypes.data
    arguments = [memory[-1], stride, pool.layout.groups[0].layers, *daemon.progress.descriptors]
    command = [sys.executable, "-c", WRITER, *map(str, arguments)]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, bufsize=0, pass_fds=[memory[-1], *daemon.progress.descriptors]
    ) as worker:
        assert worker.stdin is not None
        for transfer in range(1, 201):
            ticket = LoadTicket(transfer, transfer % 3)
            worker.stdin.write(b"x")
            fails = transfer % 7 == 3 or transfer % 5 == 2
            for layer in range(3):
                try:
                    pool.wait_layer([ticket], layer, deadline_ms=WAIT_MS)
                except LoadFailed:
                    assert fails
                    break
                assert pool.pages(layer)[0, 0] == transfer % 256
            else:
                assert not fails
        worker.stdin.close()
    assert worker.returncode == 0
    pool.close()


def open_descriptors() -> dict[int, str]:
    """What this process has open, by descriptor."""
    found = {}
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing's own descriptor
            found[int(path.name)] = str(path.readlink())
    return found


def test_pool_keeps_eventfds_until_it_is_closed_and_no_page(daemon: FakeDaemon, memory: list[int]) -> None:
    """Mapping leaves a connection and 32 eventfds open, all close-on-exec, which closing gives back."""
    layout = LAYOUTS["attention-layer_first"]
    memory.append(sealed_memory(layout.pool_bytes(SLOTS)))
    grant = offer(daemon, layout, memory[-1])
    before = open_descriptors()
    pool = map_pool(grant)
    # The other end of the connection is the fake daemon's, in this process.
    own = {number: name for number, name in open_descriptors().items() if number not in before}
    kinds = Counter(name.partition(":")[0] for name in own.values())
    assert kinds == {"anon_inode": PROGRESS_SLOTS, "socket": 2}
    assert not any(os.get_inheritable(number) for number in own)
    pool.close()
    assert {name.partition(":")[0] for number, name in open_descriptors().items() if number not in before} == {"socket"}


def test_progress_page_is_read_only_and_kept_from_forks_and_core_dumps(daemon: FakeDaemon, pool: MappedPool) -> None:
    """The reader's mapping cannot be written, is not copied on fork, and is not dumped."""
    inode = os.fstat(daemon.progress.page).st_ino
    mappings = re.findall(
        rf"^\S+ (\S+) \S+ \S+ {inode} .*?^VmFlags: ([^\n]*)$", SMAPS.read_text(), re.DOTALL | re.MULTILINE
    )
    (flags,) = [flags.split() for permissions, flags in mappings if permissions == "r--s"]
    assert {"sh", "dc", "dd"} <= set(flags)
    assert "mw" not in flags  # mprotect cannot make it writable either


@pytest.mark.parametrize("missing", [fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SEAL])
def test_unsealed_progress_page_is_refused(daemon: FakeDaemon, memory: list[int], missing: int) -> None:
    """A page that could still shrink under its reader is not mapped, and no descriptor stays open."""
    layout = LAYOUTS["attention-layer_first"]
    daemon.progress.close()
    daemon.progress = ProgressPage.create(SEALS & ~missing)
    memory.append(sealed_memory(layout.pool_bytes(SLOTS)))
    grant = offer(daemon, layout, memory[-1])
    before = open_descriptors()
    with pytest.raises(DaemonFailure, match="seals"):
        map_pool(grant)
    assert [name for number, name in open_descriptors().items() if number not in before and "socket" not in name] == []


def test_short_progress_page_is_refused(daemon: FakeDaemon, memory: list[int]) -> None:
    """A page with fewer entries than the protocol has is not mapped."""
    own, peer = socket.socketpair()
    memory.append(sealed_memory(PAGE_SIZE_BYTES - 1, name="progress"))
    with own, peer, pytest.raises(DaemonFailure, match=str(PAGE_SIZE_BYTES)):
        ProgressReader(memory[-1], (), AttachConnection(own))
