"""What the storage tier holds: copies between host pool and storage, prefetches, and paths that wait to be backed up.

Storage is a hint that expires, found by asking: it has no part in the index. A block that is fetched enters the index
when it is there and proven, so no request ever waits for storage unless it asked to.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from kvcached.core.index.run import KEY_SIZE, Run
from kvcached.core.index.tree import PrefixTree
from kvcached.core.slots.ranges import Ranges
from kvcached.core.slots.states import PREFETCH_TRANSITIONS, PrefetchState, follow
from kvcached.core.transfers.store_waits import NO_STORE
from kvcached.core.transfers.transfer import StorageTransfer
from kvcached_client.types import TransferId


class PrefetchEnd(StrEnum):
    """Why a prefetch is over."""

    FETCHED = "fetched"  #: all that storage had has come
    STORED = "stored"  #: a store of somebody else that it waited for has ended, and storage was not asked for more
    NOTHING = "nothing"  #: the host pool has everything, or storage nothing
    BELOW_THRESHOLD = "below_threshold"  #: fewer blocks than are worth a fetch
    RECOMPUTE = "recompute"  #: the engine is predicted to compute them sooner
    RATE_LIMITED = "rate_limited"  #: other prefetches have used up the bytes of this second
    TOO_MANY = "too_many"  #: so many prefetches are under way, or wait for stores, that there is no place for another
    NO_ROOM = "no_room"  #: the host pool had no slots for the rest
    STOPPED = "stopped"  #: whoever asked for it did not wait for the rest
    FAILED = "failed"  #: a block was not there after all, was not what was stored, or its store failed or hangs
    CLEARED = "cleared"  #: the namespace was cleared meanwhile
    UNAVAILABLE = "unavailable"  #: there is no storage, or none that works


class Chain(NamedTuple):
    """Blocks ``[start, limit)`` of a prompt, which an engine wants to have in the host pool.

    Attributes:
        tree: where.
        keys: of the first `limit` blocks.
        start: how many of them the engine finds already.
        stored_limit: of how many of the first ones storage may be asked; the others come from stores alone.
        block_tokens: tokens per block.
        prefill_tokens_per_s: how fast the engine computes; 0 where it has not said.
        tenant: whom the request is for; "" for nobody in particular.
    """

    tree: PrefixTree
    keys: bytes
    start: int
    stored_limit: int
    block_tokens: int
    prefill_tokens_per_s: float
    tenant: str = ""

    @property
    def limit(self) -> int:
        """How many blocks it has."""
        return len(self.keys) // KEY_SIZE

    def known(self, limit: int) -> tuple[Run, int]:
        """How far the index knows its first `limit` blocks: what some device pool holds, then what the host pool."""
        run, depth = self.tree.root, 0
        for pool in self.tree.pools:
            found, reach = self.tree.match(self.keys, limit, pool.index)
            if reach > depth:
                run, depth = found, reach
        return self.tree.match_host(run, depth, self.keys, limit)


class Arrival(NamedTuple):
    """Blocks that have come, and wait for those before them."""

    slots: Ranges[int]
    good: int  #: leading ones that are what was stored


@dataclass(slots=True, eq=False)
class Prefetch:
    """Blocks of one chain on their way from storage into the host pool.

    Attributes:
        id: of the query too.
        chain: whose blocks it brings.
        namespace, generation: of the chain's tree when it began.
        inserted: depth up to which blocks are in the index.
        next: depth of the next block to fetch.
        found: depth up to which storage says it has blocks.
        admitted: depth up to which its blocks may be fetched.
        state: see `PrefetchState`.
        copies: under way.
        arrived: by depth of their first block.
        fetched: blocks that have entered the index through it.
        asked: how many blocks the present question is about.
        began_us, began_at: when the present fetch began, and with which block.
        stopping: no more copies are begun.
        tenant: whose its blocks are, as far as that is known.
        own: stores of the session that asked, for which it does not wait.
        store: the store that it waits for.
        filling: blocks behind the hit that stores are writing.
        wait_until_ms: when it has waited long enough for that store.
    """

    id: int
    chain: Chain
    namespace: bytes
    generation: int
    inserted: int = field(init=False)
    next: int = field(init=False)
    found: int = field(init=False)
    admitted: int = field(default=0, init=False)
    state: PrefetchState = field(default=PrefetchState.WAITING, kw_only=True)
    end: PrefetchEnd = PrefetchEnd.FETCHED
    copies: dict[TransferId, StorageTransfer] = field(default_factory=dict)
    arrived: dict[int, Arrival] = field(default_factory=dict)
    fetched: int = 0
    asked: int = 0
    began_us: int = 0
    began_at: int = 0
    stopping: bool = False
    tenant: str = field(init=False)
    own: Container[TransferId] = field(default=(), kw_only=True)
    store: TransferId = field(default=NO_STORE, init=False)
    filling: int = field(default=0, init=False)
    wait_until_ms: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.inserted = self.next = self.found = self.chain.start
        self.tenant = self.chain.tenant

    def enter(self, state: PrefetchState) -> None:
        """Go along an edge of `PREFETCH_TRANSITIONS`."""
        self.state = follow(PREFETCH_TRANSITIONS, self.state, state, f"prefetch {self.id}")

    @property
    def not_begun(self) -> int:
        """How many blocks it may still fetch, or might have fetched."""
        return max(self.admitted - self.next, 0)

    def wait_for(self, store: TransferId, filling: int, until_ms: int) -> None:
        """Its next block comes with a store; stores are writing so many blocks. It waits no longer than until then."""
        self.store, self.filling, self.wait_until_ms = store, filling, until_ms

    def reach(self, depth: int) -> None:
        """So much of the chain is there, before storage is asked for the rest."""
        self.inserted = self.next = self.found = depth

    def ask(self, blocks: int) -> bytes:
        """The keys of its next blocks, at most so many, which storage is asked about."""
        self.asked = min(self.chain.stored_limit - self.next, blocks)
        return self.chain.keys[self.next * KEY_SIZE : (self.next + self.asked) * KEY_SIZE]

    def answered(self, found: int, now_us: int) -> None:
        """Storage has the first `found` of the blocks that it was asked about."""
        self.found = self.next + max(found, 0)
        self.began_us, self.began_at = now_us, self.next

    def continue_for(self, tenant: str) -> None:
        """The blocks that it continues are a tenant's, and so will be those that it brings; "": nobody's yet."""
        self.tenant = tenant or self.chain.tenant

    def admit(self) -> None:
        """What storage has of it may be fetched."""
        self.admitted = self.found

    def fetch(self, copy: StorageTransfer) -> None:
        """A copy of its next blocks is under way."""
        self.next += copy.blocks
        self.copies[copy.id] = copy

    def arrive(self, copy: StorageTransfer, good: int) -> None:
        """A copy has ended; its first `good` blocks are what had been stored, and nothing behind them is fetched."""
        self.arrived[copy.start] = Arrival(copy.host, good)
        if good < copy.blocks:
            self.found = min(self.found, copy.start + good)

    def insert(self, blocks: int, new: int) -> None:
        """So many more blocks are in the index, so many of them through it."""
        self.inserted += blocks
        self.fetched += new

    def stop(self) -> None:
        """Begin no more copies."""
        self.stopping = True

    def void(self) -> None:
        """Its namespace was cleared: nothing that it brings is of use."""
        self.stopping, self.found = True, self.inserted

    def over(self, end: PrefetchEnd) -> None:
        """Nothing is under way, and nothing will be."""
        self.enter(PrefetchState.OVER)
        self.end = end
