"""A supervisor's connection to the keeper (`kvcached.recovery.keeper`), which outlives the supervisor's container."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from array import array
from typing import Final

from kvcached.process.backoff import BackOff
from kvcached.process.descriptors import none_free
from kvcached.process.notify import WAIT_S
from kvcached.process.readable import readable
from kvcached.process.seqpacket import peer_credentials, receive
from kvcached.recovery.fd_store import (
    DESCRIPTORS_PER_MESSAGE_MAX,
    MESSAGE_BYTES_MAX,
    KeptDescriptors,
    Notice,
    remove_message,
    store_message,
)

#: How long the keeper may take to send what it has. It does nothing else.
ANSWER_S: Final = 10.0
#: Pauses between attempts to reach a keeper that is gone, in seconds.
PAUSE_MIN_S: Final = 0.1
PAUSE_MAX_S: Final = 10.0

#: The messages of the daemon that the keeper carries out as well. A barrier is over when both have reached it.
_PASSED_ON: Final = ("FDSTORE", "FDSTOREREMOVE", "BARRIER")
_NOBODY: Final = frozenset({errno.ENOENT, errno.ECONNREFUSED})

_log: Final = logging.getLogger(__name__)


class KeeperLink:
    """Has the keeper keep what the supervisor keeps.

    A keeper that was never reached, or that is lost, costs nothing until this container ends. It is tried again, and a
    new one gets everything.

    Args:
        path: the keeper's socket.
        kept: the supervisor's descriptors.
    """

    def __init__(self, path: str, kept: KeptDescriptors) -> None:
        self._path = path
        self._kept = kept
        self._connection: socket.socket | None = None
        self._pauses = BackOff(first_s=PAUSE_MIN_S, longest_s=PAUSE_MAX_S, healthy_after_s=PAUSE_MAX_S)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._attempt: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Take what the keeper has for this supervisor. Without a keeper there is nothing, and it is tried again.

        Raises:
            OSError: the keeper is another user's, serves another supervisor, or does not answer. To start without what
                it may have would need the memory a second time.
        """
        try:
            connection = await self._connect(self._kept)
        except OSError as error:
            if error.errno not in _NOBODY:
                raise
            _log.warning("no keeper at %s yet: the end of this container would drop the memory", self._path)
            self._try_later()
            return
        _log.info("the keeper has given %d descriptors", len(self._kept))
        self._use(connection)

    def pass_on(self, notice: Notice) -> None:
        """Have the keeper carry out a message of the daemon. The descriptors stay the caller's."""
        if self._connection is not None and any(notice.fields.get(each) == "1" for each in _PASSED_ON):
            text = "\n".join(f"{name}={value}" for name, value in notice.fields.items())
            self._send(text, tuple(notice.descriptors))

    def close(self) -> None:
        """Leave the keeper with what it has."""
        if self._timer is not None:
            self._timer.cancel()
        if self._attempt is not None:
            self._attempt.cancel()
        self._hang_up()

    async def _connect(self, found: KeptDescriptors) -> socket.socket:
        """A connection; `found` gets what the keeper has.

        Raises:
            OSError: there is no keeper, it is another user's, serves another supervisor, or does not answer.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.settimeout(WAIT_S)
            connection.connect(self._path)
            _check_owner(connection)
            async with asyncio.timeout(ANSWER_S):
                await _take_all(connection, found)
        except BaseException as error:
            connection.close()
            found.close()
            if isinstance(error, OSError):
                is_silent = isinstance(error, TimeoutError)  # which has no words
                reason = "it does not answer; it may hang: start it again" if is_silent else error.strerror or error
                number = errno.ETIMEDOUT if is_silent else error.errno  # a path that is too long has none
                raise OSError(number, f"keeper at {self._path}: {reason}") from None
            raise
        return connection

    def _use(self, connection: socket.socket) -> None:
        self._connection = connection
        self._began_s = self._loop.time()
        self._loop.add_reader(connection.fileno(), self._on_end)

    def _on_end(self) -> None:
        """The keeper sends nothing any more: its end is all that is to be heard."""
        self._lose("it has ended")

    def _send(self, text: str, descriptors: tuple[int, ...] = ()) -> None:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []
        try:
            if self._connection is not None:
                self._connection.sendmsg([text.encode()], ancillary)
        except OSError as error:
            self._lose(error.strerror or f"it has not read what it was sent within {WAIT_S:g} s")

    def _lose(self, reason: str) -> None:
        _log.error("the keeper is lost: %s; until it is back, the end of this container drops the memory", reason)
        self._pauses.lived(self._loop.time() - self._began_s)
        self._hang_up()
        self._try_later()

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._loop.remove_reader(self._connection.fileno())
            self._connection.close()
            self._connection = None

    def _try_later(self) -> None:
        self._timer = self._loop.call_later(self._pauses.pause_s(), self._try)

    def _try(self) -> None:
        self._attempt = self._loop.create_task(self._reopen())

    async def _reopen(self) -> None:
        """Give a keeper that is back everything. What it has itself is older than what this supervisor has."""
        older = KeptDescriptors()
        try:
            connection = await self._connect(older)
        except OSError as error:
            if error.errno not in _NOBODY:
                _log.warning("%s", error.strerror)
            self._try_later()
            return
        self._use(connection)
        for name in older.names:
            self._send(remove_message(name))
        older.close()
        for name, descriptor in zip(self._kept.names, self._kept.descriptors, strict=True):
            self._send(store_message(name), (descriptor,))
        if self._connection is not None:
            _log.info("the keeper is there, and has %d descriptors", len(self._kept))


def _check_owner(connection: socket.socket) -> None:
    """Another user's process might give memory with contents of its own.

    Raises:
        OSError: the keeper is another user's.
    """
    owner = peer_credentials(connection).uid
    if owner != os.geteuid():
        raise OSError(errno.EPERM, f"it is of user {owner}, and this process of {os.geteuid()}: give both one user")


async def _take_all(connection: socket.socket, found: KeptDescriptors) -> None:
    """Read what the keeper has, up to its word that this is all.

    Raises:
        OSError: the keeper serves another supervisor, or has closed the connection, or no descriptor is free here.
    """
    while True:
        await readable(connection.fileno())
        packet = receive(connection, MESSAGE_BYTES_MAX, DESCRIPTORS_PER_MESSAGE_MAX)
        if packet is None:
            raise OSError(errno.ECONNRESET, "it has closed the connection")
        if packet.is_none_free:  # to start without this memory would need it a second time
            packet.close()
            raise OSError(errno.EMFILE, none_free())
        notice = Notice.of(packet.data, packet.descriptors)
        found.take(notice)
        if notice.fields.get("READY") == "1":
            return
        if notice.fields.get("BUSY") == "1":
            raise OSError(errno.EBUSY, "another supervisor is connected to it; stop that one")
