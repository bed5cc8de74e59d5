from __future__ import annotations

import mmap
import os
from ctypes import byref, c_int, c_ulonglong
from itertools import permutations
from pathlib import Path

import pytest

from tests.cuda_driver.calls import READ, CudaError, Driver, peek, poke
from tests.cuda_driver.conftest import StartDriver
from tests.cuda_driver.device import GRANULE_BYTES, device_directory, live_granules
from tests.cuda_driver.trace import broken_rules, read

NEW = b"\xdb"


@pytest.mark.parametrize("size", [0, 1, 4096, GRANULE_BYTES + 4096])
def test_size_is_a_multiple_of_the_granularity(driver: Driver, size: int) -> None:
    """The call cuMemCreate refuses a size that is no multiple of 2 MiB."""
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_VALUE"):
        driver.create(size)


def test_handle_is_mapped_whole_at_offset_zero_into_free_reserved_addresses(driver: Driver, tmp_path: Path) -> None:
    """A mapping with an offset, of a part, of an unknown handle, or at addresses that are not free is refused."""
    handle, other, size = driver.create(2 * GRANULE_BYTES), driver.create(), 2 * GRANULE_BYTES
    place = driver.reserve(4 * GRANULE_BYTES)
    taken = driver.memory()
    for address, mapped, offset, name in (
        (place, size, GRANULE_BYTES, handle),
        (place, GRANULE_BYTES, 0, handle),
        (place + 4096, size, 0, handle),
        (place + 3 * GRANULE_BYTES, size, 0, handle),
        (place, size, 0, handle + 1),
        (taken, GRANULE_BYTES, 0, other),
    ):
        assert driver.attempt("cuMemMap", address, mapped, offset, name, 0) == "CUDA_ERROR_INVALID_VALUE"
    assert broken_rules(read(tmp_path / "trace")) == [
        "cuMemMap: the offset of a mapping is 0",
        "cuMemMap: a handle is mapped whole: 2097152 of 4194304 bytes",
        "cuMemMap: the address is no multiple of the granularity of 2 MiB",
        "cuMemMap: the range was not reserved with cuMemAddressReserve",
        "cuMemMap: a mapping needs a handle that is held, and the flags 0",
        "cuMemMap: the range has memory mapped already",
    ]
    driver.map(handle, size, at=place)
    assert driver.attempt("cuMemMap", place + GRANULE_BYTES, GRANULE_BYTES, 0, other, 0) == "CUDA_ERROR_INVALID_VALUE"


def test_mapping_ends_whole_and_before_its_addresses(driver: Driver) -> None:
    """A part of a mapping cannot be unmapped, and a range cannot be freed while memory is mapped in it."""
    address = driver.memory(2 * GRANULE_BYTES)
    for part in (address, address + GRANULE_BYTES):
        assert driver.attempt("cuMemUnmap", part, GRANULE_BYTES) == "CUDA_ERROR_INVALID_VALUE"
    assert driver.attempt("cuMemAddressFree", address, 2 * GRANULE_BYTES) == "CUDA_ERROR_INVALID_VALUE"
    driver.call("cuMemUnmap", address, 2 * GRANULE_BYTES)
    assert driver.attempt("cuMemUnmap", address, 2 * GRANULE_BYTES) == "CUDA_ERROR_INVALID_VALUE"
    assert driver.attempt("cuMemAddressFree", address, GRANULE_BYTES) == "CUDA_ERROR_INVALID_VALUE"
    driver.call("cuMemAddressFree", address, 2 * GRANULE_BYTES)


def test_mapping_has_no_access_before_it_is_given(driver: Driver) -> None:
    """A copy to memory that is mapped is refused before cuMemSetAccess, and again after the memory is mapped anew."""
    handle, address, stream = driver.create(), driver.reserve(), driver.stream()
    host = driver.host()
    assert driver.attempt("cuMemcpyAsync", address, host, 8, stream) == "CUDA_ERROR_INVALID_VALUE"
    driver.call("cuMemMap", address, GRANULE_BYTES, 0, handle, 0)
    assert driver.attempt("cuMemcpyAsync", address, host, 8, stream) == "CUDA_ERROR_INVALID_VALUE"
    driver.allow(address)
    driver.copy(address, host, 8, stream)
    driver.finish(stream)
    driver.call("cuMemUnmap", address, GRANULE_BYTES)
    driver.call("cuMemMap", address, GRANULE_BYTES, 0, handle, 0)
    assert driver.attempt("cuMemcpyAsync", address, host, 8, stream) == "CUDA_ERROR_INVALID_VALUE"


