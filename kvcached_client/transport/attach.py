"""Client of the attach socket: it proves which process this is, and gets the memory that the process may map.

Every descriptor is close-on-exec from the start, and every wait has a deadline. Nothing is sent to a daemon that is not
trusted (`transport.listener.check_trusted`): anybody could have made the directory in /tmp first.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Self, TypeVar, cast

import msgspec

from kvcached_client.errors import (
    DaemonUnreachable,
    ErrorCode,
    bad_reply,
    bad_value,
    request_error,
)
from kvcached_client.protocol.attach import (
    ATTACH_MESSAGE_SIZE_BYTES_MAX,
    JOINED_DESCRIPTORS,
    Attach,
    AttachRefused,
    AttachReply,
    ClaimedPool,
    ClaimPool,
    Identified,
    Identify,
    Join,
    Joined,
    JoinedHost,
    Leave,
    decode_attach_reply,
    encode_attach,
)
from kvcached_client.protocol.fields import Id, Secret, decode
from kvcached_client.transport.listener import (
    check_deadline,
    check_trusted,
    local_socket,
    no_descriptor,
    not_allowed,
    unanswered,
    unreachable,
)
from kvcached_client.transport.run_dir import ATTACH_SOCKET_NAME, socket_path

A = TypeVar("A", Identified, Joined, JoinedHost, ClaimedPool)

#: struct timeval: seconds, microseconds
_TIMEVAL: Final = struct.Struct("@ll")
#: One more than any reply has, so that too many are noticed.
_DESCRIPTORS_MAX: Final = JOINED_DESCRIPTORS + 1


class SessionGrant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a shard process needs to join its scheduler's session. It is a secret: its holder may map the pool.

    Attributes:
        id: id of the session.
        token: 32 secret bytes.
        run_dir: directory of the daemon's sockets.
    """

    id: Id
    token: Secret
    run_dir: str

    def to_bytes(self) -> bytes:
        """The grant as bytes, for a pipe to the shard process."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """The inverse of `to_bytes`.

        Raises:
            BadRequest: the bytes are no session grant.
        """
        return decode(msgspec.msgpack.Decoder(cls), data, "session grant", "send SessionGrant.to_bytes()")

    def __repr__(self) -> str:
        return f"SessionGrant(id={self.id}, run_dir={self.run_dir!r})"


class AttachConnection:
    """An open connection to the attach socket. Keep it open while the pool or the session is in use."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._process_id = os.getpid()

    def fileno(self) -> int:
        """The descriptor; it becomes readable when the daemon, or the pool behind it, is gone."""
        return self._socket.fileno()

    def is_closed_by_daemon(self) -> bool:
        """Whether the daemon has closed its end. Never waits.

        The daemon sends nothing unrequested on this socket, so an unexpected message counts as closed, too.
        """
        self._socket.settimeout(0)
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except ConnectionError:
            return True
        return True

    def leave(self) -> None:
        """Tell the daemon, if it is there, that this process no longer uses the memory, and close. Never waits.

        In a forked child it only closes: the memory is its parent's.
        """
        if os.getpid() == self._process_id:
            with contextlib.suppress(OSError):
                self._socket.settimeout(0)
                self._socket.send(encode_attach(Leave()), socket.MSG_NOSIGNAL)
        self.close()

    def close(self) -> None:
        """Close this end. Does nothing the second time."""
        self._socket.close()


@dataclass(frozen=True, slots=True)
class JoinedMemory:
    """A shard's memory as the daemon sent it, not yet checked or mapped. The caller closes the descriptors."""

    connection: AttachConnection
    joined: Joined
    pool: int
    progress: int
    events: tuple[int, ...]


def identify(
    run_dir: str | os.PathLike[str], *, client: str = "", deadline_ms: int
) -> tuple[AttachConnection, Identified]:
    """Prove to the daemon which process this is.

    Raises:
        DaemonUnreachable: nothing listens in `run_dir`, it closed the connection, or this process has no descriptor
            left.
        DaemonSilent: no reply came within `deadline_ms`.
        Refused: anybody may have put the socket there, or this user may not reach it.
        RequestError: the daemon refused.
        ValueError: `deadline_ms` is less than 1, or more than `DEADLINE_MS_MAX`.
    """
    connection, reply, _ = _ask(run_dir, Identify(client=client), Identified, 0, deadline_ms)
    return connection, reply


def join(grant: SessionGrant, shard: int, *, deadline_ms: int) -> JoinedMemory:
    """Ask for the memory of one shard of a session's pool.

    Raises:
        DaemonUnreachable, RequestError, ValueError: as `identify`.
    """
    question = _joining(grant, shard)
    connection, reply, descriptors = _ask(grant.run_dir, question, Joined, JOINED_DESCRIPTORS, deadline_ms)
    pool, progress, *events = descriptors
    return JoinedMemory(connection, reply, pool, progress, tuple(events))


@dataclass(frozen=True, slots=True)
class JoinedHostMemory:
    """The host pool as the daemon sent it, not yet checked or mapped. The caller closes the descriptor."""

    connection: AttachConnection
    joined: JoinedHost
    memory: int


def join_host(grant: SessionGrant, shard: int, *, deadline_ms: int) -> JoinedHostMemory:
    """Ask for the host pool, as one shard of a session in offload mode.

    By joining, a process declares that it has finished all copies as the same shard of an earlier session.

    Raises:
        DaemonUnreachable, RequestError, ValueError: as `identify`.
    """
    question = _joining(grant, shard)
    connection, reply, descriptors = _ask(grant.run_dir, question, JoinedHost, 1, deadline_ms)
    return JoinedHostMemory(connection, reply, descriptors[0])


