from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcached.worker.executor import PASSES_MAX, Executor, NotTaken, Task
from kvcached.worker.messages import (
    ERROR_SIZE_CHARS_MAX,
    REPLY_SIZE_BYTES_MAX,
    REQUESTS_IN_FLIGHT_MAX,
    Done,
    Probe,
    Request,
    Shutdown,
    Store,
    Work,
    encode,
)
from kvcached_client.errors import DeviceError
from tests.worker.host_rigs import load_of, store_of

PATIENCE_S = 20
LOAD, STORE, URGENT, PROBE = load_of(), store_of(), store_of(urgent=True), Probe(source=0, target=1, seed=0)
#: One for each lane.
HELD: tuple[Task, ...] = (PROBE, STORE)


def nothing(task: Task) -> tuple[int, ...]:
    return ()


class Running:
    """An executor whose reports can be awaited, and that holds back the first request of each lane until it is let."""

    def __init__(
        self,
        carry_out: Callable[[Task], tuple[int, ...]] = nothing,
        *,
        held: bool = False,
        device_works: Callable[[], bool] = lambda: True,
    ) -> None:
        self.acks: queue.Queue[Done] = queue.Queue()
        self.ended = threading.Event()
        self.entered = threading.Semaphore(0)
        self.gate = threading.Event()
        self._carry_out = carry_out
        self.stream = Executor(self._gated, self.acks.put, self.ended.set, device_works)
        self.stream.start()
        if held:
            for first in HELD:
                self.submit(0, first)
                assert self.entered.acquire(timeout=PATIENCE_S)
        else:
            self.gate.set()

    def _gated(self, task: Task) -> tuple[int, ...]:
        self.entered.release()
        assert self.gate.wait(PATIENCE_S)
        return self._carry_out(task)

    def submit(self, sequence: int, work: Work) -> None:
        self.stream.submit(Request(sequence=sequence, work=work))

    def shut_down(self, sequence: int) -> list[Done]:
        """All acks that have not been taken."""
        self.submit(sequence, Shutdown())
        self.gate.set()
        assert self.ended.wait(PATIENCE_S)
        return [self.acks.get_nowait() for _ in range(self.acks.qsize())]


def order_of(works: list[Work], *hurried: int) -> tuple[list[int], list[int]]:
    """The order in which works with the numbers 1, 2, 3, … that wait together are carried out: stores, and others."""
    running = Running(held=True)
    for sequence, work in enumerate(works, 1):
        running.submit(sequence, work)
    for transfer in hurried:
        running.stream.hurry(transfer)
    done = [ack.sequence for ack in running.shut_down(len(works) + 1)]
    assert done[-1] == len(works) + 1
    order = [sequence for sequence in done[:-1] if sequence]
    are_stores = [isinstance(work, Store) for work in works]
    return [n for n in order if are_stores[n - 1]], [n for n in order if not are_stores[n - 1]]


def test_each_lane_keeps_the_order_of_its_requests() -> None:
    """Urgent stores come before other stores, and inside each class, and among loads and probes, the first is first."""
    assert order_of([STORE, LOAD, STORE, URGENT, PROBE, LOAD, STORE]) == ([4, 1, 3, 7], [2, 5, 6])


def test_hurried_store_takes_its_place_by_age() -> None:
    """A store that somebody waits for comes before other stores, and among urgent ones where its number puts it."""
    works: list[Work] = [URGENT, *(store_of(transfer=transfer) for transfer in (10, 11, 12)), URGENT]

    assert order_of(works)[0] == [1, 5, 2, 3, 4]
    assert order_of(works, 12)[0] == [1, 4, 5, 2, 3]
    assert order_of(works, 12, 11)[0] == [1, 3, 4, 5, 2]


def test_store_has_its_turn_among_urgent_ones_that_keep_coming() -> None:
    """A store that nobody waits for is passed by so many others, and not for ever: it holds slots while it waits."""
    works: list[Work] = [STORE, *[URGENT] * (PASSES_MAX + 2)]

    assert order_of(works)[0].index(1) == PASSES_MAX


def test_hurry_of_what_does_not_wait_changes_nothing() -> None:
    """To hurry a load, an urgent store, a store twice, or what is not there changes no order and adds no report."""
    works: list[Work] = [store_of(transfer=10), load_of(transfer=11), store_of(transfer=12, urgent=True)]

    assert order_of(works, 11, 12, 13) == ([3, 1], [2])
    assert order_of(works, 10, 10) == ([1, 3], [2])


@pytest.mark.parametrize(("first", "other"), [(STORE, LOAD), (LOAD, STORE), (URGENT, PROBE)])
def test_neither_direction_waits_for_the_other(first: Task, other: Task) -> None:
    """A load is over while a store that began before it is under way, and a store while a load is."""
    entered, gate = threading.Event(), threading.Event()

    def carry_out(task: Task) -> tuple[int, ...]:
        if type(task) is type(first):
            entered.set()
            assert gate.wait(PATIENCE_S)
        return ()

    running = Running(carry_out)
    running.submit(1, first)
    assert entered.wait(PATIENCE_S)
    running.submit(2, other)

    assert running.acks.get(timeout=PATIENCE_S).sequence == 2
    gate.set()
    assert [done.sequence for done in running.shut_down(3)] == [1, 3]


def test_shutdown_comes_after_all_before_it() -> None:
    """A shutdown waits for every command before it, also the least urgent, and nothing is taken after it."""
    running = Running(held=True)
    running.submit(1, STORE)
    running.submit(2, Shutdown())
    for late in (LOAD, Shutdown()):
        with pytest.raises(NotTaken, match="a shutdown was ordered before"):
            running.submit(3, late)
    running.gate.set()
    assert running.ended.wait(PATIENCE_S)

    reported = [running.acks.get_nowait().sequence for _ in range(running.acks.qsize())]
    assert sorted(reported[:-1]) == [0, 0, 1]
    assert reported[-1] == 2


