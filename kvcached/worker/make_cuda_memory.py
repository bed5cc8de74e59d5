"""Makes CUDA memory: ``python -m kvcached.worker.make_cuda_memory FD PARENT ORDINAL SIZE_BYTES [UUID]``.

The daemon itself loads no driver. This process makes the memory, sends its descriptor and the device's UUID over the
connection that it inherits, and ends. The descriptor keeps the memory. It does not outlive the daemon, its parent.
First it sends the UUIDs of all devices, a line each: whatever comes after, it is known which devices have the numbers.
Where a UUID is given, the memory is of that device, whatever number it has now: a device that is lost makes the numbers
of others smaller.
"""

from __future__ import annotations

import os
import signal
import socket
import sys

from kvcached.process.prctl import PR_SET_PDEATHSIG, prctl
from kvcached.process.seqpacket import send
from kvcached.worker.exits import DEVICE_LOST, MISSING, NO_ROOM, REFUSED
from kvcached_client.cuda.device import Device, listed
from kvcached_client.cuda.driver import CudaFailure, CudaMissing, Driver
from kvcached_client.errors import DeviceError


def main(arguments: list[str]) -> int:
    """Make and send.

    Returns:
        The exit status, see `exits`; the last line of stderr says why it is not 0.
    """
    descriptor, parent, ordinal, size_bytes = map(int, arguments[1:5])
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it had died before the kernel was asked
        return REFUSED
    with socket.socket(fileno=descriptor) as connection:
        try:
            driver = Driver()
            send(connection, "".join(f"{each}\n" for each in listed(driver)).encode())
            device = Device.of_uuid(driver, arguments[5]) if arguments[5:] else Device(driver, ordinal)
            exported = _exported(device, size_bytes)
        except DeviceError as error:
            sys.stderr.write(f"{error}\n")
            return _status(error)
        send(connection, device.uuid.encode(), (exported,))
    return 0


def _status(error: DeviceError) -> int:
    if error.is_lost:
        return DEVICE_LOST
    if _is_of_room(error):
        return NO_ROOM
    return MISSING if isinstance(error, CudaMissing) and not error.may_come else REFUSED


def _is_of_room(error: DeviceError) -> bool:
    """Whether it may be otherwise once others have given memory of the device back."""
    return isinstance(error, CudaFailure) and error.result == "CUDA_ERROR_OUT_OF_MEMORY"


def _exported(device: Device, size_bytes: int) -> int:
    try:
        return device.make_memory(size_bytes).export()
    except CudaFailure as error:
        if not _is_of_room(error):
            raise
        detail = (
            f": {size_bytes} bytes, and {device.free_bytes()} are free (end what uses the device, or configure "
            "fewer slots)"
        )
        raise CudaFailure(error.call, error.result, detail) from None


if __name__ == "__main__":
    sys.exit(main(sys.argv))
