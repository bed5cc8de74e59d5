"""The host pool, as a device reaches it: registered in the background, a part at a time.

Others have measured 23 to 34 ms a GiB, under a lock that the driver shares between all processes of a node. So nobody
waits for it: a part that is not registered yet is copied as any other memory, which is slower, and right all the same.
"""

from __future__ import annotations

import logging
import threading
from typing import Final

from kvcached_client.cuda.device import Device, RegisteredMemory
from kvcached_client.cuda.driver import CudaFailure

#: One call for more than 512 GiB fails, and one for much less holds up every other process of the node.
PART_BYTES: Final = 1 << 30

_log: Final = logging.getLogger(__name__)


class HostPool:
    """The host pool of this process, and which of it is registered.

    Args:
        device: that reaches it.
        address: where it is mapped.
        size_bytes: all of it.
        slab_bytes: of one slab. No copy has bytes of two slabs, nor must it of two parts that are registered apart.
        part_bytes: how much is registered at once, in whole slabs.
    """

    def __init__(
        self, device: Device, address: int, size_bytes: int, slab_bytes: int, part_bytes: int = PART_BYTES
    ) -> None:
        self._device = device
        self._address = address
        self._size_bytes = size_bytes
        self._part_bytes = max(1, part_bytes // slab_bytes) * slab_bytes
        self._registered: list[RegisteredMemory] = []
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._register, name="host-registration", daemon=True)

    def start(self) -> None:
        """Begin to register, in a thread."""
        self._thread.start()

    @property
    def registered_bytes(self) -> int:
        """How much is registered."""
        return sum(part.size_bytes for part in self._registered)

    def close(self) -> None:
        """Stop registering, and undo it. No copy may use the pool any more. Does nothing the second time."""
        self._ending.set()
        if self._thread.ident is not None:
            self._thread.join()
        while self._registered:
            self._registered.pop().close()

    def _register(self) -> None:
        self._device.use()
        for first in range(0, self._size_bytes, self._part_bytes):
            if self._ending.is_set():
                return
            size = min(self._part_bytes, self._size_bytes - first)
            try:
                self._registered.append(self._device.register(self._address + first, size))
            except CudaFailure as error:
                _log.warning(
                    "%d of %d bytes of the host pool are registered: %s; copies of the rest are slower",
                    self.registered_bytes,
                    self._size_bytes,
                    error,
                )
                return
