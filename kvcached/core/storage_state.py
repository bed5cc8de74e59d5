"""What the storage tier holds: copies between host pool and storage, prefetches, and paths that wait to be backed up.

Storage is a hint that expires, found by asking: it has no part in the index. A block that is fetched enters the index
when it is there and proven, so no request ever waits for storage unless it asked to.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from kvcached.core.effects import Effect, ForgetStored
from kvcached.core.ranges import Ranges, no_ranges
from kvcached.core.run import Run
from kvcached.core.tree import Piece, PrefixTree
from kvcached_client.types import TransferId

#: Paths that wait to be backed up. Storage that lags behind this far is skipped, and what it misses is counted.
PATHS_WAITING_MAX = 1024


class BackupPolicy(StrEnum):
    """Which host copies storage gets a copy of."""

    EVERY = "every"  #: all, as soon as the host copy is complete
    SECOND_SIGHTING = "second_sighting"  #: those that a later request has hit
    ON_EVICTION = "on_eviction"  #: those that are about to leave the host pool
    NEVER = "never"


class PrefetchState(StrEnum):
    """Where a prefetch is."""

    ASKING = "asking"  #: storage looks up which blocks it has
    FETCHING = "fetching"  #: copies are under way
    OVER = "over"  #: nothing is under way, and nothing will be


PREFETCH_TRANSITIONS: frozenset[tuple[PrefetchState, PrefetchState]] = frozenset(
    {
        (PrefetchState.ASKING, PrefetchState.FETCHING),  # enough of it is there
        (PrefetchState.ASKING, PrefetchState.OVER),  # too little is, or it is not worth it, or storage was lost
        (PrefetchState.FETCHING, PrefetchState.ASKING),  # all that was asked for has come: what comes behind it?
        (PrefetchState.FETCHING, PrefetchState.OVER),  # the last copy has ended
    }
)


class PrefetchEnd(StrEnum):
    """Why a prefetch is over."""

    FETCHED = "fetched"  #: all that storage had has come
    NOTHING = "nothing"  #: the host pool has everything, or storage nothing
    BELOW_THRESHOLD = "below_threshold"  #: fewer blocks than are worth a fetch
    RECOMPUTE = "recompute"  #: the engine is predicted to compute them sooner
    RATE_LIMITED = "rate_limited"  #: other prefetches have used up the bytes of this second
    NO_ROOM = "no_room"  #: the host pool had no slots for the rest
    STOPPED = "stopped"  #: whoever asked for it did not wait for the rest
    FAILED = "failed"  #: a block was not there after all, or was not what had been stored
    CLEARED = "cleared"  #: the namespace was cleared meanwhile
    UNAVAILABLE = "unavailable"  #: there is no storage, or none that works


@dataclass(slots=True, eq=False)
class StorageCopy:
    """A copy of blocks of one path that is under way.

    Attributes:
        tree, namespace: whose blocks; the tree may have another namespace by the end.
        pieces: which blocks; a fetch has one piece.
        slots: their host slots. Those of a fetch are FILLING and in no index.
        run: of a backup: the deepest run of its path, which is pinned in the host pool up to `end`.
        attempts: of a backup: how often it has been tried before.
        set_aside: of a backup: slots that have left the index while it reads them.
    """

    id: TransferId
    tree: PrefixTree
    namespace: bytes
    pieces: list[Piece]
    slots: Ranges[int]
    run: Run | None = None
    attempts: int = 0
    set_aside: Ranges[int] = field(default_factory=no_ranges)

    @property
    def start(self) -> int:
        """Depth of the first block."""
        return self.pieces[0].start

    @property
    def end(self) -> int:
        """Depth behind the last block."""
        return self.pieces[-1].end

    @property
    def blocks(self) -> int:
        """How many it copies."""
        return sum(end - start for start, end in self.pieces)

    def depth_of(self, index: int) -> int:
        """Depth of one of its blocks, counted from 0."""
        for start, end in self.pieces:
            if index < end - start:
                return start + index
            index -= end - start
        raise IndexError(index)


class Arrival(NamedTuple):
    """Blocks that have come, and wait for those before them."""

    slots: Ranges[int]
    good: int  #: leading ones that are what was stored


@dataclass(slots=True, eq=False)
class Prefetch:
    """Blocks of one chain on their way from storage into the host pool.

    Attributes:
        id: of the query too.
        tree, namespace, generation: where.
        keys: of the whole chain.
        limit: how many blocks of it are wanted.
        block_tokens: tokens per block.
        prefill_tokens_per_s: how fast the engine computes; 0 where it has not said.
        inserted: depth up to which blocks are in the index.
        next: depth of the next block to fetch.
        found: depth up to which storage says it has blocks.
        copies: under way.
        arrived: by depth of their first block.
        fetched: blocks that have entered the index through it.
        asked: how many blocks the present question is about.
        began_us, began_at: when the present fetch began, and with which block.
        stopping: no more copies are begun.
    """

    id: int
    tree: PrefixTree
    namespace: bytes
    generation: int
    keys: bytes
    limit: int
    block_tokens: int
    prefill_tokens_per_s: float
    inserted: int
    next: int
    found: int
    state: PrefetchState = PrefetchState.ASKING
    end: PrefetchEnd = PrefetchEnd.FETCHED
    copies: dict[TransferId, StorageCopy] = field(default_factory=dict)
    arrived: dict[int, Arrival] = field(default_factory=dict)
    fetched: int = 0
    asked: int = 0
    began_us: int = 0
    began_at: int = 0
    stopping: bool = False

    def enter(self, state: PrefetchState) -> None:
        """Go along an edge of the table.

        Raises:
            RuntimeError: there is no such edge: a bug of ours.
        """
        if (self.state, state) not in PREFETCH_TRANSITIONS:
            raise RuntimeError(f"prefetch {self.id} cannot go from {self.state} to {state}")
        self.state = state


class Candidate(NamedTuple):
    """A path whose host copies are to be backed up as far as they have not been."""

    tree: PrefixTree
    run: Run
    depth: int
    attempts: int = 0


class Candidates:
    """Paths that wait to be backed up.

    Attributes:
        policy: which paths come here at all.
        waiting: the oldest first.
    """

    def __init__(self, effects: list[Effect], counters: Counter[str]) -> None:
        self.policy = BackupPolicy.NEVER
        self.waiting: deque[Candidate] = deque()
        self._effects = effects
        self._counters = counters

    def stored(self, tree: PrefixTree, run: Run, depth: int) -> None:
        """The host copies of a path are complete up to a depth."""
        if self.policy is BackupPolicy.EVERY:
            self.add(Candidate(tree, run, depth))

    def sighted(self, tree: PrefixTree, run: Run, depth: int) -> None:
        """A request has hit a path."""
        if depth and self.policy is BackupPolicy.SECOND_SIGHTING:
            self.add(Candidate(tree, run, depth))

    def cleared(self, namespace: bytes, generation: int) -> None:
        """Nothing of this generation of a namespace will be asked for again."""
        self._effects.append(ForgetStored(namespace, generation))

    def skip_all(self) -> None:
        """Storage cannot be used: nothing of what waits will be written."""
        self._counters["backup_skipped_paths"] += len(self.waiting)
        self.waiting.clear()

    def add(self, candidate: Candidate) -> None:
        """Let it wait, unless too many do."""
        if len(self.waiting) < PATHS_WAITING_MAX:
            self.waiting.append(candidate)
        else:
            self._counters["backup_skipped_paths"] += 1
