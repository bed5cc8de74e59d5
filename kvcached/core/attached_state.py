"""What engines in attached mode hold: namespaces that they declared, leases on prefixes in the host pool, copies.

Such an engine keeps its own device memory. It has no device pool here; the copies between its memory and host slots are
made by its own processes, so a host slot that they were given is theirs until they say that they are through, or are
dead.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcached.core.effects import TransferKind
from kvcached.core.host_pool import HostPool
from kvcached.core.lease import Asked
from kvcached.core.pool import SlotPool
from kvcached.core.ranges import Ranges
from kvcached.core.run import Run
from kvcached.core.states import SESSION_TRANSITIONS, TRANSFER_TRANSITIONS, SessionState, TransferState
from kvcached.core.tree import Piece, PrefixTree
from kvcached_client.types import LeaseId, SessionId, ShardIndex, TransferId


@dataclass(frozen=True, slots=True)
class SpaceSpec:
    """A namespace as an engine declares it.

    Attributes:
        root: 32 bytes; engines that give the same share their prefixes.
        label: what people call it.
        host_slots_per_slab: its blocks, with all their shards, in a slab of the host pool.
    """

    root: bytes
    label: str
    block_size: int
    shards: int
    host_slots_per_slab: int


@dataclass(slots=True, eq=False)
class Space:
    """A namespace, whose tree is in the host pool only.

    Attributes:
        spec: as it was declared.
        host: its host slots.
        tree: of the present generation.
        generation: grows when the namespace is cleared.
    """

    spec: SpaceSpec
    host: HostPool
    tree: PrefixTree
    generation: int = 0


@dataclass(slots=True, eq=False)
class AttachedLease:
    """A prefix in the host pool that one request counts on, or goes on storing behind.

    Attributes:
        id: never used twice.
        request: the engine's id of the request.
        asked: what the acquire asked for, to tell a retry from another request of the same name.
        tree, generation: of the namespace when it was acquired; the tree is a retired one after a clear.
        hit: depth that the engine was told.
        run: the deepest run it reaches; `RunTree.resolve` finds where it is after splits.
        depth: blocks ``[0, depth)`` of its chain are in the tree and pinned. Some may be holes: copies that failed.
        priority: of the request: blocks that it uses are evicted after those of lower ones.
        passed: blocks behind those that were offered and, by the write policy, not taken in. Nothing behind them is.
    """

    id: LeaseId
    request: str
    asked: Asked
    tree: PrefixTree
    generation: int
    hit: int
    run: Run
    depth: int
    passed: int = 0
    priority: int = 0

    @property
    def reached(self) -> int:
        """Where its next offer starts."""
        return self.depth + self.passed


@dataclass(slots=True, eq=False)
class Exchange:
    """A copy between an engine's memory and host slots, made by the engine's own shard processes.

    The path of its blocks is pinned in the host pool until it ends.

    Attributes:
        id: never used twice, not by copies of workers either.
        kind: store or load, seen from the engine.
        tree: where.
        run: the deepest run of its path.
        pieces: blocks that it copies, shallow ones first; a load has one piece.
        host: their slots. Those of a store are FILLING.
        waiting: shards that are not through with it.
        failure: what shards said that failed.
        corrupt: blocks of a load, counted from its first, whose stored bytes are bad.
    """

    id: TransferId
    kind: TransferKind
    tree: PrefixTree
    run: Run
    pieces: list[Piece]
    host: Ranges[int]
    waiting: set[ShardIndex]
    state: TransferState = TransferState.QUEUED
    failure: str = ""
    corrupt: set[int] = field(default_factory=set)

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

    def enter(self, state: TransferState) -> None:
        """Go along an edge of the table.

        Raises:
            RuntimeError: there is no such edge: a bug of ours.
        """
        if (self.state, state) not in TRANSFER_TRANSITIONS:
            raise RuntimeError(f"transfer {self.id} cannot go from {self.state} to {state}")
        self.state = state


@dataclass(slots=True, eq=False)
class AttachedSession:
    """What an engine group in attached mode holds.

    Attributes:
        id: never used twice, not by sessions on device pools either.
        space: where it works.
        state: see `SessionState`.
        last_heard_ms: time of the last heartbeat, or of its start.
        leases: what its requests hold, by id.
        requests: the same leases by the engine's request id.
        exchanges: copies that its processes are not through with.
        quarantined: host slots that they could write when it expired, with the pool that they are of.
    """

    id: SessionId
    space: Space
    last_heard_ms: int
    state: SessionState = SessionState.ACTIVE
    leases: dict[LeaseId, AttachedLease] = field(default_factory=dict)
    requests: dict[str, AttachedLease] = field(default_factory=dict)
    exchanges: dict[TransferId, Exchange] = field(default_factory=dict)
    quarantined: list[tuple[SlotPool, Ranges[int]]] = field(default_factory=list)

    def enter(self, state: SessionState) -> None:
        """Go along an edge of the table.

        Raises:
            RuntimeError: there is no such edge: a bug of ours.
        """
        if (self.state, state) not in SESSION_TRANSITIONS:
            raise RuntimeError(f"session {self.id} cannot go from {self.state} to {state}")
        self.state = state
