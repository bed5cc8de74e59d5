"""A worker's copies: in which order, for which session, and that every one of them is reported."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvcached_client.blocks.jobs import BlockJob, JobSpan
from kvcached_client.errors import DaemonUnreachable, DeadlineExceeded, DeviceError, ErrorCode, request_error
from kvcached_client.transport.attach import SessionGrant
from kvcached_client.types import TransferId
from kvcached_client.vllm import worker
from kvcached_client.vllm.orders import LoadOrder, SessionNote, StepOrders, StoreOrder
from kvcached_client.vllm.worker import BLOCKS_TOGETHER_MAX, PASSES_MAX, QUIET_S, STORES_TOGETHER_MAX, WorkerSide

EXPIRED = request_error(ErrorCode.SESSION_EXPIRED, "the session is over", "join the next one")
SLOW = DeadlineExceeded("slow")
GONE = DaemonUnreachable("gone")
BROKEN = request_error(ErrorCode.BAD_VALUE, "job: nonsense", "mend it")


class NotingLock:
    """The side's lock, by which a test can wait for what is done under it."""

    def __init__(self) -> None:
        self.changed = threading.Condition()

    def __enter__(self) -> None:
        self.changed.acquire()

    def __exit__(self, *_: object) -> None:
        self.changed.notify_all()
        self.changed.release()


class FakeShard:
    """A shard that notes what it does, waits where a test says so, and fails as it is told."""

    def __init__(self, rig: Rig, session: int) -> None:
        self.rig = rig
        self.session = session
        self.ended_by_daemon, self._other = os.pipe()
        self.is_closed = False

    def fileno(self) -> int:
        return self.ended_by_daemon

    def hang_up(self) -> None:
        """As the daemon does when the session ends."""
        other, self._other = self._other, -1
        os.close(other)

    def store_all(self, jobs: Sequence[BlockJob], *, after: Any) -> None:
        self.rig.together.append([job.transfer for job in jobs])
        for job in jobs:
            self._do("store", job, after)

    def load(self, job: BlockJob, *, after: Any) -> list[int]:
        bad: list[int] = self._do("load", job, after)
        return bad

    def _do(self, what: str, job: BlockJob, after: Any) -> Any:
        assert not self.is_closed
        self.rig.marks[int(job.transfer)] = after
        self.rig.done.append((what, self.session, int(job.transfer)))
        self.rig.entered.set()
        assert self.rig.go_on.wait(10)
        answer = self.rig.answers.get(int(job.transfer), [])
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        self.rig.done.append(("close", self.session, 0))
        self.is_closed = True
        os.close(self.ended_by_daemon)
        if self._other >= 0:
            os.close(self._other)


class Rig:
    """A worker's side over fake shards."""

    def __init__(self) -> None:
        self.now = 0.0
        self.device: Exception | None = None
        self.done: list[tuple[str, int, int]] = []
        self.answers: dict[int, list[int] | Exception] = {}
        self.join_errors: list[Exception] = []
        self.entered = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()
        self.shards: list[FakeShard] = []
        self.joined = threading.Semaphore(0)
        self.marks: dict[int, Any] = {}  #: by transfer
        self.together: list[list[int]] = []  #: stores that were carried out by one call
        self.made: list[Any] = []
        self.said: list[str] = []  #: to where shards come from
        self.source = SimpleNamespace(
            join=self._join,
            mark=self._mark,
            prepare=lambda: self.said.append("prepare"),
            abort=self._abort,
            close=lambda: self.said.append("close"),
        )
        self.side = WorkerSide(self.source, clock=lambda: self.now)
        lock = NotingLock()
        self.changed = lock.changed
        self.side._lock = lock  # type: ignore[assignment]

    def _abort(self) -> None:
        self.said.append("abort")
        self.go_on.set()

    def wait_for(self, what: Callable[[], object]) -> None:
        with self.changed:
            assert self.changed.wait_for(what, 10), self.done

    def _join(self, grant: SessionGrant) -> FakeShard:
        self.done.append(("join", grant.id, 0))
        self.joined.release()
        if self.join_errors:
            raise self.join_errors.pop(0)
        self.shards.append(FakeShard(self, grant.id))
        return self.shards[-1]

    def _mark(self) -> Any:
        """The mark of a step, counted from 0, by a device that may have failed."""
        if isinstance(self.device, Exception):
            raise self.device
        self.made.append(len(self.made))
        return self.made[-1]

    def begin(self, *orders: LoadOrder | StoreOrder, session: int | None = 1) -> None:
        loads = tuple(order for order in orders if isinstance(order, LoadOrder))
        stores = tuple(order for order in orders if isinstance(order, StoreOrder))
        self.side.begin(StepOrders(None if session is None else note(session), loads, stores))

    def drain(self, loads: int = 0, stores: int = 0) -> tuple[set[str], set[int], set[int], set[int]]:
        """Wait for so many copies: requests loaded, bad blocks, stores that are over, those of them that failed."""
        self.wait_for(lambda: len(self.side._loaded) >= loads and len(self.side._report.done) >= stores)
        loaded, report = self.side.take_loaded(), self.side.take_stored()
        done = set() if report is None else {transfer for _, transfer in report.done}
        failed = set() if report is None else {transfer for _, transfer in report.failed}
        return loaded, self.side.take_bad_blocks(), done, failed


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.go_on.set()
    rig.side.close()
    assert not rig.side._thread.is_alive()


