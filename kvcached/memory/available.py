"""Whether a pool fits into the memory that is left, asked before it is made.

Pools are touched lazily, so that an impossible size would otherwise show as a killed process hours later.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

from kvcached_client.doctor.memory_bounds import memory_bounds

#: The pause between two looks.
_PAUSE_S: Final = 0.1


class NotEnoughMemory(Exception):
    """A pool is larger than the memory that is left."""


def check_available(
    size_bytes: int, purpose: str, dropped_bytes: int = 0, kept_bytes: int = 0, *, root: Path = Path("/")
) -> None:
    """Refuse a size that the machine or the cgroup cannot give.

    Args:
        size_bytes: what is about to be allocated.
        purpose: what it is for, for the message.
        dropped_bytes: of shared memory in use that counts as available, as in `kvcached.memory.dropped`.
        kept_bytes: of shared memory in use that stays.
        root: where /proc and /sys are.

    Raises:
        NotEnoughMemory: names the size, what is left, and which limit says so.
    """
    bounds = ((each.available_beside(dropped_bytes, kept_bytes), each.source) for each in memory_bounds(root))
    available_bytes, source = min(bounds, default=(size_bytes, ""))
    if size_bytes > available_bytes:
        raise NotEnoughMemory(
            f"{purpose} needs {size_bytes} bytes, but {max(0, available_bytes)} are available "
            f"({source}); lower the number of slots, or host.size_bytes or host.memory_percent, or raise the"
            " limit"
        )


async def await_available(
    size_bytes: int, purpose: str, patience_s: float, dropped_bytes: int = 0, kept_bytes: int = 0
) -> None:
    """As `check_available`, for who has just dropped memory that may still be on its way back to the machine.

    Nothing tells when the kernel has freed it. So this looks again before it refuses, for `patience_s` and no longer.

    Raises:
        NotEnoughMemory: as `check_available`, when the time is over.
    """
    loop = asyncio.get_running_loop()
    end_s = loop.time() + patience_s
    while True:
        try:
            return check_available(size_bytes, purpose, dropped_bytes, kept_bytes)
        except NotEnoughMemory:
            if loop.time() >= end_s:
                raise
        await asyncio.sleep(_PAUSE_S)
