"""What engines in offload mode hold: namespaces that they declared, leases on prefixes in the host pool, copies.

Such an engine keeps its own device memory. It has no device pool here; the copies between its memory and host slots are
made by its own processes, so a host slot that they were given is theirs until they say that they are through, or are
dead.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcached.core.index.run import Run
from kvcached.core.index.tree import PrefixTree
from kvcached.core.lease import Asked
from kvcached.core.namespaces import Namespace
from kvcached.core.slots.ranges import Ranges
from kvcached.core.slots.slots import SlotPool
from kvcached.core.slots.states import SESSION_TRANSITIONS, SessionState, follow
from kvcached.core.transfers.transfer import EngineTransfer
from kvcached_client.types import LeaseId, SessionId, TransferId


@dataclass(slots=True, eq=False)
class OffloadLease:
    """A prefix in the host pool that one request counts on, or goes on storing behind.

    Attributes:
        id: never used twice.
        request: the engine's id of the request.
        asked: what the acquire asked for, to tell a retry from another request of the same name.
        tree, generation: of the namespace when it was acquired; the tree is a retired one after a clear.
        hit: depth that the engine was told.
        run: the deepest run it reaches; `RunTree.resolve` finds where it is after splits.
        depth: blocks ``[0, depth)`` of its chain are in the tree and locked. Some may be holes: copies that failed.
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
class OffloadSession:
    """What an engine group in offload mode holds.

    Attributes:
        id: never used twice, not by sessions on device pools either.
        namespace: where it works.
        state: see `SessionState`.
        last_heard_ms: time of the last heartbeat, or of its start.
        leases: what its requests hold, by id.
        requests: the same leases by the engine's request id.
        transfers: copies that its processes are not through with.
        quarantined: host slots that they could write when it expired, with the pool that they are of.
    """

    id: SessionId
    namespace: Namespace
    last_heard_ms: int
    state: SessionState = SessionState.ACTIVE
    leases: dict[LeaseId, OffloadLease] = field(default_factory=dict)
    requests: dict[str, OffloadLease] = field(default_factory=dict)
    transfers: dict[TransferId, EngineTransfer] = field(default_factory=dict)
    quarantined: list[tuple[SlotPool, Ranges[int]]] = field(default_factory=list)

    def enter(self, state: SessionState) -> None:
        """Go along an edge of the table.

        Raises:
            RuntimeError: there is no such edge: a bug of ours.
        """
        self.state = follow(SESSION_TRANSITIONS, self.state, state, f"session {self.id}")
