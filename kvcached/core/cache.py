"""The cache: the one place that decides. Requests are direct calls, what arrives by itself is an event.

Nothing outside `kvcached.core` assigns to anything in here. A call either has its whole effect or none: it checks, then
takes in an order in which what was taken can be given back, then records.
"""

from __future__ import annotations

from collections import Counter

from kvcached.core.allocate_slots import replace_missing, take_slots
from kvcached.core.checks import Checks
from kvcached.core.clearing import Clearings
from kvcached.core.eviction.eviction_log import EvictionLog
from kvcached.core.eviction.slab_eviction import evict_slabs
from kvcached.core.generations import Generations
from kvcached.core.index.run import KEY_SIZE
from kvcached.core.index.tree import PrefixTree
from kvcached.core.lease import Asked, FenceHold, ManagedLease
from kvcached.core.messages import (
    Commitment,
    Effect,
    Event,
    Grant,
    Loaded,
    MemberLost,
    MembersDied,
    PoolRestored,
    SessionEnded,
    SessionExpired,
    ShardSettled,
    Ticked,
    WorkerDied,
)
from kvcached.core.namespaces import NamespaceSpec, PoolSpec, build_trees
from kvcached.core.offload import Offload
from kvcached.core.pins import Pins
from kvcached.core.refusals import Refusal, Why
from kvcached.core.session import ManagedSession, OffloadSession
from kvcached.core.slots.host_slots import HostPool, HostQuota, SlabAllocator
from kvcached.core.slots.ranges import Ranges, append, chained, cut, no_ranges, slot_count
from kvcached.core.slots.slots import DevicePool, SlotPool
from kvcached.core.slots.states import SessionState, SlotState
from kvcached.core.transfers.prefix_locks import PrefixLocks
from kvcached.core.transfers.storage import StorageSpec, StorageTier
from kvcached.core.transfers.storage_copies import Candidates
from kvcached.core.transfers.table import TransferTable
from kvcached.core.transfers.transfer import WorkerTransfer
from kvcached.core.transfers.worker_copies import WorkerCopies
from kvcached_client.types import FenceSequence, LeaseId, SessionId, TransferId, WritePolicy

#: A scheduler runs hundreds of requests at once and queues thousands; beyond that something does not release.
LEASES_PER_SESSION_MAX = 16_384
#: A tick that comes later than this part of the TTL says that the daemon itself stood still. Ticks are at least three
#: times as frequent as the TTL, and heartbeats that arrived meanwhile have not been read yet.
LATE_TICK_DIVISOR = 2


