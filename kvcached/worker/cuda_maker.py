"""New memory of CUDA devices, made by processes that end once they have handed it over: the daemon loads no driver."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final, NamedTuple

from kvcached.process.seqpacket import receive
from kvcached_client.errors import DeviceError

_MAKER: Final = "kvcached.worker.make_cuda_memory"
#: The first process that uses a device loads the driver and creates a context.
DEADLINE_S: Final = 60.0
_UUID_BYTES_MAX: Final = 64


class MadeMemory(NamedTuple):
    """Memory of one device.

    Attributes:
        descriptor: of the memory, close-on-exec; the caller's.
        device: UUID of the device.
    """

    descriptor: int
    device: str


def make_cuda_memory(ordinals: Sequence[int], size_bytes: int) -> list[MadeMemory]:
    """New memory on each of some devices, as they are counted here, all at a time. What is in it is undefined.

    Raises:
        DeviceError: there is no driver, no such device, or not so much memory; none is left.
        OSError: a process cannot be started.
    """
    with ExitStack() as made:
        makers = [_Maker(ordinal, size_bytes, made) for ordinal in ordinals]
        memory = [maker.result(made) for maker in makers]
        made.pop_all()
        for maker in makers:
            maker.close()
    return memory


class _Maker:
    def __init__(self, ordinal: int, size_bytes: int, made: ExitStack) -> None:
        self._ordinal = ordinal
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        made.callback(self._connection.close)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _MAKER, str(theirs.fileno()), str(ordinal), str(size_bytes)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                text=True,
            )
        made.callback(self._end)

    def result(self, made: ExitStack) -> MadeMemory:
        try:
            _, said = self._process.communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise DeviceError(f"CUDA device {self._ordinal} made no memory within {DEADLINE_S:g} s") from None
        packet = None if self._process.returncode else receive(self._connection, _UUID_BYTES_MAX, 1)
        if packet is None or len(packet.descriptors) != 1:
            reason = (said.strip().splitlines() or [f"its process ended with {self._process.returncode}"])[-1]
            raise DeviceError(f"CUDA device {self._ordinal}: {reason}; kvcached doctor --cuda says more")
        made.callback(os.close, packet.descriptors[0])
        return MadeMemory(packet.descriptors[0], packet.data.decode())

    def close(self) -> None:
        self._connection.close()

    def _end(self) -> None:
        self._process.kill()
        self._process.communicate()
