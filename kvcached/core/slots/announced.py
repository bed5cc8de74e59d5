"""Which blocks of one pool routers know of: every one that is complete in it, and no other.

A block is told of when it can be found by anybody: its slot is CACHED, and its fence has signalled. It is told as gone
when its slot leaves CACHED, which happens in one place (`SlotPool.move`), so the slots remember the keys. The memory is
33 bytes a slot, and is not touched before the slot is used.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvcached.core.messages import AllRemoved, BlocksRemoved, BlocksStored, IndexChange, Tier, TierEnded
from kvcached.core.slots.ranges import Ranges, pairs
from kvcached_client.types import KEY_SIZE_BYTES

#: Of a pool with more blocks routers are told that all are gone, and not which: so many keys would take the daemon's
#: time, and more than is kept for a subscriber.
_GONE_MAX = 16_384
_ONE = b"\1"
_NO_PARENT = bytes(KEY_SIZE_BYTES)


class Announced:
    """The blocks of one pool that routers were told of.

    Args:
        changes: what routers are told is appended here.
        tier: which pool that is.
        slots: of the pool.

    Attributes:
        tier: as it is at present.
        slots: of the pool.
        count: blocks in it.
    """

    def __init__(self, changes: list[IndexChange], tier: Tier, slots: int) -> None:
        self.tier = tier
        self.slots = slots
        self.count = 0
        self._changes = changes
        self._known = bytearray(slots)  #: 1 where routers know of the slot's block
        self._keys = np.zeros(slots * KEY_SIZE_BYTES, np.uint8).data
        self._parents = np.zeros(slots * KEY_SIZE_BYTES, np.uint8).data

    def add(self, parent: bytes, keys: bytes, slots: Ranges[int]) -> None:
        """Consecutive blocks of a chain are complete in these slots, one each: routers are told."""
        self.inherit(parent, keys, slots)
        self._changes.append(BlocksStored(self.tier, parent, keys))

    def inherit(self, parent: bytes, keys: bytes, slots: Ranges[int]) -> None:
        """The same for blocks from before a restart, which routers get with their first snapshot."""
        parents = (parent or _NO_PARENT) + keys
        at = 0
        for first, count in pairs(slots):
            size, place = count * KEY_SIZE_BYTES, first * KEY_SIZE_BYTES
            self._keys[place : place + size] = keys[at : at + size]
            self._parents[place : place + size] = parents[at : at + size]
            self._known[first : first + count] = _ONE * count
            at += size
            self.count += count

    def remove(self, slots: Ranges[int]) -> None:
        """These slots hold complete blocks no more: routers are told of those that they know of."""
        known, keys = self._known, self._keys
        gone: list[bytes] = []
        for first, count in pairs(slots):
            end = first + count
            told = known.count(_ONE, first, end)
            if told == count:
                gone.append(keys[first * KEY_SIZE_BYTES : end * KEY_SIZE_BYTES].tobytes())
            elif told:  # others were committed under a fence that has not signalled
                places = [slot * KEY_SIZE_BYTES for slot in range(first, end) if known[slot]]
                gone += [keys[place : place + KEY_SIZE_BYTES].tobytes() for place in places]
            known[first:end] = bytes(count)
            self.count -= told
        if gone:
            self._changes.append(BlocksRemoved(self.tier, b"".join(gone)))

    def remove_all(self) -> None:
        """Nobody finds any of the blocks any more.

        Some routers take "all" for all of a daemon: blocks that are few are named.
        """
        if self.count > _GONE_MAX:
            self._changes.append(AllRemoved(self.tier))
        elif self.count:
            slots = np.flatnonzero(np.frombuffer(self._known, np.uint8))
            self._changes.append(BlocksRemoved(self.tier, _rows(self._keys, slots).tobytes()))
        self._known = bytearray(self.slots)
        self.count = 0

    def end(self) -> None:
        """As `remove_all`, and whatever else is known of the blocks is to be forgotten."""
        self.remove_all()
        self._changes.append(TierEnded(self.tier))

    def rename(self, namespace: bytes, generation: int) -> None:
        """What comes now belongs to another generation of the namespace."""
        self.tier = self.tier._replace(namespace=namespace, generation=generation)

    def next_known(self, slot: int) -> int:
        """The first slot from `slot` on whose block routers know of; -1 where there is none."""
        return self._known.find(_ONE, slot)

    def section(self, first: int, count: int, stretches_max: int) -> tuple[list[BlocksStored], int]:
        """The blocks in slots ``[first, first + count)``, neighbours of a chain together, and where to go on.

        At most so many stretches are told: one costs as much as a dozen blocks that continue a chain.
        """
        known = np.frombuffer(self._known, np.uint8)[first : first + count]
        slots = np.flatnonzero(known) + first
        if not len(slots):
            return [], first + count
        keys, parents = _rows(self._keys, slots), _rows(self._parents, slots)
        starts = [0, *(np.flatnonzero((parents[1:] != keys[:-1]).any(axis=1)) + 1).tolist(), len(slots)]
        is_whole = len(starts) <= stretches_max + 1
        told = [
            BlocksStored(self.tier, _parent(parents[start].tobytes()), keys[start:end].tobytes())
            for start, end in pairwise(starts[: stretches_max + 1])
        ]
        return told, first + count if is_whole else int(slots[starts[stretches_max]])

    def known_keys(self) -> bytes:
        """The keys of all blocks that routers know of, in the order of their slots."""
        return _rows(self._keys, np.flatnonzero(np.frombuffer(self._known, np.uint8))).tobytes()

    def recount(self) -> int:
        """`count`, counted afresh."""
        return self._known.count(_ONE)

    def key(self, slot: int) -> bytes:
        """The key of a slot's block that routers know of; empty where they know of none."""
        place = slot * KEY_SIZE_BYTES
        return self._keys[place : place + KEY_SIZE_BYTES].tobytes() if self._known[slot] else b""


def _rows(table: memoryview, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    return np.frombuffer(table, np.uint8).reshape(-1, KEY_SIZE_BYTES)[slots]


def _parent(stored: bytes) -> bytes:
    return b"" if stored == _NO_PARENT else stored
