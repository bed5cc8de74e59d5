"""Slots of a pool: who is in which state, checked at every move.

Rules: a slot changes state only in `SlotPool.move`, which refuses every edge that is not in the table and every slot
that is not in the state it is said to be in. Double and foreign frees end there, before anything has changed.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from kvcached.core.index.run import Run
from kvcached.core.messages import BlocksCached, BlocksUncached, HeaderChange
from kvcached.core.slots.announced import Announced
from kvcached.core.slots.doubts import Doubts
from kvcached.core.slots.ranges import FreeRanges, Ranges, cut, join, one_range, pairs, slot_count
from kvcached.core.slots.states import POOL_TRANSITIONS, SLOT_TRANSITIONS, PoolState, SlotState, follow

_EDGES = tuple(
    tuple((source, target) in SLOT_TRANSITIONS for target in SlotState) for source in SlotState
)  # two tuple look-ups a move instead of hashing a pair of enums

#: Slots of one state as bytes to compare with and copy from; longer ranges make theirs when they come.
_PATTERN_LENGTH_MAX = 8192
#: Commits that wait for their copy to the host pool. Beyond that the oldest are left to demotion, which finds them.
UNSTORED_MAX = 4096
#: Stores that failed since the last tick; demotion finds the others.
FAILED_STORES_MAX = 256

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


class SlotPool:
    """Numbered slots, each in one state.

    Attributes:
        name: what messages call it.
        slots: number of slots.
        counts: slots by state; they add up to `slots`.
        protected: blocks of the index in this pool that eviction cannot have.
        clock: logical time of last use; grows with every touch.
        journal: what happened to slots.
        announced: the blocks that routers know of; None where nobody tells them.
    """

    __slots__ = (
        "_free",
        "_pattern_length",
        "_patterns",
        "_states",
        "announced",
        "clock",
        "counts",
        "journal",
        "name",
        "protected",
        "slots",
    )

    def __init__(self, name: str, slots: int, initial: SlotState) -> None:
        self.name = name
        self.slots = slots
        self.clock = 0
        self.journal = Journal()
        self.announced: Announced | None = None
        self._pattern_length = min(slots, _PATTERN_LENGTH_MAX)
        self._patterns = tuple(bytes([state]) * self._pattern_length for state in SlotState)
        self._set_all(initial)

    def _set_all(self, state: SlotState) -> None:
        self.protected = 0
        self.counts = [0] * len(SlotState)
        self.counts[state] = self.slots
        self._states = bytearray([state]) * self.slots
        self._free = FreeRanges(self.slots, empty=state is not SlotState.FREE)

    def announce(self, announced: Announced | None) -> None:
        """Tell routers of its blocks from now on; None: of none any more."""
        self.announced = announced

    @property
    def free(self) -> int:
        """Slots that can be granted at once."""
        return self.counts[SlotState.FREE]

    def state_of(self, slot: int) -> SlotState:
        """The state of one slot."""
        return SlotState(self._states[slot])

    def holds(self, first: int, count: int, state: SlotState) -> bool:
        """Whether the slots ``[first, first + count)`` exist and are all in one state."""
        return first >= 0 and self._states.startswith(bytes([state]) * count, first)

    def leading(self, first: int, count: int, state: SlotState) -> int:
        """How many of the slots ``[first, first + count)`` come before the first that is not in a state."""
        low, high = 0, count
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.holds(first + low, middle - low, state) else (low, middle - 1)
        return low

    def has(self, ranges: Ranges[int]) -> bool:
        """Whether all these slots exist, no more than there are."""
        exist = all(first >= 0 and count > 0 and first + count <= self.slots for first, count in pairs(ranges))
        return exist and slot_count(ranges) <= self.slots

    def count_in(self, first: int, count: int, state: SlotState) -> int:
        """How many of the slots ``[first, first + count)`` are in a state."""
        return self._states.count(state, first, first + count)

    def having(self, ranges: Ranges[int], state: SlotState) -> Ranges[int]:
        """Those of the slots that are in a state. Slot by slot: for what happens seldom."""
        slots = (slot for first, count in pairs(ranges) for slot in range(first, first + count))
        return join([one_range(slot, 1) for slot in slots if self._states[slot] == state])

    def count_states(self) -> list[int]:
        """Slots by state, counted afresh (the invariant checker compares them with `counts`)."""
        return [self._states.count(state) for state in SlotState]

    def free_ranges(self) -> list[tuple[int, int]]:
        """What the allocator holds, as (first, count), by first slot."""
        return self._free.ranges()

    def take(self, count: int, state: SlotState, cause: str) -> Ranges[int]:
        """Move `count` free slots to `state`; the caller has checked `free`. The ranges belong to the caller."""
        ranges = self._free.take(count)
        self.move(ranges, SlotState.FREE, state, cause)
        return ranges

    def move(self, ranges: Ranges[int], source: SlotState, target: SlotState, cause: str) -> None:
        """Move slots along one edge of the table; into FREE they can be granted again.

        Raises:
            IllegalTransition: no such edge, a slot is not in `source`, or it does not exist. Nothing has changed.
        """
        if not ranges:
            return
        states, edge = self._states, _EDGES[source][target]
        old, new, longest = self._patterns[source], self._patterns[target], self._pattern_length
        moved = 0
        for first, count in pairs(ranges):
            if count > longest:
                old, new, longest = bytes([source]) * count, bytes([target]) * count, count
            if not edge or count <= 0 or first < 0 or not states.startswith(old[:count], first):
                self._undo(cut(ranges, moved)[0], source)
                self._refuse(first, count, source, target)
            states[first : first + count] = new[:count]
            moved += count
        if not target:  # FREE
            give = self._free.give
            for first, count in pairs(ranges):
                give(first, count)
        self.counts[source] -= moved
        self.counts[target] += moved
        copy = ranges[:]
        self.journal.record(cause, source, target, copy)
        if source is SlotState.CACHED:
            self._left_cached(copy)
            if self.announced is not None:
                self.announced.remove(copy)

    def _left_cached(self, ranges: Ranges[int]) -> None:
        """Slots have left CACHED. The headers of host blocks are written by who writes the blocks: nothing is to do."""

    def _undo(self, ranges: Ranges[int], source: SlotState) -> None:
        for first, count in pairs(ranges):
            self._states[first : first + count] = bytes([source]) * count

    def _refuse(self, first: int, count: int, source: SlotState, target: SlotState) -> None:
        for slot in range(max(first, 0), min(first + max(count, 1), self.slots)):
            actual = self.state_of(slot)
            if actual is not source or (source, target) not in SLOT_TRANSITIONS:
                raise IllegalTransition(slot, actual, source, target, self.journal.story(slot))
        raise IllegalTransition(first, source, source, target, [])


class DevicePool(SlotPool):
    """The slots of one engine replica, the same ids on every shard.

    Attributes:
        index: position of this pool in its tree.
        block_size: tokens per block.
        shards: how many hold a part of every slot; each has its own part in a transfer.
        epoch: of the daemon; another one makes requests of an earlier life stale.
        healthy: false while a worker is lost; nothing is copied then.
        watermark: slots that demotion keeps free.
        load_threshold: fewer blocks than this are computed rather than loaded.
        load_quota: blocks that loads may be writing at any time.
        orphaned: FILLING slots that are not in the tree any more, because a load before theirs failed.
        paused: no copies are started, because somebody has asked for that.
        clearing: its namespace is being cleared: nobody gets a session, and no copies are started.
        state: whether it has its memory; nobody gets a session unless it is awake.
        frozen: an engine from before a restart may use any of its blocks: none is evicted, and no copies are started.
        stores_paused: a store failed or was refused: demotion starts no further one before the next tick.
        demand: slots that somebody waits for while blocks are written back; 0 where nobody does.
        failed_stores: paths whose store failed, tried once more at the next tick.
        doubts: slots out of which stores have failed.
        doubtful: paths whose store must be the only one of the pool, and waits for that; as `unstored`.
        unstored: ends of committed paths that the host pool is to get, oldest first, as (run, depth).
        header_changes: what is to be written beside the slots: told of every slot that leaves CACHED.
    """

    __slots__ = (
        "block_size",
        "clearing",
        "demand",
        "doubtful",
        "doubts",
        "epoch",
        "failed_stores",
        "frozen",
        "header_changes",
        "healthy",
        "index",
        "load_quota",
        "load_threshold",
        "orphaned",
        "paused",
        "shards",
        "state",
        "stores_paused",
        "unstored",
        "watermark",
    )

    def __init__(
        self,
        name: str,
        index: int,
        slots: int,
        epoch: int,
        *,
        block_size: int = 1,
        shards: int = 1,
        watermark: int = 0,
        load_threshold: int = 1,
        load_quota: int | None = None,
        header_changes: list[HeaderChange] | None = None,
    ) -> None:
        super().__init__(name, slots, SlotState.FREE)
        self.header_changes: list[HeaderChange] = [] if header_changes is None else header_changes
        self.index = index
        self.block_size = block_size
        self.shards = shards
        self.epoch = epoch
        self.healthy = True
        self.watermark = watermark
        self.load_threshold = load_threshold
        self.load_quota = max(slots // 2, load_threshold) if load_quota is None else load_quota
        self.orphaned = 0
        self.demand = 0
        self.paused = False
        self.clearing = False
        self.state = PoolState.AWAKE
        self.frozen = False
        self.stores_paused = False
        self.failed_stores: deque[tuple[Run, int]] = deque(maxlen=FAILED_STORES_MAX)
        self.doubts = Doubts()
        self.doubtful: deque[tuple[Run, int]] = deque(maxlen=FAILED_STORES_MAX)
        self.unstored: deque[tuple[Run, int]] = deque(maxlen=UNSTORED_MAX)

    @property
    def evictable(self) -> int:
        """Slots of the index that eviction can free."""
        counts = self.counts
        if self.frozen:
            return 0
        return counts[SlotState.CACHED] + counts[SlotState.FILLING] - self.orphaned - self.protected

    @property
    def copies(self) -> bool:
        """Whether copies may be started."""
        return self.healthy and not (self.paused or self.clearing or self.frozen)

    def note_cached(self, blocks: BlocksCached) -> None:
        """All bytes of these blocks are there: anybody may find them."""
        self.header_changes.append(blocks)
        if self.announced is not None:
            self.announced.add(blocks.parent, blocks.keys, blocks.slots)

    def _left_cached(self, ranges: Ranges[int]) -> None:
        self.header_changes.append(BlocksUncached(self.name, ranges))

    def lose_workers(self) -> None:
        """Nothing is copied until `restore_workers`."""
        self.healthy = False

    def restore_workers(self) -> None:
        """Every shard has a worker again."""
        self.healthy = True

    def pause(self) -> None:
        """Somebody asks that no copies are started."""
        self.paused = True

    def resume(self) -> None:
        """The end of `pause`."""
        self.paused = False

    def freeze(self) -> None:
        """An engine from before a restart may use any of its blocks."""
        self.frozen = True

    def thaw(self) -> None:
        """No engine uses any of its blocks but those that leases have locked."""
        self.frozen = False

    def begin_clear(self) -> None:
        """Its namespace is being cleared."""
        self.clearing = True

    def end_clear(self) -> None:
        """Its namespace has been cleared."""
        self.clearing = False

    def enter(self, state: PoolState) -> None:
        """Fall asleep or wake, by the table."""
        self.state = follow(POOL_TRANSITIONS, self.state, state, f"pool {self.name}")

    def need(self, slots: int) -> None:
        """Somebody waits for so many slots."""
        self.demand = max(self.demand, slots)

    def meet_demand(self) -> None:
        """Nobody waits for slots any more."""
        self.demand = 0

    def pause_stores(self) -> None:
        """A store failed or was refused."""
        self.stores_paused = True

    def resume_stores(self) -> None:
        """Demotion may start stores again."""
        self.stores_paused = False

    def orphan(self, slots: int) -> None:
        """So many FILLING slots have left the tree; below 0: so many of those are free now."""
        self.orphaned += slots

    def forget_unstored(self) -> None:
        """Nothing that it has waits any more to be copied to the host pool."""
        self.unstored.clear()
        self.failed_stores.clear()
        self.doubtful.clear()

    def note_unstored(self, run: Run, depth: int) -> int:
        """The host pool is to get the path ``[0, depth)``. Returns how many older paths were forgotten for it."""
        forgotten = int(len(self.unstored) == UNSTORED_MAX)
        self.unstored.append((run, depth))
        return forgotten
