"""Makes memory of a CUDA device: ``python -m kvcached.worker.make_cuda_memory FD ORDINAL SIZE_BYTES``.

The daemon itself loads no driver. This process makes the memory, sends its descriptor and the device's UUID over the
connection that it inherits, and ends. The descriptor keeps the memory.
"""

from __future__ import annotations

import socket
import sys

from kvcached.process.seqpacket import send
from kvcached_client.cuda.device import Device
from kvcached_client.cuda.driver import Driver
from kvcached_client.errors import DeviceError

_EXIT_REFUSED = 3


def main(arguments: list[str]) -> int:
    """Make and send.

    Returns:
        The exit status: 3 where the driver refused; stderr says why.
    """
    descriptor, ordinal, size_bytes = map(int, arguments[1:])
    try:
        device = Device(Driver(), ordinal)
        exported = device.make_memory(size_bytes).export()
    except DeviceError as error:
        sys.stderr.write(f"{error}\n")
        return _EXIT_REFUSED
    with socket.socket(fileno=descriptor) as connection:
        send(connection, device.uuid.encode(), (exported,))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
