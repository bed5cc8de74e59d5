"""The manager's end of systemd's notification protocol: who says what, and the descriptors that are to be kept."""

from __future__ import annotations

import logging
import os
import socket
import struct
from array import array
from collections.abc import Iterator
from typing import Final, NamedTuple

from kvcached.descriptor_store import UNNAMED, is_name

#: A daemon stores one descriptor for each pool of host memory, which is one.
KEPT_MAX: Final = 64
#: Of one message; systemd's own limit on text is the same.
MESSAGE_BYTES_MAX: Final = 4096
_DESCRIPTORS_PER_MESSAGE_MAX: Final = 16
#: More than a queue holds. Whoever floods it must not keep us from signals.
_MESSAGES_PER_CALL_MAX: Final = 1024
_CREDENTIALS: Final = struct.Struct("iII")

_log: Final = logging.getLogger(__name__)


class Notice(NamedTuple):
    """One message of the daemon's."""

    fields: dict[str, str]
    descriptors: list[int]  #: close-on-exec; the receiver's to close


class NoticeSocket:
    """A datagram socket in the abstract name space, so that no folder has to be writable.

    Anybody on the machine may send to it. By the kernel's word on each message only one process is listened to.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind("")  # the kernel chooses a name that is free
        self.name = "@" + self._socket.getsockname()[1:].decode("ascii")

    def fileno(self) -> int:
        """For who waits until there is a message."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close it."""
        self._socket.close()

    def messages(self, pid: int) -> Iterator[Notice]:
        """What process `pid`, of this user, has sent; all other messages are dropped and logged. Never waits."""
        room = socket.CMSG_SPACE(_CREDENTIALS.size) + socket.CMSG_SPACE(_DESCRIPTORS_PER_MESSAGE_MAX * 4)
        for _ in range(_MESSAGES_PER_CALL_MAX):
            try:
                data, ancillary, flags, _ = self._socket.recvmsg(MESSAGE_BYTES_MAX, room, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            sender, descriptors = _unpacked(ancillary)
            fault = ""
            # Nobody is process 0, but senders from other pid namespaces look so.
            if sender is None or not pid or sender[:2] != (pid, os.geteuid()):
                fault = f"it is of process {sender[0] if sender else 0}, not of the daemon ({pid})"
            elif flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                fault = f"more than {MESSAGE_BYTES_MAX} bytes or {_DESCRIPTORS_PER_MESSAGE_MAX} descriptors"
            if fault:
                _log.warning("a notification was not believed: %s", fault)
                _close(descriptors)
            else:
                yield Notice(_fields(data), descriptors)


class KeptDescriptors:
    """Descriptors that are kept for the next daemon, in the order in which they came."""

    def __init__(self) -> None:
        self._kept: list[tuple[str, int]] = []

    def __len__(self) -> int:
        """How many."""
        return len(self._kept)

    @property
    def names(self) -> list[str]:
        """What they are called."""
        return [name for name, _ in self._kept]

    @property
    def descriptors(self) -> list[int]:
        """They themselves, in the same order."""
        return [descriptor for _, descriptor in self._kept]

    def take(self, notice: Notice) -> None:
        """Keep, drop, or close again what came with a message, as it says."""
        name = notice.fields.get("FDNAME", "stored")
        if not is_name(name):
            _log.warning("descriptors called %r are called %s", name, UNNAMED)
            name = UNNAMED
        if notice.fields.get("FDSTOREREMOVE") == "1":
            self._drop(name)
        if notice.fields.get("FDSTORE") != "1":
            _close(notice.descriptors)
            return
        for descriptor in notice.descriptors:
            self._keep(name, descriptor)

    def close(self) -> None:
        """Close all of them."""
        _close(self.descriptors)
        self._kept.clear()

    def _keep(self, name: str, descriptor: int) -> None:
        same = [other for known, other in self._kept if known == name and os.path.sameopenfile(other, descriptor)]
        if same or len(self._kept) == KEPT_MAX:
            if not same:
                _log.error("descriptor %s not kept: there are %d already", name, KEPT_MAX)
            os.close(descriptor)
        else:
            self._kept.append((name, descriptor))

    def _drop(self, name: str) -> None:
        _close([descriptor for known, descriptor in self._kept if known == name])
        self._kept = [(known, descriptor) for known, descriptor in self._kept if known != name]


def _unpacked(ancillary: list[tuple[int, int, bytes]]) -> tuple[tuple[int, int, int] | None, list[int]]:
    """Process, user and group of the sender, and what it sent along."""
    sender, descriptors = None, array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS) and len(content) == _CREDENTIALS.size:
            sender = _CREDENTIALS.unpack(content)
        elif (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(content[: len(content) // descriptors.itemsize * descriptors.itemsize])
    return sender, list(descriptors)


def _fields(data: bytes) -> dict[str, str]:
    lines = data.decode("utf-8", "replace").split("\n")
    return dict(line.split("=", 1) for line in lines if "=" in line)


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
