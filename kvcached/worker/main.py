"""The worker process: ``python -m kvcached.worker.main FD NAME``, with an inherited connection and a name for `ps`.

It holds one shard's pool and maps the host pool, listens on a socket of its own, and carries out the daemon's commands.
It ends when the daemon says so, closes the connection, or is gone.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import sys
from pathlib import Path
from typing import Final

import msgspec

from kvcached.seqpacket import listen, peer_credentials, receive, send
from kvcached.worker.available import NotEnoughMemory
from kvcached.worker.messages import (
    MESSAGE_SIZE_BYTES_MAX,
    Abandon,
    Ack,
    Command,
    Hurry,
    Load,
    WorkerConfig,
    WorkerListening,
    WorkerReady,
    decode_command,
    decode_config,
    encode,
)
from kvcached.worker.shard import Shard
from kvcached.worker.stream import CommandStream, NotTaken

_EXIT_STARTUP: Final = 3
#: One daemon connects; room for one more, which is refused.
_BACKLOG: Final = 2

_log: Final = logging.getLogger(__name__)


class DaemonGone(Exception):
    """The daemon ended or closed the connection. Nothing is left to do."""


def main(arguments: list[str]) -> int:
    """Run until the daemon needs no worker any more.

    Returns:
        The exit status: 0, or 3 where the pool or the socket could not be made, or the host pool is not usable.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    control = socket.socket(fileno=int(arguments[1]))
    config, descriptors = _read_config(control)
    try:
        shard = Shard(config, descriptors)
        # Left over from a worker that was killed, or is about to end: this daemon has the run directory to itself.
        Path(config.socket_path).unlink(missing_ok=True)
        listener = listen(config.socket_path, _BACKLOG)
    except (NotEnoughMemory, OSError, ValueError) as error:
        _log.error("%s", error)
        return _EXIT_STARTUP
    _log.info("worker %s/%d: pool of %d bytes", config.replica, config.shard, config.geometry.size_bytes)
    try:
        send(control, encode(WorkerListening()))
        control.close()
        connection = _accept(listener, config.daemon_pidfd)
        _Service(shard, config.daemon_pidfd, connection).run()
    except (DaemonGone, ConnectionError) as reason:
        _log.info("ending: %s", reason)
    return 0


def _read_config(control: socket.socket) -> tuple[WorkerConfig, list[int]]:
    packet = receive(control, MESSAGE_SIZE_BYTES_MAX, 1)
    if packet is None:
        raise DaemonGone("the daemon sent no configuration")
    return decode_config(packet.data), packet.descriptors


def _accept(listener: socket.socket, daemon_pidfd: int) -> socket.socket:
    """Wait for a connection of this user. The listener is closed: there is one daemon."""
    with listener, selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        selector.register(daemon_pidfd, selectors.EVENT_READ)
        while True:
            ready = {key.fileobj for key, _ in selector.select()}
            if daemon_pidfd in ready:
                raise DaemonGone("the daemon is dead")
            connection, _ = listener.accept()
            credentials = peer_credentials(connection)
            if credentials.uid == os.geteuid():
                # Acks are sent by the stream's thread, which may wait; `receive` never waits either way.
                connection.settimeout(None)
                return connection
            _log.warning("refused a connection of uid %d", credentials.uid)
            connection.close()


class _Service:
    """Reads commands, hands them to the stream, and watches for the end of all three: daemon, connection, stream."""

    def __init__(self, shard: Shard, daemon_pidfd: int, connection: socket.socket) -> None:
        self._shard = shard
        self._daemon_pidfd = daemon_pidfd
        self._connection = connection
        self._stream_ended = os.eventfd(0)
        self._sequence = 0
        self._stream = CommandStream(
            shard.carry_out, self._acknowledge, lambda: os.eventfd_write(self._stream_ended, 1)
        )

    def run(self) -> None:
        """Say ready, then serve. Returns after `Shutdown`, raises DaemonGone or ConnectionError otherwise."""
        send(self._connection, encode(WorkerReady()), self._shard.descriptors)
        self._stream.start()
        with selectors.DefaultSelector() as selector:
            for descriptor in (self._connection.fileno(), self._daemon_pidfd, self._stream_ended):
                selector.register(descriptor, selectors.EVENT_READ)
            while True:
                readable = {key.fd for key, _ in selector.select()}
                if self._stream_ended in readable:
                    return
                if self._daemon_pidfd in readable:
                    raise DaemonGone("the daemon is dead")
                self._receive()

    def _receive(self) -> None:
        packet = receive(self._connection, MESSAGE_SIZE_BYTES_MAX, 0)
        if packet is None:
            raise DaemonGone("the daemon closed the connection")
        command = self._decode(packet.data)
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
            case Abandon(transfer=transfer, progress=entry):
                self._shard.progress.fail(entry, transfer)
            case _:
                self._stream.submit(command)
                return
        self._acknowledge(Ack(sequence=command.sequence))

    def _decode(self, data: bytes) -> Command:
        try:
            return decode_command(data)
        except msgspec.DecodeError as error:
            raise DaemonGone(f"it sent a command that cannot be decoded: {error}") from error

    def _refuse(self, command: Command, reason: str) -> None:
        _log.error("command %d refused: %s", command.sequence, reason)
        if isinstance(command.work, Load):
            self._shard.progress.fail(command.work.progress, command.work.transfer)
        self._acknowledge(Ack(sequence=command.sequence, error=reason))

    def _acknowledge(self, ack: Ack) -> None:
        self._connection.sendall(encode(ack))


if __name__ == "__main__":
    sys.exit(main(sys.argv))
