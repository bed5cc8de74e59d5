"""Slots of a device pool out of which copies to the host pool have failed.

A block that cannot be read, as on a page of memory with an error that cannot be corrected, ends the worker that copies
it, and with the worker every copy that is under way. So blocks whose copy has failed are copied apart from others, and
in smaller and smaller parts, until the one that fails alone is found. It is given up: nothing is copied out of its slot
any more until the pool has other memory.
"""

from __future__ import annotations

from itertools import islice

from kvcached.core.slots.ranges import Ranges, every_slot, slot_count

#: A store that has failed twice is made again in so many parts: a block among 256 is found by the fourth failure.
PARTS = 16


class Doubts:
    """How many blocks a store out of these slots may have. There are at most as many as the pool has slots."""

    __slots__ = ("_most",)

    def __init__(self) -> None:
        self._most: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._most)

    def has_any(self, slots: Ranges[int]) -> bool:
        """Whether a store out of one of these slots has failed, and none has succeeded since."""
        return bool(self._most) and any(slot in self._most for slot in every_slot(slots))

    def gives_up(self, slots: Ranges[int]) -> bool:
        """Whether the block of one of these slots is given up."""
        return any(self._most.get(slot) == 0 for slot in every_slot(slots))

    def next_store(self, slots: Ranges[int]) -> tuple[int, bool]:
        """Of how many of the first of these slots a store may be, and whether it must be the only one of the pool.

        None where the first slot's block is given up.
        """
        most = self._most.get(slots[0]) if slots else None
        is_doubted = most is not None
        for place, slot in enumerate(islice(every_slot(slots), most)):
            if slot in self._most and not (is_doubted and self._most[slot]):
                return place, is_doubted
        count = slot_count(slots)
        return count if most is None else min(most, count), is_doubted

    def note_failed(self, slots: Ranges[int]) -> int:
        """A store has failed; returns how many blocks are given up now."""
        count, given_up = slot_count(slots), 0
        smaller = -(-count // PARTS) if count > 1 else 0
        for slot in every_slot(slots):
            # The first failure may be that of another store, which has ended the worker of all.
            self._most[slot] = smaller if slot in self._most else count
            given_up += not self._most[slot]
        return given_up

    def note_stored(self, slots: Ranges[int]) -> None:
        """A store has succeeded."""
        if self._most:
            for slot in every_slot(slots):
                self._most.pop(slot, None)

    def forget(self) -> None:
        """The slots are of other memory now."""
        self._most.clear()
