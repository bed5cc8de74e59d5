"""The worker process: ``python -m kvcached.worker.main FD NAME``, with an inherited connection and a name for `ps`.

It maps a shard's pool and the host pool, both of which are the daemon's, and carries out the daemon's commands. It owns
nothing, and ends with its connection: when the daemon says so, closes it, or dies.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from typing import Final, NoReturn

import msgspec

from kvcached.process.seqpacket import send, wait_packet
from kvcached.worker.messages import (
    DESCRIPTORS_MAX,
    MESSAGE_SIZE_BYTES_MAX,
    Ack,
    Command,
    Hurry,
    Load,
    WorkerReady,
    decode_command,
    decode_config,
    encode,
)
from kvcached.worker.shard import Shard
from kvcached.worker.stream import CommandStream, NotTaken

_EXIT_STARTUP: Final = 3

_log: Final = logging.getLogger(__name__)


def main(arguments: list[str]) -> int:
    """Serve until the daemon is gone, or has ordered the end.

    Returns:
        The exit status: 3 where memory is not what the configuration says; else the process ends by itself.
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
    except (OSError, ValueError) as error:  # msgspec.DecodeError is a ValueError
        _log.error("%s", error)
        return _EXIT_STARTUP
    _log.info("worker %s/%d: pool of %d bytes", config.replica, config.shard, config.geometry.size_bytes)
    return serve(Serving(shard, connection))


def serve(serving: Serving) -> NoReturn:
    """Carry out what comes. A copy that is under way when the daemon is gone ends with the process."""
    reason = serving.run()
    _log.info("ending: %s", reason)
    logging.shutdown()
    os._exit(0)


class Serving:
    """Reads the daemon's commands and hands them to a stream, which acknowledges them.

    Args:
        shard: what the commands are about.
        connection: to the daemon, blocking.
    """

    def __init__(self, shard: Shard, connection: socket.socket) -> None:
        self._shard = shard
        self._connection = connection
        self._sequence = 0
        self._stream = CommandStream(shard.carry_out, self._acknowledge, self._hang_up)

    def run(self) -> str:
        """Serve until nothing more is to be done; returns why."""
        self._stream.start()
        try:
            send(self._connection, encode(WorkerReady()))
            while (packet := wait_packet(self._connection, MESSAGE_SIZE_BYTES_MAX, 0)) is not None:
                self._follow(decode_command(packet.data))
        except msgspec.DecodeError as error:
            return f"a command cannot be decoded: {error}"
        except OSError as error:
            return f"the connection broke: {error}"
        return "the daemon has ordered it, or is gone"

    def _hang_up(self) -> None:
        """The stream carries out nothing more: `run` need not wait for commands."""
        self._connection.shutdown(socket.SHUT_RDWR)

    def _follow(self, command: Command) -> None:
        if command.sequence != self._sequence + 1:
            self._refuse(command, f"sequence {command.sequence} after {self._sequence}")
            return
        self._sequence = command.sequence
        if isinstance(command.work, Hurry):  # carried out when it is read, not in its turn
            self._stream.hurry(command.work.transfer)
            self._acknowledge(Ack(sequence=command.sequence))
            return
        try:
            self._stream.submit(command)
        except NotTaken as reason:
            self._refuse(command, str(reason))

    def _refuse(self, command: Command, reason: str) -> None:
        _log.error("command %d refused: %s", command.sequence, reason)
        if isinstance(command.work, Load):
            self._shard.progress.fail(command.work.progress, command.work.transfer)
        self._acknowledge(Ack(sequence=command.sequence, error=reason))

    def _acknowledge(self, ack: Ack) -> None:
        self._connection.sendall(encode(ack))


if __name__ == "__main__":
    sys.exit(main(sys.argv))
