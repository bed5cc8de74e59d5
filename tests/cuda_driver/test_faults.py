from __future__ import annotations

from functools import partial
from pathlib import Path
from threading import Event, Thread

import pytest

from tests.cuda_driver.calls import CudaError, Driver
from tests.cuda_driver.conftest import StartDriver
from tests.cuda_driver.device import bring_back, lose
from tests.cuda_driver.trace import ran, read


def outcomes(driver: Driver, count: int) -> list[bool]:
    """Which of many allocations fail."""
    failed = []
    for _ in range(count):
        try:
            driver.call("cuMemRelease", driver.create())
            failed.append(False)
        except CudaError as error:
            assert error.name == "CUDA_ERROR_OUT_OF_MEMORY"
            failed.append(True)
    return failed


def test_same_seed_has_the_same_faults(start_driver: StartDriver) -> None:
    """A fault with a probability strikes at chances that the seed fixes."""
    runs = [outcomes(start_driver(seed=seed, faults="out_of_memory=0.3", poison=0), 60) for seed in (7, 7, 8)]
    assert runs[0] == runs[1] != runs[2]
    assert 5 < sum(runs[0]) < 40


def test_fault_at_a_chance_strikes_once(start_driver: StartDriver) -> None:
    """A fault at the third chance strikes there and nowhere else."""
    assert outcomes(start_driver(faults="out_of_memory=@3"), 6) == [False, False, True, False, False, False]


def test_refused_values(start_driver: StartDriver) -> None:
    """A device whose streams neither write values nor wait for them says so, and does everything else."""
    driver = start_driver(faults="refused_values=1")
    stream, address = driver.stream(), driver.map(driver.create())
    for name in ("cuStreamWriteValue32_v2", "cuStreamWaitValue32_v2", "cuStreamWriteValue64_v2"):
        assert driver.attempt(name, stream, address, 0, 0) == "CUDA_ERROR_NOT_SUPPORTED"
    driver.finish(stream)


def test_failed_launch_stays(start_driver: StartDriver, tmp_path: Path) -> None:
    """After a launch failed, its stream does nothing more and every call in the context fails, even after a release."""
    driver = start_driver(faults="launch_failure=@2")
    done: list[int] = []
    stream, other = driver.stream(), driver.stream()
    for number in range(3):
        driver.launch(stream, partial(done.append, number))
    event = driver.event()
    driver.call("cuEventRecord", event, stream)
    assert driver.attempt("cuStreamSynchronize", stream) == "CUDA_ERROR_LAUNCH_FAILED"
    assert done == [0]
    assert driver.attempt("cuStreamQuery", other) == "CUDA_ERROR_LAUNCH_FAILED"
    assert driver.attempt("cuEventQuery", event) == "CUDA_ERROR_LAUNCH_FAILED"
    driver.call("cuDevicePrimaryCtxRelease_v2", 0)
    driver.retain()
    with pytest.raises(CudaError, match="CUDA_ERROR_LAUNCH_FAILED"):
        driver.stream()
    assert [record.result for record in ran(read(tmp_path / "trace"))] == ["CUDA_SUCCESS", "CUDA_ERROR_LAUNCH_FAILED"]


def test_failed_launch_ends_waits(start_driver: StartDriver) -> None:
    """A stream that waits for a value or for another stream ends its wait when the context fails."""
    driver = start_driver(faults="launch_failure=@1", delay_us=0)
    waiter, follower, host = driver.stream(), driver.stream(), driver.host()
    event = driver.event()
    driver.call("cuStreamWaitValue32_v2", waiter, host, 1, 0)
    driver.call("cuEventRecord", event, waiter)
    driver.call("cuStreamWaitEvent", follower, event, 0)
    driver.launch(driver.stream(), lambda: None)
    assert driver.attempt("cuStreamSynchronize", follower) == "CUDA_ERROR_LAUNCH_FAILED"


def test_export_is_refused_by_seed(start_driver: StartDriver) -> None:
    """The export that the fault names fails; the next one of the same handle does not."""
    driver = start_driver(faults="refused_export=@1")
    handle = driver.create()
    with pytest.raises(CudaError, match="CUDA_ERROR_NOT_PERMITTED"):
        driver.export(handle)
    assert driver.import_(driver.export(handle))