@dataclass(frozen=True, slots=True)
class PoolDescriptors:
    """An engine pool as the daemon sent it, not yet checked, locked or mapped. The caller closes the descriptors.

    Attributes:
        memory: of the rank; None if only the table was asked for.
    """

    claimed: ClaimedPool
    table: int
    memory: int | None


def claim_pool(run_dir: str | os.PathLike[str], question: ClaimPool, *, deadline_ms: int) -> PoolDescriptors:
    """Ask for device memory of an engine that the daemon keeps.

    Raises:
        DaemonUnreachable, RequestError, ValueError: as `identify`.
    """
    count = 1 if question.rank is None else 2
    connection, reply, descriptors = _ask(run_dir, question, ClaimedPool, count, deadline_ms)
    connection.close()
    return PoolDescriptors(reply, descriptors[0], None if question.rank is None else descriptors[1])


def _joining(grant: object, shard: int) -> Join:
    if not isinstance(grant, SessionGrant):
        raise bad_value(f"a {type(grant).__name__} in place of a session grant", "pass client.session")
    return Join(session=grant.id, token=grant.token, shard=shard)


def _ask(
    run_dir: str | os.PathLike[str], question: Attach, expected: type[A], descriptor_count: int, deadline_ms: int
) -> tuple[AttachConnection, A, list[int]]:
    """Send a question on a new connection; the connection, the expected reply, and that many descriptors."""
    deadline_ms = check_deadline(deadline_ms)
    deadline_ns = time.monotonic_ns() + deadline_ms * 1_000_000
    path = socket_path(run_dir, ATTACH_SOCKET_NAME)
    connection = local_socket(path, socket.SOCK_SEQPACKET)
    try:
        # With Python's own timeout, a full queue of connections would fail at once; so the kernel waits.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(*divmod(deadline_ms * 1000, 10**6)))
        connection.connect(path)
        check_trusted(connection, path)
        _send(connection, question)
        remaining_ns = max(1, deadline_ns - time.monotonic_ns())
        connection.settimeout(remaining_ns / 1e9)
        reply, descriptors = _receive(connection, path)
    except (TimeoutError, BlockingIOError):
        with connection:
            raise unanswered(path, connection, deadline_ms) from None
    except BaseException as error:
        connection.close()
        if isinstance(error, PermissionError):
            raise not_allowed(path, error) from None
        if isinstance(error, OSError):
            raise unreachable(path, error) from error
        raise
    is_answer = isinstance(reply, expected) and len(descriptors) == descriptor_count
    if isinstance(question, Join) and isinstance(reply, (Joined, JoinedHost)):
        is_answer = is_answer and reply.shard == question.shard
    if not is_answer:
        connection.close()
        close_all(descriptors)
        raise bad_reply(f"the daemon answered {type(reply).__name__} with {len(descriptors)} descriptors")
    return AttachConnection(connection), cast("A", reply), descriptors


def _send(connection: socket.socket, question: Attach) -> None:
    # No SIGPIPE comes, which would kill a process that does not ignore it. `socket.send_fds` ignores its flags.
    own = _own_pidfd()
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", own))]
    try:
        connection.sendmsg([encode_attach(question)], ancillary, socket.MSG_NOSIGNAL)
    except PermissionError:  # the daemon takes no descriptors: its kernel, which is ours, tells it who we are
        connection.send(encode_attach(question), socket.MSG_NOSIGNAL)
    finally:
        for descriptor in own:
            os.close(descriptor)


def _own_pidfd() -> list[int]:
    try:
        return [os.pidfd_open(os.getpid())]
    except OSError:
        # A sandbox may forbid the call. The daemon then needs SO_PEERPIDFD; without that it refuses.
        return []


def _receive(connection: socket.socket, path: str) -> tuple[AttachReply, list[int]]:
    # `socket.recv_fds` ignores its flags (Python 3.11), so descriptors would be inherited by every child.
    received = array("i")
    room = socket.CMSG_LEN(_DESCRIPTORS_MAX * received.itemsize)
    data, ancillary, flags, _ = connection.recvmsg(ATTACH_MESSAGE_SIZE_BYTES_MAX, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            received.frombytes(content[: len(content) // received.itemsize * received.itemsize])
    descriptors = list(received)
    try:
        return _read(data, flags, path, len(descriptors)), descriptors
    except BaseException:
        close_all(descriptors)
        raise


def _read(data: bytes, flags: int, path: str, descriptor_count: int) -> AttachReply:
    if not data:
        raise DaemonUnreachable(f"{path}: the daemon closed the connection without a reply")
    if flags & socket.MSG_CTRUNC and descriptor_count < _DESCRIPTORS_MAX:
        raise no_descriptor(path, "the daemon's descriptors did not all arrive")
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        raise bad_reply("the attach reply is larger than allowed", ErrorCode.OVERSIZE)
    reply = decode_attach_reply(data)
    if isinstance(reply, AttachRefused):
        raise request_error(reply.code, reply.message, reply.fix)
    return reply


def close_all(descriptors: Iterable[int]) -> None:
    """Close descriptors of this process."""
    for descriptor in descriptors:
        os.close(descriptor)
