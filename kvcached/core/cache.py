"""The cache: the door of the core, which owns its parts. Requests are direct calls, what arrives by itself is an event.

Engines on device pools speak to `managed`, engines in offload mode to `offload`; both kinds prefetch here, and what an
administrator asks for that concerns several parts is here, too. Nothing outside `kvcached.core` assigns to anything in
here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable

from kvcached.core.clearing import Clearings
from kvcached.core.eviction.eviction_log import EvictionLog
from kvcached.core.eviction.reuse import PENDING_BLOCKS, ReuseSample
from kvcached.core.generations import Generations
from kvcached.core.index import announcements
from kvcached.core.index.announcements import Announcements
from kvcached.core.index.run import KEY_SIZE
from kvcached.core.index.tree import PrefixTree
from kvcached.core.lease import ManagedLease
from kvcached.core.managed import Managed
from kvcached.core.managed_session import ManagedSession
from kvcached.core.messages import (
    Effect,
    Event,
    HeaderChange,
    MemberLost,
    MembersDied,
    PoolRestored,
    Ticked,
    WorkerDied,
)
from kvcached.core.namespaces import Namespaces, NamespaceSpec, PoolSpec, Trees
from kvcached.core.offload import Offload
from kvcached.core.pins import Pins
from kvcached.core.refusals import Why
from kvcached.core.removal import Removals
from kvcached.core.session import OffloadSession, Sessions
from kvcached.core.sleep import Sleeps
from kvcached.core.slots.announced import Announced
from kvcached.core.slots.host_slots import HostPool, HostQuota, SlabAllocator
from kvcached.core.slots.ranges import Ranges
from kvcached.core.slots.slots import DevicePool, SlotPool
from kvcached.core.slots.states import SessionState
from kvcached.core.transfers.prefix_locks import PrefixLocks
from kvcached.core.transfers.storage import StorageSpec, StorageTier
from kvcached.core.transfers.storage_copies import Candidates
from kvcached.core.transfers.storage_state import Chain, Prefetch
from kvcached.core.transfers.store_waits import longest_hit
from kvcached.core.transfers.table import TransferTable
from kvcached.core.transfers.transfer import WorkerTransfer
from kvcached.core.transfers.worker_copies import WorkerCopies
from kvcached_client.types import SessionId, TransferId, WritePolicy

#: A tick that comes later than this part of the TTL says that the daemon itself stood still. Ticks are at least three
#: times as frequent as the TTL, and heartbeats that arrived meanwhile have not been read yet.
LATE_TICK_DIVISOR = 2


class Cache:
    """Trees, pools, sessions and leases of one daemon.

    Attributes:
        epoch: of this daemon's start; pools begin theirs there.
        pools: of replicas, by name.
        managed: sessions on device pools, and what they ask for.
        offload: sessions of engines in offload mode, what they ask for, and their namespaces.
        worker_copies: copies between device pools and the host pool, which workers make.
        effects: what the world is asked to do; the service takes them after each call.
        index_changes: what routers are told, in order; empty where nobody tells them.
        header_changes: what is to be written beside the slots of device pools, in order, before any effect and reply.
        counters: totals since the start, by name.
        eviction_log: what left the trees lately.
        generations: of namespaces.
        clearings: namespaces of replicas that are being cleared.
        removals: removes prefixes that an operator names.
        sleeps: device pools that fall asleep and wake.
        policy_changes: how often a namespace got another write policy.
        storage: the tier below the host pool.
        pins: prefixes that people keep cached.
        slab_allocator: slabs of the host pool, and which namespace has them.
    """

    def __init__(
        self,
        pools: list[PoolSpec],
        *,
        epoch: int,
        session_ttl_ms: int,
        host_slabs: int = 0,
        namespaces_max: int = 0,
        host_eviction_policy: str = "lru",
        pin_quota_percent: int = 25,
        storage: StorageSpec | None = None,
        generations: Generations | None = None,
        host_quota: HostQuota | None = None,
        offload_write_policy: WritePolicy = WritePolicy.WRITE_THROUGH,
        announces: bool = False,
    ) -> None:
        self.epoch = epoch
        self.session_ttl_ms = session_ttl_ms
        self.effects: list[Effect] = []
        self.header_changes: list[HeaderChange] = []
        self.counters: Counter[str] = Counter()
        self.eviction_log = EvictionLog()
        self.generations = generations or Generations()
        self.policy_changes = 0
        self.pins = Pins(self.counters, pin_quota_percent)
        self._now_ms = 0
        self._last_session = 0
        sessions = Sessions[ManagedSession, ManagedLease](session_ttl_ms)
        self._table = table = TransferTable(sessions, self.effects, self.counters)
        self.worker_copies = WorkerCopies(table, self.pins)
        locks = PrefixLocks()
        waiting = Candidates(self.effects, self.counters)
        self.slab_allocator = allocator = SlabAllocator(
            host_slabs, self.effects, host_eviction_policy, host_quota, self.counters,
            self._make_room, self._evict_slabs,
        )  # fmt: skip
        announced = Announcements(is_wanted=announces)
        self.index_changes = announced.changes
        self._reuse = ReuseSample(host_slabs) if host_slabs else None
        trees = Trees(allocator, self.counters, self.eviction_log, waiting, announced, self._reuse)
        namespaces = Namespaces(trees, namespaces_max, locks, self.generations, self.pins, offload_write_policy)
        self.offload = Offload(namespaces, session_ttl_ms, table, locks)
        pool_trees = trees.of_pools(pools, epoch, self.header_changes)
        self.managed = Managed(sessions, table, self.worker_copies, locks, pool_trees)
        self.pools = self.managed.pools
        self.generations.spare(lambda: namespaces.in_use() | {tree.namespace for tree in pool_trees})
        generation_of = namespaces.generation_of
        self.storage = StorageTier(storage or StorageSpec(), table, generation_of, waiting, locks, lambda: self.trees)
        self.sleeps = Sleeps(sessions, self.worker_copies, self.managed.pools, self.managed.trees)
        self.clearings = Clearings(sessions, self.worker_copies, self.storage, self.managed.expire, locks)
        self.removals = Removals(namespaces, self.storage.prefetches, self.counters)

    def _make_room(self, taker: HostPool) -> bool:
        return self.offload.namespaces.make_room(taker)

    def _evict_slabs(self, host: HostPool, count: int) -> int:
        tree = next(tree for tree in self.trees if tree.host is host)
        return tree.evict_slabs(count, "a slab for another namespace")

    @property
    def version(self) -> int:
        """Grows with what a successor has to know: owners of slabs, namespaces, policies, sleeping pools, returns."""
        changes = self.policy_changes + self.sleeps.version + self.managed.version
        namespaces = self.offload.namespaces.version + self.clearings.version + changes
        return self.slab_allocator.version + namespaces

    @property
    def transfers(self) -> dict[TransferId, WorkerTransfer]:
        """Copies between tiers that have not ended."""
        return self._table.worker

    @property
    def trees(self) -> list[PrefixTree]:
        """Every tree once, those of offload engines last."""
        return [*dict.fromkeys(self.managed.trees.values()), *self.offload.namespaces.trees]

    def announced(self) -> list[Announced]:
        """What routers know of every namespace, pool by pool."""
        return [each for tree in self.trees for each in announcements.tiers(tree)]

    def announced_to(self, session: SessionId) -> Announced | None:
        """What routers know of the pool into which a session stores; None where nobody tells them, or it only loads."""
        managed, offload = self.managed.sessions.get(session), self.offload.sessions.get(session)
        if managed is not None:
            return managed.pool.announced
        host = None if offload is None or offload.read_only else offload.namespace.tree.host
        return None if host is None else host.announced

    def tree_of(self, replica: str) -> PrefixTree:
        """The index that a replica's pool is in."""
        return self.managed.trees[replica]

    # --- sessions ---------------------------------------------------------------------------------------------------

    def open_session(self, replica: str, now_ms: int, *, counted: bool = True) -> ManagedSession:
        """Give a replica's pool to a new session. One engine at a time is the service's business.

        What a session does that is not `counted` (a health check) is missing in the counters and in the estimates.

        Raises:
            Refusal: see `Managed.open`.
        """
        return self.managed.open(self._next_session_id(), replica, now_ms, counted=counted)

    def open_offload(self, spec: NamespaceSpec, now_ms: int, *, read_only: bool = False) -> OffloadSession:
        """A session of an engine in offload mode, which stores nothing if it is read-only.

        Raises:
            Refusal: see `Namespaces.enter`.
        """
        return self.offload.open(self._next_session_id(), spec, now_ms, read_only=read_only)

    def restore_session(self, replica: str) -> ManagedSession:
        """An engine from before a restart may write into all of a pool, which has outlived that: it is expired."""
        return self.managed.restore(self._next_session_id(), replica, self._now_ms)

    def restore_offload(self, root: bytes, slots: list[tuple[SlotPool, Ranges[int]]]) -> OffloadSession:
        """An engine from before a restart may write host slots, which are set aside: it is expired."""
        return self.offload.restore(self._next_session_id(), root, slots)

    def close_session(self, session_id: SessionId) -> None:
        """Its processes say that none of them will touch the pool again.

        That does not tell what became of work whose fence has not signalled: blocks committed under it are dropped.
        """
        offload, session = self.offload.sessions.get(session_id), self.managed.sessions.get(session_id)
        if offload is not None:
            self.offload.end(offload)
        elif session is not None:
            self.managed.end(session)

    def handle(self, event: Event) -> None:
        """Take in what arrived by itself. Events about what is gone already change nothing."""
        match event:
            case Ticked():
                self._on_ticked(event.now_ms)
            case MemberLost():
                self._on_member_lost(event.session)
            case MembersDied():
                self.close_session(event.session)
            case WorkerDied():
                self._on_worker_died(self.pools[event.pool])
            case PoolRestored():
                self.pools[event.pool].restore_workers()
            case _:
                self.storage.handle(event)
                self.offload.namespaces.drop_retired()

    def settle(self) -> None:
        """Decide what nobody waits for: what is stored, and what makes room. Call it after each request and event."""
        if self.eviction_log.size_bytes > self.eviction_log.bytes_max:
            self.eviction_log.trim()
        if self.clearings.under_way:
            self.clearings.advance()
        self.managed.settle()
        if self.sleeps.is_any_falling():
            self.sleeps.advance()
        if self.storage.is_active:
            self.storage.settle()
        if self._reuse is not None and self._reuse.pending_blocks >= PENDING_BLOCKS:
            self._reuse.look()

    # --- requests that are no part's alone --------------------------------------------------------------------------

    def prefetch(
        self, session_id: SessionId, epoch: int, keys: bytes, tokens: int, rate: float, *, full: bool, tenant: str = ""
    ) -> Prefetch:
        """Begin to bring a prompt's blocks into the host pool: from storage, and what other sessions are storing.

        Args:
            session_id: of the engine.
            epoch: of its pool; says nothing in offload mode.
            keys: of the prompt's full blocks.
            tokens: of the prompt.
            rate: tokens per second that the engine computes in its prefill; 0 = not known, and storage is used always.
            full: as in `acquire`.
            tenant: as in `acquire`.

        Raises:
            Refusal: stale, or keys and tokens contradict each other.
        """
        session: ManagedSession | OffloadSession
        own: Container[TransferId] = ()
        if session_id in self.offload.sessions:
            session = self.offload.sessions.active(session_id)
            limit = session.hit_limit(keys, tokens, full=full)
            depth, own = longest_hit(session.tree, keys, limit).depth, session.transfers
        else:
            session = self.managed.session_at(session_id, epoch)
            limit = session.hit_limit(keys, tokens, full=full)
            run, depth = session.tree.match(keys, limit, session.pool.index)
            depth = session.tree.match_host(run, depth, keys, limit)[1]
        stays = self.removals.stays_in_storage(session.tree, keys, limit)
        chain = Chain(session.tree, keys[: limit * KEY_SIZE], depth, stays, session.block_size, rate, tenant)
        return self.storage.prefetch(session_id, chain, own)

    def pause(self, replica: str = "") -> None:
        """Start no copies for a replica; for "" none at all, those of engines in offload mode included.

        Requests go on. A hit is what the device has; engines in offload mode are told to compute, and have nothing to
        store. What is under way goes on, too, and can be counted.
        """
        for pool in self._pools_of(replica):
            pool.pause()
        if not replica:
            self._table.pause()

    def resume(self, replica: str = "") -> None:
        """The end of `pause`, of a replica's or of all."""
        for pool in self._pools_of(replica):
            pool.resume()
        if not replica:
            self._table.resume()

    def is_paused(self, replica: str = "") -> bool:
        """Whether a pause of these holds: for "" of all, so that the end of one replica's is the end of it."""
        return all(pool.paused for pool in self._pools_of(replica)) and (bool(replica) or self._table.paused)

    def copies_under_way(self, replica: str = "") -> int:
        """Copies of a replica that have not ended; for "" all, those of engines in offload mode included."""
        pools = {id(pool) for pool in self._pools_of(replica)}
        transfers = sum(id(transfer.pool) in pools for transfer in self.transfers.values())
        return transfers + (0 if replica else len(self.offload.transfers) + len(self.storage.copies))

    def set_write_policy(self, tree: PrefixTree, policy: WritePolicy) -> None:
        """Copy blocks of a tree by another policy from now on.

        Copies under way go on, and what the host pool has stays. Blocks that waited to be copied do so no more, unless
        the new policy is write-through: they are treated as it treats what is committed already.
        """
        if policy is tree.write_policy:
            return
        tree.set_write_policy(policy)
        self.policy_changes += 1
        if policy is WritePolicy.WRITE_THROUGH:
            return
        for pool in tree.pools:
            pool.forget_unstored()
        for session in self.managed.sessions.values():
            if session.tree is tree:
                session.forget_unstored()

    # --- steps ------------------------------------------------------------------------------------------------------

    def _pools_of(self, replica: str) -> Iterable[DevicePool]:
        return (self.pools[replica],) if replica else self.pools.values()

    def _next_session_id(self) -> SessionId:
        self._last_session += 1
        return SessionId(self._last_session)

    def _on_member_lost(self, session_id: SessionId) -> None:
        offload, session = self.offload.sessions.get(session_id), self.managed.sessions.get(session_id)
        if offload is not None and offload.state is SessionState.ACTIVE:
            self.offload.lose_member(offload)
        elif session is not None and session.state is SessionState.ACTIVE:
            self.managed.expire(session, Why.SESSION_LOST_MEMBER)

    def _on_ticked(self, now_ms: int) -> None:
        """Expire sessions that went silent. A tick that comes late itself (a suspended machine) expires nobody."""
        late = bool(self._now_ms) and now_ms - self._now_ms > self.session_ttl_ms // LATE_TICK_DIVISOR
        self._now_ms = now_ms
        self.slab_allocator.tick(now_ms)
        self.storage.tick(now_ms)
        self.pins.tick(now_ms)
        self.sleeps.tick(now_ms)
        self.offload.on_ticked(now_ms, late=late)
        self.managed.on_ticked(now_ms, late=late)

    def _on_worker_died(self, pool: DevicePool) -> None:
        """Nothing is copied until there are other workers; the memory, and what is cached and held in it, stays."""
        pool.lose_workers()
        self.counters["workers_lost"] += 1
