"""The host pool of a daemon's process, as a file that tests open behind the daemon's back."""

from __future__ import annotations

import os
from pathlib import Path


def host_pool_file(pid: int) -> Path:
    """One of the daemon's descriptors of it: there is a second one for engines that only load."""
    # realpath, for a descriptor that is closed meanwhile is none
    folder = Path(f"/proc/{pid}/fd")
    return next(path for path in folder.iterdir() if os.path.realpath(path).startswith("/memfd:kvcached-host"))
