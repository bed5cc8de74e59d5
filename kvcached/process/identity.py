"""Which process is meant, told from later ones that get its id: by its start time."""

from __future__ import annotations

import errno
import os
import select
from pathlib import Path
from typing import Annotated, Final

import msgspec

#: A C int.
PID_MAX: Final = (1 << 31) - 1
#: Fields of /proc/<pid>/stat behind the program's name, counted from 0.
_STAT_START_TIME: Final = 19
#: By the state that /proc/<pid>/stat names, which is its first field.
_STATES: Final = {
    b"T": "is stopped (SIGSTOP, or a debugger); continue it with kill -CONT {}",
    b"D": "waits in the kernel, for a device or a file system",
    b"R": "runs: it is busy, or hangs in a loop",
    b"S": "waits, or hangs",
}
#: What `pidfd_open` says of an id that nobody has, and of one that a thread has: ENOENT, before Linux 6.9 EINVAL.
_NO_PROCESS: Final = frozenset({errno.ESRCH, errno.ENOENT, errno.EINVAL})


class ProcessIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A process, told from later ones that get its id.

    Attributes:
        pid: in the daemon's pid namespace.
        started: when it started, in clock ticks after the boot.
    """

    pid: Annotated[int, msgspec.Meta(gt=0, le=PID_MAX)]
    started: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


def pid_namespace() -> int:
    """The inode of this process's pid namespace. No other namespace has it while this one exists."""
    return Path("/proc/self/ns/pid").stat().st_ino


def identity_of(pid: int) -> ProcessIdentity | None:
    """What tells a process from later ones that get its id; None where it is gone, or not visible from here."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return ProcessIdentity(pid, int(fields[_STAT_START_TIME]))


def state_of(pid: int) -> str:
    """What a process does that does not answer, in words that follow its name."""
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except OSError:
        return "is gone"
    return _STATES.get(state.upper(), "is about to end").format(pid)


def arguments_of(pid: int) -> list[bytes]:
    """The command line of a process; empty where it cannot be seen, as that of one that is about to die."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]
    except OSError:
        return []


def pidfd_of(pid: int) -> int | None:
    """A pidfd, the caller's to close; None where no process has this id, though a thread of one may.

    Raises:
        OSError: there are no descriptors, or no memory for one.
    """
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno in _NO_PROCESS:
            return None
        raise


def open_process(pid: int, started: int) -> int | None:
    """A pidfd of a process that was written down, or None where it is dead. The caller closes it.

    A process whose start time cannot be seen is taken for the one that was meant: to wait for a stranger's end costs
    some slots, to take a living writer for dead would cost somebody's blocks.
    """
    pidfd = pidfd_of(pid)
    if pidfd is None:
        return None
    found = identity_of(pid)
    # Alive after the look: then what was seen was this process's, and not that of another one with its id.
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    if poll.poll(0) or (found is not None and found.started != started):
        os.close(pidfd)
        return None
    return pidfd
