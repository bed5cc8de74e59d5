"""The host pool of a daemon's process, as a file that tests open behind the daemon's back."""

from __future__ import annotations

import os
from pathlib import Path


def host_pool_file(pid: int) -> Path:
    """One of the daemon's descriptors of it: there is a second one for engines that only load."""
    # realpath, for a descriptor that is closed meanwhile is none
    folder = Path(f"/proc/{pid}/fd")
    return next(path for path in folder.iterdir() if os.path.realpath(path).startswith("/memfd:kvcached-host"))


def mapped_bytes(pid: int, pool: Path) -> int:
    """How much of a pool a process maps; the daemon maps all of it, and the file is longer than the pool."""
    lines = (line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
    inode = str(pool.stat().st_ino)
    places = (line[0].split("-") for line in lines if line[4] == inode and "kvcached-host" in line[5])
    return sum(int(end, 16) - int(start, 16) for start, end in places)
