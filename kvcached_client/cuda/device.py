"""Devices: their memory, which processes share by descriptors, and host memory that they reach.

All work is in a device's primary context, which torch uses as well. The context is current to one thread at a time.
"""

from __future__ import annotations

import ctypes
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple, Self

from kvcached_client.cuda.driver import CudaFailure, CudaMissing, Driver, Opaque, Stream

_IPC_HANDLE_BYTES: Final = 64


class SharedAllocation(NamedTuple):
    """Memory of ``cudaMalloc``: where it is in this process, and by which handle another process opens it."""

    address: int
    size_bytes: int
    handle: bytes


class Device:
    """One device, with its primary context.

    Attributes:
        driver: how to call it.
        ordinal: its number in this process; other processes may count otherwise.
        uuid: names the device in every process, as ``GPU-…`` of nvidia-smi; of a MIG instance its own.
        name: of the model.
        granularity_bytes: memory is made and mapped in multiples of it.
    """

    def __init__(self, driver: Driver, ordinal: int = 0) -> None:
        """Retain the primary context, and make it current to this thread.

        Raises:
            CudaMissing: there is no such device.
            CudaFailure: the driver refused one of the steps.
        """
        if not 0 <= ordinal < (count := driver.devices()):
            raise CudaMissing(
                f"device {ordinal} of {count}",
                "name one that nvidia-smi lists, whose numbers CUDA has where CUDA_DEVICE_ORDER=PCI_BUS_ID is set; see "
                "CUDA_VISIBLE_DEVICES",
            )
        self.driver = driver
        self.ordinal = ordinal
        self._device = driver.call("cuDeviceGet", ordinal)
        self.uuid = _uuid(driver, self._device)
        self.name: str = driver.call("cuDeviceGetName", 256, self._device).partition(b"\0")[0].decode()
        self._context = driver.call("cuDevicePrimaryCtxRetain", self._device)
        minimum = driver.names.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        try:
            self.use()
            self.granularity_bytes: int = driver.call("cuMemGetAllocationGranularity", self._properties(), minimum)
        except BaseException:
            self.close()
            raise

    @classmethod
    def of_uuid(cls, driver: Driver, wanted: str) -> Self:
        """The device with a UUID, whatever its number in this process is.

        Raises:
            CudaMissing: this process sees no such device.
            CudaFailure: the driver refused one of the steps.
        """
        count = driver.devices()
        for ordinal in range(count):
            if _uuid(driver, driver.call("cuDeviceGet", ordinal)) == wanted:
                return cls(driver, ordinal)
        raise CudaMissing(
            f"device {wanted} is none of the {count} that this process sees",
            "let engine and daemon see the same devices: CUDA_VISIBLE_DEVICES, the container's --gpus",
        )

    def use(self) -> None:
        """Make the device's context current to the calling thread."""
        self.driver.call("cuCtxSetCurrent", self._context)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the device's context current to the calling thread, which has its own context again afterwards."""
        with own_context(self.driver):
            self.use()
            yield

    def attribute(self, name: str) -> int:
        """An attribute by the end of its name, as ``ASYNC_ENGINE_COUNT``."""
        attribute = getattr(self.driver.names.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self.driver.call("cuDeviceGetAttribute", attribute, self._device))

    def host_node(self) -> int:
        """The memory node of the machine that is closest to the device; -1 = unknown, as to drivers before CUDA 12.2.

        Raises:
            CudaFailure: the device is lost. Whatever else the driver refuses, it is no reason to do without the device.
        """
        try:
            return self.attribute("HOST_NUMA_ID")
        except CudaFailure as error:
            if error.is_lost:
                raise
            return -1

    def works(self) -> bool:
        """Whether the context still does anything: after some failures it does nothing more. Never waits.

        Nothing is queued on the default stream: to ask for its state asks for that of the context.
        """
        try:
            with self.current():
                self.driver.call("cuStreamQuery", self.driver.names.CUstream(0))
        except CudaFailure as error:
            return error.result == "CUDA_ERROR_NOT_READY"
        return True

    def free_bytes(self) -> int:
        """Memory of the device that nobody has."""
        return int(self.driver.call("cuMemGetInfo")[0])

    def close(self) -> None:
        """Release the context. Nothing of the device may be used any more. Does nothing the second time."""
        if self._context is not None:
            self._context = None
            self.driver.call("cuDevicePrimaryCtxRelease", self._device)

    def whole_granules(self, size_bytes: int) -> int:
        """The size of memory that has room for so much."""
        return -(-size_bytes // self.granularity_bytes) * self.granularity_bytes

    def make_memory(self, size_bytes: int) -> DeviceMemory:
        """New memory that other processes can map. Its size is rounded up to the granularity, its content is undefined.

        Raises:
            CudaFailure: there is not so much, or the driver refused one of the steps.
        """
        size_bytes = self.whole_granules(size_bytes)
        return DeviceMemory(self, self.make_handle(size_bytes), size_bytes)

    def make_handle(self, size_bytes: int) -> Opaque:
        """New memory of whole granules, not mapped: the caller's to release. Raises as `make_memory`."""
        return self.driver.call("cuMemCreate", size_bytes, self._properties(), 0)

    def open_memory(self, descriptor: int, size_bytes: int, *, address: int = 0) -> DeviceMemory:
        """Memory that another process, or an earlier one, has made and exported. The descriptor stays the caller's.

        Args:
            descriptor: as `DeviceMemory.export` gave it, on the same device.
            size_bytes: of the whole memory, as `DeviceMemory.size_bytes` was.
            address: where it is to be mapped, if that is free.

        Raises:
            CudaFailure: it is none of this device, or the driver refused one of the steps.
        """
        return DeviceMemory(self, self.import_handle(descriptor), size_bytes, address)

    def import_handle(self, descriptor: int) -> Opaque:
        """As `open_memory`, without mapping it: the caller's to release."""
        return self.driver.call("cuMemImportFromShareableHandle", descriptor, self._descriptor_kind())

    def allow_access(self, address: int, size_bytes: int) -> None:
        """Let this device read and write memory that was mapped."""
        names = self.driver.names
        access = names.CUmemAccessDesc()
        access.location.type = names.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self.ordinal
        access.flags = names.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self.driver.call("cuMemSetAccess", address, size_bytes, [access], 1)

    def zero(self, address: int, size_bytes: int) -> None:
        """Zero memory; returns when that is done."""
        stream = self.make_stream()
        try:
            stream.zero(address, size_bytes)
        finally:
            stream.finish()

    def share(self, address: int) -> SharedAllocation:
        """The allocation of ``cudaMalloc`` that an address is in, for another process to open.

        Raises:
            CudaFailure: the address is none of such memory in this process, or the driver refused.
        """
        base, size_bytes = self.driver.call("cuMemGetAddressRange", address)
        handle = self.driver.call("cuIpcGetMemHandle", base)
        return SharedAllocation(int(base), int(size_bytes), ctypes.string_at(handle.getPtr(), _IPC_HANDLE_BYTES))

    def open_allocation(self, handle: bytes) -> int:
        """Map an allocation of another process, until this process ends; returns the address.

        The other process must not free it meanwhile. What becomes of it when that process dies, no document says.

        Raises:
            ValueError: this is no handle.
            CudaFailure: the driver refused.
        """
        if len(handle) != _IPC_HANDLE_BYTES:
            raise ValueError(f"an IPC handle of {len(handle)} bytes")
        shared = self.driver.names.CUipcMemHandle()
        ctypes.memmove(shared.getPtr(), handle, _IPC_HANDLE_BYTES)
        lazily = self.driver.names.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        return int(self.driver.call("cuIpcOpenMemHandle", shared, lazily))

    def make_stream(self) -> Stream:
        """A stream that does not wait for the default stream."""
        return Stream(self.driver)

    def register(self, address: int, size_bytes: int, *, read_only: bool = False) -> RegisteredMemory:
        """Let the device reach memory of this process: then copies need no second copy, and run beside the processor.

        Args:
            address: of the memory.
            size_bytes: of the memory.
            read_only: the memory is mapped read-only. Some devices cannot reach such memory.

        Raises:
            CudaFailure: some of it is registered already, or the driver refused.
        """
        return RegisteredMemory(self, address, size_bytes, read_only=read_only)

    def _properties(self) -> Opaque:
        names = self.driver.names
        properties = names.CUmemAllocationProp()
        properties.type = names.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = names.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = self.ordinal
        properties.requestedHandleTypes = self._descriptor_kind()
        return properties

    def _descriptor_kind(self) -> Opaque:
        return self.driver.names.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


@contextmanager
def own_context(driver: Driver) -> Iterator[None]:
    """The calling thread may use any device in here; afterwards the context that was current before is so again.

    Calls in here do not break a CUDA graph that the engine captures in another thread, as vLLM does at its start: none
    of them touches the streams that capture.
    """
    modes = driver.names.CUstreamCaptureMode
    before = driver.call("cuCtxGetCurrent")
    mode = driver.call("cuThreadExchangeStreamCaptureMode", modes.CU_STREAM_CAPTURE_MODE_RELAXED)
    try:
        yield
    finally:
        driver.call("cuThreadExchangeStreamCaptureMode", mode)
        driver.call("cuCtxSetCurrent", before)


def uuid_of(ordinal: int) -> str:
    """The UUID of a device by its number in this process, whose driver is loaded for it.

    Raises:
        CudaMissing: this process has no driver.
        CudaFailure: there is no such device.
    """
    driver = Driver()
    return _uuid(driver, driver.call("cuDeviceGet", ordinal))


def listed(driver: Driver) -> list[str]:
    """The UUIDs of all devices, by their numbers in this process; empty for one that does not tell its own."""
    return [_uuid_if_told(driver, ordinal) for ordinal in range(driver.devices())]


def _uuid_if_told(driver: Driver, ordinal: int) -> str:
    try:
        return _uuid(driver, driver.call("cuDeviceGet", ordinal))
    except CudaFailure:
        return ""


def _uuid(driver: Driver, device: Opaque) -> str:
    """Of an instance of a device (MIG) its own, by which its memory is told from that of its neighbours."""
    # Bindings before CUDA 13 have the call that knows instances beside one that gives the whole device's UUID.
    name = "cuDeviceGetUuid_v2" if hasattr(driver.names, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
    return f"GPU-{uuid.UUID(bytes=bytes(driver.call(name, device).bytes))}"


class DeviceMemory:
    """Memory of a device, mapped into this process, readable and writable.

    It lives as long as some process has it mapped or holds a descriptor of it.

    Attributes:
        address: where it is mapped.
        size_bytes: all of it.
    """

    def __init__(self, device: Device, handle: Opaque, size_bytes: int, address: int = 0) -> None:
        """Map what the handle names; takes the handle over."""
        self._driver = driver = device.driver
        self._handle: Opaque = handle
        self.size_bytes = size_bytes
        self.address = 0
        reserved = 0
        try:
            reserved = int(driver.call("cuMemAddressReserve", size_bytes, 0, address, 0))
            driver.call("cuMemMap", reserved, size_bytes, 0, handle, 0)
            self.address = reserved
            device.allow_access(reserved, size_bytes)
        except BaseException:
            if reserved and not self.address:
                driver.call("cuMemAddressFree", reserved, size_bytes)
            self.close()
            raise

    def export(self) -> int:
        """A new descriptor of the memory, which any process may pass on and keep, and `open_memory` maps.

        Raises:
            CudaFailure: the driver refused.
            ValueError: the memory is closed.
        """
        if self._handle is None:
            raise ValueError("the device memory is closed")
        kind = self._driver.names.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        return int(self._driver.call("cuMemExportToShareableHandle", self._handle, kind, 0))

    def close(self) -> None:
        """Unmap. No queued work may use the memory any more. Does nothing the second time."""
        handle, self._handle = self._handle, None
        address, self.address = self.address, 0
        if address:
            self._driver.call("cuMemUnmap", address, self.size_bytes)
            self._driver.call("cuMemAddressFree", address, self.size_bytes)
        if handle is not None:
            self._driver.call("cuMemRelease", handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RegisteredMemory:
    """Memory of this process that the device reaches.

    Attributes:
        address, size_bytes: of the memory.
        device_address: where the device finds it.
    """

    def __init__(self, device: Device, address: int, size_bytes: int, *, read_only: bool) -> None:
        names = device.driver.names
        self._driver = device.driver
        flags = names.CU_MEMHOSTREGISTER_PORTABLE | names.CU_MEMHOSTREGISTER_DEVICEMAP
        if read_only:
            flags |= names.CU_MEMHOSTREGISTER_READ_ONLY
        self._driver.call("cuMemHostRegister", address, size_bytes, flags)
        self.address = address
        self.size_bytes = size_bytes
        self._is_open = True
        try:
            self.device_address = int(self._driver.call("cuMemHostGetDevicePointer", address, 0))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End that. No queued copy may use the memory any more. Does nothing the second time."""
        if self._is_open:
            self._is_open = False
            self._driver.call("cuMemHostUnregister", self.address)
