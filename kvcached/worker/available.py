"""How much memory this process may still take, asked before a pool is made.

Pools are touched lazily, so that an impossible size would otherwise show as a killed process hours later. The memory of
a memfd counts as shared memory of this cgroup; the size of /dev/shm does not bound it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

#: Version 1 says "unlimited" by a number near 2**63.
_UNLIMITED_BYTES = 1 << 60


class MemoryBound(NamedTuple):
    """A limit on further memory."""

    available_bytes: int
    source: str  #: the file that says so


class NotEnoughMemory(Exception):
    """A pool is larger than the memory that is left."""


def check_available(size_bytes: int, purpose: str, *, root: Path = Path("/")) -> None:
    """Refuse a size that the machine or the cgroup cannot give.

    Args:
        size_bytes: what is about to be allocated.
        purpose: what it is for, for the message.
        root: where /proc and /sys are.

    Raises:
        NotEnoughMemory: names the size, what is left, and which limit says so.
    """
    bound = min([*_machine(root), *_cgroup(root)], default=None)
    if bound is not None and size_bytes > bound.available_bytes:
        raise NotEnoughMemory(
            f"{purpose} needs {size_bytes} bytes, but {max(0, bound.available_bytes)} are available "
            f"({bound.source}); lower the number of slots or host.size_bytes, or raise the limit"
        )


def _machine(root: Path) -> Iterator[MemoryBound]:
    path = root / "proc/meminfo"
    for name, value in _pairs(path):
        if name == "MemAvailable:":
            yield MemoryBound(value * 1024, str(path))


def _cgroup(root: Path) -> Iterator[MemoryBound]:
    try:
        memberships = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in memberships:
        _, controllers, path = line.split(":", 2)
        mounted = root / "sys/fs/cgroup"
        if controllers == "":
            yield from _limits(mounted, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _limits(mounted / "memory", path, *files)


def _limits(mounted: Path, path: str, limit_name: str, usage_name: str, cache_name: str) -> Iterator[MemoryBound]:
    """The limits of a cgroup and of all above it. Inside a container the path may be one that only the host sees."""
    own = mounted / path.lstrip("/")
    for group in [own, *own.parents]:
        limit = _number(group / limit_name)
        if limit is not None and limit < _UNLIMITED_BYTES:
            usage = _number(group / usage_name) or 0
            cache = sum(value for name, value in _pairs(group / "memory.stat") if name == cache_name)
            yield MemoryBound(limit - usage + cache, str(group / limit_name))
        if group == mounted:
            return


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _pairs(path: Path) -> Iterator[tuple[str, int]]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        name, _, rest = line.partition(" ")
        value = rest.split()
        if value and value[0].isdigit():
            yield name, int(value[0])
