from __future__ import annotations

from ctypes import byref, c_float
from functools import partial

from tests.cuda_driver.calls import DISABLE_TIMING, INTERPROCESS, CudaError, Driver, IpcHandle

NOT_READY, SUCCESS, INVALID_HANDLE = "CUDA_ERROR_NOT_READY", "CUDA_SUCCESS", "CUDA_ERROR_INVALID_HANDLE"


def test_event_that_was_never_recorded_stands_for_nothing(driver: Driver) -> None:
    """A wait for an event before its first record waits for nothing, even if the event is recorded later."""
    stream, waiter, event, done = driver.stream(), driver.stream(), driver.event(), []
    assert driver.attempt("cuEventQuery", event) == SUCCESS
    driver.call("cuStreamWaitEvent", waiter, event, 0)
    driver.launch(stream, lambda: done.append("work"))
    driver.call("cuEventRecord", event, stream)
    driver.launch(waiter, lambda: done.append("did not wait"))
    driver.finish(waiter)
    assert done == ["did not wait"]


def test_event_stands_for_what_its_stream_held(driver: Driver) -> None:
    """An event is done when the work before its record is done; work queued after it is not waited for."""
    stream, event, done = driver.stream(), driver.event(), []
    driver.launch(stream, lambda: done.append("before"))
    driver.call("cuEventRecord", event, stream)
    driver.launch(stream, lambda: done.append("after"))
    assert driver.attempt("cuEventQuery", event) == NOT_READY
    driver.call("cuEventSynchronize", event)
    assert done == ["before"]
    assert driver.attempt("cuEventQuery", event) == SUCCESS


def test_wait_holds_to_the_record_of_its_time(driver: Driver) -> None:
    """A wait is for the last record before it: not for work after that record, and not for a later record."""
    stream, waiter, event, done = driver.stream(), driver.stream(), driver.event(), []
    driver.launch(stream, lambda: done.append("first"))
    driver.call("cuEventRecord", event, stream)
    driver.launch(stream, lambda: done.append("second"))
    driver.call("cuStreamWaitEvent", waiter, event, 0)
    driver.call("cuEventRecord", event, stream)
    driver.launch(waiter, lambda: done.append("waiter"))
    driver.finish(waiter)
    assert done == ["first", "waiter"]
    driver.call("cuEventSynchronize", event)
    assert done == ["first", "waiter", "second"]


def test_wait_for_an_event_orders_two_streams(driver: Driver) -> None:
    """Waiting for the last of a chain of streams has all of the chain done, in its order."""
    done: list[int] = []
    streams = [driver.stream() for _ in range(4)]
    for number, stream in enumerate(streams):
        driver.launch(stream, partial(done.append, number))
        event = driver.event()
        driver.call("cuEventRecord", event, stream)
        if number < 3:
            driver.call("cuStreamWaitEvent", streams[number + 1], event, 0)
        driver.call("cuEventDestroy_v2", event)  # a wait that is queued needs it no longer
    driver.finish(streams[-1])
    assert done == [0, 1, 2, 3]


def test_event_that_is_destroyed_is_refused(driver: Driver) -> None:
    """No call takes an event that was destroyed."""
    stream, event = driver.stream(), driver.event()
    driver.call("cuEventDestroy_v2", event)
    for name, arguments in (
        ("cuEventRecord", (event, stream)),
        ("cuStreamWaitEvent", (stream, event, 0)),
        ("cuEventQuery", (event,)),
        ("cuEventSynchronize", (event,)),
        ("cuEventDestroy_v2", (event,)),
    ):
        assert driver.attempt(name, *arguments) == INVALID_HANDLE


def test_time_between_events(driver: Driver) -> None:
    """Two events that take time tell how long the work between them took, once both are done."""
    stream, milliseconds = driver.stream(), c_float()
    start, end, timeless = driver.event(0), driver.event(0), driver.event(DISABLE_TIMING)
    for event in (start, end, timeless):
        driver.call("cuEventRecord", event, stream)
    assert driver.attempt("cuEventElapsedTime", byref(milliseconds), start, end) == NOT_READY
    driver.finish(stream)
    driver.call("cuEventElapsedTime", byref(milliseconds), start, end)
    assert milliseconds.value >= 0
    assert driver.attempt("cuEventElapsedTime", byref(milliseconds), start, timeless) == INVALID_HANDLE


def test_only_interprocess_events_are_shared(driver: Driver) -> None:
    """An IPC handle is given for an event that was created INTERPROCESS, which is given with DISABLE_TIMING only."""
    handle = IpcHandle()
    assert driver.attempt("cuIpcGetEventHandle", byref(handle), driver.event()) == INVALID_HANDLE
    try:
        driver.event(INTERPROCESS)
    except CudaError as error:
        assert error.name == "CUDA_ERROR_INVALID_VALUE"
    else:
        raise AssertionError
    driver.call("cuIpcGetEventHandle", byref(handle), driver.event(INTERPROCESS | DISABLE_TIMING))
    assert handle.bytes.startswith(b"event-")
