"""What kvcached does with a device, written for NVIDIA's cuda-bindings: run by test_processes.py as a program."""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import socket
import sys
from typing import Any

SIZE = 4 << 20
driver: Any = importlib.import_module("cuda.bindings.driver")


def check(result: Any) -> Any:
    """The values of a call; an error ends the program."""
    values = result if isinstance(result, tuple) else (result,)
    if values[0] != driver.CUresult.CUDA_SUCCESS:
        sys.exit(f"{values[0]}")
    return values[1] if len(values) == 2 else values[1:]


FD = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def start() -> None:
    check(driver.cuInit(0))
    device = check(driver.cuDeviceGet(0))
    check(driver.cuCtxSetCurrent(check(driver.cuDevicePrimaryCtxRetain(device))))


def map_memory(handle: Any) -> Any:
    address = check(driver.cuMemAddressReserve(SIZE, 0, driver.CUdeviceptr(0), 0))
    check(driver.cuMemMap(address, SIZE, 0, handle, 0))
    access = driver.CUmemAccessDesc()
    access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = 0
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    check(driver.cuMemSetAccess(address, SIZE, [access], 1))
    return address


def export_and_wait(give: socket.socket) -> None:
    """Create memory, fill it, send its descriptor, and wait to be killed."""
    start()
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = 0
    properties.requestedHandleTypes = FD
    handle = check(driver.cuMemCreate(SIZE, properties, 0))
    ctypes.memset(int(map_memory(handle)), 0x5A, SIZE)
    socket.send_fds(give, [b"memory"], [int(check(driver.cuMemExportToShareableHandle(handle, FD, 0)))])
    signal.pause()


def import_and_copy(descriptor: int) -> bytes:
    """Map the memory of the process that was killed, and copy the ends of it by a batch."""
    start()
    handle = check(driver.cuMemImportFromShareableHandle(descriptor, FD))
    os.close(descriptor)
    address = int(map_memory(handle))
    stream = check(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
    host = int(check(driver.cuMemHostAlloc(4096, 0)))
    attributes = driver.CUmemcpyAttributes()
    attributes.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    to = [driver.CUdeviceptr(host), driver.CUdeviceptr(host + 16)]
    from_ = [driver.CUdeviceptr(address), driver.CUdeviceptr(address + SIZE - 16)]
    check(driver.cuMemcpyBatchAsync(to, from_, [16, 16], 2, [attributes], [0], 1, stream))
    check(driver.cuStreamSynchronize(stream))
    return ctypes.string_at(host, 32)


def main() -> None:
    give, take = socket.socketpair()
    exporter = os.fork()
    if exporter == 0:
        export_and_wait(give)
    (descriptor,) = socket.recv_fds(take, 10, 1)[1]
    os.kill(exporter, signal.SIGKILL)
    os.waitpid(exporter, 0)
    if import_and_copy(descriptor) != b"\x5a" * 32:
        sys.exit("the bytes are not those of the exporter")
    sys.stdout.write("copied\n")


if __name__ == "__main__":
    main()
