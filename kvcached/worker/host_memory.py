"""The host pool's memory: one sealed memfd of the daemon's, handed to every worker.

It belongs to no worker, so that no worker's death loses it. The daemon never maps it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from kvcached.worker.memory import sealed_memfd


@dataclass(frozen=True, slots=True)
class HostMemory:
    """The memory of a host pool of `slabs` slabs.

    Attributes:
        descriptor: the memfd, close-on-exec. Whoever made this closes it, after the workers.
    """

    descriptor: int
    slabs: int
    slab_bytes: int

    def close(self) -> None:
        """Close the descriptor. The memory is freed when the last process that has mapped it ends."""
        os.close(self.descriptor)


def create_host_memory(slabs: int, slab_bytes: int) -> HostMemory:
    """Make a host pool, all zero. It takes up memory only where it is written.

    Raises:
        OSError: the kernel refused one of the steps.
    """
    return HostMemory(sealed_memfd("kvcached-host", slabs * slab_bytes), slabs, slab_bytes)