def note(session: int) -> SessionNote:
    return SessionNote(session, SessionGrant(id=session, token=bytes(32), run_dir="/run/kvcached").to_bytes())


def job(transfer: int, blocks: list[int]) -> BlockJob:
    keys = bytes(16 * len(blocks))
    slots = np.arange(len(blocks), dtype=np.int32)
    return BlockJob(TransferId(transfer), 1, (JobSpan(0, b"", keys, np.array(blocks, np.int32), slots),))


def load(transfer: int, blocks: list[int] | None = None, *, session: int = 1) -> LoadOrder:
    return LoadOrder(session, f"r{transfer}", job(transfer, blocks or [10, 11]))


def store(transfer: int, *, session: int = 1) -> StoreOrder:
    return StoreOrder(session, job(transfer, [20, 21, 22]))


def large(transfer: int) -> StoreOrder:
    """A store that is carried out by itself."""
    return StoreOrder(1, job(transfer, list(range(BLOCKS_TOGETHER_MAX))))


def test_load_is_reported(rig: Rig) -> None:
    """A load that arrived is reported once, with no bad block."""
    rig.begin(load(1))
    assert rig.drain(loads=1) == ({"r1"}, set(), set(), set())
    assert rig.side.take_loaded() == set()


def test_bad_blocks_are_reported_with_their_load(rig: Rig) -> None:
    """Blocks that are not what was stored are named by vLLM's ids, when their request is reported and not later."""
    rig.answers[1] = [1]
    rig.begin(load(1, [40, 41, 42]))
    assert rig.drain(loads=1) == ({"r1"}, {41}, set(), set())
    assert rig.side.take_bad_blocks() == set()


def test_bad_blocks_wait_for_their_load(rig: Rig) -> None:
    """Bad blocks of a load that nobody was told of yet are not given out before it is."""
    rig.answers[1] = [0]
    assert rig.side.take_loaded() == set()
    rig.begin(load(1, [40]))
    rig.wait_for(lambda: rig.side._loaded)
    assert rig.side.take_bad_blocks() == set()
    assert (rig.side.take_loaded(), rig.side.take_bad_blocks()) == ({"r1"}, {40})


def test_requests_with_bad_blocks_are_named_with_their_load(rig: Rig) -> None:
    """With several groups, vLLM is told of the requests: a bad block fails the load, in the report that ends it."""
    rig.answers = {1: [0], 2: []}
    rig.begin(load(1, [40]))
    rig.begin(load(2, [41]))
    rig.wait_for(lambda: len(rig.side._loaded) > 1)
    assert rig.side.take_failed() == set()
    assert (rig.side.take_loaded(), rig.side.take_failed()) == ({"r1", "r2"}, {"r1"})
    assert rig.side.take_failed() == set()


@pytest.mark.parametrize("error", [EXPIRED, SLOW, GONE, BROKEN, ZeroDivisionError()])
def test_failed_copies_are_reported(rig: Rig, error: Exception) -> None:
    """However a copy fails, its load is over with all blocks bad, and its store is over and failed."""
    rig.answers = {1: error, 2: error}
    rig.begin(load(1), store(2))
    assert rig.drain(loads=1, stores=1) == ({"r1"}, {10, 11}, {2}, {2})


