"""AF_UNIX SOCK_SEQPACKET: one send is one message, and descriptors travel with it. Standard library only.

`socket.recv_fds` and `socket.send_fds` are not used: they ignore the flags that they are given.

Whoever gets descriptors closes those it does not want; `Packet.close` does it for all of them.
"""

from __future__ import annotations

import os
import socket
import struct
from array import array
from contextlib import suppress
from typing import NamedTuple, Self

from kvcached.process.descriptors import was_none_free

_CREDENTIALS = struct.Struct("iII")
_SO_PEERGROUPS = 59
#: As many groups as Python can ask for. Of a process that has more, its user and first group count.
_GROUPS_BYTES_MAX = 1024


class Credentials(NamedTuple):
    """Who connected, by the kernel's word."""

    pid: int  #: 0 where the process is not visible from this pid namespace
    uid: int
    gid: int

    @property
    def process(self) -> int:
        """Whose limits of processes count."""
        return self.pid

    @property
    def user(self) -> int:
        """Whose limits of users count."""
        return self.uid

    @property
    def words(self) -> str:
        """For the log."""
        return f"process {self.pid} of user {self.uid}"


class Packet(NamedTuple):
    """One received message."""

    data: bytes
    descriptors: list[int]  #: close-on-exec; the receiver's to close
    cut: bool  #: bytes or descriptors are lost: beyond the receiver's limits, or because it has too many files open
    is_none_free: bool = False  #: it is the latter

    def close(self) -> None:
        """Close every descriptor that came along."""
        for descriptor in self.descriptors:
            os.close(descriptor)


class SocketFile(NamedTuple):
    """A socket's file, told from another one that may have its path by now: somebody may have removed the directory."""

    path: str
    device: int
    inode: int
    changed_ns: int

    @classmethod
    def at(cls, path: str) -> Self:
        """The one that is at a path.

        Raises:
            OSError: there is none.
        """
        status = os.lstat(path)
        return cls(path, status.st_dev, status.st_ino, status.st_ctime_ns)

    @property
    def is_there(self) -> bool:
        """Whether it is at its path, whatever its mode may be by now."""
        with suppress(OSError):
            found = SocketFile.at(self.path)
            return (found.device, found.inode) == (self.device, self.inode)
        return False

    def remove(self) -> None:
        """Remove it, unless another one is in its place, or none."""
        with suppress(FileNotFoundError, NotADirectoryError):
            if SocketFile.at(self.path) == self:
                os.unlink(self.path)  # noqa: PTH108 - a path of a socket is text


def listen(path: str, backlog: int, kind: socket.SocketKind = socket.SOCK_SEQPACKET) -> socket.socket:
    """A non-blocking AF_UNIX socket listening at `path`, usable by this user only.

    Call it while no other thread creates files: the umask belongs to the whole process.

    Raises:
        OSError: the path is in use, too long, or its directory is missing or not writable.
    """
    listener = socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK)
    previous = os.umask(0o077)
    try:
        listener.bind(path)
        listener.listen(backlog)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"{error.strerror or error}: {path}") from error
    finally:
        os.umask(previous)
    return listener


def peer_credentials(connection: socket.socket) -> Credentials:
    """Process, user and group of the peer at the time it connected."""
    return Credentials(
        *_CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    )


def peer_groups(connection: socket.socket) -> tuple[int, ...]:
    """Supplementary groups of the peer at the time it connected; none where there are more than 256."""
    try:
        return tuple(array("I", connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_BYTES_MAX)))
    except OSError:
        return ()


def receive(connection: socket.socket, size_bytes_max: int, descriptors_max: int) -> Packet | None:
    """The next message, or None where the peer has closed its end. Never waits.

    An empty message without descriptors cannot be told from a closed end, and counts as one.

    Raises:
        BlockingIOError: there is no message now.
        ConnectionError: the connection broke.
    """
    flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
    descriptors = array("i")
    room = socket.CMSG_LEN(descriptors_max * descriptors.itemsize)
    data, ancillary, told, _ = connection.recvmsg(size_bytes_max, room, flags)
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(content[: len(content) // descriptors.itemsize * descriptors.itemsize])
    cut = bool(told & (socket.MSG_TRUNC | socket.MSG_CTRUNC))
    if not data and not descriptors and not cut:
        return None
    return Packet(data, list(descriptors), cut, was_none_free(told, len(descriptors), descriptors_max))


def wait_packet(connection: socket.socket, size_bytes_max: int, descriptors_max: int) -> Packet | None:
    """Wait for the next message on a blocking socket; None where the peer has closed its end, or is gone."""
    try:
        connection.recv(1, socket.MSG_PEEK)  # waits
        return receive(connection, size_bytes_max, descriptors_max)
    except ConnectionError:
        return None


def send(connection: socket.socket, data: bytes, descriptors: tuple[int, ...] = ()) -> None:
    """Send one message whole. Never waits.

    Raises:
        BlockingIOError: the peer has not read what it was sent before.
        OSError: the connection broke, or the message is larger than the socket's buffer.
    """
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []
    connection.sendmsg([data], ancillary, socket.MSG_DONTWAIT)
