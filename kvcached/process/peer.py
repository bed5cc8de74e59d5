"""The process at the other end of an attach connection, held by a descriptor that outlives its process id."""

from __future__ import annotations

import errno
import os
import re
import select
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

from kvcached.process.access import NO_GRANTS, Grants
from kvcached.process.identity import ProcessIdentity, identity_of, open_process
from kvcached.process.seqpacket import Credentials, peer_credentials
from kvcached_client.errors import ErrorCode, RequestError, request_error

_SO_PEERPIDFD: Final = 77
_PID_LINE: Final = re.compile(r"^Pid:\t(-?\d+)$", re.MULTILINE)


class PeerProcess:
    """A process that connected. Dead means that it writes to no memory any more.

    Attributes:
        pid: its id in this pid namespace, for messages; ids are used again, so it is no identity.
        uid: its effective user id when it connected; -1 for one that an earlier daemon wrote down.
        gid: its effective group id when it connected; -1 likewise.
        grants: what its user may do.
        identity: what tells it from later processes with its id; None where that is not visible.
    """

    is_seen = True

    def __init__(self, credentials: Credentials, pidfd: int, grants: Grants) -> None:
        """Takes over `pidfd`."""
        self.pid, self.uid, self.gid = credentials
        self.grants = grants
        self._pidfd = pidfd
        self._dead = False
        self._process = _process_of(pidfd)
        self.identity = identity_of(self.pid) if self.pid else None

    @classmethod
    def found(cls, process: ProcessIdentity) -> Self | None:
        """A process that an earlier daemon wrote down; None where it is dead. Until it attaches, it may do nothing."""
        pidfd = open_process(process.pid, process.started)
        return None if pidfd is None else cls(Credentials(process.pid, -1, -1), pidfd, NO_GRANTS)

    @classmethod
    def of(cls, connection: socket.socket, sent: Sequence[int], grants: Grants) -> Self:
        """The peer of a connection.

        Args:
            connection: an accepted AF_UNIX connection.
            sent: descriptors that the peer sent, one of which may be its own pidfd. They stay the caller's to close.
            grants: what its user may do.

        Raises:
            Refused: the peer is dead, or neither the kernel nor the peer gives a pidfd of it.
        """
        credentials = peer_credentials(connection)
        pidfd = _kernel_pidfd(connection)
        if pidfd is None:
            pidfd = _sent_pidfd(credentials.pid, sent)
        peer = cls(credentials, pidfd, grants)
        if peer.is_dead():
            peer.close()
            raise _no_pidfd(f"process {peer.pid} is dead")
        return peer

    def fileno(self) -> int:
        """The pidfd, readable from the process's death on; -1 once closed."""
        return self._pidfd

    def is_dead(self) -> bool:
        """Whether the process has ended, as far as was known when it was closed. Never waits."""
        if not self._dead and self._pidfd >= 0:
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            self._dead = bool(poll.poll(0))
        return self._dead

    def is_same_process(self, other: object) -> bool:
        """Whether two living peers are surely one process; an invisible pid (0) is nobody's name."""
        if not isinstance(other, PeerProcess):
            return False
        process = other._process  # noqa: SLF001 - its own class
        if self is other or (self._process is not None and self._process == process):
            return True
        return self._process is None and self.pid == other.pid != 0

    def close(self) -> None:
        """Close the pidfd. Does nothing the second time."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def __repr__(self) -> str:
        return f"PeerProcess(pid={self.pid}, uid={self.uid})"


class UnseenProcess:
    """A process from before a restart that is not visible from here: it may live, and its death cannot be seen.

    What it may write stays set aside until its engine says, from whatever process that has shown the engine's secret,
    that it is through.
    """

    is_seen = False
    pid = 0
    identity = None
    grants = NO_GRANTS

    def is_dead(self) -> bool:
        """Never, as far as can be known."""
        return False

    def is_same_process(self, other: object) -> bool:
        """Whether it is this very object: no process can be known to be one that is not seen."""
        return other is self

    def close(self) -> None:
        """Nothing to close."""


def _process_of(pidfd: int) -> tuple[int, int] | None:
    """What tells processes apart: the inode of a pidfd, or None where all of them share one (before Linux 6.9)."""
    anonymous = os.eventfd(0)
    try:
        shared_device = os.fstat(anonymous).st_dev
    finally:
        os.close(anonymous)
    status = os.fstat(pidfd)
    return None if status.st_dev == shared_device else (status.st_dev, status.st_ino)


def _kernel_pidfd(connection: socket.socket) -> int | None:
    """The peer's pidfd by the kernel's word, or None where the kernel (before 6.5) cannot say."""
    try:
        pidfd = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as error:
        if error.errno == errno.ENOPROTOOPT:
            return None
        raise _no_pidfd(f"SO_PEERPIDFD: {os.strerror(error.errno or 0)}; it may be dead") from None
    os.set_inheritable(pidfd, False)  # noqa: FBT003
    return pidfd


def _sent_pidfd(pid: int, sent: Sequence[int]) -> int:
    """A duplicate of the sent descriptor that is a pidfd of `pid`."""
    for descriptor in sent:
        described = _PID_LINE.search(Path(f"/proc/self/fdinfo/{descriptor}").read_text())
        if described is not None and pid > 0 and int(described[1]) == pid:
            return os.dup(descriptor)
    raise _no_pidfd(f"this kernel has no SO_PEERPIDFD, and process {pid} sent no pidfd of its own")


def _no_pidfd(reason: str) -> RequestError:
    return request_error(
        ErrorCode.UNAUTHENTICATED,
        f"the death of the peer could not be seen: {reason}",
        "connect from the process itself, in the daemon's pid namespace, and send pidfd_open(getpid())",
    )