class Refusal(Exception):
    """Something that nobody foresaw."""


failures = st.sampled_from([None, ValueError("bad"), OSError(5, "broken"), KeyError("x"), MemoryError(), Refusal("no")])
works = st.sampled_from([LOAD, STORE, URGENT, PROBE])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(works, failures), max_size=8), st.lists(st.integers(0, 3), max_size=3))
def test_each_request_is_reported_exactly_once(orders: list[tuple[Task, Exception | None]], hurried: list[int]) -> None:
    """Whatever fails in whatever way, each command is acknowledged once, with its error, and the next one goes on."""
    running = Running(lambda task: outcomes[id(task)]())
    copies = [Request(sequence=index, work=_copy(work)) for index, (work, _) in enumerate(orders, 1)]
    outcomes = {id(command.work): _outcome(failure) for command, (_, failure) in zip(copies, orders, strict=True)}

    for command in copies:
        running.stream.submit(command)
    for transfer in hurried:
        running.stream.hurry(transfer)
    taken = running.shut_down(len(orders) + 1)
    acks = {ack.sequence: ack for ack in taken}

    assert len(taken) == len(acks) == len(orders) + 1
    for index, (_, failure) in enumerate(orders, 1):
        assert acks[index].error == (f"{type(failure).__name__}: {failure}" if failure else "")
        assert acks[index].corrupt == (() if failure else (7,))


def _copy(work: Task) -> Task:
    """An equal object of its own."""
    return type(work)(**{name: getattr(work, name) for name in work.__struct_fields__})


def _outcome(failure: Exception | None) -> Callable[[], tuple[int, ...]]:
    def act() -> tuple[int, ...]:
        if failure is not None:
            raise failure
        return (7,)

    return act


def test_stream_takes_commands_while_a_copy_runs() -> None:
    """A long copy does not hold up the caller: commands queue behind it up to the limit, then are turned away."""
    running = Running(held=True)
    for index in range(REQUESTS_IN_FLIGHT_MAX):
        running.submit(1 + index, STORE if index % 2 else LOAD)
    with pytest.raises(NotTaken, match="too many requests wait"):
        running.submit(1000, LOAD)
    assert running.acks.empty()

    acks = running.shut_down(1001)

    assert sorted(ack.sequence for ack in acks) == [0, *range(REQUESTS_IN_FLIGHT_MAX + 1), 1001]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("work", [*HELD, Shutdown()])
@pytest.mark.parametrize("error", [BrokenPipeError, Refusal])
def test_executor_ends_when_a_report_fails(work: Work, error: type[Exception]) -> None:
    """An executor whose report fails in whatever way ends, in both lanes, instead of copying on."""
    ended = threading.Event()

    def broken(ack: Done) -> None:
        raise error

    stream = Executor(nothing, broken, ended.set, lambda: True)
    stream.start()
    stream.submit(Request(sequence=1, work=work))

    assert ended.wait(PATIENCE_S)
    for thread in threading.enumerate():
        if thread.name in {"stores", "loads"}:
            thread.join(PATIENCE_S)  # its error counts here, and not in the next test


def test_longest_acks_fit_into_a_message() -> None:
    """Neither the longest error nor the most corrupt blocks make an ack larger than the daemon reads."""
    running = Running(lambda task: _fail() if isinstance(task, Store) else tuple(range(70_000, 71_024)))
    running.submit((1 << 63) - 2, STORE)
    running.submit((1 << 63) - 1, LOAD)

    acks = [ack for ack in running.shut_down(1) if ack.sequence > 1]

    assert len(acks[0].error or acks[1].error) == ERROR_SIZE_CHARS_MAX
    assert all(len(encode(ack)) <= REPLY_SIZE_BYTES_MAX for ack in acks)


def _fail() -> tuple[int, ...]:
    raise OSError("\U0001f4a5" * 5000)


def test_executor_ends_when_its_device_has_failed() -> None:
    """A request that the device's failure ended is not reported, and nothing is begun after it: the worker ends.

    It does not wait for what the other lane is at, nor is that reported: the daemon must not think that it lives.
    """
    gate = threading.Event()

    def carry_out(task: Task) -> tuple[int, ...]:
        if isinstance(task, Store):
            assert gate.wait(PATIENCE_S)
            return ()
        raise DeviceError("CUDA_ERROR_LAUNCH_FAILED")

    running = Running(carry_out, held=True, device_works=lambda: False)
    running.submit(1, PROBE)
    running.submit(2, STORE)
    running.gate.set()

    assert running.ended.wait(PATIENCE_S)
    gate.set()
    assert str(running.stream.device_error) == "CUDA_ERROR_LAUNCH_FAILED"
    for thread in threading.enumerate():
        if thread.name == "stores":
            thread.join(PATIENCE_S)
    assert running.acks.empty()


def test_request_that_a_working_device_refuses_fails_alone() -> None:
    """It is reported with what the device said, and the next one is carried out."""

    def carry_out(task: Task) -> tuple[int, ...]:
        if isinstance(task, Store):
            raise DeviceError("cuMemcpyBatchAsync: CUDA_ERROR_INVALID_VALUE, copy 3 of 12")
        return ()

    running = Running(carry_out)
    running.submit(1, STORE)
    assert running.acks.get(timeout=PATIENCE_S).error.endswith("CUDA_ERROR_INVALID_VALUE, copy 3 of 12")
    running.submit(2, PROBE)
    assert running.shut_down(3) == [Done(sequence=2), Done(sequence=3)]
    assert running.stream.device_error is None
