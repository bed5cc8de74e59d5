"""A maker of CUDA memory that does what a test tells it: ``python -m tests.cuda.odd_maker``.

Over the socket in $ODD_MAKER it says its process id and its device; then it hears "make", "refuse" or nothing.
"""

from __future__ import annotations

import os
import socket
import sys

from kvcached.worker import make_cuda_memory
from kvcached_client.cuda.device import Device
from kvcached_client.errors import DeviceError

_export = make_cuda_memory._exported


def exported(device: Device, size_bytes: int) -> int:
    with socket.socket(socket.AF_UNIX) as told:
        told.connect(os.environ["ODD_MAKER"])
        told.sendall(f"{os.getpid()} {device.ordinal}\n".encode())
        heard = told.makefile().readline().strip()
    if heard == "make":
        return _export(device, size_bytes)
    raise DeviceError(f"told to {heard}")


if __name__ == "__main__":
    make_cuda_memory._exported = exported
    sys.exit(make_cuda_memory.main(sys.argv))
