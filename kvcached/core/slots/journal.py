"""A bounded memory of what happened to slots, to tell a block's story when an edge is illegal."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from kvcached.core.slots.ranges import Ranges, pairs
from kvcached.core.slots.states import SlotState

#: Enough to see several thousand requests back.
JOURNAL_LENGTH_MAX = 8192
#: Numbers in all remembered ranges together: 1 MiB.
JOURNAL_RANGE_ITEMS_MAX = 1 << 18


class Entry(NamedTuple):
    """One move of slots from a state to another."""

    number: int
    cause: str  #: the operation, and the lease or session it acted for
    source: SlotState
    target: SlotState
    ranges: Ranges[int]


class Journal:
    """Ring of the last moves of one pool's slots."""

    __slots__ = ("_entries", "_items", "_number")

    def __init__(self) -> None:
        self._entries: deque[tuple[int, str, SlotState, SlotState, Ranges[int]]] = deque()
        self._items = 0
        self._number = 0

    def record(self, cause: str, source: SlotState, target: SlotState, ranges: Ranges[int]) -> None:
        """Remember a move. `ranges` is kept, not copied: the caller no longer changes it."""
        self._number = number = self._number + 1
        entries = self._entries
        entries.append((number, cause, source, target, ranges))
        self._items = items = self._items + len(ranges)
        while len(entries) > JOURNAL_LENGTH_MAX or items > JOURNAL_RANGE_ITEMS_MAX:
            self._items = items = items - len(entries.popleft()[4])

    def story(self, slot: int) -> list[Entry]:
        """The remembered moves of one slot, oldest first."""
        return [
            Entry(*entry)
            for entry in self._entries
            if any(first <= slot < first + count for first, count in pairs(entry[4]))
        ]


class IllegalTransition(Exception):
    """A slot was asked to leave a state that it is not in: a bug of ours. Carries the slot's story.

    Nothing has been changed when it is raised.
    """

    def __init__(self, slot: int, actual: SlotState, source: SlotState, target: SlotState, story: list[Entry]) -> None:
        lines = [f"  #{entry.number} {entry.cause}: {entry.source.name} -> {entry.target.name}" for entry in story]
        super().__init__(
            f"slot {slot} is {actual.name}, asked to go {source.name} -> {target.name}; its story:\n"
            + ("\n".join(lines) or "  (nothing remembered)")
        )
        self.slot = slot
        self.actual = actual
        self.story = story
