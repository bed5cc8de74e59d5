"""Limits of the memory of this process, from the machine and its cgroups. Standard library only.

The memory of a memfd counts as shared memory of the cgroup of whoever touches a page first; the size of /dev/shm does
not bound it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

#: Version 1 says "unlimited" by a number near 2**63.
_UNLIMITED_BYTES = 1 << 60


class MemoryBound(NamedTuple):
    """A limit on memory."""

    limit_bytes: int  #: of all that count
    available_bytes: int  #: memory that is left; below 0 if more is in use
    source: str  #: the file with the limit
    shared_bytes: int = 0  #: of what is in use, shared memory such as that of memfds

    def available_beside(self, shared_bytes: int, kept_bytes: int = 0) -> int:
        """What is left if so much shared memory is given back, and so much of it is not.

        Some of that may be in swap space, or in the account of another cgroup: what this one has comes back at most.
        """
        return self.available_bytes + min(shared_bytes, max(self.shared_bytes - kept_bytes, 0))


def memory_bounds(root: Path = Path("/")) -> list[MemoryBound]:
    """Every limit for this process: the machine's, and those of its cgroup and the cgroup's ancestors.

    Page cache that can be dropped counts as available.

    Args:
        root: directory that holds /proc and /sys.
    """
    return [*_machine(root), *_cgroup(root)]


def _machine(root: Path) -> Iterator[MemoryBound]:
    path = root / "proc/meminfo"
    sizes = {name: value * 1024 for name, value in _pairs(path)}
    if "MemAvailable:" in sizes:
        available_bytes = sizes["MemAvailable:"]
        yield MemoryBound(sizes.get("MemTotal:", available_bytes), available_bytes, str(path), sizes.get("Shmem:", 0))


def _cgroup(root: Path) -> Iterator[MemoryBound]:
    try:
        memberships = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in memberships:
        _, controllers, path = line.split(":", 2)
        mounted = root / "sys/fs/cgroup"
        if controllers == "":
            yield from _limits(mounted, path, ("memory.max", "memory.current", "inactive_file", "shmem"))
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_shmem")
            yield from _limits(mounted / "memory", path, names)


def _limits(mounted: Path, path: str, names: tuple[str, str, str, str]) -> Iterator[MemoryBound]:
    """The limits of a cgroup and its ancestors. In a container, the path may exist only on the host.

    Args:
        mounted: where the controller's files are.
        path: of the cgroup.
        names: the files of limit and usage; what memory.stat calls page cache that can be dropped, and shared memory.
    """
    limit_name, usage_name, cache_name, shared_name = names
    own = mounted / path.lstrip("/")
    for group in [own, *own.parents]:
        limit = _number(group / limit_name)
        if limit is not None and limit < _UNLIMITED_BYTES:
            usage = _number(group / usage_name) or 0
            stat = dict(_pairs(group / "memory.stat"))
            available_bytes = limit - usage + stat.get(cache_name, 0)
            yield MemoryBound(limit, available_bytes, str(group / limit_name), stat.get(shared_name, 0))
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
