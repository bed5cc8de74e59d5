"""The storage process's states and deadlines, without a process and without waiting."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvcached.core.messages import (
    QueryStorage,
    Span,
    StartBackup,
    StorageAnswered,
    StorageEmptied,
    StorageEvent,
    StorageLost,
    StorageReady,
    StorageSuspended,
)
from kvcached.storage import client as link
from kvcached.storage.backend import Usage
from kvcached.storage.client import (
    BREAKER_FAILURES,
    FIRST_PAUSE_S,
    FORGET_S_MAX,
    HUNG_TIMEOUTS,
    LATE_TIMEOUTS,
    LONGEST_PAUSE_S,
    StorageLink,
)
from kvcached.storage.forgets import DELETE_BLOCKS_MAX, delete_blocks
from kvcached.storage.link_state import LinkState
from kvcached.storage.messages import (
    BlockFormat,
    Delete,
    Done,
    Forget,
    NotOpened,
    Opened,
    Ping,
    Progress,
    Query,
    ReadRecord,
    Request,
    StorageConfig,
)
from kvcached.storage.refused_writes import REFUSAL_LOG_S
from kvcached_client.blocks.host_layout import HostGeometry
from kvcached_client.types import TransferId
from tests.virtual_time import VirtualTimeLoop

TIMEOUT_S = 1.0
LATE_S = TIMEOUT_S * LATE_TIMEOUTS
CONFIG = StorageConfig(backend="fake", settings={}, key_file="", timeout_s=TIMEOUT_S, host_bytes=1 << 20)
KIND = BlockFormat(
    namespace=bytes(16),
    header_namespace=bytes(16),
    header_generation=0,
    fingerprint=bytes(16),
    generation=0,
    geometry=HostGeometry(slabs=1, slab_bytes=1 << 20, shards=1, block_bytes=4096),
)

#: How the keys of its blocks begin.
PREFIX = KIND.stored().prefix()


class FakeProcess:
    """A storage process that opens, answers and dies when a test says so."""

    made: list[FakeProcess]

    def __init__(self, *_: object, on_opened: Any, on_reply: Any, on_exit: Any) -> None:
        self.on_opened, self.on_reply, self.on_exit = on_opened, on_reply, on_exit
        self.dead = asyncio.Event()
        self.orders: list[Request] = []
        self.kills: list[str] = []
        FakeProcess.made.append(self)

    def open(self, threads: int = 1, blocks: int = -1) -> None:
        self.on_opened(Opened(persistent=True, threads=threads, usage=Usage(blocks, -1, -1)))

    def send(self, order: Request) -> None:
        self.orders.append(order)

    def answer(self, order: Request, error: str = "") -> None:
        self.orders.remove(order)
        self.on_reply(Done(sequence=order.sequence, failed=bool(error), error=error))

    def looks(self) -> list[Request]:
        """Questions whether it answers again."""
        return [order for order in self.orders if isinstance(order, Ping)]

    def forgets(self) -> list[Request]:
        return [order for order in self.orders if isinstance(order, Forget)]

    def kill(self, reason: str) -> None:
        self.kills.append(reason)

    async def stop(self, *_: float | None) -> None:
        await self.dead.wait()
        self.on_exit("ended")


class Rig:
    """A link at an open process."""

    def __init__(self, clock: VirtualTimeLoop) -> None:
        self.clock = clock
        self.events: list[StorageEvent] = []
        self.link = StorageLink(CONFIG, (-1, -1), Path(), 1, lambda *_: KIND, self.events.append)
        self.link.attach()
        self.process.open()

    @property
    def process(self) -> FakeProcess:
        return FakeProcess.made[-1]

    def state(self) -> LinkState:
        """Where the link is now."""
        return self.link.state

    def ask(self) -> Request:
        """The core asks something."""
        self.link.carry_out(QueryStorage(1, bytes(32), 0, bytes(16)))
        order = self.process.orders[-1]
        assert isinstance(order, Query)
        return order

    def fail(self, times: int) -> None:
        for _ in range(times):
            self.process.answer(self.ask(), "EIO")

    def back_up(self, error: str = "", *, failed: bool = False, written: int = 0) -> None:
        """The core has a block written, and this comes of it."""
        span = Span(0, bytes(16), bytes(16), array("i", [0, 1]), array("i"))
        self.link.carry_out(StartBackup(TransferId(1), bytes(32), 0, (span,)))
        order = self.process.orders.pop()
        self.process.on_reply(Done(sequence=order.sequence, failed=failed, error=error, written=written))

    def restart(self, threads: int = 1) -> None:
        """The process dies, and the next one opens when its pause is over."""
        self.process.on_exit("was ended")
        self.clock.pass_s(LONGEST_PAUSE_S)
        self.process.open(threads)


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """A link that is ready, to a process that begins one order at a time."""
    monkeypatch.setattr(link, "StorageProcess", FakeProcess)
    FakeProcess.made = []

    async def made(clock: VirtualTimeLoop) -> Rig:
        return Rig(clock)

    with closing(VirtualTimeLoop()) as clock:
        yield clock.run_until_complete(made(clock))


def test_attach_waits_for_the_process_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes never have one backend: what is attached while it is detached starts when that is dead."""
    monkeypatch.setattr(link, "StorageProcess", FakeProcess)
    FakeProcess.made = []
    events: list[StorageEvent] = []

    async def play() -> None:
        storage = StorageLink(CONFIG, (-1, -1), Path(), 1, lambda *_: None, events.append)
        storage.attach()
        FakeProcess.made[0].open()
        detaching = asyncio.create_task(storage.detach(1.0))
        await asyncio.sleep(0)
        storage.attach()
        assert len(FakeProcess.made) == 1
        FakeProcess.made[0].dead.set()
        await detaching
        assert len(FakeProcess.made) == 2
        FakeProcess.made[1].open()
        assert storage.state is LinkState.READY

    asyncio.run(play())

    assert events == [StorageReady(), StorageLost(), StorageReady()]


