"""Slots that a client keeps for the time when its daemon is away: new requests are computed in them meanwhile."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import numpy as np

from kvcached_client.errors import KvcachedError
from kvcached_client.grants import Declaration, Slots
from kvcached_client.types import NO_FENCE

if TYPE_CHECKING:
    from kvcached_client.lease import Lease
    from kvcached_client.transport.channel import SessionChannel
    from kvcached_client.types import FenceSequence, LeaseId

_log: Final = logging.getLogger("kvcached_client")


class Reserve:
    """The slots of one lease, which nobody writes before they are taken. Used by one thread.

    Args:
        keeper: the lease; it has slots only.
    """

    def __init__(self, keeper: Lease) -> None:
        self._keeper = keeper
        self._capacity_tokens = keeper.capacity_tokens
        self._free: list[int] = keeper.block_table.tolist()
        #: Slots that came back while work was queued on them, with the fence behind that.
        self._fenced: list[tuple[FenceSequence, list[int]]] = []
        self._signalled = NO_FENCE

    def take(self, count: int) -> Slots | None:
        """So many slots, or None where fewer are left."""
        if count > len(self._free):
            return None
        taken, self._free = self._free[:count], self._free[count:]
        return np.array(taken, np.int32)

    def give(self, slots: Slots, fence: FenceSequence) -> None:
        """Slots come back. They are taken again once `fence` has signalled."""
        self._fenced.append((fence, slots.tolist()))
        self.signal(self._signalled)

    def signal(self, fence: FenceSequence) -> None:
        """The engine's queued work up to a fence is over."""
        self._signalled = fence
        self._free += [slot for named, slots in self._fenced if named <= fence for slot in slots]
        self._fenced = [(named, slots) for named, slots in self._fenced if named > fence]

    def refill(self) -> None:
        """Slots in place of those that other leases have taken for good, as far as the pool has any."""
        had = len(self._free)
        try:
            self._keeper.allocate(self._capacity_tokens)
        except KvcachedError as error:
            _log.info("the reserve has only %d slots for now: %s", had, error)
        self._free += self._keeper.block_table[had:].tolist()

    # As a lease that is declared:

    def declaration(self) -> Declaration | None:
        """What is left of it."""
        self._keeper.hold_only(np.array(self._free, np.int32))
        return self._keeper.declaration()

    def take_up(self, channel: SessionChannel, lease_id: LeaseId) -> None:
        """See `Lease.take_up`. Slots that wait for their fence are the daemon's, which waits for it as well."""
        self._fenced.clear()
        self._keeper.take_up(channel, lease_id)
