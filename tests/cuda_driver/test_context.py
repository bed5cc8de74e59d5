from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from functools import partial
from pathlib import Path

import pytest

from tests.cuda_driver.calls import CudaError, Driver, Uuid, peek
from tests.cuda_driver.conftest import StartDriver

VMM, POSIX_HANDLES, FABRIC_HANDLES, HOST_REGISTER, WRITE_VALUE_64 = 102, 103, 128, 99, 122


def test_cu_init_comes_first(load_driver: StartDriver) -> None:
    """Every call before cuInit gives CUDA_ERROR_NOT_INITIALIZED."""
    assert load_driver().attempt("cuDeviceGetCount", byref(c_int())) == "CUDA_ERROR_NOT_INITIALIZED"


def test_context_must_be_current(load_driver: StartDriver) -> None:
    """Copies, streams, allocations and registrations need a current context; virtual memory calls do not."""
    driver = load_driver()
    driver.call("cuInit", 0)

    assert driver.attempt("cuMemcpyAsync", 0, 0, 1, None) == "CUDA_ERROR_INVALID_CONTEXT"
    needy: list[Callable[[], int]] = [driver.stream, driver.event, partial(driver.alloc, 1), driver.host]
    for make in (*needy, driver.free_bytes):
        with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_CONTEXT"):
            make()
    assert peek(driver.memory()) == b"\xdb"


def test_compute_mode_says_how_many_processes_have_a_context(start_driver: StartDriver) -> None:
    """In the mode of one process the next one gets its context when the first has given it up, and else never."""
    first = start_driver(compute_mode=3)
    with pytest.raises(CudaError, match="CUDA_ERROR_DEVICE_UNAVAILABLE"):
        start_driver(compute_mode=3)
    first.call("cuDevicePrimaryCtxRelease_v2", 0)
    start_driver(compute_mode=3)
    with pytest.raises(CudaError, match="CUDA_ERROR_DEVICE_UNAVAILABLE"):
        start_driver(compute_mode=2)


def test_context_is_per_thread_stack(driver: Driver) -> None:
    """A context that is popped is no longer current, and the one below it is."""
    context = c_void_p()
    driver.call("cuCtxPopCurrent_v2", byref(context))
    assert driver.attempt("cuCtxSynchronize") == "CUDA_ERROR_INVALID_CONTEXT"
    driver.call("cuCtxPushCurrent_v2", context)
    assert driver.attempt("cuCtxSynchronize") == "CUDA_SUCCESS"
    assert driver.attempt("cuCtxSetCurrent", 12345) == "CUDA_ERROR_INVALID_CONTEXT"


def test_last_release_destroys_the_primary_context(driver: Driver) -> None:
    """The primary context lives until it is released as often as it was retained; its streams end with it."""
    stream = driver.stream()
    driver.retain()
    driver.call("cuDevicePrimaryCtxRelease_v2", 0)
    driver.finish(stream)

    driver.call("cuDevicePrimaryCtxRelease_v2", 0)
    assert driver.attempt("cuStreamQuery", stream) == "CUDA_ERROR_CONTEXT_IS_DESTROYED"
    assert driver.attempt("cuDevicePrimaryCtxRelease_v2", 0) == "CUDA_ERROR_INVALID_CONTEXT"
    driver.retain()
    assert driver.attempt("cuStreamQuery", stream) == "CUDA_ERROR_INVALID_HANDLE"


def test_host_functions_make_no_calls(driver: Driver) -> None:
    """A call of the driver from a host function gives CUDA_ERROR_NOT_PERMITTED."""
    stream, results = driver.stream(), []
    driver.launch(stream, lambda: results.append(driver.attempt("cuStreamQuery", stream)))
    driver.finish(stream)
    assert results == ["CUDA_ERROR_NOT_PERMITTED"]


def test_device_says_what_it_can(driver: Driver) -> None:
    """The device has virtual memory, descriptors to share, registration and 64-bit values, and no fabric handles."""
    found = {}
    for attribute in (VMM, POSIX_HANDLES, FABRIC_HANDLES, HOST_REGISTER, WRITE_VALUE_64):
        value = c_int(-1)
        driver.call("cuDeviceGetAttribute", byref(value), attribute, 0)
        found[attribute] = value.value
    assert found == {VMM: 1, POSIX_HANDLES: 1, FABRIC_HANDLES: 0, HOST_REGISTER: 1, WRITE_VALUE_64: 1}
    total = c_size_t()
    driver.call("cuDeviceTotalMem_v2", byref(total), 0)
    assert total.value == 64 << 20
    assert driver.attempt("cuDeviceGet", byref(c_int()), 1) == "CUDA_ERROR_INVALID_DEVICE"


def uuid(driver: Driver, device: int) -> bytes:
    found = Uuid()
    driver.call("cuDeviceGetUuid_v2", byref(found), device)
    return bytes(found.bytes)


def test_uuid_names_a_device_where_its_number_does_not(
    load_driver: StartDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA_VISIBLE_DEVICES renumbers the devices; their UUIDs stay what they are."""
    plain = load_driver(devices=2)
    plain.call("cuInit", 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    swapped = load_driver(devices=2)
    swapped.call("cuInit", 0)

    assert uuid(plain, 0) == uuid(swapped, 1) != uuid(plain, 1)


def test_errors_have_names_and_words(load_driver: StartDriver) -> None:
    """Results have a name and a text, before cuInit as well; a number that is no result is refused."""
    driver, words = load_driver(), c_char_p()
    assert driver.error_name(712) == "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"
    driver.call("cuGetErrorString", 2, byref(words))
    assert words.value == b"out of memory"
    assert driver.attempt("cuGetErrorName", 54321, byref(words)) == "CUDA_ERROR_INVALID_VALUE"


def test_symbols_are_found_by_version(load_driver: StartDriver) -> None:
    """A symbol is the newest version that the caller and the driver know; the status says why there is none."""
    driver = load_driver()
    old, new = driver.symbol("cuMemcpyBatchAsync", 12080), driver.symbol("cuMemcpyBatchAsync", 13000)
    assert old == driver.symbol("cuMemcpyBatchAsync", 12090) != new
    address, status = c_void_p(), c_int()
    find = ("cuGetProcAddress_v2", b"cuMemcpyBatchAsync", byref(address), 12070, 0, byref(status))
    assert (driver.attempt(*find), status.value, address.value) == ("CUDA_ERROR_NOT_FOUND", 2, None)
    find = ("cuGetProcAddress_v2", b"cuNoSuchCall", byref(address), 13000, 0, byref(status))
    assert (driver.attempt(*find), status.value) == ("CUDA_ERROR_NOT_FOUND", 1)


def test_old_driver_has_the_old_batch_only(load_driver: StartDriver) -> None:
    """A driver of CUDA 12.8 gives its own batched copy to a program that was built for 13.0."""
    driver = load_driver(version=12080)
    version = c_int()
    driver.call("cuDriverGetVersion", byref(version))
    assert version.value == 12080
    assert driver.symbol("cuMemcpyBatchAsync", 13000) == driver.symbol("cuMemcpyBatchAsync", 12080)


def test_bad_setting_is_refused(load_driver: StartDriver, capfd: pytest.CaptureFixture[str], device: Path) -> None:
    """A list of faults that cannot be read is an error of cuInit, which names the variable."""
    assert load_driver(faults="out_of_mem=1").attempt("cuInit", 0) == "CUDA_ERROR_OPERATING_SYSTEM"
    assert "FAKE_CUDA_FAULTS" in capfd.readouterr().err
    assert ctypes.sizeof(Uuid) == 16
