"""Both ends of the service manager's descriptor store, which keeps descriptors while no daemon runs, and its datagrams.

The manager is systemd or `kvcached supervise`. A stored memfd keeps its memory, so the next daemon has the blocks of
the daemon before it. The next daemon inherits the stored descriptors from number 3 on, and three environment variables
that give their number, their names, and the process that they are for.

The daemon's end is `store`, `remove`, `taken_in` and `take_stored`; the manager's end is `NoticeSocket` and
`KeptDescriptors`. `kvcached.process.notify` sends what the daemon has to say.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import shutil
import socket
import struct
import tempfile
import time
from array import array
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple, Self

from kvcached.process.descriptors import is_same_memfd, none_free, was_none_free
from kvcached.process.notify import NOTIFY_VARIABLE, WAIT_S, notify, notify_now, send_unsent, unsent
from kvcached.process.readable import readable

#: No daemon stores as many; a larger number is a mistake.
DESCRIPTORS_MAX: Final = 1024
FIRST_DESCRIPTOR: Final = 3
#: Set by the manager that starts the daemon.
PID_VARIABLE: Final = "LISTEN_PID"
COUNT_VARIABLE: Final = "LISTEN_FDS"
NAMES_VARIABLE: Final = "LISTEN_FDNAMES"
VARIABLES: Final = (PID_VARIABLE, COUNT_VARIABLE, NAMES_VARIABLE)
#: The name that systemd gives to descriptors without a name.
UNNAMED: Final = "unknown"
NAME_LENGTH_MAX: Final = 255

#: A daemon stores one descriptor for the host pool, and one for each shard of each device pool.
KEPT_MAX: Final = 256
#: The longest message; systemd has the same limit.
MESSAGE_BYTES_MAX: Final = 4096
DESCRIPTORS_PER_MESSAGE_MAX: Final = 16
TOO_LARGE: Final = f"more than {MESSAGE_BYTES_MAX} bytes or {DESCRIPTORS_PER_MESSAGE_MAX} descriptors at once"
#: How many messages are read at a time: more than a queue holds. A flood of messages must not delay signals.
_MESSAGES_PER_CALL_MAX: Final = 1024
#: The interval between two log lines about rejected messages.
_REFUSAL_LOG_PAUSE_S: Final = 60.0
#: Writable even in containers with a read-only file system.
_LAST_RESORT: Final = "/dev/shm"  # noqa: S108 - the directory that is made in it is private
_PREFIX: Final = "kvcached-notify-"
_CREDENTIALS: Final = struct.Struct("iII")

_log: Final = logging.getLogger(__name__)


def take_stored() -> dict[str, list[int]]:
    """The descriptors that the manager has stored, by name. They are close-on-exec; the caller closes them.

    Call this before the process opens any other descriptor. It removes the variables from the environment, so that no
    child process uses them and a second call returns nothing. Invalid values are logged and ignored.
    """
    pid, count, names = (os.environ.pop(variable, "") for variable in VARIABLES)
    if pid != str(os.getpid()):
        if pid:
            _log.warning("%s=%s is not this process (%d): descriptors not taken", PID_VARIABLE, pid, os.getpid())
        return {}
    if not (count.isdecimal() and count.isascii() and len(count) <= NAME_LENGTH_MAX and int(count) <= DESCRIPTORS_MAX):
        _log.warning("%s=%s is no number up to %d: descriptors not taken", COUNT_VARIABLE, count, DESCRIPTORS_MAX)
        return {}
    descriptors = range(FIRST_DESCRIPTOR, FIRST_DESCRIPTOR + int(count))
    return _by_name(descriptors, names)


def is_anything_stored() -> bool:
    """Whether the manager has stored descriptors that `take_stored` has not taken yet."""
    return os.environ.get(PID_VARIABLE, "") == str(os.getpid()) and os.environ.get(COUNT_VARIABLE, "") not in {"", "0"}


def store(name: str, descriptor: int) -> bool:
    """Ask the manager to keep a duplicate of a descriptor under a name, until `remove` or the end of the service.

    A memfd that is stored twice under one name is kept once.

    Returns:
        Whether the request was sent; False without a manager.

    Raises:
        ValueError: the name is not allowed.
    """
    return notify(store_message(name), descriptor)


def remove(name: str) -> bool:
    """Ask the manager to close the descriptors that it keeps under a name. Returns and raises as `store`.

    Those that it was not sent yet leave the queue.
    """
    return notify(remove_message(name), instead_of=_name_line(name))


def store_message(name: str) -> str:
    """What goes with a descriptor that is to be kept."""
    return f"FDSTORE=1\n{_name_line(name)}\nFDPOLL=0"


def remove_message(name: str) -> str:
    """What has the descriptors of a name closed."""
    return f"FDSTOREREMOVE=1\n{_name_line(name)}"


async def taken_in() -> bool:
    """Wait until the manager has carried out all that it was sent before, within `WAIT_S`; whether it has.

    It has when it closes a pipe that it is sent then. It has not while messages wait for it. True without a manager.
    """
    send_unsent()
    try:
        ours, theirs = os.pipe2(os.O_CLOEXEC)
    except OSError as error:  # no descriptor is left: who waits here goes on, as where the manager is slow
        _log.warning("the service manager is not waited for: %s", error)
        return False
    try:
        is_sent = not unsent() and notify_now("BARRIER=1", theirs, wait_s=WAIT_S)
    finally:
        os.close(theirs)
    try:
        if is_sent:
            async with asyncio.timeout(WAIT_S):
                await readable(ours)
    except TimeoutError:
        _log.warning("the service manager has not carried out what it was sent %g s ago", WAIT_S)
        return False
    finally:
        os.close(ours)
    return is_sent or not os.environ.get(NOTIFY_VARIABLE)


def is_name(name: str) -> bool:
    """Whether a descriptor may have this name: 1 to 255 printable ASCII characters without a colon."""
    return 0 < len(name) <= NAME_LENGTH_MAX and name.isascii() and name.isprintable() and ":" not in name


def _name_line(name: str) -> str:
    if not is_name(name):
        raise ValueError(f"{name!r} is no name for a descriptor: give up to 255 ASCII characters without colons")
    return f"FDNAME={name}"


def _by_name(descriptors: range, names: str) -> dict[str, list[int]]:
    called = names.split(":") if names else []
    if len(called) != len(descriptors):
        if called:
            _log.warning("%s has %d names for %d descriptors: not used", NAMES_VARIABLE, len(called), len(descriptors))
        called = [UNNAMED] * len(descriptors)
    found: dict[str, list[int]] = {}
    for name, descriptor in zip(called, descriptors, strict=True):
        try:
            os.set_inheritable(descriptor, False)  # noqa: FBT003 - takes no keyword
        except OSError as error:
            if error.errno != errno.EBADF:
                raise
            _log.warning("descriptor %d (%s) was announced and is not there", descriptor, name)
        else:
            found.setdefault(name, []).append(descriptor)
    return found


class Notice(NamedTuple):
    """One message from the daemon."""

    fields: dict[str, str]
    descriptors: list[int]  #: close-on-exec; the receiver closes them

    @classmethod
    def of(cls, data: bytes, descriptors: list[int]) -> Self:
        """A message as it was received."""
        lines = data.decode("utf-8", "replace").split("\n")
        return cls(dict(line.split("=", 1) for line in lines if "=" in line), descriptors)


class NoticeSocket:
    """A datagram socket in a private directory, which no other user may enter.

    Other processes of this user can send to it. The kernel reports the sender of each message, so messages from all
    processes but one are dropped.

    Attributes:
        name: its path.

    Raises:
        OSError: neither a directory for temporary files nor /dev/shm can be written.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        try:
            self.name = _bind_in_private(self._socket)
        except OSError:
            self._socket.close()
            raise
        self._refusals = Refusals("notifications were not believed")

    def fileno(self) -> int:
        """The descriptor to poll for messages."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close it, and remove its directory."""
        self._socket.close()
        shutil.rmtree(Path(self.name).parent, ignore_errors=True)

    def messages(self, pid: int) -> Iterator[Notice]:
        """The messages of process `pid` of this user. All other messages are dropped and counted. Never waits."""
        room = socket.CMSG_SPACE(_CREDENTIALS.size) + socket.CMSG_SPACE(DESCRIPTORS_PER_MESSAGE_MAX * 4)
        for _ in range(_MESSAGES_PER_CALL_MAX):
            try:
                data, ancillary, flags, _ = self._socket.recvmsg(MESSAGE_BYTES_MAX, room, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            sender, descriptors = _unpacked(ancillary)
            fault = ""
            # No process has the id 0, but senders from other pid namespaces appear with it.
            if sender is None or not pid or sender[:2] != (pid, os.geteuid()):
                fault = f"it is of process {sender[0] if sender else 0}, not of the daemon ({pid})"
            elif flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                is_lost = was_none_free(flags, len(descriptors), DESCRIPTORS_PER_MESSAGE_MAX)
                fault = none_free() if is_lost else TOO_LARGE
            if fault:
                self._refusals.note(fault)
                _close(descriptors)
            else:
                yield Notice.of(data, descriptors)


class Refusals:
    """Logs what was rejected: the first, then one line for all within a minute.

    One line each would let any process that can send to the socket fill the disk.

    Args:
        what: words that follow their number.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._unlogged = 0
        self._logged_s = -math.inf

    def note(self, fault: str) -> None:
        """Count one more."""
        self._unlogged += 1
        now_s = time.monotonic()
        if now_s - self._logged_s < _REFUSAL_LOG_PAUSE_S:
            return
        _log.warning("%d %s since the last such line; the last: %s", self._unlogged, self._what, fault)
        self._unlogged, self._logged_s = 0, now_s


class KeptDescriptors:
    """Descriptors that are kept for the next daemon, in the order of their arrival."""

    def __init__(self) -> None:
        self._kept: list[tuple[str, int]] = []

    def __len__(self) -> int:
        """The number of descriptors."""
        return len(self._kept)

    @property
    def names(self) -> list[str]:
        """Their names."""
        return [name for name, _ in self._kept]

    @property
    def descriptors(self) -> list[int]:
        """The descriptors, in the order of `names`."""
        return [descriptor for _, descriptor in self._kept]

    def take(self, notice: Notice) -> None:
        """Carry out a message: keep the descriptors that came with it, or close the kept ones that it names."""
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
        same = [other for known, other in self._kept if known == name and is_same_memfd(other, descriptor)]
        if same or len(self._kept) == KEPT_MAX:
            if not same:
                _log.error("descriptor %s not kept: the limit of %d is reached", name, KEPT_MAX)
            os.close(descriptor)
        else:
            self._kept.append((name, descriptor))

    def _drop(self, name: str) -> None:
        _close([descriptor for known, descriptor in self._kept if known == name])
        self._kept = [(known, descriptor) for known, descriptor in self._kept if known != name]


def _bind_in_private(unbound: socket.socket) -> str:
    """Bind to a path in a new directory that only this user may enter; returns the path."""
    for parent in (None, _LAST_RESORT):
        try:
            directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        except OSError as error:
            reason = error
            continue
        try:
            unbound.bind(path := str(directory / "socket"))
        except OSError as error:  # also raised for a path that is too long
            directory.rmdir()
            reason = error
        else:
            _remove_stale(directory.parent)
            return path
    raise OSError(
        reason.errno,
        f"no socket for the daemon's notifications, neither where TMPDIR says nor in {_LAST_RESORT}: {reason}; "
        f"name a directory that can be written in TMPDIR",
    )


def _remove_stale(parent: Path) -> None:
    """Remove what this user's supervisors have left that were killed: directories with a socket that nobody has."""
    for directory in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as trial:
            if directory.stat(follow_symlinks=False).st_uid != os.geteuid():
                continue
            try:
                trial.connect(str(directory / "socket"))
            except ConnectionRefusedError:
                shutil.rmtree(directory, ignore_errors=True)


def _unpacked(ancillary: list[tuple[int, int, bytes]]) -> tuple[tuple[int, int, int] | None, list[int]]:
    """Process, user and group of the sender, and the descriptors that it sent."""
    sender, descriptors = None, array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS) and len(content) == _CREDENTIALS.size:
            sender = _CREDENTIALS.unpack(content)
        elif (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(content[: len(content) // descriptors.itemsize * descriptors.itemsize])
    return sender, list(descriptors)


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
