"""The engines of the model of the tiers: what they hold, and how they come and go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvcached.core.cache import Cache
from kvcached.core.messages import ClearingEnded, Grant, MemberLost, MembersDied, PoolRestored, Ticked, WorkerDied
from kvcached.core.namespaces import PoolSpec
from kvcached.core.refusals import Refusal
from kvcached.core.slots.states import SlotState
from kvcached_client.errors import ErrorCode
from kvcached_client.types import FenceSequence, LeaseId, SessionId
from tests.core.history import Choose, History
from tests.core.model import BLOCK_SIZE, TENANT_QUOTA, chain_keys
from tests.core.tier_accounts import Accounts
from tests.core.tier_world import NAMESPACES, SHARDS, World


@dataclass
class HeldLease:
    """What the model believes one request holds."""

    id: LeaseId
    request: str
    chain: list[bytes]
    asked: tuple[int, int, bool]
    hit: int
    ready: int
    depth: int
    table: list[int]  #: slots of the blocks that it reads
    open: list[int]
    loading: bool
    scratch: list[int] = field(default_factory=list)
    fence: int = 0
    grant: Grant | None = None


@dataclass
class HeldSession:
    """What the model believes one engine holds."""

    id: SessionId
    pool: str
    epoch: int
    expired: bool = False
    fence: int = 0
    next_fence: int = 1
    leases: dict[LeaseId, HeldLease] = field(default_factory=dict)
    unwritten: list[tuple[int, list[int]]] = field(default_factory=list)  #: (fence, slots of blocks it is queued for)


class TierSessions(History):
    """Engines on two pools of one namespace and one of another, which share a small host pool.

    Args:
        namespaces_max: how many namespaces others may declare, for each of which there is a slab more.
    """

    def __init__(self, choose: Choose, *, namespaces_max: int = 0) -> None:
        super().__init__(choose)
        slots, per_slab = (10, 16, 24)[choose(3)], (4, 12, 24)[choose(3)]
        watermark, threshold, quota = (0, 2, 4)[choose(3)], (1, 1, 2)[choose(3)], (None, 3)[choose(2)]
        self.cache = Cache(
            [
                PoolSpec(name, space, BLOCK_SIZE, slots, SHARDS, per_slab, watermark, threshold, quota)
                for name, space in NAMESPACES.items()
            ],
            epoch=7,
            session_ttl_ms=1000,
            host_slabs=2 + choose(2) + namespaces_max,
            namespaces_max=namespaces_max,
            announces=True,
            host_quota=TENANT_QUOTA,
        )
        self.world = World(self.cache, per_slab)
        self.accounts = Accounts(self.cache, self.world)
        self.sessions: dict[SessionId, HeldSession] = {}

    # --- choices ----------------------------------------------------------------------------------------------------

    def pick_session(self) -> HeldSession | None:
        active = [session for session in self.sessions.values() if not session.expired]
        return active[self.choose(len(active))] if active else None

    def pick_lease(self, *, loading: bool | None = None) -> tuple[HeldSession, HeldLease] | None:
        """A lease of an active session; one that loads, or one that does not, where that is asked for."""
        held = [
            (session, lease)
            for session in self.sessions.values()
            for lease in session.leases.values()
            if not session.expired and loading in {None, lease.loading}
        ]
        return held[self.choose(len(held))] if held else None

    def some_chain(self) -> list[bytes]:
        """Long enough to need room, alike enough to be shared."""
        symbols = [int(not self.choose(6)) for _ in range(self.choose(9))]
        keys = chain_keys((*symbols, self.choose(3)))
        self.world.parents.update(zip(keys, [b"", *keys], strict=False))
        return keys

    # --- sessions ---------------------------------------------------------------------------------------------------

    def open_session(self) -> None:
        name = "abc"[self.choose(3)]
        if any(session.pool == name for session in self.sessions.values()):
            return
        try:
            session = self.cache.open_session(name, 0)
        except Refusal as error:
            pool = self.cache.pools[name]
            assert pool.clearing
            assert error.code is ErrorCode.CLEARING
            return
        self.sessions[session.id] = HeldSession(session.id, name, session.pool.epoch)

    def pick_any_session(self) -> HeldSession | None:
        return list(self.sessions.values())[self.choose(len(self.sessions))] if self.sessions else None

    def leave(self) -> None:
        if (session := self.pick_any_session()) is not None:
            self.gone(session, self.cache.close_session)

    def die(self) -> None:
        if (session := self.pick_any_session()) is not None:
            self.gone(session, lambda session_id: self.cache.handle(MembersDied(session_id)))

    def lose_member(self) -> None:
        if (session := self.pick_any_session()) is not None:
            self.accounts.stripping(session.pool)
            self.cache.handle(MemberLost(session.id))
            session.expired = True
            session.leases.clear()

    def gone(self, session: HeldSession, tell: Callable[[SessionId], None]) -> None:
        """What it had queued and not written never will be: those slots contain anything."""
        self.accounts.stripping(session.pool)
        for _, slots in session.unwritten:
            self.world.write(session.pool, slots, b"junk")
        tell(session.id)
        del self.sessions[session.id]

    def signal(self) -> None:
        if (session := self.pick_session()) is not None:
            fence = self.choose(session.next_fence)
            self.written(session, fence)
            self.cache.managed.heartbeat(session.id, FenceSequence(fence), 0)

    def written(self, session: HeldSession, fence: int) -> None:
        session.fence = max(session.fence, fence)
        for slots in (slots for queued, slots in session.unwritten if queued <= session.fence):
            self.world.unwritten[session.pool].difference_update(slots)
        session.unwritten = [each for each in session.unwritten if each[0] > session.fence]

    def lose_worker(self) -> None:
        name = "abc"[self.choose(3)]
        pool = self.cache.pools[name]
        cached = pool.counts[SlotState.CACHED]
        self.world.lose(name)
        self.cache.handle(WorkerDied(name))
        assert pool.counts[SlotState.CACHED] == cached

    def restore(self) -> None:
        name = "abc"[self.choose(3)]
        if any(copy.lost and copy.order.pool == name for copy in self.world.copies.values()):
            return
        self.cache.handle(PoolRestored(name))

    # --- what people ask for ----------------------------------------------------------------------------------------

    def pause(self) -> None:
        self.cache.pause(("", "a", "c")[self.choose(3)])

    def resume(self) -> None:
        self.cache.resume()

    def clear(self) -> None:
        """All sessions of a namespace are over, at once; its blocks when its copies have ended."""
        tree = self.cache.tree_of("ac"[self.choose(2)])
        if tree.pools[0].clearing:
            return
        names = {pool.name for pool in tree.pools}
        for name in names:
            self.accounts.stripping(name)
            self.accounts.clearing(name)  # loads that wait for others fail, and with them what continues them
        self.cache.clearings.begin(tree, b"anew")
        for session in self.sessions.values():
            if session.pool in names:
                session.expired = True
                session.leases.clear()

    def settle(self) -> None:
        """What the cache decides by itself."""
        for name, pool in self.cache.pools.items():
            if pool.clearing:
                self.accounts.clearing(name)
        self.cache.settle()
        for effect in self.cache.effects:
            if isinstance(effect, ClearingEnded):
                for name in effect.pools:
                    assert self.cache.tree_of(name).run_count == 0
                    assert self.cache.pools[name].counts[SlotState.CACHED] == 0
        for name, pool in self.cache.pools.items():
            tree = self.cache.tree_of(name)
            assert not pool.clearing or any(each.tree is tree for each in self.cache.transfers.values())

    def tick(self) -> None:
        self.cache.handle(Ticked(1))  # nobody's time runs out here: `tests.core.model` has that
