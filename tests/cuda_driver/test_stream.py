from __future__ import annotations

from ctypes import c_uint32
from functools import partial
from pathlib import Path

import pytest

from tests.cuda_driver.calls import AND, EQ, GEQ, NO_MEMORY_BARRIER, NOR, Driver, peek, poke
from tests.cuda_driver.conftest import StartDriver
from tests.cuda_driver.trace import ran, read

NOT_READY, SUCCESS = "CUDA_ERROR_NOT_READY", "CUDA_SUCCESS"
BLOCKING = 0


def test_stream_is_late_until_somebody_waits(driver: Driver) -> None:
    """What is queued is not done while nobody waits for it, and is done in its order when somebody does."""
    done: list[object] = []
    stream, other = driver.stream(), driver.stream()
    for number in range(5):
        driver.launch(stream, partial(done.append, number))
        driver.launch(other, lambda: done.append("other"))
    assert driver.attempt("cuStreamQuery", stream) == NOT_READY
    driver.finish(stream)
    assert done == list(range(5))
    assert driver.attempt("cuStreamQuery", stream) == SUCCESS
    assert driver.attempt("cuStreamQuery", other) == NOT_READY
    driver.call("cuCtxSynchronize")
    assert done[5:] == ["other"] * 5


def test_streams_overtake_one_another_by_seed(start_driver: StartDriver, tmp_path: Path) -> None:
    """Work of several streams runs in any order; the seed decides, and decides the same each time."""
    orders = []
    for number, seed in enumerate((1, 1, 2, 3, 4, 5, 6)):
        driver = start_driver(seed=seed, trace=tmp_path / f"trace-{number}")
        host, streams = driver.host(), [driver.stream() for _ in range(6)]
        for place, stream in enumerate(streams):
            driver.call("cuStreamWriteValue32_v2", stream, host + 4 * place, 1, 0)
        driver.call("cuCtxSynchronize")
        records = ran(read(tmp_path / f"trace-{number}"), "write value")
        orders.append(tuple(streams.index(record.stream) for record in records))
    assert orders[0] == orders[1]
    assert len(set(orders)) == 6


def test_null_stream_and_blocking_streams_wait_for_one_another(driver: Driver) -> None:
    """The NULL stream comes after all that blocking streams hold, and before what they get later."""
    blocking, free, done = driver.stream(BLOCKING), driver.stream(), []
    driver.launch(blocking, lambda: done.append("blocking"))
    driver.launch(free, lambda: done.append("free"))
    driver.launch(0, lambda: done.append("null"))
    driver.launch(blocking, lambda: done.append("later"))
    driver.finish(blocking)
    assert done == ["blocking", "null", "later"]
    driver.finish(free)
    assert done[-1] == "free"


def test_stream_that_is_destroyed_ends_its_work(driver: Driver) -> None:
    """A stream that is destroyed does what it holds; its handle is refused from then on."""
    stream, done = driver.stream(), []
    driver.launch(stream, lambda: done.append(1))
    driver.call("cuStreamDestroy_v2", stream)
    assert driver.attempt("cuStreamSynchronize", stream) == "CUDA_ERROR_INVALID_HANDLE"
    assert driver.attempt("cuStreamDestroy_v2", 0) == "CUDA_ERROR_INVALID_HANDLE"
    driver.call("cuCtxSynchronize")
    assert done == [1]


def test_per_thread_stream_is_not_here(driver: Driver) -> None:
    """The per-thread default stream is refused: this driver does not have it."""
    assert driver.attempt("cuStreamSynchronize", 2) == "CUDA_ERROR_INVALID_HANDLE"