def test_nothing_is_asked_before_whoever_has_to_is_ready(rig: Rig) -> None:
    """The backend is open, and this daemon's alone: what others have left there is looked at first.

    A process that dies meanwhile is not taken for its successor, which is looked at as well.
    """
    waiting: list[Callable[[], None]] = []
    rig.link.before_ready = waiting.append
    rig.restart()
    assert (rig.state(), rig.events[-1]) == (LinkState.STARTING, StorageLost())
    rig.restart()
    waiting[0]()
    assert (rig.state(), len(waiting)) == (LinkState.STARTING, 2)
    waiting[1]()
    assert (rig.state(), rig.events[-1]) == (LinkState.READY, StorageReady())


@pytest.mark.parametrize("is_wanted", [False, True], ids=["it died", "it was wanted again"])
def test_next_start_is_planned_whatever_the_core_says(rig: Rig, *, is_wanted: bool) -> None:
    """An internal error in whoever is told of the loss keeps no link in the state of before: it starts again."""

    def fail(_: StorageEvent) -> None:
        raise KeyError("namespace")

    if is_wanted:
        rig.link.state, rig.link._is_wanted = LinkState.DETACHED, True
    rig.link._tell = fail
    with pytest.raises(KeyError):
        rig.process.on_exit("was ended")
    rig.link._tell = rig.events.append
    rig.clock.pass_s(LONGEST_PAUSE_S)
    assert len(FakeProcess.made) == 2
    rig.process.open()

    assert rig.state() is LinkState.READY


def test_backend_that_cannot_be_opened_is_tried_again(rig: Rig) -> None:
    """The reason is told as it came, whether the settings are wrong is known, and the next start may succeed."""
    rig.process.on_exit("was ended")
    rig.clock.pass_s(LONGEST_PAUSE_S)
    rig.process.on_opened(NotOpened(reason="no such key", is_misconfigured=True))
    rig.process.on_exit("cannot open its backend: no such key")
    assert (rig.state(), rig.link.is_misconfigured) == (LinkState.WAITING, True)
    assert rig.link.why == "the storage process cannot open its backend: no such key"
    rig.clock.pass_s(LONGEST_PAUSE_S)
    rig.process.open()

    assert (rig.state(), rig.link.is_misconfigured) == (LinkState.READY, False)


