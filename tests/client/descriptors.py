"""Which descriptors of a memory a process has, and a child that it forks; and a process that has none left."""

from __future__ import annotations

import contextlib
import os
import resource
import struct
from collections.abc import Iterator
from pathlib import Path


def held_here_and_in_a_child(inode: int) -> tuple[int, int]:
    """How many descriptors of a file this process has, and a child that it forks now."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, struct.pack("q", _held(inode)))
        os._exit(0)
    os.waitpid(child, 0)
    (in_child,) = struct.unpack("q", os.read(reader, 8))
    os.close(reader)
    os.close(writer)
    return _held(inode), in_child


def take_all_descriptors() -> None:
    """Let this process open nothing more, until its limit of open files is raised."""
    free = os.open("/", os.O_RDONLY)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    """A while in which this process can open nothing."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    take_all_descriptors()
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def _held(inode: int) -> int:
    found = 0
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing's own descriptor
            found += path.stat().st_ino == inode
    return found
