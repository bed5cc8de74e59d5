"""A transfer: a copy of blocks of one path between two tiers. Its executor is whoever moves the bytes.

==============  ======================================  =========================================================
executor        it copies between                       what it may touch ends with
==============  ======================================  =========================================================
worker          a device pool and the host pool         the word of every shard's worker, or its death
engine          an engine's own memory, the host pool   the word of every shard's process, or the engine's death
storage         the host pool and storage               the word of the storage process, or its death
==============  ======================================  =========================================================
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcached.core.index.pieces import Piece
from kvcached.core.index.run import Run
from kvcached.core.index.tree import PrefixTree
from kvcached.core.lease import ManagedLease
from kvcached.core.messages import TransferKind
from kvcached.core.slots.ranges import Ranges, no_ranges
from kvcached.core.slots.slots import DevicePool
from kvcached.core.slots.states import TRANSFER_TRANSITIONS, TransferState, follow
from kvcached_client.types import ShardIndex, TransferId

#: A load forgets leases that were released after it has gathered so many more.
RELEASED_LEASES_MAX = 64


@dataclass(slots=True, eq=False)
class Transfer:
    """What every copy has, whoever makes it. Its path ``[0, end)`` is locked in the host pool until it ends.

    Attributes:
        id: never used twice, whoever the executor is.
        kind: store or load, seen from the tier above.
        tree: where.
        run: the deepest run of its path; `RunTree.resolve` finds where its blocks are after splits.
        pieces: blocks that it copies, shallow ones first; a load has one piece.
        host: their host slots. Those that it writes to are FILLING.
        state: see `TransferState`.
    """

    id: TransferId
    kind: TransferKind
    tree: PrefixTree
    run: Run
    pieces: list[Piece]
    host: Ranges[int]
    state: TransferState = field(default=TransferState.QUEUED, kw_only=True)

    def enter(self, state: TransferState) -> None:
        """Go along an edge of `TRANSFER_TRANSITIONS`."""
        self.state = follow(TRANSFER_TRANSITIONS, self.state, state, f"transfer {self.id}")

    @property
    def start(self) -> int:
        """Depth of its first block."""
        return self.pieces[0].start

    @property
    def end(self) -> int:
        """Depth behind its last block."""
        return self.pieces[-1].end

    @property
    def blocks(self) -> int:
        """How many it copies."""
        return sum(piece.end - piece.start for piece in self.pieces)


@dataclass(slots=True, eq=False)
class ShardTransfer(Transfer):
    """A copy that every shard of an engine makes its own part of.

    Attributes:
        waiting: shards that are not through with it.
        failure: what shards said that failed.
        corrupt: blocks of a load, counted from its first, whose stored bytes are bad.
    """

    waiting: set[ShardIndex] = field(default_factory=set, kw_only=True)
    failure: str = field(default="", kw_only=True)
    corrupt: set[int] = field(default_factory=set, kw_only=True)

    def fail(self, why: str) -> None:
        """It has failed, where `why` is not empty; the first reason counts."""
        self.failure = self.failure or why


@dataclass(slots=True, eq=False)
class EngineTransfer(ShardTransfer):
    """A copy between an engine's memory and host slots, made by the engine's own shard processes."""


@dataclass(slots=True, eq=False)
class WorkerTransfer(ShardTransfer):
    """A copy between a device pool and host slots, made by the pool's workers.

    Its path is locked in the device pool, too, but for a load that is orphaned.

    Attributes:
        pool: the device pool.
        device: the device slots. Those that it writes to are FILLING.
        after: stores that must end before a load can start.
        leases: those that a load was started for, or that joined it. Some may have been released since.
        progress: entry of the progress pages that a load reports to.
        urgent: somebody waits for it.
        was_started: shards were told of it.
        orphaned: a load before it on its path failed; its slots are in no tree, and free when it ends.
    """

    pool: DevicePool
    device: Ranges[int]
    after: set[TransferId] = field(default_factory=set)
    leases: list[ManagedLease] = field(default_factory=list)
    progress: int = 0
    urgent: bool = False
    orphaned: bool = False
    was_started: bool = False

    def order(self) -> None:
        """Every shard is told of it now."""
        self.enter(TransferState.RUNNING)
        self.was_started = True
        self.waiting = {ShardIndex(shard) for shard in range(self.pool.shards)}

    def hurry(self) -> None:
        """Somebody waits for it now."""
        self.urgent = True

    def wait_for(self, stores: set[TransferId]) -> None:
        """Of a load: it starts when these have ended."""
        self.after = stores

    def join(self, lease: ManagedLease) -> None:
        """Of a load: a lease waits for it, too. From time to time those that were released meanwhile are forgotten."""
        if len(self.leases) % RELEASED_LEASES_MAX == 0:
            self.leases = [each for each in self.leases if self.id in each.loads]
        self.leases.append(lease)
        lease.loads.add(self.id)

    def orphan(self, why: str) -> None:
        """Of a load: what it continues has left the tree, and so have its slots. Nobody waits for it any more."""
        self.orphaned = True
        self.pool.orphan(self.blocks)
        self.fail(why)
        for lease in self.leases:
            lease.loads.discard(self.id)

    def crosses(self, run: Run, depth: int) -> bool:
        """Whether the path ``[0, depth)`` to `run` shares the first block of this transfer."""
        return self.tree.passes(run, depth, self.run, self.start)


@dataclass(slots=True, eq=False)
class StorageTransfer(Transfer):
    """A copy between host slots and storage: a backup is its store, a fetch its load.

    The slots of a fetch are in no index, so that there is no path to lock: its run is the root.

    Attributes:
        namespace: whose blocks; the tree may have another namespace by the end.
        attempts: of a backup: how often it has been tried before.
        set_aside: of a backup: slots that have left the index while it reads them.
    """

    namespace: bytes
    attempts: int = 0
    set_aside: Ranges[int] = field(default_factory=no_ranges)

    @property
    def is_cleared(self) -> bool:
        """Whether its tree was cleared since it began: then it locks no path, and its slots are in no index."""
        return self.tree.namespace != self.namespace

    def depth_of(self, index: int) -> int:
        """Depth of one of its blocks, counted from 0."""
        for start, end in self.pieces:
            if index < end - start:
                return start + index
            index -= end - start
        raise IndexError(index)
