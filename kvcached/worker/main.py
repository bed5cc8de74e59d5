"""The worker process: ``python -m kvcached.worker.main FD NAME``, with an inherited connection and a name for `ps`.

The worker maps a shard's pool and the host pool, both of which belong to the daemon, and carries out the daemon's
requests. It owns no memory. It ends when the daemon sends `Shutdown`, closes the connection or dies.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from contextlib import suppress
from typing import Final, NamedTuple, NoReturn

import msgspec

from kvcached.process.seqpacket import send, wait_packet
from kvcached.worker.executor import Executor, NotTaken
from kvcached.worker.exits import DEVICE_FAILED, DEVICE_LOST, MEMORY_GONE
from kvcached.worker.messages import (
    DESCRIPTORS_MAX,
    MESSAGE_SIZE_BYTES_MAX,
    Done,
    HostRegistered,
    Hurry,
    Load,
    Ready,
    Request,
    decode_config,
    decode_request,
    encode,
)
from kvcached.worker.pool_memory import MemoryGone
from kvcached.worker.shard import Shard
from kvcached_client.errors import DeviceError

_EXIT_STARTUP: Final = 3

_log: Final = logging.getLogger(__name__)


class Ending(NamedTuple):
    """Why a worker has nothing more to do, and its exit status."""

    reason: str
    status: int = 0


class Serving:
    """Reads the daemon's requests and hands them to an executor, which reports them.

    Args:
        shard: what the requests are about.
        connection: to the daemon, blocking.
    """

    def __init__(self, shard: Shard, connection: socket.socket) -> None:
        self._shard = shard
        self._connection = connection
        self._sequence = 0
        self._executor = Executor(shard.carry_out, self._report, self._hang_up, shard.device_works)

    def run(self) -> Ending:
        """Serve until nothing more is to be done; returns why."""
        reason = self._served()
        if (error := self._executor.device_error) is not None:  # it has hung up, which looks as if the daemon had
            return Ending(f"the device has failed, only another process can use it: {error}", DEVICE_FAILED)
        return Ending(reason)

    def _served(self) -> str:
        self._executor.start()
        try:
            send(self._connection, encode(Ready()))
            self._shard.begin(self._tell)
            while (packet := wait_packet(self._connection, MESSAGE_SIZE_BYTES_MAX, 0)) is not None:
                self._follow(decode_request(packet.data))
        except msgspec.DecodeError as error:
            return f"a request cannot be decoded: {error}"
        except OSError as error:
            return f"the connection broke: {error}"
        return "the daemon has ordered it, or is gone"

    def _hang_up(self) -> None:
        """The executor carries out nothing more: `run` need not wait for requests."""
        self._connection.shutdown(socket.SHUT_RDWR)

    def _follow(self, request: Request) -> None:
        if request.sequence != self._sequence + 1:
            self._refuse(request, f"sequence {request.sequence} after {self._sequence}")
            return
        self._sequence = request.sequence
        if isinstance(request.work, Hurry):  # carried out when it is read, not in its turn
            self._executor.hurry(request.work.transfer)
            self._report(Done(sequence=request.sequence))
            return
        try:
            self._executor.submit(request)
        except NotTaken as reason:
            self._refuse(request, str(reason))

    def _refuse(self, request: Request, reason: str) -> None:
        _log.error("request %d refused: %s", request.sequence, reason)
        if isinstance(request.work, Load):
            self._shard.progress.fail(request.work.progress, request.work.transfer)
        self._report(Done(sequence=request.sequence, error=reason))

    def _report(self, done: Done) -> None:
        self._connection.sendall(encode(done))

    def _tell(self, registered: HostRegistered) -> None:
        with suppress(OSError):  # the daemon is gone, and this process is about to end
            self._connection.sendall(encode(registered))


def main(arguments: list[str]) -> int:
    """Serve until the daemon is gone or has sent `Shutdown`.

    Returns:
        The exit status: 3 if the memory does not match the configuration, or as `kvcached.worker.exits` has it;
        otherwise the process exits in here.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    connection = socket.socket(fileno=int(arguments[1]))
    connection.settimeout(None)
    packet = wait_packet(connection, MESSAGE_SIZE_BYTES_MAX, DESCRIPTORS_MAX)
    if packet is None:
        return 0
    try:
        config = decode_config(packet.data)
        shard = Shard(config, packet.descriptors)
    except (OSError, ValueError, DeviceError) as error:  # msgspec.DecodeError is a ValueError
        _log.error("%s", error)
        return _exit_status(error)
    _log.info("worker %s/%d: pool of %d bytes", config.replica, config.shard, config.geometry.size_bytes)
    return serve(Serving(shard, connection))


def _exit_status(error: Exception) -> int:
    if isinstance(error, MemoryGone):
        return MEMORY_GONE
    return DEVICE_LOST if isinstance(error, DeviceError) and error.is_lost else _EXIT_STARTUP


def serve(serving: Serving) -> NoReturn:
    """Carry out requests. A copy that is under way when the daemon goes away ends with the process."""
    ending = serving.run()
    _log.log(logging.ERROR if ending.status else logging.INFO, "ending: %s", ending.reason)
    logging.shutdown()
    os._exit(ending.status)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
