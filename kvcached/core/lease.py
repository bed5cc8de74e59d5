"""What one request of an engine holds, with a device pool or without one, and what a fence still holds after it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Final, NamedTuple

from kvcached.core.index.run import Run
from kvcached.core.index.tree import PrefixTree
from kvcached.core.messages import Grant
from kvcached.core.slots.ranges import Ranges, append, chained, cut, no_ranges
from kvcached_client.types import NO_FENCE, FenceSequence, LeaseId, TransferId

#: Instead of the id of a transfer that there is not.
NO_TRANSFER: Final = TransferId(0)


class Asked(NamedTuple):
    """The terms of an acquire. Keys are chained, so the last one stands for all."""

    tokens: int
    key_count: int
    last_key: bytes
    reserve: int
    full: bool
    load_from: int | None = None


@dataclass(slots=True, eq=False)
class Lease:
    """A locked prefix ``(run, depth)`` that one request counts on.

    Attributes:
        id: never used twice by leases of its kind.
        request: the engine's id of the request.
        asked: what the acquire asked for, to tell a retry from another request of the same name.
        hit: depth that the engine was told.
        run: the deepest run it reaches; `RunTree.resolve` finds where it is after splits.
        depth: blocks ``[0, depth)`` of its chain are in the tree and locked.
        priority: of the request: blocks that it uses are evicted after those of lower ones.
        tenant: whom the request is for; "" for nobody in particular.
    """

    id: LeaseId
    request: str
    asked: Asked
    hit: int
    run: Run
    depth: int
    priority: int = field(default=0, kw_only=True)
    tenant: str = field(default="", kw_only=True)

    def reach(self, run: Run, depth: int) -> None:
        """Its path is ``[0, depth)`` to `run` from now on; the lock is the caller's to move."""
        self.run, self.depth = run, depth

    @property
    def has_grown(self) -> bool:
        """Whether the engine has gone on behind its hit: an acquire of the same name is another request then."""
        raise NotImplementedError


@dataclass(slots=True, eq=False)
class ManagedLease(Lease):
    """A prefix in a device pool, and exclusive slots for what comes behind it.

    Its hit may still be loading. Where a load fails, `depth` falls behind `hit` until the engine has asked for slots in
    place of those of the missing blocks.

    Attributes:
        open: exclusive slots that may still be committed.
        scratch: exclusive slots of blocks that were in the tree already; the engine reads them until release.
        fence: the latest fence of its commits: until it has signalled, none of its slots is free of queued work.
        loads: transfers that part of the hit waits for.
        replacement: slots for blocks of the hit that could not be loaded.
        answer: what its acquire was answered, and is again; None for a lease from before a restart.
    """

    open: Ranges[int]
    scratch: Ranges[int] = field(default_factory=no_ranges)
    fence: FenceSequence = NO_FENCE
    loads: set[TransferId] = field(default_factory=set)
    replacement: Ranges[int] = field(default_factory=no_ranges)
    answer: Grant | None = None

    def committed(self, run: Run, depth: int, left: Ranges[int], scratch: Ranges[int]) -> None:
        """Blocks up to `depth` are in the tree; `left` are open still, and `scratch` the copies of what was there."""
        self.run, self.depth, self.open = run, depth, left
        append(self.scratch, scratch)

    def keep_scratch(self, slots: Ranges[int]) -> None:
        """Of its copies of blocks that are in the tree, only these are its own still."""
        self.scratch = slots

    def written_until(self, fence: FenceSequence) -> None:
        """Queued work may write its slots until this fence has signalled."""
        self.fence = max(self.fence, fence)

    def answered(self, grant: Grant) -> Grant:
        """Its acquire is answered, and is again when it is asked again."""
        self.answer = grant
        return grant

    def promise(self, hit: int) -> None:
        """Its hit is so many blocks."""
        self.hit = hit

    def replace_missing(self, slots: Ranges[int]) -> None:
        """The rest of its hit could not be loaded: the engine computes it into these slots."""
        self.hit, self.replacement = self.depth, slots
        self.open = chained(slots, self.open)

    def load_into(self, count: int) -> None:
        """A load has its first `count` open slots now."""
        self.open = cut(self.open, count)[1]

    @property
    def has_grown(self) -> bool:
        """Whether something was committed behind its hit."""
        return self.depth > self.hit


@dataclass(slots=True, eq=False)
class SharedCopy:
    """A slot that several declared leases read, of a block that the tree has in another slot.

    Attributes:
        leases: those that are not released.
        fence: the latest that a release of one of the others named.
    """

    leases: set[LeaseId]
    fence: FenceSequence = NO_FENCE


@dataclass(slots=True, eq=False)
class OffloadLease(Lease):
    """A prefix in the host pool, and what the request goes on storing behind it.

    Some of its blocks may be holes: copies that failed.

    Attributes:
        tree, generation: of the namespace when it was acquired; the tree is a retired one after a clear.
        passed: blocks behind those that were offered and, by the write policy, not taken in. Nothing behind them is.
        filling: blocks behind the hit that other sessions were storing when it was acquired.
        load: the load that its acquire has announced; 0 for none.
    """

    tree: PrefixTree
    generation: int
    passed: int = 0
    filling: int = 0
    load: TransferId = NO_TRANSFER

    def load_with(self, transfer: TransferId) -> None:
        """Its acquire announces this load, too."""
        self.load = transfer

    @property
    def reached(self) -> int:
        """Where its next offer starts."""
        return self.depth + self.passed

    def pass_over(self, blocks: int) -> None:
        """So many more blocks were offered and not taken in."""
        self.passed += blocks

    @property
    def has_grown(self) -> bool:
        """Whether something was offered behind its hit."""
        return self.reached > self.hit


@dataclass(slots=True)
class FenceHold:
    """What must stay as it is until the engine's queued work is over.

    Attributes:
        fence: it is over when the session has signalled this or a later one.
        run, depth: locked prefix.
        suspect: blocks from here to `depth` are good only once the fence has signalled; `depth` where all are.
        slots: released slots, FENCED until then.
        unstored: paths that the host pool is to get once the fence has signalled: depth by run.
    """

    fence: FenceSequence
    run: Run
    depth: int
    suspect: int
    slots: Ranges[int]
    unstored: dict[Run, int] = field(default_factory=dict)

    def reach(self, run: Run, depth: int) -> None:
        """Its path is ``[0, depth)`` to `run` from now on; the lock is the caller's to move."""
        self.run, self.depth = run, depth
        self.suspect = min(self.suspect, depth)


class FenceHolds:
    """What fences of a session still hold, in the order in which that was noted."""

    def __init__(self) -> None:
        self._holds: dict[int, FenceHold] = {}  #: by number
        self._by_fence: list[tuple[FenceSequence, int]] = []  #: a heap of fences and numbers
        self._last = 0

    def __len__(self) -> int:
        return len(self._holds)

    def __iter__(self) -> Iterator[FenceHold]:
        return iter(self._holds.values())

    def append(self, hold: FenceHold) -> None:
        """One more."""
        self._last += 1
        self._holds[self._last] = hold
        heappush(self._by_fence, (hold.fence, self._last))

    def take(self, fence: FenceSequence) -> list[FenceHold]:
        """Remove what this fence and earlier ones hold. O(log n) for each."""
        numbers: list[int] = []
        while self._by_fence and self._by_fence[0][0] <= fence:
            numbers.append(heappop(self._by_fence)[1])
        return [self._holds.pop(number) for number in sorted(numbers)]

    def clear(self) -> None:
        """Forget all."""
        self._holds.clear()
        self._by_fence.clear()
