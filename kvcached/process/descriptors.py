"""How many files this process may have open, what it looks like when it has them all, and which are the same."""

from __future__ import annotations

import fcntl
import os
import resource
import socket


def raise_soft_limit() -> None:
    """Allow as many open files as the hard limit does: a shell's soft limit is for its commands, not for pools."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def was_none_free(told: int, count: int, count_max: int) -> bool:
    """Whether descriptors of a message are lost because this process had too many files open.

    Args:
        told: the flags that the kernel gave with the message.
        count: how many descriptors have come.
        count_max: for how many there was room.
    """
    return bool(told & socket.MSG_CTRUNC) and count < count_max


def none_free() -> str:
    """Why they are lost, in words for the operator."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    what = f"no descriptor is free: this process may have {most} files open"
    return f"{what}; raise LimitNOFILE= of the unit, or ulimit -n"


def is_same_memfd(one: int, other: int) -> bool:
    """Whether two descriptors are of one memfd. Other files may share an inode: those that a CUDA driver exports do."""
    try:
        for descriptor in (one, other):
            fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        return False
    return os.path.sameopenfile(one, other)
