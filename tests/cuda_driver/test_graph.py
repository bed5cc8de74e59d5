from __future__ import annotations

import threading
from ctypes import byref, c_int, c_void_p
from functools import partial

import pytest

from tests.cuda_driver.calls import CAPTURE_GLOBAL, CAPTURE_RELAXED, CAPTURE_THREAD_LOCAL, Driver, peek
from tests.cuda_driver.device import GRANULE_BYTES

SUCCESS, UNSUPPORTED = "CUDA_SUCCESS", "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
INVALIDATED = "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"
BLOCKING = 0


def in_another_thread(work: partial[str]) -> str:
    """What a call gives there. Contexts are current to one thread: unsafe calls need none to be refused."""
    said: list[str] = []
    thread = threading.Thread(target=lambda: said.append(work()))
    thread.start()
    thread.join()
    return said[0]


def test_capture_queues_nothing_and_launch_queues_all(driver: Driver) -> None:
    """Captured work is done by launches alone, in its order, each time."""
    done: list[int] = []
    stream = driver.stream()

    def work() -> None:
        for number in range(3):
            driver.launch(stream, partial(done.append, number))

    graph = driver.record(stream, work)
    driver.finish(stream)
    assert done == []
    for _ in range(2):
        driver.call("cuGraphLaunch", graph, stream)
    driver.finish(stream)
    assert done == [0, 1, 2] * 2
    driver.call("cuGraphExecDestroy", graph)
    assert driver.attempt("cuGraphLaunch", graph, stream) == "CUDA_ERROR_INVALID_HANDLE"


def test_launches_of_a_graph_follow_each_other_on_two_streams(driver: Driver) -> None:
    """A graph runs once at a time: a launch on another stream waits for the launch before."""
    done: list[str] = []
    one, other = driver.stream(), driver.stream()
    graph = driver.record(one, lambda: driver.launch(one, lambda: done.append("graph")))
    driver.launch(one, lambda: done.append("before"))
    driver.call("cuGraphLaunch", graph, one)
    driver.call("cuGraphLaunch", graph, other)
    driver.finish(other)
    assert done == ["before", "graph", "graph"]


def test_graph_that_is_under_way_is_not_destroyed(driver: Driver) -> None:
    """Destroying a graph whose launch is not over is refused, and works afterwards."""
    stream = driver.stream()
    graph = driver.record(stream, lambda: driver.launch(stream, lambda: None))
    driver.call("cuGraphLaunch", graph, stream)
    assert driver.attempt("cuGraphExecDestroy", graph) == "CUDA_ERROR_INVALID_VALUE"
    driver.finish(stream)
    driver.call("cuGraphExecDestroy", graph)


def test_graph_uses_what_is_mapped_at_its_addresses(driver: Driver) -> None:
    """Other memory that is mapped at a captured address is what the graph writes."""
    first, second, stream = driver.create(), driver.create(), driver.stream()
    address = driver.map(first)
    graph = driver.record(stream, lambda: driver.call("cuMemsetD8Async", address, 7, 16, stream))
    driver.call("cuMemUnmap", address, GRANULE_BYTES)
    driver.map(second, at=address)
    driver.call("cuGraphLaunch", graph, stream)
    driver.finish(stream)
    assert peek(address, 16) == bytes([7]) * 16
    assert peek(driver.map(first)) != bytes([7])


def test_graph_whose_memory_is_gone_fails_for_good(driver: Driver) -> None:
    """A launch over an address that is no longer mapped is an illegal address, as a kernel's would be."""
    memory, source, stream = driver.memory(), driver.memory(), driver.stream()
    graph = driver.record(stream, lambda: driver.copy(memory, source, 16, stream))
    driver.call("cuMemUnmap", memory, GRANULE_BYTES)
    driver.call("cuGraphLaunch", graph, stream)
    assert driver.attempt("cuStreamSynchronize", stream) == "CUDA_ERROR_ILLEGAL_ADDRESS"