class Cache:
    """Trees, pools, sessions and leases of one daemon.

    Attributes:
        epoch: of this daemon's start; pools begin theirs there.
        pools: by replica name.
        sessions: active and expired ones on device pools.
        offload: sessions of engines in offload mode, and their namespaces.
        effects: what the world is asked to do; the service takes them after each call.
        counters: totals since the start, by name.
        eviction_log: what left the trees lately.
        generations: of namespaces.
        clearings: namespaces of replicas that are being cleared.
        policy_changes: how often a namespace got another write policy.
        storage: the tier below the host pool.
        pins: prefixes that people keep cached.
        slab_allocator: slabs of the host pool, and which namespace has them.
        checks: what requests must satisfy.
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
    ) -> None:
        self.epoch = epoch
        self.session_ttl_ms = session_ttl_ms
        self.pools: dict[str, DevicePool] = {}
        self.sessions: dict[SessionId, ManagedSession] = {}
        self.effects: list[Effect] = []
        self.counters: Counter[str] = Counter()
        self.eviction_log = EvictionLog()
        self.generations = generations or Generations()
        self.policy_changes = 0
        self.pins = Pins(self.counters, pin_quota_percent)
        self._trees: dict[str, PrefixTree] = {}
        self.checks = Checks(self.sessions, {spec.name: spec.block_size for spec in pools}, session_ttl_ms)
        self._now_ms = 0
        self._next_session = 1
        self._last_lease = 0
        self._table = table = TransferTable(self.sessions, self.effects, self.counters)
        self._worker_copies = WorkerCopies(table, self.pins)
        self._locks = locks = PrefixLocks()
        waiting = Candidates(self.effects, self.counters)
        self.slab_allocator = allocator = SlabAllocator(
            host_slabs, self.effects, host_eviction_policy, host_quota, self.counters,
            self._make_room, self._evict_slabs,
        )  # fmt: skip
        self.offload = Offload(
            allocator, namespaces_max, session_ttl_ms, table, self.eviction_log, locks, self.generations, self.pins,
            waiting, offload_write_policy,
        )  # fmt: skip
        generation_of = self.offload.namespaces.generation_of
        self.storage = StorageTier(storage or StorageSpec(), table, generation_of, waiting, locks)
        self.clearings = Clearings(self.sessions, self._worker_copies, self.storage, self._expire, locks)
        for tree in build_trees(pools, allocator, epoch, self.counters, self.eviction_log, waiting):
            self.pools.update({pool.name: pool for pool in tree.pools})
            self._trees.update({pool.name: tree for pool in tree.pools})
        #: pools above a host pool, with their trees
        self._stored = [(tree, pool) for tree in self.trees for pool in tree.pools if tree.host is not None]

    def _make_room(self, taker: HostPool) -> bool:
        return self.offload.namespaces.make_room(taker)

    def _evict_slabs(self, host: HostPool, count: int) -> int:
        tree = next(tree for tree in self.trees if tree.host is host)
        return evict_slabs(tree, host, count, "a slab for another namespace")

    @property
    def version(self) -> int:
        """Grows with what a successor has to know of this cache: who has which slab, namespaces, their policies."""
        namespaces = self.offload.namespaces.version + self.clearings.version + self.policy_changes
        return self.slab_allocator.version + namespaces

    @property
    def transfers(self) -> dict[TransferId, WorkerTransfer]:
        """Copies between tiers that have not ended."""
        return self._table.worker

    @property
    def trees(self) -> list[PrefixTree]:
        """Every tree once, those of offload engines last."""
        return [*dict.fromkeys(self._trees.values()), *self.offload.namespaces.trees]

    def tree_of(self, replica: str) -> PrefixTree:
        """The index that a replica's pool is in."""
        return self._trees[replica]

    # --- sessions ---------------------------------------------------------------------------------------------------

    def open_session(self, replica: str, now_ms: int, *, counted: bool = True) -> ManagedSession:
        """Give a replica's pool to a new session. One engine at a time is the service's business.

        What a session does that is not `counted` (a health check) is missing in the counters.
        """
        pool = self.pools[replica]
        if pool.clearing:
            raise Refusal(Why.CLEARING, replica=replica)
        session = ManagedSession(SessionId(self._next_session), now_ms, self._trees[replica], pool)
        if counted:
            session.count_in(self.counters)
        self._next_session += 1
        self.sessions[session.id] = session
        session.counters["sessions_opened"] += 1
        return session

    def open_offload(self, spec: NamespaceSpec, now_ms: int) -> OffloadSession:
        """A session of an engine in offload mode.

        Raises:
            Refusal: see `Namespaces.enter`.
        """
        session = self.offload.open(SessionId(self._next_session), spec, now_ms)
        self._next_session += 1
        return session

    def restore_session(self, replica: str) -> ManagedSession:
        """An engine from before a restart may write into all of a pool, which has outlived that: it is expired."""
        pool = self.pools[replica]
        session = ManagedSession(SessionId(self._next_session), self._now_ms, self._trees[replica], pool)
        self._next_session += 1
        session.restore()
        self.sessions[session.id] = session
        return session

    def restore_offload(self, root: bytes, slots: list[tuple[SlotPool, Ranges[int]]]) -> OffloadSession:
        """An engine of before a restart may write host slots, which are set aside: it is expired."""
        session = self.offload.restore(SessionId(self._next_session), root, slots)
        self._next_session += 1
        return session

    def heartbeat(self, session_id: SessionId, fence: FenceSequence, now_ms: int) -> ManagedSession:
        """The session lives, and its work up to `fence` is over."""
        session = self.checks.session(session_id)
        session.heard(now_ms)
        session.signal(fence)
        return session

    def close_session(self, session_id: SessionId) -> None:
        """Its processes say that none of them will touch the pool again.

        That does not tell what became of work whose fence has not signalled: blocks committed under it are dropped.
        """
        offload, session = self.offload.sessions.get(session_id), self.sessions.get(session_id)
        if offload is not None:
            self.offload.end(offload)
        elif session is not None:
            self._end(session)

    def handle(self, event: Event) -> None:
        """Take in what arrived by itself. Events about what is gone already change nothing."""
        match event:
            case ShardSettled():
                self._worker_copies.on_shard_settled(event)
            case Ticked():
                self._on_ticked(event.now_ms)
            case MemberLost():
                self._on_member_lost(event.session)
            case MembersDied():
                self.close_session(event.session)
            case WorkerDied():
                self._on_worker_died(self.pools[event.pool])
            case PoolRestored():
                self.pools[event.pool].healthy = True
            case _:
                self.storage.handle(event)
                self.offload.namespaces.drop_retired()

    def settle(self) -> None:
        """Decide what nobody waits for: what is stored, and what makes room. Call it after each request and event."""
        self.eviction_log.trim()
        self.clearings.advance()
        for tree, pool in self._stored:
            if pool.unstored or pool.demand or pool.free < pool.watermark:
                self._worker_copies.stores.settle(tree, pool)
        self.storage.settle(lambda: self.trees)

    def next_lease(self) -> LeaseId:
        """An id that no lease on a device pool has had."""
        self._last_lease += 1
        return LeaseId(self._last_lease)

    # --- requests ---------------------------------------------------------------------------------------------------

    def match(self, session_id: SessionId, epoch: int, keys: bytes, tokens: int, *, full: bool) -> tuple[int, int]:
        """How many leading blocks the session's pool holds, and how many more the host pool. Changes nothing."""
        session = self.checks.session_at(session_id, epoch)
        limit = self.checks.hit_limit(session, keys, tokens, full=full)
        run, depth = session.tree.match(keys, limit, session.pool.index)
        if session.tree.host is None:
            return depth, 0
        return depth, session.tree.match_host(run, depth, keys, limit)[1] - depth

    def acquire(
        self,
        session_id: SessionId,
        epoch: int,
        request: str,
        keys: bytes,
        tokens: int,
        reserve: int,
        *,
        full: bool,
        priority: int = 0,
    ) -> Grant:
        """Match, pin the hit, and reserve slots for the rest of the prompt and `reserve` blocks more.

        Raises:
            Refusal: stale, over a limit, another request under a live request's id, or no capacity. Nothing was
                taken; what capacity would have to evict is still there.
        """
        session = self.checks.session_at(session_id, epoch)
        asked = Asked(tokens, len(keys) // KEY_SIZE, keys[-KEY_SIZE:], reserve, full)
        held = session.requests.get(request)
        if held is not None:
            return self._grant_again(session, held, asked)
        if len(session.leases) >= LEASES_PER_SESSION_MAX:
            raise Refusal(Why.LEASES_FULL, leases=len(session.leases))
        tree, pool = session.tree, session.pool
        limit = self.checks.hit_limit(session, keys, tokens, full=full)
        run, depth = tree.match(keys, limit, pool.index)
        need = max(-(-tokens // self.checks.block_sizes[pool.name]) - depth, 0) + reserve
        cause = f"acquire {request!r} by session {session.id}"
        ranges = no_ranges()
        tree.lock(run, depth, pool.index)
        try:
            tree.touch(run, pool.index, hit=depth, priority=priority)
            ranges = take_slots(session, self._worker_copies, need, cause)
            lease = ManagedLease(self.next_lease(), request, asked, depth, run, depth, ranges, priority=priority)
            session.add(lease)
        except BaseException:
            pool.move(ranges, SlotState.LEASED, SlotState.FREE, f"rollback of {cause}")
            tree.unlock(run, depth, pool.index)
            raise
        session.counters["acquires"] += 1
        session.counters["hit_blocks"] += depth
        try:
            if tree.host is not None:
                self._acquire_from_host(session, lease, keys, limit)
                self.storage.backups.candidates.sighted(tree, lease.run, lease.depth)
            grant = lease.answer = self._table.grant(session, lease)
        except BaseException:
            session.release(lease, session.fence)
            raise
        self._locks.acquired(session.id, keys, limit)
        session.counters["missed_blocks"] += len(keys) // KEY_SIZE - lease.hit
        return grant

    def load(self, session_id: SessionId, epoch: int, lease_id: LeaseId) -> Loaded | None:
        """What became of a lease's loads; None while some are under way, and `LoadsEnded` will follow.

        Raises:
            Refusal: stale, not the session's lease, or no capacity for the blocks that are missing from the hit:
                then nothing has changed, and asking again may help.
        """
        session = self.checks.session_at(session_id, epoch)
        lease = self.checks.lease(session, lease_id, self._last_lease)
        if lease.loads:
            return None
        replace_missing(session, self._worker_copies, lease)
        return Loaded(min(lease.hit, lease.depth), lease.replacement.tobytes())

    def retry_when_freed(self, session_id: SessionId, epoch: int, blocks: int) -> int | None:
        """How many slots can be granted now; None if that is too few and transfers under way may change it."""
        session = self.checks.session_at(session_id, epoch)
        return self._worker_copies.retry_when_freed(session.tree, session.pool, blocks)

    def allocate(self, session_id: SessionId, epoch: int, lease_id: LeaseId, blocks: int) -> bytes:
        """More exclusive slots for a lease, packed."""
        session = self.checks.session_at(session_id, epoch)
        lease = self.checks.lease(session, lease_id, self._last_lease)
        ranges = take_slots(session, self._worker_copies, blocks, f"allocate for lease {lease.id}")
        append(lease.open, ranges)
        return ranges.tobytes()

    def commit(
        self,
        session_id: SessionId,
        epoch: int,
        lease_id: LeaseId,
        start: int,
        keys: bytes,
        slots: Ranges[int],
        fence: FenceSequence,
    ) -> Commitment:
        """The lease's next blocks are computed: make them matchable and pin them for the lease.

        Blocks from the first on that a load is writing right now for somebody else are not taken in: they stay the
        lease's, whose depth says where its next commit starts.

        Raises:
            Refusal: stale, not the session's lease, `start` is not its depth, or the slots are not its own
                exclusive ones, one per key. Nothing has changed.
        """
        session = self.checks.session_at(session_id, epoch)
        lease = self.checks.lease(session, lease_id, self._last_lease)
        left = self.checks.commit(session, lease, start, keys, slots, fence)
        tree, pool = session.tree, session.pool
        if not keys:
            return Commitment(lease.depth, 0, 0)
        lease.fence = max(lease.fence, fence)
        count = self._worker_copies.loads.settled_blocks(session, lease, keys)
        if count < len(keys) // KEY_SIZE:
            keys, (slots, later) = keys[: count * KEY_SIZE], cut(slots, count)
            left = chained(later, left)  # in the order of their blocks, so that ranges may be named across the two
        if not count:
            return Commitment(lease.depth, 0, 0)
        held = tree.resolve(lease.run, lease.depth)
        run, duplicates = tree.commit(held, lease.depth, keys, slots, pool.index)
        depth = lease.depth + count
        tree.lock(run, depth, pool.index)
        tree.unlock(tree.resolve(held, lease.depth), lease.depth, pool.index)
        tree.touch(run, pool.index, priority=lease.priority)
        scratch, adopted = cut(slots, duplicates) if duplicates else (no_ranges(), slots)
        pool.move(adopted, SlotState.LEASED, SlotState.CACHED, f"commit by lease {lease.id}")
        stores = bool(adopted) and session.writes_through and tree.write_policy is WritePolicy.WRITE_THROUGH
        if fence > session.fence and adopted:
            tree.lock(run, depth, pool.index)
            unstored = {run: depth} if stores else {}
            session.holds.append(FenceHold(fence, run, depth, lease.depth + duplicates, no_ranges(), unstored))
        elif stores:
            session.counters["stores_forgotten"] += pool.note_unstored(run, depth)
        if duplicates:
            self._worker_copies.stores.note_hit(session, run, lease.depth + duplicates)
        lease.run, lease.depth, lease.open = run, depth, left
        append(lease.scratch, scratch)
        session.counters["committed_blocks"] += count - duplicates
        session.counters["duplicate_blocks"] += duplicates
        return Commitment(depth, count - duplicates, duplicates)

    def release(self, session_id: SessionId, epoch: int, lease_id: LeaseId, fence: FenceSequence) -> None:
        """Give a lease back: its pins and its exclusive slots, at once or when the fence signals."""
        session = self.checks.session_at(session_id, epoch)
        lease = self.checks.lease(session, lease_id, self._last_lease)
        self.checks.fence(session, max(fence, lease.fence))
        session.release(lease, fence)
        session.counters["releases"] += 1

    def finish(
        self,
        session_id: SessionId,
        epoch: int,
        lease_id: LeaseId,
        start: int,
        keys: bytes,
        slots: Ranges[int],
        fence: FenceSequence,
    ) -> Commitment:
        """`commit` and `release` in one step: both, or, where the commit is refused, neither."""
        session = self.checks.session_at(session_id, epoch)
        self.checks.fence(session, fence, holds=2)
        commitment = self.commit(session_id, epoch, lease_id, start, keys, slots, fence)
        self.release(session_id, epoch, lease_id, fence)
        return commitment

    # --- steps ------------------------------------------------------------------------------------------------------

    def _acquire_from_host(self, session: ManagedSession, lease: ManagedLease, keys: bytes, limit: int) -> None:
        self._worker_copies.stores.note_hit(session, lease.run, lease.depth)
        self._worker_copies.loads.join(session, lease)
        self._worker_copies.loads.start(session, lease, keys, limit)
        session.tree.touch_host(lease.run, hit=lease.depth, priority=lease.priority)
        lease.hit = lease.depth

    def _grant_again(self, session: ManagedSession, lease: ManagedLease, asked: Asked) -> Grant:
        if lease.asked != asked or lease.has_grown:
            raise Refusal(Why.REQUEST_IN_USE, request=lease.request, lease=lease.id)
        # What became of its loads is for `load` to tell, lest two answers to one request differ.
        return lease.answer or self._table.grant(session, lease)

    def _end(self, session: ManagedSession) -> None:
        """The one way out: everything a session holds is given back, however it went."""
        self._locks.leave(session.id)
        freed = session.end(self._worker_copies.cut_off)
        del self.sessions[session.id]
        session.counters["sessions_ended"] += 1
        self.effects.append(SessionEnded(session.id, freed))

    def _on_member_lost(self, session_id: SessionId) -> None:
        offload, session = self.offload.sessions.get(session_id), self.sessions.get(session_id)
        if offload is not None and offload.state is SessionState.ACTIVE:
            self.offload.lose_member(offload)
        elif session is not None and session.state is SessionState.ACTIVE:
            self._expire(session)

    def _on_ticked(self, now_ms: int) -> None:
        """Expire sessions that went silent. A tick that comes late itself (a suspended machine) expires nobody."""
        self._worker_copies.stores.try_again(self.pools.values())
        late = bool(self._now_ms) and now_ms - self._now_ms > self.session_ttl_ms // LATE_TICK_DIVISOR
        self._now_ms = now_ms
        self.slab_allocator.tick(now_ms)
        self.storage.tick(now_ms)
        self.pins.tick(now_ms)
        self.offload.on_ticked(now_ms, late=late)
        for session in list(self.sessions.values()):
            if late:
                session.heard(now_ms)
            elif session.state is SessionState.ACTIVE and now_ms - session.last_heard_ms > self.session_ttl_ms:
                self._expire(session)

    def _expire(self, session: ManagedSession) -> None:
        """Its leases are over, but its processes may live: what they could write waits for their death."""
        self._locks.leave(session.id)
        session.expire(self._worker_copies.cut_off)
        session.counters["sessions_expired"] += 1
        self.effects.append(SessionExpired(session.id, slot_count(session.quarantined)))

    def _on_worker_died(self, pool: DevicePool) -> None:
        """Nothing is copied until there are other workers; the memory, and what is cached and held in it, stays."""
        pool.healthy = False
        self.counters["workers_lost"] += 1