def test_store_is_reported(rig: Rig) -> None:
    """A store is reported as over, by session and transfer."""
    rig.begin(store(5))
    rig.wait_for(lambda: rig.side._report.done)
    report = rig.side.take_stored()
    assert report is not None
    assert (report.done, report.failed) == ({(1, 5): 1}, set())
    assert rig.side.take_stored() is None


def test_stores_have_their_turn_beside_loads(rig: Rig) -> None:
    """Under any number of loads a store that waits is carried out after so many of them, and frees its blocks."""
    rig.go_on.clear()
    rig.begin(load(1))
    assert rig.entered.wait(10)
    transfers = range(10, 10 + 3 * PASSES_MAX)
    rig.begin(large(2), large(3), *(load(transfer) for transfer in transfers))
    rig.go_on.set()
    rig.drain(loads=1 + len(transfers), stores=2)
    kinds = [what for what, _, _ in rig.done if what in {"load", "store"}]
    between = ["load"] * PASSES_MAX
    assert kinds == ["load", *between, "store", *between, "store", *between]


def test_loads_go_first(rig: Rig) -> None:
    """Loads overtake stores that wait; each kind keeps its order."""
    rig.go_on.clear()
    rig.begin(large(1), large(2), large(3))
    assert rig.entered.wait(10)
    rig.begin(load(4))
    rig.begin(load(5))
    rig.go_on.set()
    rig.drain(loads=2, stores=3)
    assert [transfer for _, _, transfer in rig.done if transfer] == [1, 4, 5, 2, 3]


def stores_behind_a_load(rig: Rig, *orders: StoreOrder) -> list[list[int]]:
    """Stores that wait while a load is made: which of them one call carries out."""
    rig.go_on.clear()
    rig.begin(load(1000))
    assert rig.entered.wait(10)
    for order in orders:
        rig.begin(order)
    rig.go_on.set()
    rig.drain(loads=1, stores=len(orders))
    return rig.together


def test_small_stores_are_carried_out_together(rig: Rig) -> None:
    """Stores that wait go into one call and one report, behind the mark of the last; a large one goes by itself."""
    together = stores_behind_a_load(rig, store(1), store(2), large(3), store(4), store(5))
    assert together == [[1, 2], [3], [4, 5]]
    assert (rig.marks[1], rig.marks[2]) == (2, 2)


def test_stores_of_two_sessions_do_not_go_together(rig: Rig) -> None:
    """Stores of the last session, which are void, take no store of the next one along."""
    rig.go_on.clear()
    rig.begin(load(1000))
    assert rig.entered.wait(10)
    rig.begin(store(1))
    rig.begin(store(2, session=2), session=2)
    rig.go_on.set()
    assert rig.drain(loads=1, stores=2)[2:] == ({1, 2}, set())
    assert rig.together == [[1], [2]]


def test_stores_that_go_together_are_limited(rig: Rig) -> None:
    """One report names no more stores than a message may."""
    orders = [StoreOrder(1, job(transfer, [20])) for transfer in range(1, STORES_TOGETHER_MAX + 2)]
    assert [len(each) for each in stores_behind_a_load(rig, *orders)] == [STORES_TOGETHER_MAX, 1]


def test_stores_that_failed_together_are_all_reported(rig: Rig) -> None:
    """A failure of one call is the failure of all its stores."""
    rig.answers = {2: BROKEN}
    rig.go_on.clear()
    rig.begin(load(1000))
    assert rig.entered.wait(10)
    rig.begin(store(1), store(2))
    rig.go_on.set()
    assert rig.drain(loads=1, stores=2)[2:] == ({1, 2}, {1, 2})


def test_copies_begin_behind_the_mark_of_their_step(rig: Rig) -> None:
    """All copies of a step have the mark that was made when its orders came, however late they are made."""
    rig.go_on.clear()
    rig.begin(store(1), store(2))
    assert rig.entered.wait(10)
    rig.begin(load(3), store(4))
    rig.begin()
    rig.go_on.set()
    rig.drain(loads=1, stores=3)
    assert (rig.marks, rig.made) == ({1: 0, 2: 0, 3: 1, 4: 1}, [0, 1])


