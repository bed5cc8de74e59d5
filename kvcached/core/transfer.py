"""A copy between tiers: what it copies, who waits for it, and how far the shards are."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcached.core.effects import TransferKind
from kvcached.core.lease import Lease
from kvcached.core.pool import DevicePool
from kvcached.core.ranges import Ranges
from kvcached.core.run import Run
from kvcached.core.states import TRANSFER_TRANSITIONS, TransferState
from kvcached.core.tree import Piece, PrefixTree
from kvcached_client.types import ShardIndex, TransferId


@dataclass(slots=True, eq=False)
class Transfer:
    """One copy over all shards of a device pool.

    From its start to its end the path ``[0, end)`` of its blocks is pinned in the device pool and in the host pool, but
    for the device pin of a load that is orphaned, and for that of a transfer whose pool was lost.

    Attributes:
        id: never used twice.
        kind: store or load.
        tree, pool: where.
        epoch: of the pool at its start; the pool's slots are its business no more once that is over.
        run: the deepest run of its path; `RunTree.resolve` finds where its blocks are after splits.
        pieces: blocks that it copies, shallow ones first; a load has one piece.
        device, host: their slots. Those it writes to are FILLING.
        waiting: shards that are not through with it.
        failure: what shards said that failed.
        corrupt: blocks of a load, counted from 0, whose stored bytes are bad.
        after: stores that must end before a load can start.
        leases: those that a load was started for, or that joined it. Some may have been released since.
        progress: entry of the progress pages that a load reports to.
        urgent: somebody waits for it.
        was_started: shards were told of it.
        orphaned: a load before it on its path failed; its slots are in no tree, and free when it ends.
    """

    id: TransferId
    kind: TransferKind
    tree: PrefixTree
    pool: DevicePool
    epoch: int
    run: Run
    pieces: list[Piece]
    device: Ranges[int]
    host: Ranges[int]
    state: TransferState = TransferState.QUEUED
    waiting: set[ShardIndex] = field(default_factory=set)
    failure: str = ""
    corrupt: set[int] = field(default_factory=set)
    after: set[TransferId] = field(default_factory=set)
    leases: list[Lease] = field(default_factory=list)
    progress: int = 0
    urgent: bool = False
    orphaned: bool = False
    was_started: bool = False

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

    @property
    def is_current(self) -> bool:
        """Whether the pool's memory is still the one that it was started for."""
        return self.epoch == self.pool.epoch

    def enter(self, state: TransferState) -> None:
        """Go along an edge of the table.

        Raises:
            RuntimeError: there is no such edge: a bug of ours.
        """
        if (self.state, state) not in TRANSFER_TRANSITIONS:
            raise RuntimeError(f"transfer {self.id} cannot go from {self.state} to {state}")
        self.state = state

    def crosses(self, run: Run, depth: int) -> bool:
        """Whether the path ``[0, depth)`` to `run` shares the first block of this transfer."""
        if depth <= self.start:
            return False
        return self.tree.resolve(run, self.start + 1) is self.tree.resolve(self.run, self.start + 1)
