"""What the model of offload mode knows: every byte of the host pool, who was handed which slots, what was promised."""

from __future__ import annotations

from collections import Counter

from kvcached.core.cache import Cache
from kvcached.core.index.host_tree import HOST
from kvcached.core.index.tree import PrefixTree
from kvcached.core.namespaces import NamespaceSpec
from kvcached.core.slots.states import SlotState
from kvcached_client.types import SessionId
from tests.core.model import BLOCK_SIZE
from tests.core.offload_books import Edition, HeldLease, Index, Job, OffloadAccounts, Player
from tests.core.slab_memory import SlabMemory

#: Namespaces that engines may declare: one more than there may be, with blocks of several sizes.
SPECS = [
    NamespaceSpec(bytes([number]) * 32, f"model {number}", BLOCK_SIZE, shards, per_slab)
    for number, (shards, per_slab) in enumerate([(2, 4), (2, 3), (1, 6), (2, 8)])
]


class OffloadWorld:
    """Engines in offload mode on a cache, the memory that they share, and what must be true of both.

    Attributes:
        done: what has happened, by name.
    """

    def __init__(self, cache: Cache, memory: SlabMemory) -> None:
        self.cache = cache
        self.core = cache.offload
        self.memory = memory
        self.players: dict[SessionId, Player] = {}
        self.editions: dict[PrefixTree, Edition] = {}
        self.cleared: set[Edition] = set()  #: never again a namespace's
        self.corrupt: set[tuple[Edition, int]] = set()  #: slots with bytes that were found corrupt
        self.symbols: dict[bytes, tuple[int, ...]] = {}  #: what a key stands for
        self.over: list[tuple[SessionId, Job]] = []  #: copies that have ended lately
        self.done: Counter[str] = Counter()
        self.accounts = OffloadAccounts(cache)

    def begin(self) -> None:
        """Look before a step."""
        self.accounts.begin(self._index())

    def check(self, *, alone: bool) -> None:
        """Look after it. `alone`: nobody else makes counters grow."""
        index = self._index()
        for (edition, key), (slot, state) in index.places.items():
            self._check_place(edition, key, slot, state)
        for player in self.players.values():
            for job in player.jobs.values():
                self._check_job(job)
            for lease in player.leases.values():
                self._check_lease(lease, index)
        self._check_quarantine()
        if alone:
            self.accounts.check(index)

    def _check_place(self, edition: Edition, key: bytes, slot: int, state: SlotState) -> None:
        """What the index has is there, on every shard, or about to be written by one copy."""
        writers = [
            job
            for player in self.players.values()
            for job in player.jobs.values()
            if job.is_store and not job.orphaned and job.edition == edition and (key, slot) in job.blocks
        ]
        assert (state is SlotState.FILLING) == bool(writers)
        if state is SlotState.CACHED:
            spec = self._spec(edition)
            contents = {self.memory.read(shard, spec.host_slots_per_slab, slot) for shard in range(spec.shards)}
            assert contents <= {(edition, key), ("rotten", slot)}, contents
            if (edition, slot) in self.corrupt and contents != {(edition, key)}:
                assert self._readers(edition, slot), "known as corrupt, read by nobody, and still in the index"

    def _check_job(self, job: Job) -> None:
        """A copy's slots have the bytes that it left there, or may read."""
        per_slab = job.spec.host_slots_per_slab
        for key, slot in job.blocks:
            for shard in range(job.spec.shards):
                content = self.memory.read(shard, per_slab, slot)
                if not job.is_store:
                    assert content in {(job.edition, key), ("rotten", slot)}, "a load of other bytes"
                elif shard in job.waiting:
                    assert content == ("job", job.transfer), "somebody else wrote where a store writes"

    def _check_lease(self, lease: HeldLease, index: Index) -> None:
        """What a lease was promised stays where it is, unless it proved corrupt."""
        for key, slot in zip(lease.chain, lease.slots, strict=False):
            place = index.places.get((lease.edition, key))
            assert place == (slot, SlotState.CACHED) or key in lease.lost, "evicted"

    def _check_quarantine(self) -> None:
        """Slots are set aside exactly for those who may still write them."""
        aside = sum(len(job.blocks) for player in self.players.values() for job in player.jobs.values() if job.orphaned)
        assert aside == sum(tree.members[HOST].counts[SlotState.QUARANTINED] for tree in self.core.namespaces.trees)

    def _readers(self, edition: Edition, slot: int) -> list[tuple[Job, int]]:
        """Loads under way that read a slot, and where in them."""
        return [
            (job, number)
            for player in self.players.values()
            for job in player.jobs.values()
            if not job.is_store and job.edition == edition
            for number, (_, other) in enumerate(job.blocks)
            if other == slot
        ]

    def _index(self) -> Index:
        for space in self.core.namespaces.by_root.values():
            edition = (space.spec.root, space.generation)
            known = self.editions.setdefault(space.tree, edition)
            assert known == edition
            assert edition not in self.cleared, "a generation is used twice"
        return Index(self.cache, self.editions)

    def _edition(self, player: Player) -> Edition:
        return player.spec.root, self.core.namespaces.by_root[player.spec.root].generation

    def _spec(self, edition: Edition) -> NamespaceSpec:
        return next(spec for spec in SPECS if spec.root == edition[0])