def test_lost_device_is_lost_for_everybody(start_driver: StartDriver) -> None:
    """A device that falls off fails every call of every process that uses it, and is not there for a new one."""
    healthy, unlucky = start_driver(), start_driver(faults="device_lost=@2")
    unlucky.stream()
    stream, host, context = healthy.stream(), healthy.host(), healthy.retain()
    began, done, ended = Event(), [], []
    healthy.launch(stream, began.set)
    healthy.call("cuStreamWaitValue32_v2", stream, host, 1, 0)  # which nobody writes
    healthy.launch(stream, lambda: done.append(1))

    def wait_for_the_stream() -> None:
        healthy.call("cuCtxSetCurrent", context)
        ended.append(healthy.attempt("cuStreamSynchronize", stream))

    waiting = Thread(target=wait_for_the_stream)
    waiting.start()
    began.wait()
    with pytest.raises(CudaError, match="CUDA_ERROR_UNKNOWN"):
        unlucky.stream()
    waiting.join()
    assert ended == ["CUDA_ERROR_UNKNOWN"]
    assert healthy.attempt("cuStreamQuery", stream) == "CUDA_ERROR_UNKNOWN"
    assert done == []
    with pytest.raises(CudaError, match="CUDA_ERROR_NO_DEVICE"):
        start_driver()


@pytest.mark.parametrize("keeps_memory", [True, False])
def test_lost_device_comes_back(start_driver: StartDriver, device: Path, *, keeps_memory: bool) -> None:
    """A process from before stays without it; a new one has it, and what it held only where that was kept."""
    before = start_driver()
    exported = before.export(before.create())
    lose(device)
    assert before.attempt("cuCtxSynchronize") == "CUDA_ERROR_UNKNOWN"
    with pytest.raises(CudaError, match="CUDA_ERROR_NO_DEVICE"):
        start_driver()
    bring_back(device, keeps_memory=keeps_memory)
    assert before.attempt("cuCtxSynchronize") == "CUDA_ERROR_UNKNOWN"
    if keeps_memory:
        start_driver().import_(exported)
    else:
        with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_VALUE"):
            start_driver().import_(exported)


def test_calls_for_memory_may_give_an_earlier_failure(start_driver: StartDriver) -> None:
    """After a failure in the current context cuMemUnmap gives that failure or works, by seed."""
    results = set()
    for seed in range(6):
        driver = start_driver(faults="launch_failure=@1", seed=seed)
        address, stream = driver.memory(), driver.stream()
        driver.launch(stream, lambda: None)
        assert driver.attempt("cuStreamSynchronize", stream) == "CUDA_ERROR_LAUNCH_FAILED"
        results.add(driver.attempt("cuMemUnmap", address, 2 << 20))
        driver.call("cuCtxSetCurrent", None)
        driver.call("cuMemRelease", driver.create())
    assert results == {"CUDA_SUCCESS", "CUDA_ERROR_LAUNCH_FAILED"}


def test_byte_that_cannot_be_read_is_of_the_memory(start_driver: StartDriver) -> None:
    """Copies out of it fail, and every later call of their context; so do those of the next process that maps it.

    Copies of its neighbours and of other memory do not.
    """
    first = start_driver(bad_memory=1, bad_offset=100)
    bad, other = first.create(), first.create()
    exported = first.export(bad)
    second = start_driver(bad_memory=1, bad_offset=100)
    places = (first, first.map(other), first.map(bad)), (second, 0, second.map(second.import_(exported)))
    for driver, good, address in places:
        stream, host = driver.stream(), driver.host()
        for source in (address, address + 101, *([good + 50] if good else [])):
            driver.call("cuMemcpyDtoHAsync_v2", host, source, 100, stream)
            driver.call("cuStreamSynchronize", stream)
        driver.call("cuMemcpyDtoHAsync_v2", host, address + 50, 100, stream)
        for _ in range(2):
            assert driver.attempt("cuStreamSynchronize", stream) == "CUDA_ERROR_ECC_UNCORRECTABLE"
