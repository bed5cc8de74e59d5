"""One daemon's connection to this worker: commands in, an ack for each out."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator

import msgspec

from kvcached.seqpacket import receive, send
from kvcached.worker.messages import (
    MESSAGE_SIZE_BYTES_MAX,
    Abandon,
    Ack,
    Command,
    Hurry,
    Load,
    Shutdown,
    WorkerReady,
    decode_command,
    encode,
)
from kvcached.worker.shard import Shard
from kvcached.worker.stream import CommandStream, NotTaken

_log = logging.getLogger(__name__)


class DaemonGone(Exception):
    """The daemon ended or closed the connection: it gives no further orders, and reads no acks."""


class BadCommand(Exception):
    """The daemon sent what cannot be decoded, so that nobody knows what it wants."""


class Serving:
    """Reads commands and hands them to a stream, which acknowledges them.

    Args:
        shard: what the commands are about.
        connection: to the daemon. Closed by `close`.

    Attributes:
        ended: an eventfd that is readable from the moment when nothing is copied any more, nor will be.
    """

    def __init__(self, shard: Shard, connection: socket.socket) -> None:
        # Acks are sent by the stream's thread, which may wait; `receive` never waits either way.
        connection.settimeout(None)
        self.ended = os.eventfd(0, os.EFD_CLOEXEC)
        self._shard = shard
        self._connection = connection
        self._sequence = 0
        self._is_last = False
        self._stream = CommandStream(shard.carry_out, self._acknowledge, lambda: os.eventfd_write(self.ended, 1))
        self._stream.start()

    @property
    def is_last(self) -> bool:
        """Whether the daemon has ordered this worker's end."""
        return self._is_last

    def fileno(self) -> int:
        """The connection, readable when `receive` has something to do."""
        return self._connection.fileno()

    def greet(self) -> None:
        """Say that this worker is ready, and hand out its memory.

        Raises:
            OSError: the daemon is gone.
        """
        send(self._connection, encode(WorkerReady()), self._shard.descriptors)

    def receive(self) -> None:
        """Take one command.

        Raises:
            DaemonGone: there are no more, or an ack reaches nobody.
            BadCommand: it cannot be decoded.
        """
        try:
            packet = receive(self._connection, MESSAGE_SIZE_BYTES_MAX, 0)
            if packet is None:
                raise DaemonGone("the daemon closed the connection")
            self._follow(_decode(packet.data))
        except OSError as error:
            raise DaemonGone(f"the connection broke: {error}") from error

    def drop(self) -> None:
        """Give up what has not begun: no order of a daemon that is gone is started any more.

        Loads among it fail, for engines may wait for them. What is being carried out is finished: see `ended`.
        """
        unread = list(self._unread())
        with contextlib.suppress(OSError):  # it is not connected any more
            self._connection.shutdown(socket.SHUT_RDWR)  # wakes the stream where it waits to send an ack
        for command in (*self._stream.abandon(), *unread):
            self._is_last = self._is_last or isinstance(command.work, Shutdown)
            self._fail_load(command)

    def close(self) -> None:
        """Give back the descriptors. Only once it has `ended`."""
        os.close(self.ended)
        self._connection.close()

    def _unread(self) -> Iterator[Command]:
        """Commands that arrived and were not taken; the socket's buffer bounds them."""
        with contextlib.suppress(OSError, BadCommand):
            while (packet := receive(self._connection, MESSAGE_SIZE_BYTES_MAX, 0)) is not None:
                yield _decode(packet.data)

    def _follow(self, command: Command) -> None:
        if command.sequence != self._sequence + 1:
            self._refuse(command, f"sequence {command.sequence} after {self._sequence}")
            return
        self._sequence = command.sequence
        try:
            self._take(command)
        except NotTaken as reason:
            self._refuse(command, str(reason))

    def _take(self, command: Command) -> None:
        """Carry out what must not wait; queue the rest."""
        match command.work:
            case Hurry(transfer=transfer):
                self._stream.hurry(transfer)
            case Abandon():
                self._fail_load(command)
            case work:
                self._stream.submit(command)
                self._is_last = self._is_last or isinstance(work, Shutdown)
                return
        self._acknowledge(Ack(sequence=command.sequence))

    def _refuse(self, command: Command, reason: str) -> None:
        _log.error("command %d refused: %s", command.sequence, reason)
        self._fail_load(command)
        self._acknowledge(Ack(sequence=command.sequence, error=reason))

    def _fail_load(self, command: Command) -> None:
        if isinstance(command.work, Load | Abandon):
            self._shard.progress.fail(command.work.progress, command.work.transfer)

    def _acknowledge(self, ack: Ack) -> None:
        self._connection.sendall(encode(ack))


def _decode(data: bytes) -> Command:
    try:
        return decode_command(data)
    except msgspec.DecodeError as error:
        raise BadCommand(f"it sent a command that cannot be decoded: {error}") from error
