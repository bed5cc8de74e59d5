"""Host pools that a start has dropped, while processes may still map them.

An engine in offload mode maps its pool until it has joined a session of the next daemon, so a dropped pool is not free
when the next one needs room, and nobody unmaps it before there is a next one. Pages of the new pool are taken as they
are written. So what is dropped counts as available; for that it is held open: what is still held cannot have been
counted as free already.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvcached.memory.host_pool import MemoryIdentity

#: The unit of `st_blocks`.
_BLOCK_BYTES: Final = 512


class DroppedMemory:
    """Descriptors of memory that is used no more; `close` gives it back as soon as no other process maps it."""

    def __init__(self) -> None:
        self._held: dict[MemoryIdentity, int] = {}

    def hold(self, descriptor: int) -> None:
        """Take over a descriptor."""
        identity = MemoryIdentity.of(descriptor)
        if identity in self._held:
            os.close(descriptor)
        else:
            self._held[identity] = descriptor

    @property
    def size_bytes(self) -> int:
        """How much of it has been written, and so takes up memory or swap space."""
        return sum(os.fstat(descriptor).st_blocks * _BLOCK_BYTES for descriptor in self._held.values())

    def mapped_by(self) -> list[int]:
        """Other processes that map some of it, as far as they can be seen from here."""
        return [pid for pid in _other_processes() if any(_maps(pid, identity) for identity in self._held)]

    def close(self) -> None:
        """Hold it no longer. Does nothing the second time."""
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()


def _other_processes() -> Iterator[int]:
    pids = (int(name) for name in os.listdir("/proc") if name.isdecimal())  # noqa: PTH208
    return (pid for pid in sorted(pids) if pid != os.getpid())


def _maps(pid: int, identity: MemoryIdentity) -> bool:
    """Whether a process maps a memory; False where that cannot be seen."""
    device = f"{os.major(identity.device):02x}:{os.minor(identity.device):02x}"
    wanted = [device.encode(), str(identity.inode).encode()]
    try:
        lines = Path(f"/proc/{pid}/maps").read_bytes().splitlines()
    except OSError:
        return False
    return any(line.split(maxsplit=5)[3:5] == wanted for line in lines)
