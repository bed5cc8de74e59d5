"""Waiting, layer by layer, for cached blocks that are still copied from the host pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvcached_client import KvcachedError
from kvcached_client.protocol.engine import LoadTicket

#: (tickets, layer): `MappedPool.wait_layer` with a deadline. Raises KvcachedError where the layer will not come.
WaitLayer = Callable[[Sequence[LoadTicket], int], None]


class LayerWaits:
    """The waits of one step on one shard.

    Copying and computing overlap: while a layer is computed, the next ones arrive.

    Args:
        wait_layer: waits for a layer of some loads.
        loads: what each item of the step waits for; nothing for most.

    Attributes:
        unread: items, by index, whose blocks did not arrive; nothing is waited for on their behalf any more.
    """

    def __init__(self, wait_layer: WaitLayer, loads: Sequence[Sequence[LoadTicket]]) -> None:
        self._wait_layer = wait_layer
        self._loads = loads
        self.unread: list[int] = []

    def __call__(self, item: int, layer: int) -> None:
        """Return when layer `layer` of the item's cached blocks can be read, or will never be."""
        if not self._loads[item] or item in self.unread:
            return
        try:
            self._wait_layer(self._loads[item], layer)
        except KvcachedError:
            # whatever it was (a failed load, a deadline, a daemon that is gone), the scheduler hears of it, too
            self.unread.append(item)
