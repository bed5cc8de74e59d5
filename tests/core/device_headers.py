"""What the headers of device pools say, as a plain dictionary, and a cache that finds it after a restart."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvcached.core.cache import Cache
from kvcached.core.index.run import KEY_SIZE
from kvcached.core.messages import BlocksUncached
from kvcached.core.restart.restore import StoredBlocks, no_blocks
from kvcached.core.slots.ranges import pairs
from kvcached.core.slots.states import SlotState


class Header(NamedTuple):
    """Of one block."""

    key: bytes
    parent: bytes
    depth: int


class DeviceHeaders:
    """The headers of all pools of a cache, by pool and slot, the one that was written last in the end."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.pools: dict[str, dict[int, Header]] = {name: {} for name in cache.pools}

    def write(self) -> None:
        """Take over what has changed."""
        for change in self.cache.header_changes:
            slots = [slot for first, count in pairs(change.slots) for slot in range(first, first + count)]
            of_pool = self.pools[change.pool]
            if isinstance(change, BlocksUncached):
                for slot in slots:
                    of_pool.pop(slot, None)
                continue
            parent = change.parent or bytes(KEY_SIZE)
            assert bool(change.depth) == bool(change.parent)
            assert len(slots) * KEY_SIZE == len(change.keys)
            for place, slot in enumerate(slots):
                key = change.keys[place * KEY_SIZE : (place + 1) * KEY_SIZE]
                assert slot not in of_pool, "a header is written over another one"
                of_pool[slot] = Header(key, parent, change.depth + place)
                parent = key
        self.cache.header_changes.clear()

    def look(self) -> None:
        """Every block whose bytes are known to be there has its header, and no other slot has one."""
        self.write()
        for name, headers in self.pools.items():
            assert headers == expected(self.cache, name), f"headers of pool {name}"

    def found(self, name: str) -> StoredBlocks:
        """What the next daemon finds."""
        self.write()
        rows = self.pools[name]
        if not rows:
            return no_blocks()
        return StoredBlocks(
            np.frombuffer(b"".join(each.key for each in rows.values()), np.uint8).reshape(-1, KEY_SIZE),
            np.frombuffer(b"".join(each.parent for each in rows.values()), np.uint8).reshape(-1, KEY_SIZE),
            np.array([each.depth for each in rows.values()], np.int64),
            np.array([*rows], np.int64),
            np.arange(len(rows)),
        )


def expected(cache: Cache, name: str) -> dict[int, Header]:
    """What the headers of a pool have to say: its blocks that are CACHED, and whose fence has signalled."""
    tree, pool = cache.tree_of(name), cache.pools[name]
    suspects: set[int] = set()
    for session in cache.managed.sessions.values():
        for hold in session.holds if session.pool is pool else ():
            path = tree.path_slots(hold.run, hold.suspect, hold.depth, pool.index)
            suspects.update(slot for first, count in pairs(path) for slot in range(first, first + count))
    found: dict[int, Header] = {}
    for run in tree.runs():
        segment = run.segments[pool.index]
        if segment is None:
            continue
        keys = tree.path_keys(run, 0, run.end)
        slots = [slot for first, count in pairs(segment.ranges) for slot in range(first, first + count)]
        for depth, slot in enumerate(slots, run.start):
            if pool.state_of(slot) is SlotState.CACHED and slot not in suspects:
                parent = keys[(depth - 1) * KEY_SIZE : depth * KEY_SIZE] if depth else bytes(KEY_SIZE)
                found[slot] = Header(keys[depth * KEY_SIZE : (depth + 1) * KEY_SIZE], parent, depth)
    return found
