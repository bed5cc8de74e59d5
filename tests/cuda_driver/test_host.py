from __future__ import annotations

import mmap
import tempfile
import time
from collections.abc import Iterator
from ctypes import addressof, byref, c_char, c_ulonglong

import numpy as np
import pytest

from tests.cuda_driver.calls import DEVICE_MAP, PORTABLE, CudaError, Driver, peek, poke
from tests.cuda_driver.conftest import StartDriver

PAGE, READ_ONLY = 4096, 8
ALREADY, NOT_REGISTERED = "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"


@pytest.fixture
def pages() -> Iterator[int]:
    """The address of eight pages of ordinary memory."""
    with mmap.mmap(-1, 8 * PAGE) as memory:
        view = c_char.from_buffer(memory)
        yield addressof(view)
        del view


def register(driver: Driver, address: int, size: int, flags: int = PORTABLE | DEVICE_MAP) -> str:
    return driver.attempt("cuMemHostRegister_v2", address, size, flags)


def test_page_is_registered_once(driver: Driver, pages: int) -> None:
    """A range that shares a page with a registered one is refused, whichever way they overlap; a neighbour is not."""
    assert register(driver, pages + 2 * PAGE, 2 * PAGE) == "CUDA_SUCCESS"
    for address, size in (
        (pages + 2 * PAGE, 2 * PAGE),
        (pages, 8 * PAGE),
        (pages + 3 * PAGE, PAGE),
        (pages, 2 * PAGE + 1),
        (pages + 4 * PAGE - 1, 2),
    ):
        assert register(driver, address, size) == ALREADY
    assert register(driver, pages, 2 * PAGE) == "CUDA_SUCCESS"
    assert register(driver, pages + 4 * PAGE, PAGE + 10) == "CUDA_SUCCESS"
    assert register(driver, pages + 5 * PAGE + 100, 10) == ALREADY


def test_registration_ends_with_its_first_address(driver: Driver, pages: int) -> None:
    """A registration is ended by its first address, once; then the range can be registered again."""
    assert register(driver, pages, 2 * PAGE) == "CUDA_SUCCESS"
    assert driver.attempt("cuMemHostUnregister", pages + PAGE) == NOT_REGISTERED
    driver.call("cuMemHostUnregister", pages)
    assert driver.attempt("cuMemHostUnregister", pages) == NOT_REGISTERED
    assert register(driver, pages, 4 * PAGE) == "CUDA_SUCCESS"


def test_range_must_be_there_and_below_512_gib(driver: Driver, pages: int) -> None:
    """Memory that is not mapped, device memory, and 512 GiB in one call cannot be registered."""
    assert register(driver, 1 << 46, PAGE) == "CUDA_ERROR_INVALID_VALUE"
    assert register(driver, pages, 512 << 30) == "CUDA_ERROR_INVALID_VALUE"
    assert register(driver, driver.memory(), PAGE) == "CUDA_ERROR_INVALID_VALUE"
    assert register(driver, pages, 0) == "CUDA_ERROR_INVALID_VALUE"


def test_memory_that_is_mapped_read_only_is_registered_as_such(driver: Driver) -> None:
    """Without the flag the driver would pin pages to write them, which the kernel refuses."""
    with tempfile.TemporaryFile() as file:
        file.truncate(2 * PAGE)
        with mmap.mmap(file.fileno(), 2 * PAGE, prot=mmap.PROT_READ) as memory:
            address = np.frombuffer(memory, np.uint8).ctypes.data
            assert register(driver, address, 2 * PAGE) == "CUDA_ERROR_INVALID_VALUE"
            assert register(driver, address, 2 * PAGE, PORTABLE | DEVICE_MAP | READ_ONLY) == "CUDA_SUCCESS"
            driver.call("cuMemHostUnregister", address)


def test_copy_stays_within_one_registered_range(driver: Driver, pages: int) -> None:
    """A copy over the border of two registered ranges, or of registered and pageable memory, is refused."""
    device, stream = driver.memory(), driver.stream()
    for half in range(2):
        assert register(driver, pages + (1 + half) * PAGE, PAGE) == "CUDA_SUCCESS"
    for start in (2 * PAGE - 8, PAGE - 8, 3 * PAGE - 8):
        assert driver.attempt("cuMemcpyAsync", device, pages + start, 16, stream) == "CUDA_ERROR_INVALID_VALUE"
        assert driver.attempt("cuMemcpyAsync", pages + start, device, 16, stream) == "CUDA_ERROR_INVALID_VALUE"
        assert driver.batch([(device, pages + start, 16)], stream) == "CUDA_ERROR_INVALID_VALUE"
    driver.copy(device, pages + 2 * PAGE, PAGE, stream)
    driver.finish(stream)
    assert peek(device, PAGE) == bytes(PAGE)