@pytest.mark.parametrize(
    ("test", "wanted", "before", "after"),
    [
        (GEQ, 5, 4, 5),
        (GEQ, 5, 0xFFFFFFFF, 6),
        (GEQ, 0xFFFFFFF0, 0xFFFFFFEF, 3),  # cyclic: 3 comes after 0xFFFFFFF0
        (EQ, 5, 6, 5),
        (AND, 6, 9, 4),
        (NOR, 0xFFFFFFFE, 1, 0),
    ],
)
def test_stream_waits_until_memory_holds_a_value(
    driver: Driver, test: int, wanted: int, before: int, after: int
) -> None:
    """A wait for a value ends when the host or another stream stores one that passes its test, and not before."""
    stream, writer, host, seen = driver.stream(), driver.stream(), driver.host(), []
    poke(host, bytes(c_uint32(before)))
    driver.call("cuStreamWaitValue32_v2", stream, host, wanted, test)
    driver.launch(stream, lambda: seen.append(int.from_bytes(peek(host, 4), "little")))
    driver.call("cuStreamWriteValue32_v2", writer, host, after, 0)
    assert driver.attempt("cuStreamQuery", stream) == NOT_READY
    driver.finish(writer)
    driver.finish(stream)
    assert seen == [after]


def test_host_store_ends_a_wait_of_64_bits(driver: Driver) -> None:
    """A plain store of the host to registered memory ends a stream's wait."""
    stream, host = driver.stream(), driver.host()
    driver.call("cuStreamWaitValue64_v2", stream, host, 1 << 40, GEQ)
    poke(host, ((1 << 40) + 1).to_bytes(8, "little"))
    driver.finish(stream)


def test_value_lies_aligned_in_memory_of_the_device_or_registered(driver: Driver) -> None:
    """A write or wait is refused for pageable memory, a crooked address, unknown flags, and a flush."""
    stream, device, pageable = driver.stream(), driver.memory(), bytearray(16)
    assert driver.attempt("cuStreamWriteValue32_v2", stream, device, 1, 0) == SUCCESS
    assert driver.attempt("cuStreamWriteValue64_v2", stream, device + 4, 1, 0) == "CUDA_ERROR_INVALID_VALUE"
    assert driver.attempt("cuStreamWaitValue32_v2", stream, device, 1, 4) == "CUDA_ERROR_INVALID_VALUE"
    assert driver.attempt("cuStreamWaitValue32_v2", stream, device, 1, 1 << 30) == "CUDA_ERROR_NOT_SUPPORTED"
    address = (c_uint32 * 4).from_buffer(pageable)
    assert driver.attempt("cuStreamWriteValue32_v2", stream, id(address) // 8 * 8, 1, 0) == "CUDA_ERROR_INVALID_VALUE"


def test_value_is_written_after_the_copies_before_it(driver: Driver) -> None:
    """Who sees the value sees the bytes that were copied before it, if the write keeps its barrier."""
    stream, waiter, host, device, seen = driver.stream(), driver.stream(), driver.host(), driver.memory(), []
    driver.copy(device, host, 4096, stream)
    driver.call("cuStreamWriteValue32_v2", stream, device + 8192, 1, 0)
    driver.call("cuStreamWaitValue32_v2", waiter, device + 8192, 1, EQ)
    driver.launch(waiter, lambda: seen.append(peek(device)))
    driver.finish(stream)
    driver.finish(waiter)
    assert seen == [b"\0"]


def test_value_without_barrier_may_overtake_a_copy(start_driver: StartDriver, tmp_path: Path) -> None:
    """With NO_MEMORY_BARRIER the value is written before the copy with some seeds and after it with others."""
    orders = set()
    for seed in range(6):
        trace = tmp_path / f"trace-{seed}"
        driver = start_driver(seed=seed, trace=trace)
        stream, host, device = driver.stream(), driver.host(), driver.memory()
        driver.launch(stream, lambda: None)
        driver.copy(device, host, 8, stream)
        driver.call("cuStreamWriteValue32_v2", stream, host + 64, 1, NO_MEMORY_BARRIER)
        driver.finish(stream)
        orders.add(tuple(record.name for record in ran(read(trace))))
    assert orders == {("host function", "copy", "write value"), ("host function", "write value", "copy")}