@pytest.mark.parametrize("call", ["cuStreamSynchronize", "cuStreamQuery", "cuCtxSynchronize", "cuEventQuery"])
def test_call_that_waits_breaks_the_capture(driver: Driver, call: str) -> None:
    """A call that waits or asks is refused during a capture, and the capture then gives no graph."""
    stream, event, graph = driver.stream(), driver.event(), c_void_p()
    driver.call("cuStreamBeginCapture_v2", stream, CAPTURE_GLOBAL)
    arguments = () if call == "cuCtxSynchronize" else (event,) if call == "cuEventQuery" else (stream,)
    assert driver.attempt(call, *arguments) == UNSUPPORTED
    assert driver.attempt("cuStreamEndCapture", stream, byref(graph)) == INVALIDATED
    assert graph.value is None
    driver.finish(stream)


def test_what_is_no_node_breaks_the_capture(driver: Driver) -> None:
    """Events, stream values, batches and copies of pageable memory are not captured."""
    stream, event, memory, graph = driver.stream(), driver.event(), driver.memory(), c_void_p()
    host, pageable = driver.host(), bytes(16)
    attempts: list[partial[str]] = [
        partial(driver.attempt, "cuEventRecord", event, stream),
        partial(driver.attempt, "cuStreamWaitEvent", stream, event, 0),
        partial(driver.attempt, "cuStreamWriteValue32_v2", stream, host, 1, 0),
        partial(driver.batch, [(memory, host, 16)], stream),
        partial(driver.attempt, "cuMemcpyHtoDAsync_v2", memory, pageable, 16, stream),
    ]
    for attempt in attempts:
        driver.call("cuStreamBeginCapture_v2", stream, CAPTURE_GLOBAL)
        assert attempt() == UNSUPPORTED
        assert driver.attempt("cuStreamEndCapture", stream, byref(graph)) == INVALIDATED


@pytest.mark.parametrize(
    ("mode", "is_broken"), [(CAPTURE_GLOBAL, True), (CAPTURE_THREAD_LOCAL, False), (CAPTURE_RELAXED, False)]
)
def test_unsafe_call_of_another_thread(driver: Driver, mode: int, is_broken: bool) -> None:
    """A global capture is broken by unsafe calls of any thread; a thread's own mode can say that it does not mind."""
    stream, event, status = driver.stream(), driver.event(), c_int()
    ask = partial(driver.attempt, "cuEventQuery", event)

    def relaxed() -> str:
        driver.call("cuThreadExchangeStreamCaptureMode", byref(c_int(CAPTURE_RELAXED)))
        return ask()

    driver.call("cuStreamBeginCapture_v2", stream, mode)
    assert in_another_thread(partial(relaxed)) == SUCCESS
    driver.call("cuStreamIsCapturing", stream, byref(status))
    assert status.value == 1
    assert in_another_thread(ask) == (UNSUPPORTED if is_broken else SUCCESS)
    driver.call("cuStreamIsCapturing", stream, byref(status))
    assert status.value == (2 if is_broken else 1)


def test_captures_begin_and_end_where_they_may(driver: Driver) -> None:
    """No capture on the NULL stream, none within another, none that another thread ends."""
    stream, graph = driver.stream(BLOCKING), c_void_p()
    assert driver.attempt("cuStreamBeginCapture_v2", 0, CAPTURE_GLOBAL) == UNSUPPORTED
    assert driver.attempt("cuStreamEndCapture", stream, byref(graph)) == "CUDA_ERROR_ILLEGAL_STATE"
    driver.call("cuStreamBeginCapture_v2", stream, CAPTURE_THREAD_LOCAL)
    context = driver.retain()

    def end() -> str:
        driver.call("cuCtxSetCurrent", context)
        return driver.attempt("cuStreamEndCapture", stream, byref(graph))

    assert in_another_thread(partial(end)) == "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD"
    assert driver.attempt("cuMemsetD8Async", driver.create(), 0, 1, 0) == "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"
    driver.call("cuStreamEndCapture", stream, byref(graph))