def test_access_for_reading_is_not_for_writing(driver: Driver) -> None:
    """A mapping with read access can be the source of a copy and not its destination."""
    handle, address, stream = driver.create(), driver.reserve(), driver.stream()
    host = driver.host()
    driver.call("cuMemMap", address, GRANULE_BYTES, 0, handle, 0)
    driver.allow(address, access=READ)
    driver.copy(host, address, 8, stream)
    driver.finish(stream)
    assert peek(host, 8) == NEW * 8
    assert driver.attempt("cuMemcpyAsync", address, host, 8, stream) == "CUDA_ERROR_INVALID_VALUE"


def test_copy_goes_over_the_border_of_two_mappings_but_not_of_two_allocations(driver: Driver) -> None:
    """Mappings side by side are one range to a copy; cuMemAlloc memory ends where it ends."""
    place, stream, host = driver.reserve(2 * GRANULE_BYTES), driver.stream(), driver.host()
    for half in range(2):
        driver.map(driver.create(), at=place + half * GRANULE_BYTES)
    driver.copy(host, place + GRANULE_BYTES - 4, 8, stream)
    driver.finish(stream)
    assert peek(host, 8) == NEW * 8
    end = driver.alloc(4096) + 4096
    assert driver.attempt("cuMemcpyAsync", end - 4, host, 8, stream) == "CUDA_ERROR_INVALID_VALUE"


@pytest.mark.parametrize("order", list(permutations(["mapping", "handle", "descriptor", "imported"])))
def test_memory_lives_as_long_as_anything_refers_to_it(driver: Driver, device: Path, order: tuple[str, ...]) -> None:
    """Memory is freed with the last of its mapping, its handles and its descriptors, in whatever order they go."""
    handle = driver.create(2 * GRANULE_BYTES)
    address, descriptor = driver.map(handle, 2 * GRANULE_BYTES), driver.export(handle)
    imported = driver.import_(descriptor)
    assert imported != handle
    end = {
        "mapping": lambda: driver.call("cuMemUnmap", address, 2 * GRANULE_BYTES),
        "handle": lambda: driver.call("cuMemRelease", handle),
        "imported": lambda: driver.call("cuMemRelease", imported),
        "descriptor": lambda: os.close(descriptor),
    }
    for name in order:
        assert live_granules(device) == 2
        end[name]()
    assert live_granules(device) == 0


def test_each_import_and_each_retain_wants_its_own_release(driver: Driver, device: Path) -> None:
    """A handle that was retained is released twice; a third release is refused."""
    handle, again = driver.create(), c_ulonglong()
    address = driver.map(handle)
    driver.call("cuMemRetainAllocationHandle", byref(again), address + 100)
    assert again.value == handle
    driver.call("cuMemUnmap", address, GRANULE_BYTES)
    driver.call("cuMemRelease", handle)
    assert live_granules(device) == 1
    driver.call("cuMemRelease", handle)
    assert live_granules(device) == 0
    assert driver.attempt("cuMemRelease", handle) == "CUDA_ERROR_INVALID_VALUE"


def test_export_is_asked_for_when_the_memory_is_made(driver: Driver) -> None:
    """Memory that was created without requestedHandleTypes cannot be exported."""
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_VALUE"):
        driver.export(driver.create(handle_types=0))


def test_descriptor_is_of_no_use_without_the_driver(driver: Driver) -> None:
    """Who holds a descriptor can pass it on, and can neither map nor read the memory."""
    descriptor = driver.export(driver.create())
    with pytest.raises(PermissionError):
        mmap.mmap(descriptor, GRANULE_BYTES)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.read(descriptor, 1)
    os.close(descriptor)


def test_only_descriptors_of_the_devices_are_imported(driver: Driver) -> None:
    """A memfd of somebody else is no memory of the device."""
    descriptor = os.memfd_create("not of a device")
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_VALUE"):
        driver.import_(descriptor)
    os.close(descriptor)


def test_memory_of_other_devices_is_not_imported(driver: Driver, load_driver: StartDriver) -> None:
    """Memory of a device in another directory is no memory of these devices, though its file has the same name."""
    with device_directory() as elsewhere:
        other = load_driver(directory=elsewhere)
        other.start()
        descriptor = other.export(other.create())
        with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_VALUE"):
            driver.import_(descriptor)
        os.close(descriptor)


