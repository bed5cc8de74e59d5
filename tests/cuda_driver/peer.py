"""A process of its own that uses the fake driver as it is told: `python -m tests.cuda_driver.peer DESCRIPTOR`.

It is told over a socket, one JSON packet a command, with descriptors beside it; it answers each with one packet.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from ctypes import addressof, byref, c_char, c_ulonglong, c_void_p, memset
from pathlib import Path
from typing import Any

from tests.cuda_driver.calls import (
    DEVICE_MAP,
    DISABLE_TIMING,
    GEQ,
    INTERPROCESS,
    CudaError,
    Driver,
    IpcHandle,
    peek,
)
from tests.cuda_driver.device import GRANULE_BYTES

ROOT = Path(__file__).parents[2]
PACKET_BYTES = 4096
LAZY_PEER_ACCESS = 1
Answer = dict[str, Any]


class Commands:
    """What a peer can be told. Each command gives JSON and, where it says so, a descriptor."""

    def __init__(self) -> None:
        self.driver = Driver("libcuda.so.1")
        self.driver.start()
        self.stream = self.driver.stream()
        self.handle = 0
        self.address = 0
        self.page = mmap.mmap(-1, mmap.PAGESIZE)
        self.event = 0

    def make(self, byte: int) -> Answer:
        """Create a granule full of the byte; gives its descriptor."""
        self.handle = self.driver.create()
        self.address = self.driver.map(self.handle)
        memset(self.address, byte, GRANULE_BYTES)
        return {"descriptor": self.driver.export(self.handle)}

    def take(self, descriptor: int) -> Answer:
        """Import memory and map it; the descriptor is closed, and the mapping alone holds the memory."""
        handle = self.driver.import_(descriptor)
        os.close(descriptor)
        self.address = self.driver.map(handle)
        self.driver.call("cuMemRelease", handle)
        return {}

    def read(self) -> Answer:
        """The first and the last byte of the memory, copied by a stream."""
        host = self.driver.host()
        self.driver.copy(host, self.address, 1, self.stream)
        self.driver.copy(host + 1, self.address + GRANULE_BYTES - 1, 1, self.stream)
        self.driver.finish(self.stream)
        return {"bytes": list(peek(host, 2))}

    def free_bytes(self) -> Answer:
        return {"bytes": self.driver.free_bytes()}

    def allocate(self, byte: int) -> Answer:
        """Memory of cuMemAlloc, and its IPC handle; the own handle is opened, too, to see what that gives."""
        handle, own = IpcHandle(), c_ulonglong()
        self.address = self.driver.alloc(GRANULE_BYTES)
        memset(self.address, byte, GRANULE_BYTES)
        self.driver.call("cuIpcGetMemHandle", byref(handle), self.address)
        opened = self.driver.attempt("cuIpcOpenMemHandle_v2", byref(own), handle, LAZY_PEER_ACCESS)
        return {"handle": bytes(handle).hex(), "own": opened}

    def free(self) -> Answer:
        self.driver.call("cuMemFree_v2", self.address)
        return {}

    def open(self, handle: str) -> Answer:
        """Open an IPC handle twice; the address is the same, and is closed as often as it was opened."""
        addresses = [c_ulonglong(), c_ulonglong()]
        for address in addresses:
            shared = IpcHandle.from_buffer_copy(bytes.fromhex(handle))
            self.driver.call("cuIpcOpenMemHandle_v2", byref(address), shared, LAZY_PEER_ACCESS)
        self.driver.call("cuIpcCloseMemHandle", addresses[1].value)
        self.address = addresses[0].value
        return {"same": addresses[0].value == addresses[1].value}

    def share_page(self, descriptor: int) -> Answer:
        """Map and register a page that other processes map as well."""
        self.page = mmap.mmap(descriptor, mmap.PAGESIZE)
        os.close(descriptor)
        self.driver.call("cuMemHostRegister_v2", self._page_address(), mmap.PAGESIZE, DEVICE_MAP)
        return {}

    def _page_address(self) -> int:
        return addressof(c_char.from_buffer(self.page))

    def write_value(self, value: int) -> Answer:
        self.driver.call("cuStreamWriteValue64_v2", self.stream, self._page_address(), value, 0)
        return {}

    def wait_value(self, value: int) -> Answer:
        self.driver.call("cuStreamWaitValue64_v2", self.stream, self._page_address(), value, GEQ)
        return {}

    def record_event(self) -> Answer:
        """Record an INTERPROCESS event behind all that the stream holds."""
        handle = IpcHandle()
        self.event = self.driver.event(INTERPROCESS | DISABLE_TIMING)
        self.driver.call("cuEventRecord", self.event, self.stream)
        self.driver.call("cuIpcGetEventHandle", byref(handle), self.event)
        return {"handle": bytes(handle).hex()}

    def wait_event(self, handle: str) -> Answer:
        """Make the stream wait for an event of another process."""
        event = c_void_p()
        self.driver.call("cuIpcOpenEventHandle", byref(event), IpcHandle.from_buffer_copy(bytes.fromhex(handle)))
        self.driver.call("cuStreamWaitEvent", self.stream, event, 0)
        return {"state": self.driver.attempt("cuEventQuery", event)}

    def query(self) -> Answer:
        return {"state": self.driver.attempt("cuStreamQuery", self.stream)}

    def finish(self) -> Answer:
        self.driver.finish(self.stream)
        return {}

    def fork(self) -> Answer:
        """What a call gives in a child that was forked after cuInit."""
        child = os.fork()
        if child == 0:
            os._exit(self.driver.attempt("cuMemRelease", 0) == "CUDA_ERROR_NOT_INITIALIZED")
        return {"refused": os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1}


def serve(told: socket.socket) -> None:
    """Do what comes, until the other side is gone."""
    commands = Commands()
    while packet := socket.recv_fds(told, PACKET_BYTES, 1):
        data, descriptors = packet[0], packet[1]
        if not data:
            return
        command = json.loads(data)
        name, arguments = command["name"], command["arguments"]
        if descriptors:
            arguments["descriptor"] = descriptors[0]
        try:
            answer = getattr(commands, name)(**arguments)
        except CudaError as error:
            answer = {"error": error.name}
        given = [answer.pop("descriptor")] if "descriptor" in answer else []
        socket.send_fds(told, [json.dumps(answer).encode()], given)
        for descriptor in given:
            os.close(descriptor)


class Peer:
    """The process, from outside."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._tell, told = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.cuda_driver.peer", str(told.fileno())],
            env={**os.environ, **environment},
            pass_fds=[told.fileno()],
            cwd=ROOT,
        )
        told.close()

    def ask(self, name: str, descriptor: int | None = None, **arguments: object) -> Answer:
        """Tell a command, with a descriptor that is closed here; a descriptor that comes back is in the answer."""
        message = json.dumps({"name": name, "arguments": arguments}).encode()
        socket.send_fds(self._tell, [message], [] if descriptor is None else [descriptor])
        if descriptor is not None:
            os.close(descriptor)
        data, descriptors, _, _ = socket.recv_fds(self._tell, PACKET_BYTES, 1)
        if not data:
            message_of_end = "the peer has ended"
            raise EOFError(message_of_end)
        answer: Answer = json.loads(data)
        return {**answer, "descriptor": descriptors[0]} if descriptors else answer

    def kill(self) -> None:
        """End the process by SIGKILL and wait until it is gone."""
        self.process.kill()
        self.process.wait()
        self._tell.close()


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