def test_copy_notices_that_its_memory_was_unregistered(driver: Driver, pages: int) -> None:
    """A copy that is queued fails when its host memory is unregistered before it runs."""
    device, stream = driver.memory(), driver.stream()
    register(driver, pages, PAGE)
    driver.copy(device, pages, 8, stream)
    driver.call("cuMemHostUnregister", pages)
    assert driver.attempt("cuStreamSynchronize", stream) == "CUDA_ERROR_ILLEGAL_ADDRESS"


def test_memory_of_a_queued_copy_may_be_registered(start_driver: StartDriver, pages: int) -> None:
    """A copy with pageable memory that is registered before the copy runs is made all the same, in both directions."""
    for seed in range(4):
        driver = start_driver(seed=seed)
        stream, device = driver.stream(), driver.memory()
        poke(device, b"there")
        driver.copy(pages, device, 5, stream)
        driver.copy(device + 64, pages, 5, stream)
        assert register(driver, pages, PAGE) == "CUDA_SUCCESS"
        driver.finish(stream)
        assert (peek(pages, 5), peek(device + 64, 5)) == (b"there", b"there")


def test_host_memory_that_is_gone_is_an_error_and_no_crash(driver: Driver) -> None:
    """A copy from registered memory that its owner unmapped fails in the stream."""
    memory = mmap.mmap(-1, PAGE)
    view = c_char.from_buffer(memory)
    address = addressof(view)
    register(driver, address, PAGE)
    device, stream = driver.memory(), driver.stream()
    driver.copy(device, address, 8, stream)
    del view
    memory.close()
    assert driver.attempt("cuStreamSynchronize", stream) == "CUDA_ERROR_ILLEGAL_ADDRESS"


def test_device_address_wants_its_flag(driver: Driver, pages: int) -> None:
    """The device address of registered memory is given for memory that was registered with DEVICEMAP."""
    address = c_ulonglong()
    assert driver.attempt("cuMemHostGetDevicePointer_v2", byref(address), pages, 0) == "CUDA_ERROR_INVALID_VALUE"
    register(driver, pages, PAGE, PORTABLE)
    assert driver.attempt("cuMemHostGetDevicePointer_v2", byref(address), pages, 0) == "CUDA_ERROR_INVALID_VALUE"
    register(driver, pages + PAGE, PAGE, DEVICE_MAP)
    driver.call("cuMemHostGetDevicePointer_v2", byref(address), pages + PAGE + 8, 0)
    assert address.value == pages + PAGE + 8


def test_registration_costs_time(start_driver: StartDriver) -> None:
    """Registering takes the stated time for each MiB."""
    driver = start_driver(register_us_per_mib=20_000)
    with mmap.mmap(-1, 2 << 20) as memory:
        view = c_char.from_buffer(memory)
        begin = time.monotonic()
        assert register(driver, addressof(view), 2 << 20) == "CUDA_SUCCESS"
        assert time.monotonic() - begin >= 0.040
        del view


def test_host_memory_of_the_driver_is_freed_once(driver: Driver) -> None:
    """Memory of cuMemHostAlloc is pinned, and cuMemFreeHost takes it once."""
    host = driver.host()
    poke(host, b"bytes")
    assert register(driver, host, PAGE) == ALREADY
    assert driver.attempt("cuMemHostUnregister", host) == NOT_REGISTERED
    driver.call("cuMemFreeHost", host)
    assert driver.attempt("cuMemFreeHost", host) == "CUDA_ERROR_INVALID_VALUE"


def test_registration_is_refused_by_seed(start_driver: StartDriver, pages: int) -> None:
    """The registration that the fault names fails, and the next one does not."""
    driver = start_driver(faults="refused_registration=@2")
    driver.host()
    assert register(driver, pages, PAGE) == "CUDA_ERROR_OUT_OF_MEMORY"
    assert register(driver, pages, PAGE) == "CUDA_SUCCESS"
    with pytest.raises(CudaError):
        driver.call("cuMemHostRegister_v2", pages, PAGE, 0)