def test_device_is_full_until_something_is_freed(start_driver: StartDriver) -> None:
    """A device gives no more memory than it has; cuMemGetInfo says how much is left, in granules."""
    driver = start_driver(memory_mib=8)
    handles = [driver.create() for _ in range(3)]
    address = driver.alloc(1)
    assert driver.free_bytes() == 0
    with pytest.raises(CudaError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        driver.create()
    driver.call("cuMemRelease", handles[0])
    driver.call("cuMemFree_v2", address)
    assert driver.free_bytes() == 2 * GRANULE_BYTES
    driver.create(2 * GRANULE_BYTES)


def test_addresses_stay_over_a_remap_and_new_memory_is_poison(driver: Driver) -> None:
    """Memory that is mapped where other memory was has none of its bytes; the old memory mapped again has them all."""
    first, second = driver.create(), driver.create()
    address = driver.map(first)
    poke(address, b"kept")
    driver.call("cuMemUnmap", address, GRANULE_BYTES)
    driver.map(second, at=address)
    assert peek(address, 4) == NEW * 4
    assert peek(address + GRANULE_BYTES - 1) == NEW
    driver.call("cuMemUnmap", address, GRANULE_BYTES)
    driver.map(first, at=address)
    assert peek(address, 4) == b"kept"


@pytest.mark.parametrize("remap", [False, True])
def test_queued_copy_finds_that_its_memory_went(driver: Driver, tmp_path: Path, remap: bool) -> None:
    """A copy whose memory was unmapped or replaced while it was queued fails, and its context stays failed."""
    handle, stream, host = driver.create(), driver.stream(), driver.host()
    address = driver.map(handle)
    driver.copy(address, host, 8, stream)
    driver.call("cuMemUnmap", address, GRANULE_BYTES)
    if remap:
        driver.map(handle, at=address)
    assert driver.attempt("cuStreamSynchronize", stream) == "CUDA_ERROR_ILLEGAL_ADDRESS"
    assert driver.attempt("cuCtxSynchronize") == "CUDA_ERROR_ILLEGAL_ADDRESS"
    assert any("freed, remapped" in rule for rule in broken_rules(read(tmp_path / "trace")))


def test_hint_of_an_address_may_be_ignored(start_driver: StartDriver) -> None:
    """An address is reserved where the caller asks, unless the fault strikes or something else is there."""
    driver = start_driver(faults="ignored_hint=@2")
    place = driver.reserve()
    driver.call("cuMemAddressFree", place, GRANULE_BYTES)
    assert driver.reserve(hint=place) == place
    assert driver.reserve(hint=place) != place
    driver.call("cuMemAddressFree", place, GRANULE_BYTES)
    elsewhere = driver.reserve(hint=place)
    assert elsewhere != place
    assert elsewhere % GRANULE_BYTES == 0
    assert driver.reserve(hint=place) == place


def test_memory_of_an_allocation_is_freed_once(driver: Driver, device: Path) -> None:
    """The call cuMemFree takes what cuMemAlloc gave, once, and no address inside it."""
    address = driver.alloc(GRANULE_BYTES + 1)
    assert live_granules(device) == 2
    assert driver.attempt("cuMemFree_v2", address + 1) == "CUDA_ERROR_INVALID_VALUE"
    driver.call("cuMemFree_v2", address)
    assert driver.attempt("cuMemFree_v2", address) == "CUDA_ERROR_INVALID_VALUE"
    assert live_granules(device) == 0


def test_allocations_go_with_their_context_and_handles_do_not(driver: Driver, device: Path) -> None:
    """The end of a primary context frees what cuMemAlloc gave; memory of cuMemCreate stays with its handles."""
    driver.alloc(1)
    handle = driver.create()
    driver.call("cuDevicePrimaryCtxRelease_v2", 0)
    assert live_granules(device) == 1
    driver.call("cuMemRelease", handle)
    assert live_granules(device) == 0


def test_address_says_its_device(driver: Driver) -> None:
    """The device of an address is asked for by cuPointerGetAttribute; an address of nothing has none."""
    ordinal, device_of = c_int(-1), 9
    for address in (driver.memory(), driver.alloc(4096)):
        driver.call("cuPointerGetAttribute", byref(ordinal), device_of, address + 64)
        assert ordinal.value == 0
    assert driver.attempt("cuPointerGetAttribute", byref(ordinal), device_of, 4096) == "CUDA_ERROR_INVALID_VALUE"
