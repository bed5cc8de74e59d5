"""The host pool, as a device reaches it: registered in the background, a part at a time.

Others have measured 23 to 34 ms a GiB, under a lock that the driver shares between all processes of a node. So nobody
waits for it: a part that is not registered yet is copied as any other memory, which is slower, and right all the same.
For the same reason a shard registers only what it copies.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Final

from kvcached_client.blocks.host_layout import HostGeometry, part_bytes
from kvcached_client.cuda.device import Device, RegisteredMemory
from kvcached_client.cuda.driver import CudaFailure

#: One call for more than 512 GiB fails, and one for much less holds up every other process of the node.
CALL_BYTES: Final = 1 << 30
#: A smaller part of a slab is not registered by itself: the calls would cost more than the pages that they spare.
OWN_PART_BYTES_MIN: Final = 1 << 20

_log: Final = logging.getLogger(__name__)


def shard_ranges(host: HostGeometry, shard: int, call_bytes: int = CALL_BYTES) -> list[range]:
    """What to register for a shard, as offsets in the host pool, a call each. No copy crosses the end of a range.

    A copy has bytes of one slab. Where a slab is one part, ranges are whole slabs; else the shard's part of each slab.

    Args:
        host: where slabs and their parts are.
        shard: whose copies they are.
        call_bytes: how much is registered at once where ranges are whole slabs.
    """
    size_bytes, own = host.size_bytes, part_bytes(host.slab_bytes, host.parts)
    if host.parts > 1 and own >= OWN_PART_BYTES_MIN:
        return [range(first, first + own) for first in range(shard * own, size_bytes, host.slab_bytes)]
    step = max(1, call_bytes // host.slab_bytes) * host.slab_bytes
    return [range(first, min(first + step, size_bytes)) for first in range(0, size_bytes, step)]


class HostPool:
    """The host pool of this process, and which of it is registered.

    Args:
        device: that reaches it.
        address: where it is mapped.
        ranges: what to register, see `shard_ranges`.
        read_only: it is mapped read-only. A device that cannot register such memory copies it as any other.

    Attributes:
        size_bytes: of all ranges.
        registered_bytes: of those that are registered.
        error: why no more will be; empty while nothing is wrong.
    """

    def __init__(self, device: Device, address: int, ranges: Sequence[range], *, read_only: bool = False) -> None:
        self.size_bytes = sum(map(len, ranges))
        self.registered_bytes = 0
        self.error = ""
        self._device = device
        self._address = address
        self._ranges = ranges
        self._read_only = read_only
        self._registered: list[RegisteredMemory] = []
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, on_progress: Callable[[HostPool], None] = lambda _: None) -> None:
        """Begin to register, in a thread.

        Args:
            on_progress: called in that thread whenever `CALL_BYTES` more are registered, and once at the end.
        """
        self._thread = threading.Thread(
            target=self._register, args=(on_progress,), name="host-registration", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait until no more will be registered."""
        if self._thread is not None:
            self._thread.join()

    @property
    def is_own_thread(self) -> bool:
        """Whether the calling thread is the one that registers, which cannot wait for its own end."""
        return self._thread is threading.current_thread()

    def close(self) -> None:
        """Stop registering, and undo it. No copy may use the pool any more. Does nothing the second time."""
        self._ending.set()
        self.wait()
        while self._registered:
            self._registered.pop().close()
        self.registered_bytes = 0

    def _register(self, on_progress: Callable[[HostPool], None]) -> None:
        try:
            with self._device.current():
                self._register_all(on_progress)
        except CudaFailure as error:
            self.error = str(error)
            _log.warning(
                "%d of %d bytes of the host pool are registered: %s; copies of the rest are slower",
                self.registered_bytes,
                self.size_bytes,
                error,
            )
        on_progress(self)

    def _register_all(self, on_progress: Callable[[HostPool], None]) -> None:
        told_bytes = 0
        for each in self._ranges:
            if self._ending.is_set():
                return
            if self.registered_bytes - told_bytes >= CALL_BYTES:
                told_bytes = self.registered_bytes
                on_progress(self)
            start = self._address + each.start
            self._registered.append(self._device.register(start, len(each), read_only=self._read_only))
            self.registered_bytes += len(each)
