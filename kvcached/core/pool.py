"""A device pool's slots: who is in which state, checked at every move.

Rules: a slot changes state only in `DevicePool.move`, which refuses every edge that is not in the table and every slot
that is not in the state it is said to be in. Double and foreign frees end there, before anything has changed.
"""

from __future__ import annotations

from kvcached.core.free_ranges import FreeRanges
from kvcached.core.journal import IllegalTransition, Journal
from kvcached.core.ranges import Ranges, pairs
from kvcached.core.states import SLOT_TRANSITIONS, SlotState

_EDGES = tuple(
    tuple((source, target) in SLOT_TRANSITIONS for target in SlotState) for source in SlotState
)  # two tuple look-ups a move instead of hashing a pair of enums

#: Slots of one state as bytes to compare with and copy from; longer ranges make theirs when they come.
_PATTERN_LENGTH_MAX = 8192


class DevicePool:
    """The slots of one engine replica, the same ids on every shard.

    Attributes:
        name: the replica's.
        index: position of this pool in its tree.
        slots: number of slots.
        epoch: grows when the memory behind the slots was lost.
        healthy: false once a worker is lost; nothing is granted then.
        counts: slots by state; they add up to `slots`.
        protected: cached slots under a lease or fence, which eviction cannot have.
        clock: logical time of last use; grows with every touch.
    """

    __slots__ = (
        "_free",
        "_pattern_length",
        "_patterns",
        "_states",
        "clock",
        "counts",
        "epoch",
        "healthy",
        "index",
        "journal",
        "name",
        "protected",
        "slots",
    )

    def __init__(self, name: str, index: int, slots: int, epoch: int) -> None:
        self.name = name
        self.index = index
        self.slots = slots
        self.epoch = epoch
        self.healthy = True
        self.journal = Journal()
        self.clock = 0
        self._pattern_length = min(slots, _PATTERN_LENGTH_MAX)
        self._patterns = tuple(bytes([state]) * self._pattern_length for state in SlotState)
        self.reset(epoch)

    def reset(self, epoch: int) -> None:
        """Forget every slot: the memory behind them is gone or new."""
        self.epoch = epoch
        self.protected = 0
        self.counts = [0] * len(SlotState)
        self.counts[SlotState.FREE] = self.slots
        self._states = bytearray(self.slots)
        self._free = FreeRanges(self.slots)

    @property
    def free(self) -> int:
        """Slots that can be granted at once."""
        return self.counts[SlotState.FREE]

    @property
    def evictable(self) -> int:
        """Cached slots that eviction can free."""
        return self.counts[SlotState.CACHED] - self.protected

    def state_of(self, slot: int) -> SlotState:
        """The state of one slot."""
        return SlotState(self._states[slot])

    def holds(self, first: int, count: int, state: SlotState) -> bool:
        """Whether the slots ``[first, first + count)`` exist and are all in one state."""
        return first >= 0 and self._states.startswith(bytes([state]) * count, first)

    def count_states(self) -> list[int]:
        """Slots by state, counted afresh (the invariant checker compares them with `counts`)."""
        return [self._states.count(state) for state in SlotState]

    def free_ranges(self) -> list[tuple[int, int]]:
        """What the allocator holds, as (first, count), by first slot."""
        return self._free.ranges()

    def take(self, count: int, cause: str) -> Ranges[int]:
        """Grant `count` free slots; the caller has checked `free`. The ranges belong to the caller."""
        ranges = self._free.take(count)
        self.move(ranges, SlotState.FREE, SlotState.LEASED, cause)
        return ranges

    def move(self, ranges: Ranges[int], source: SlotState, target: SlotState, cause: str) -> None:
        """Move slots along one edge of the table; into FREE they can be granted again.

        Raises:
            IllegalTransition: no such edge, a slot is not in `source`, or it does not exist. Nothing has changed.
        """
        states, edge = self._states, _EDGES[source][target]
        old, new, longest = self._patterns[source], self._patterns[target], self._pattern_length
        moved = 0
        for index in range(0, len(ranges), 2):
            first, count = ranges[index], ranges[index + 1]
            if count > longest:
                old, new, longest = bytes([source]) * count, bytes([target]) * count, count
            if not edge or count <= 0 or first < 0 or not states.startswith(old[:count], first):
                self._undo(ranges[:index], source)
                self._refuse(first, count, source, target)
            states[first : first + count] = new[:count]
            moved += count
        if target is SlotState.FREE:
            for index in range(0, len(ranges), 2):
                self._free.give(ranges[index], ranges[index + 1])
        self.counts[source] -= moved
        self.counts[target] += moved
        self.journal.record(cause, source, target, ranges[:])

    def _undo(self, ranges: Ranges[int], source: SlotState) -> None:
        for first, count in pairs(ranges):
            self._states[first : first + count] = bytes([source]) * count

    def _refuse(self, first: int, count: int, source: SlotState, target: SlotState) -> None:
        for slot in range(max(first, 0), min(first + max(count, 1), self.slots)):
            actual = self.state_of(slot)
            if actual is not source or (source, target) not in SLOT_TRANSITIONS:
                raise IllegalTransition(slot, actual, source, target, self.journal.story(slot))
        raise IllegalTransition(first, source, source, target, [])
