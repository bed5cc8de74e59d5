"""What the model of offload mode believes: engines, their leases, their copies, and which blocks are stored where."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvcached.core.cache import Cache
from kvcached.core.index.host_tree import HOST
from kvcached.core.index.tree import PrefixTree
from kvcached.core.namespaces import NamespaceSpec
from kvcached.core.slots.states import SlotState
from kvcached_client.types import LeaseId, SessionId, TransferId
from tests.core.tier_world import solid_slots

#: A namespace and its generation.
Edition = tuple[bytes, int]
#: A block: its edition and its key.
Block = tuple[Edition, bytes]


@dataclass(eq=False)
class Job:
    """A copy that was handed to an engine's shards.

    Attributes:
        blocks: key and slot of each.
        waiting: shards that have not said that they are through.
        corrupt: blocks that are known to be bad.
        orphaned: its session has expired: nothing ends it but the death of the processes.
    """

    transfer: TransferId
    is_store: bool
    edition: Edition
    spec: NamespaceSpec
    blocks: list[tuple[bytes, int]]
    waiting: set[int]
    failed: bool = False
    corrupt: set[int] = field(default_factory=set)
    orphaned: bool = False
    is_called_off: bool = False


@dataclass(eq=False)
class HeldLease:
    """A lease as its engine sees it.

    Attributes:
        chain: keys of the prompt, and of what was generated.
        slots: where the hit's blocks were when it was acquired.
        lost: blocks of the hit that proved corrupt.
    """

    id: LeaseId
    request: str
    chain: list[bytes]
    asked: tuple[int, int, bool, int | None]
    edition: Edition
    slots: list[int]
    depth: int
    lost: set[bytes] = field(default_factory=set)

    @property
    def hit(self) -> int:
        return len(self.slots)


@dataclass(eq=False)
class Player:
    """An engine in offload mode."""

    id: SessionId
    spec: NamespaceSpec
    heard_ms: int
    expired: bool = False
    leases: dict[LeaseId, HeldLease] = field(default_factory=dict)
    jobs: dict[TransferId, Job] = field(default_factory=dict)


class Index:
    """What the trees of offload engines say, read run by run."""

    def __init__(self, cache: Cache, editions: dict[PrefixTree, Edition]) -> None:
        self.places: dict[Block, tuple[int, SlotState]] = {}
        for tree in cache.offload.namespaces.trees:
            host = tree.members[HOST]
            for run in tree.runs():
                for key, slot in solid_slots(run, HOST).items():
                    assert (editions[tree], key) not in self.places
                    self.places[editions[tree], key] = (slot, host.state_of(slot))

    @property
    def cached(self) -> set[Block]:
        """Blocks whose copy is complete."""
        return {block for block, (_, state) in self.places.items() if state is SlotState.CACHED}

    def expect_hit(self, edition: Edition, chain: list[bytes]) -> list[int]:
        """The slots of the leading blocks of a chain whose copies are complete."""
        slots: list[int] = []
        for key in chain:
            slot, state = self.places.get((edition, key), (0, SlotState.FREE))
            if state is not SlotState.CACHED:
                break
            slots.append(slot)
        return slots


class OffloadAccounts:
    """The books of one step: what the counters of the cache must say of it.

    Attributes:
        index: before the step.
        ended: blocks of stores that were written by every shard in this step.
        punched: blocks that were found corrupt, and that nobody reads any more.
        due: what counters must have grown by.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self.begin(Index(cache, {}))

    def begin(self, index: Index) -> None:
        """Before a step."""
        self.index = index
        self._before = Counter(self._cache.counters)
        self.ended: set[Block] = set()
        self.punched: set[Block] = set()
        self.due: Counter[str] = Counter()

    def grown(self) -> Counter[str]:
        """What the step has counted."""
        counters = self._cache.counters
        return Counter({name: counters[name] - self._before[name] for name in counters})

    def check(self, index: Index) -> None:
        """After a step of a cache that has offload engines only."""
        grown, before, after = self.grown(), self.index.cached, index.cached
        assert after - before <= self.ended
        assert grown["stored_blocks"] == len(self.ended)
        lost = grown["host_evicted_blocks"] + grown["host_dropped_blocks"] + len(self.punched)
        assert len(before) + len(self.ended) - lost == len(after)
        for name in (
            "store_failed_blocks",
            "store_refused_blocks",
            "loaded_blocks",
            "load_failed_blocks",
            "load_called_off_blocks",
            "host_hit_blocks",
            "missed_blocks",
            "acquires",
            "releases",
            "cleared_blocks",
            "sessions_opened",
            "sessions_ended",
            "sessions_expired",
        ):
            assert grown[name] == self.due[name], name