def test_attach_ends_a_pause(rig: Rig) -> None:
    """Who has mended something need not wait for the next attempt; what was planned for the pause's end is not done."""
    rig.process.on_exit("was ended")
    rig.link.attach()
    assert rig.state() is LinkState.STARTING
    rig.process.open()
    rig.clock.pass_s(LONGEST_PAUSE_S)

    assert (rig.state(), len(FakeProcess.made)) == (LinkState.READY, 2)


def test_wait_for_storage_does_not_hide_why_it_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits in vain is told what went wrong before, too."""
    monkeypatch.setattr(link, "StorageProcess", FakeProcess)
    FakeProcess.made = []

    async def play() -> str:
        storage = StorageLink(CONFIG, (-1, -1), Path(), 1, lambda *_: None, lambda _: None)
        storage.attach()
        storage.why = "no such device"
        assert not await storage.started(0.001)
        return storage.why

    assert asyncio.run(play()) == "it was not ready within 0.001 s; before that: no such device"


def test_record_that_can_be_read_proves_nothing_of_blocks(rig: Rig) -> None:
    """It is read every few seconds: a service that fails all else stays suspended, with its growing pauses."""

    def read() -> None:
        assert rig.link.ask(lambda number: ReadRecord(sequence=number, known=b""), lambda _: None)
        rig.process.answer(rig.process.orders[-1])

    for _ in range(BREAKER_FAILURES):
        rig.process.answer(rig.ask(), "EIO")
        read()
    assert rig.state() is LinkState.SUSPENDED
    read()
    assert rig.state() is LinkState.SUSPENDED
    rig.clock.pass_s(FIRST_PAUSE_S)
    (look,) = rig.process.looks()
    rig.process.answer(look)

    assert rig.state() is LinkState.READY


def test_forgets_that_fail_leave_a_local_disk_in_use(rig: Rig) -> None:
    """One of the two could not do it; the other one has blocks. The pauses between the attempts grow."""
    rig.link._config = msgspec.structs.replace(rig.link._config, local_disk={})
    rig.link.forget(PREFIX, lambda _: None)
    attempts = 0
    for _ in range(120):
        for order in rig.process.forgets():
            rig.process.answer(order, "the service is away")
            attempts += 1
        rig.clock.pass_s(1)

    assert BREAKER_FAILURES < attempts < 10
    assert rig.state() is LinkState.READY


@pytest.mark.parametrize("has_disk", [False, True])
def test_deletions_that_fail_suspend_storage_without_a_local_disk(rig: Rig, *, has_disk: bool) -> None:
    """They fail as other requests do; a disk in front of a service that is away goes on."""
    rig.link._config = msgspec.structs.replace(rig.link._config, local_disk={} if has_disk else None)
    told: list[Done] = []
    for _ in range(BREAKER_FAILURES):
        delete_blocks(rig.link.ask, PREFIX, bytes(16), told.append)
        rig.process.answer(rig.process.orders[-1], "it is away")

    assert rig.state() is (LinkState.READY if has_disk else LinkState.SUSPENDED)
    assert [(each.failed, each.error) for each in told] == [(True, "it is away")] * BREAKER_FAILURES


def test_deletion_that_a_dead_process_had_is_told_as_failed(rig: Rig) -> None:
    """Whoever waits for it gets his answer, and nobody repeats it for him."""
    told: list[Done] = []
    delete_blocks(rig.link.ask, PREFIX, bytes(32), told.append)
    (order,) = rig.process.orders
    assert order == Delete(sequence=order.sequence, prefix=PREFIX, keys=bytes(32))
    rig.restart()

    assert [(each.failed, each.error) for each in told] == [(True, "the storage process was ended")]
    assert rig.process.orders == []


def test_deletion_tells_what_may_come_back(rig: Rig) -> None:
    """All parts are deleted, and what one of them says is told with the number of all."""
    told: list[Done] = []
    delete_blocks(rig.link.ask, PREFIX, bytes(16 * 3 * DELETE_BLOCKS_MAX), told.append)
    for error in ("", "writes got no answer", ""):
        (order,) = rig.process.orders
        rig.process.orders.clear()
        rig.process.on_reply(Done(sequence=order.sequence, count=2, error=error))

    assert [(over.count, over.failed, over.error) for over in told] == [(6, False, "writes got no answer")]


@pytest.mark.parametrize("has_disk", [False, True])
def test_record_that_cannot_be_read_suspends_storage_without_a_local_disk(rig: Rig, *, has_disk: bool) -> None:
    """Nobody has to wait for a service that is known to be away; a disk in front of it goes on."""
    rig.link._config = msgspec.structs.replace(rig.link._config, local_disk={} if has_disk else None)
    for _ in range(BREAKER_FAILURES):
        assert rig.link.ask(lambda number: ReadRecord(sequence=number, known=b""), lambda _: None)
        rig.process.answer(rig.process.orders[-1], "it is away")

    assert rig.state() is (LinkState.READY if has_disk else LinkState.SUSPENDED)
    assert rig.link.why.endswith("it is away")
    assert rig.link.counters["failures"] == BREAKER_FAILURES


def test_storage_that_takes_no_blocks_says_why(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """The reason stays until a block is taken, also over orders with nothing new; the log has it once a minute."""
    with caplog.at_level(logging.INFO):
        for _ in range(5):
            rig.back_up("full: File too large")
            rig.back_up()
            rig.back_up("EIO", failed=True)
        assert rig.link.write_refusal == "full: File too large"
        assert rig.state() is LinkState.READY
        assert caplog.text.count("accepts no blocks") == 1
        rig.clock.pass_s(REFUSAL_LOG_S)
        rig.back_up("full: File too large")
        assert caplog.text.count("accepts no blocks") == 2
        rig.back_up(written=1)

    assert not rig.link.write_refusal
    assert "accepts blocks again" in caplog.text


def test_late_answer_suspends(rig: Rig) -> None:
    """A call that takes longer than it may suspends storage; its answer, when it comes, ends that."""
    order = rig.ask()
    rig.clock.pass_s(LATE_S * 0.99)
    assert rig.state() is LinkState.READY
    rig.clock.pass_s(LATE_S * 0.02)
    assert rig.state() is LinkState.SUSPENDED
    rig.process.answer(order)

    assert rig.state() is LinkState.READY
    assert rig.events[:3] == [StorageReady(), StorageSuspended(), StorageReady()]
    assert isinstance(rig.events[3], StorageAnswered)


def test_order_that_gets_on_is_not_late(rig: Rig) -> None:
    """An order of many slow calls suspends nothing while it reports progress, however long all of it takes."""
    order = rig.ask()
    for _ in range(3 * HUNG_TIMEOUTS):
        rig.clock.pass_s(TIMEOUT_S)
        rig.process.on_reply(Progress(sequence=order.sequence))
    assert rig.state() is LinkState.READY
    rig.clock.pass_s(LATE_S)
    assert rig.state() is LinkState.SUSPENDED
    for _ in range(3 * HUNG_TIMEOUTS):
        rig.process.on_reply(Progress(sequence=order.sequence))
        rig.clock.pass_s(TIMEOUT_S)
    rig.process.answer(order)

    assert (rig.state(), rig.process.kills) == (LinkState.READY, [])


def test_emptied_storage_is_told(rig: Rig) -> None:
    """The core hears that storage has no blocks: when an empty device was attached, and when all were forgotten."""
    rig.process.on_exit("was ended")
    rig.clock.pass_s(LONGEST_PAUSE_S)
    rig.process.open(blocks=0)
    assert rig.events[1:] == [StorageLost(), StorageEmptied(), StorageReady()]
    for error in ("EIO", ""):
        assert rig.link.forget_all(lambda _: None)
        rig.process.answer(rig.process.forgets()[0], error)

    assert rig.events[4:] == [StorageEmptied()]


def test_failures_in_a_row_suspend(rig: Rig) -> None:
    """One failure less than the breaker takes changes nothing; an answer in between begins the count anew."""
    rig.fail(BREAKER_FAILURES - 1)
    rig.process.answer(rig.ask())
    rig.fail(BREAKER_FAILURES - 1)
    assert rig.state() is LinkState.READY
    rig.fail(1)

    assert rig.state() is LinkState.SUSPENDED


@pytest.mark.parametrize("reason", ["late", "failing"])
def test_suspended_storage_is_asked_until_it_answers(rig: Rig, reason: str) -> None:
    """However it came to be suspended and however often the question fails, it is asked again, later and later."""
    if reason == "late":
        order = rig.ask()
        rig.clock.pass_s(LATE_S)
        rig.process.answer(order, "EIO")
    else:
        rig.fail(BREAKER_FAILURES)
    pauses = []
    for _ in range(9):
        assert rig.process.looks() == []
        began_s = rig.clock.time()
        while not rig.process.looks():
            rig.clock.pass_s(FIRST_PAUSE_S / 2)
            assert rig.clock.time() <= began_s + LONGEST_PAUSE_S + 1
        pauses.append(rig.clock.time() - began_s)
        rig.process.answer(rig.process.looks()[0], "EIO")

    assert pauses == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    rig.clock.pass_s(LONGEST_PAUSE_S)
    rig.process.answer(rig.process.looks()[0])
    assert rig.state() is LinkState.READY


def test_pauses_grow_while_only_probes_succeed(rig: Rig) -> None:
    """Storage that answers probes and then fails is probed later and later; an order that succeeds ends that."""

    def pause_s() -> float:
        rig.fail(BREAKER_FAILURES)
        began_s = rig.clock.time()
        while not rig.process.looks():
            rig.clock.pass_s(FIRST_PAUSE_S / 2)
        rig.process.answer(rig.process.looks()[0])
        assert rig.state() is LinkState.READY
        return rig.clock.time() - began_s

    assert [pause_s() for _ in range(4)] == [0.5, 1, 2, 4]
    rig.process.answer(rig.ask())
    assert pause_s() == FIRST_PAUSE_S


def test_orders_that_wait_for_their_turn_are_not_late(rig: Rig) -> None:
    """A process that works off many orders, each in time, is neither suspended nor killed, however many wait."""
    orders = [rig.ask() for _ in range(3 * HUNG_TIMEOUTS)]
    for order in orders:
        rig.clock.pass_s(TIMEOUT_S * 0.9)
        rig.process.answer(order)

    assert rig.state() is LinkState.READY
    assert rig.events.count(StorageSuspended()) == 0
    assert rig.process.kills == []


def test_one_order_that_hangs_is_noticed_beside_others(rig: Rig) -> None:
    """Beside orders that are answered, one that is not suspends storage, and in the end the process is killed."""
    rig.restart(threads=2)
    hung = rig.ask()
    for _ in range(11 * HUNG_TIMEOUTS):
        rig.clock.pass_s(TIMEOUT_S / 10)
        for order in rig.process.orders[:]:
            if order is not hung:
                rig.process.answer(order)
        if rig.state() is LinkState.READY:
            rig.ask()

    assert rig.events.count(StorageSuspended()) == 1
    assert len(rig.process.kills) == 1


def test_killed_process_is_waited_for(rig: Rig) -> None:
    """A process that waits for its device dies late: until then the loop is not kept busy."""
    rig.ask()
    rig.clock.pass_s(TIMEOUT_S * HUNG_TIMEOUTS)
    rig.clock.pass_s(3600)

    assert len(rig.process.kills) == 1


def test_deadlines_hold_after_a_suspension(rig: Rig) -> None:
    """An order that was sent when storage was ready again is late as any other."""
    first = rig.ask()
    rig.clock.pass_s(LATE_S)
    second = rig.ask()
    rig.process.answer(first)
    assert rig.state() is LinkState.READY
    rig.clock.pass_s(LATE_S)

    assert rig.state() is LinkState.SUSPENDED
    rig.process.answer(second)
    assert rig.state() is LinkState.READY


def test_pauses_are_short_again_after_a_good_time(rig: Rig) -> None:
    """A process that dies after it has worked for long starts as soon as the first one that died."""
    for _ in range(8):
        rig.restart()
        rig.clock.pass_s(LONGEST_PAUSE_S + 1)
    made = len(FakeProcess.made)
    rig.process.on_exit("was ended")
    rig.clock.pass_s(FIRST_PAUSE_S)

    assert len(FakeProcess.made) == made + 1


def test_pauses_grow_while_processes_die_at_once(rig: Rig) -> None:
    """What dies as soon as it has started is started later and later."""
    for _ in range(8):
        rig.restart()
    made = len(FakeProcess.made)
    rig.process.on_exit("was ended")
    rig.clock.pass_s(LONGEST_PAUSE_S - 1)

    assert len(FakeProcess.made) == made


def test_pauses_grow_while_processes_do_not_open(rig: Rig) -> None:
    """A backend that cannot be opened any more is tried later and later, however long it worked before."""
    rig.clock.pass_s(10 * LONGEST_PAUSE_S)
    pauses = []
    for _ in range(8):
        made, began_s = len(FakeProcess.made), rig.clock.time()
        rig.process.on_exit("was ended")
        while len(FakeProcess.made) == made:
            rig.clock.pass_s(FIRST_PAUSE_S)
        pauses.append(rig.clock.time() - began_s)

    assert pauses == [0.5, 1, 2, 4, 8, 16, 30, 30]


def test_forgetting_a_namespace_survives_the_process(rig: Rig) -> None:
    """What is to be forgotten is, by the next process, if the one that was told has died over it."""
    told: list[Done] = []
    rig.link.forget(PREFIX, told.append)
    assert len(rig.process.forgets()) == 1
    rig.restart()
    (order,) = rig.process.forgets()
    assert told == []
    rig.process.answer(order)

    assert [over.failed for over in told] == [False]


def test_forgetting_a_namespace_is_tried_until_it_is_done(rig: Rig) -> None:
    """A backend that cannot forget now is told again, after a while and when storage works."""
    told: list[Done] = []
    rig.link.forget(PREFIX, told.append)
    for _ in range(3):
        rig.process.answer(rig.process.forgets()[0], "the index is being made")
        assert rig.process.forgets() == []
        rig.clock.pass_s(LONGEST_PAUSE_S)
    assert (told, len(rig.link.due)) == ([], 1)
    rig.process.answer(rig.process.forgets()[0])

    assert (len(told), len(rig.link.due)) == (1, 0)


def test_forgetting_waits_for_what_is_being_written(rig: Rig) -> None:
    """A namespace is forgotten after the writes that may be of it, and when storage works."""
    rig.fail(BREAKER_FAILURES)
    rig.link.forget(PREFIX, lambda _: None)
    assert rig.process.forgets() == []
    rig.clock.pass_s(FIRST_PAUSE_S)
    rig.process.answer(rig.process.looks()[0])

    assert len(rig.process.forgets()) == 1


def test_forgetting_may_take_long(rig: Rig) -> None:
    """Millions of blocks are not forgotten within a timeout: that is no hang, unless it takes much longer."""
    rig.link.forget(PREFIX, lambda _: None)
    rig.clock.pass_s(FORGET_S_MAX * 0.99)
    assert rig.state() is LinkState.READY
    assert rig.process.kills == []
    rig.clock.pass_s(FORGET_S_MAX)

    assert len(rig.process.kills) == 1


def test_forgetting_that_gets_on_may_take_any_time(rig: Rig) -> None:
    """A page is deleted each minute, for an hour: only a page that hangs ends the process."""
    rig.link.forget(PREFIX, lambda _: None)
    (order,) = rig.process.forgets()
    for _ in range(60):
        rig.clock.pass_s(60)
        rig.process.on_reply(Progress(sequence=order.sequence))
    assert (rig.state(), rig.process.kills) == (LinkState.READY, [])
    rig.clock.pass_s(FORGET_S_MAX + 1)

    assert len(rig.process.kills) == 1


def test_whoever_has_everything_forgotten_hears_of_a_death(rig: Rig) -> None:
    """The one who asked is told that it failed, and why."""
    told: list[Done] = []
    assert rig.link.forget_all(told.append)
    rig.process.on_exit("was ended by SIGKILL")

    assert [(over.failed, over.error) for over in told] == [(True, "the storage process was ended by SIGKILL")]
