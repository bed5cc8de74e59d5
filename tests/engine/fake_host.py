"""A host pool in a dictionary, and loads that arrive only for those who wait for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcached_client.errors import LoadFailed
from kvcached_client.pool import MappedPool
from kvcached_client.protocol.engine import LoadTicket

#: Of a slot that nothing has arrived in yet: NaN in every float, so that who reads it too early computes NaN.
_NOT_YET = 0xFF


@dataclass(frozen=True)
class FakeLoad:
    keys: list[bytes]
    slots: list[int]
    ticket: LoadTicket
    arriving: int  # that many of its blocks; the rest fails


class FakeHost:
    """Bytes of blocks by key. A layer of a load is copied on a shard when that shard waits for it, not before.

    Without pools there are no bytes, only tickets: enough for a scheduler whose steps are not computed.
    """

    def __init__(self) -> None:
        self.pools: Sequence[MappedPool] = ()
        self.blocks: dict[bytes, list[list[npt.NDArray[np.uint8]]]] = {}  # per shard, per layer
        self.fails: dict[int, int] = {}  # number of a load, from 1 → blocks of it that arrive
        self.loads: dict[int, FakeLoad] = {}
        self.waits: list[tuple[int, int, int]] = []  # (shard, transfer, layer)

    def store(self, key: bytes, slot: int) -> None:
        self.blocks[key] = [[pages[slot].copy() for pages in layers_of(pool)] for pool in self.pools]

    def start(self, keys: list[bytes], slots: list[int]) -> FakeLoad:
        transfer = len(self.loads) + 1
        ticket = LoadTicket(transfer=transfer, progress=transfer % 32)
        load = self.loads[transfer] = FakeLoad(keys, slots, ticket, self.fails.get(transfer, len(keys)))
        for pool in self.pools:
            for pages in layers_of(pool):
                pages[slots] = _NOT_YET
        return load

    def waiter(self, shard: int) -> Callable[[Sequence[LoadTicket], int], None]:
        """`MappedPool.wait_layer` of a shard. A load that fails does so after its first layer, which arrived whole."""

        def wait_layer(tickets: Sequence[LoadTicket], layer: int) -> None:
            for ticket in tickets:
                self.waits.append((shard, ticket.transfer, layer))
                load = self.loads[ticket.transfer]
                failing = load.arriving < len(load.keys)
                if failing and layer:
                    raise LoadFailed(f"transfer {ticket.transfer}")
                self._copy(load, shard, layer, len(load.keys) if failing else load.arriving)

        return wait_layer

    def finish(self, transfer: int) -> FakeLoad:
        """All of it that arrives has arrived."""
        load = self.loads[transfer]
        for shard, pool in enumerate(self.pools):
            for layer in range(len(layers_of(pool))):
                self._copy(load, shard, layer, load.arriving)
        return load

    def _copy(self, load: FakeLoad, shard: int, layer: int, count: int) -> None:
        if self.pools:
            pages = self.pools[shard].pages(layer)
            for key, slot in zip(load.keys[:count], load.slots[:count], strict=True):
                pages[slot] = self.blocks[key][shard][layer]


def layers_of(pool: MappedPool) -> list[npt.NDArray[np.uint8]]:
    return [pool.pages(layer) for layer in range(pool.layout.groups[0].layers)]