def test_device_that_has_failed_ends_all_copies(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """Where a stream cannot be marked, no copy is made any more: orders are reported as failed, and vLLM goes on."""
    rig.begin(load(1))
    rig.drain(loads=1)
    rig.device = DeviceError("cuEventRecord: CUDA_ERROR_LAUNCH_FAILED")
    rig.begin(load(2), store(3))
    assert rig.drain(loads=1, stores=1) == ({"r2"}, {10, 11}, {3}, {3})
    rig.device = None
    rig.begin(load(4, session=2), session=2)
    assert rig.drain(loads=1)[1] == {10, 11}
    assert rig.done == [("join", 1, 0), ("load", 1, 1)]
    assert "no more copies by this worker: cuEventRecord" in caplog.text


def test_session_is_joined_before_it_is_needed(rig: Rig) -> None:
    """The first step that names a session makes the worker join it, though there is nothing to copy; once."""
    rig.begin()
    assert rig.joined.acquire(timeout=10)
    rig.begin()
    rig.begin(load(1))
    rig.drain(loads=1)
    assert rig.done == [("join", 1, 0), ("load", 1, 1)]


def test_copies_end_before_the_next_session_is_joined(rig: Rig) -> None:
    """Loads of the old session are made from its memory before it is left; its stores that wait are void.

    It is left before the next is joined: two processes that copy would be on the device at once.
    """
    rig.go_on.clear()
    rig.begin(store(1))
    assert rig.entered.wait(10)
    rig.begin(load(2), store(3))
    rig.begin(load(4, session=2), store(5, session=2), session=2)
    rig.go_on.set()
    assert rig.drain(loads=2, stores=3) == ({"r2", "r4"}, set(), {1, 3, 5}, {3})
    assert rig.done == [
        ("join", 1, 0),
        ("store", 1, 1),
        ("load", 1, 2),
        ("close", 1, 0),
        ("join", 2, 0),
        ("load", 2, 4),
        ("store", 2, 5),
    ]


def test_while_there_is_no_session_the_mapping_stays(rig: Rig) -> None:
    """A step that names no session changes nothing: a load that was ordered before is still made."""
    rig.begin()
    assert rig.joined.acquire(timeout=10)
    rig.begin(load(1), session=None)
    assert rig.drain(loads=1) == ({"r1"}, set(), set(), set())


def test_orders_of_an_unknown_session_fail(rig: Rig) -> None:
    """Orders of a session that was never joined fail at once."""
    rig.begin(load(1, session=3), store(2, session=3), session=None)
    assert rig.drain(loads=1, stores=1) == ({"r1"}, {10, 11}, {2}, {2})
    assert rig.done == []


@pytest.mark.parametrize("error", [GONE, EXPIRED, SLOW, ZeroDivisionError()])
def test_join_that_fails_is_not_tried_for_a_while(rig: Rig, error: Exception) -> None:
    """Orders of a session that cannot be joined fail without a try, until a while has passed."""
    rig.join_errors = [error]
    rig.begin(load(1))
    rig.begin(load(2), store(3))
    assert rig.drain(loads=2, stores=1) == ({"r1", "r2"}, {10, 11}, {3}, {3})
    rig.now += QUIET_S
    rig.begin(load(4))
    assert rig.drain(loads=1) == ({"r4"}, set(), set(), set())
    assert rig.done == [("join", 1, 0), ("join", 1, 0), ("load", 1, 4)]


def test_next_session_is_tried_at_once(rig: Rig) -> None:
    """What failed in one session does not delay the next one."""
    rig.join_errors = [GONE]
    rig.begin(load(1))
    rig.begin(load(2, session=2), session=2)
    assert rig.drain(loads=2) == ({"r1", "r2"}, {10, 11}, set(), set())


def test_silent_daemon_costs_one_deadline(rig: Rig) -> None:
    """After an answer that did not come, orders fail for a while without a try; the session is kept."""
    rig.answers[1] = SLOW
    rig.begin(store(1))
    rig.begin(load(2), store(3))
    rig.drain(loads=1, stores=2)
    assert rig.done == [("join", 1, 0), ("store", 1, 1)] or rig.done[1:] == [("load", 1, 2), ("store", 1, 1)]
    rig.now += QUIET_S
    rig.begin(load(4))
    assert rig.drain(loads=1)[1] == set()


def test_session_that_is_over_is_left(rig: Rig) -> None:
    """A worker that is told that the session is over unmaps its memory, and does not join it again."""
    rig.answers[1] = EXPIRED
    rig.begin(store(1))
    rig.drain(stores=1)
    rig.begin(load(2))
    assert rig.drain(loads=1)[1] == {10, 11}
    assert rig.done == [("join", 1, 0), ("store", 1, 1), ("close", 1, 0)]


def test_idle_worker_notices_the_end_of_the_session(rig: Rig) -> None:
    """A worker without orders unmaps the memory of a dead daemon when its connection ends."""
    rig.begin(load(1))
    rig.drain(loads=1)
    closed = threading.Event()
    (shard,) = rig.shards
    close = shard.close

    def note_close() -> None:
        close()
        closed.set()

    shard.close = note_close  # type: ignore[method-assign]
    shard.hang_up()
    assert closed.wait(10)


def test_process_for_the_next_session_is_started_when_one_is_over(rig: Rig) -> None:
    """Not at the end: no session follows."""
    rig.answers[1] = EXPIRED
    rig.begin(store(1))
    rig.drain(stores=1)
    rig.begin(load(2, session=2), session=2)
    rig.drain(loads=1)
    rig.side.close()
    assert rig.said == ["prepare", "close"]


@pytest.mark.parametrize("why", ["end", "device"])
def test_copies_that_may_never_end_are_aborted(rig: Rig, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """A copy behind a mark that is never reached ends with vLLM, or as soon as the device is seen to have failed."""
    monkeypatch.setattr(worker, "CLOSE_S_MAX", 0.2)
    rig.go_on.clear()
    rig.begin(load(1))
    assert rig.entered.wait(10)
    if why == "device":
        rig.device = DeviceError("launch failure")
        rig.begin(store(2))
        rig.drain(loads=1, stores=1)
    rig.side.close()
    assert rig.said == ["abort", "close"]


def test_fault_of_the_thread_fails_all_orders(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """After a fault of kvcached in the thread, orders are reported as failed, those of later sessions, too."""
    rig.begin(load(1))
    rig.drain(loads=1)
    waits = threading.Event()

    def broken_wait() -> int:
        waits.set()
        raise ZeroDivisionError

    rig.shards[0].fileno = broken_wait  # type: ignore[method-assign]
    rig.begin(load(2), store(3))
    rig.drain(loads=1, stores=1)
    assert waits.wait(10)
    rig.begin(load(4), store(5))
    rig.begin(load(6, session=2), session=2)
    loaded, bad, stored, failed = rig.drain(loads=2, stores=1)
    assert (loaded, bad, stored, failed) == ({"r4", "r6"}, {10, 11}, {5}, {5})
    assert "a fault of kvcached" in caplog.text


LOAD_AND_STORE = pytest.mark.parametrize("order", [load(2), store(2)], ids=["load", "store"])


def assert_failed(rig: Rig, order: LoadOrder | StoreOrder) -> None:
    """Give one of these orders: it is reported as failed."""
    rig.begin(order)
    if isinstance(order, LoadOrder):
        assert rig.drain(loads=1) == ({"r2"}, {10, 11}, set(), set())
    else:
        assert rig.drain(stores=1) == (set(), set(), {2}, {2})


@LOAD_AND_STORE
def test_fault_beside_a_copy_loses_no_orders(rig: Rig, order: LoadOrder | StoreOrder) -> None:
    """Orders that the thread has in hand at a fault of kvcached are reported as failed, and so are all later ones."""
    rig.begin(load(1))
    rig.drain(loads=1)
    rig.side._clock = broken  # type: ignore[assignment]
    rig.answers[2] = SLOW
    assert_failed(rig, order)
    rig.begin(load(3), store(4))
    assert rig.drain(1, 1) == ({"r3"}, {10, 11}, {4}, {4})


@LOAD_AND_STORE
def test_next_session_that_cannot_be_prepared(rig: Rig, order: LoadOrder | StoreOrder) -> None:
    """Where nothing can be made ready for the next session, no order is lost, and that session is joined."""
    rig.begin(load(1))
    rig.drain(loads=1)
    rig.source.prepare = broken
    rig.answers[2] = EXPIRED
    assert_failed(rig, order)
    rig.begin(load(3, session=2), store(4, session=2), session=2)
    assert rig.drain(1, 1) == ({"r3"}, set(), {4}, set())


def test_fault_after_the_device_has_failed(rig: Rig) -> None:
    """A first fault of kvcached does not end the thread that reports orders, though no copy is made any more."""
    rig.begin(load(1))
    rig.drain(loads=1)
    rig.device = DeviceError("launch failure")
    rig.shards[0].fileno = broken  # type: ignore[method-assign, assignment]
    rig.begin(load(2))
    rig.drain(loads=1)
    rig.begin(load(3), store(4))
    assert rig.drain(1, 1) == ({"r3"}, {10, 11}, {4}, {4})


def test_shard_that_cannot_be_closed(rig: Rig) -> None:
    """Where leaving a session fails, the next one is joined all the same, and no order is lost."""
    rig.begin(load(1))
    rig.drain(loads=1)
    rig.shards[0].close = broken  # type: ignore[method-assign]
    rig.answers[2] = EXPIRED
    rig.begin(load(2))
    assert rig.drain(loads=1)[:2] == ({"r2"}, {10, 11})
    rig.begin(load(3, session=2), session=2)
    assert rig.drain(loads=1)[:2] == ({"r3"}, set())


def broken() -> None:
    raise ZeroDivisionError


def test_counts(rig: Rig) -> None:
    """Blocks and seconds are counted, those that failed apart, and taken once."""
    rig.answers = {1: [0], 3: BROKEN}
    rig.begin(load(1), store(2))
    rig.drain(loads=1, stores=1)
    rig.begin(store(3))
    rig.drain(stores=1)
    counts = rig.side.take_counts()
    assert counts is not None
    assert (counts.loaded_blocks, counts.load_failed_blocks) == (1, 1)
    assert (counts.stored_blocks, counts.store_failed_blocks) == (3, 3)
    assert counts.load_seconds > 0 < counts.store_seconds
    assert rig.side.take_counts() is None


def test_sleep_waits_for_the_copy_under_way(rig: Rig) -> None:
    """The memory is taken away when the copy that uses it is over, and not before."""
    rig.go_on.clear()
    rig.begin(store(1))
    assert rig.entered.wait(10)
    is_asleep = threading.Event()

    def sleep() -> None:
        rig.side.fall_asleep()
        is_asleep.set()

    thread = threading.Thread(target=sleep)
    thread.start()
    rig.begin(store(2), load(3))
    assert not is_asleep.is_set()
    rig.go_on.set()
    thread.join(10)
    assert is_asleep.is_set()
    assert rig.drain(1, 2) == ({"r3"}, {10, 11}, {1, 2}, {2})
    assert [what for what, *_ in rig.done] == ["join", "store"]


def test_nothing_is_copied_asleep(rig: Rig) -> None:
    """Orders of a worker that sleeps fail, and those that come after it has woken up are carried out."""
    rig.begin()
    rig.side.fall_asleep()
    rig.side.fall_asleep()
    rig.begin(load(1), store(2))
    assert rig.drain(1, 1) == ({"r1"}, {10, 11}, {2}, {2})
    rig.side.wake_up()
    rig.begin(load(3), store(4))
    assert rig.drain(1, 1) == ({"r3"}, set(), {4}, set())
    assert [(what, number) for what, _, number in rig.done] == [("join", 0), ("load", 3), ("store", 4)]


def test_copy_that_does_not_end_keeps_vllm_awake(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory may not be taken away, and the worker goes on as before."""
    monkeypatch.setattr(worker, "CLOSE_S_MAX", 0.01)
    rig.go_on.clear()
    rig.begin(store(1))
    assert rig.entered.wait(10)
    with pytest.raises(RuntimeError, match="this vLLM cannot sleep now"):
        rig.side.fall_asleep()
    monkeypatch.undo()
    rig.go_on.set()
    rig.begin(load(2))
    assert rig.drain(1, 1) == ({"r2"}, set(), {1}, set())


def test_close_ends_the_copy_under_way_and_drops_the_rest(rig: Rig) -> None:
    """Closing waits for the copy under way, leaves the session and ends the thread; again it does nothing."""
    rig.go_on.clear()
    rig.begin(large(1), large(2))
    assert rig.entered.wait(10)
    closing = threading.Thread(target=rig.side.close)
    closing.start()
    rig.wait_for(lambda: rig.side._is_closing)
    rig.go_on.set()
    closing.join(10)
    assert rig.done == [("join", 1, 0), ("store", 1, 1), ("close", 1, 0)]
    rig.side.close()


def test_close_while_idle() -> None:
    """A worker that waits for orders ends at once."""
    rig = Rig()
    rig.side.close()
    assert not rig.side._thread.is_alive()
