"""The cache: the one place that decides. Requests are direct calls, what arrives by itself is an event.

Nothing outside `kvcached.core` assigns to anything in here. A call either has its whole effect or none: it checks, then
takes in an order in which what was taken can be given back, then records.
"""

from __future__ import annotations

from collections import Counter

from kvcached.core.answers import Commitment, Grant, Loaded, PoolSpec
from kvcached.core.attached import Attached
from kvcached.core.attached_state import AttachedSession, SpaceSpec
from kvcached.core.checks import Checks
from kvcached.core.clearing import Clearings
from kvcached.core.effects import Effect, SessionEnded, SessionExpired
from kvcached.core.events import Event, MemberLost, MembersDied, PoolRestored, ShardSettled, Ticked, WorkerDied
from kvcached.core.forgotten import ForgottenKeys
from kvcached.core.host_pool import SlabStock
from kvcached.core.lease import Asked, FenceHold, Lease
from kvcached.core.pinned import Pins
from kvcached.core.planting import plant_all
from kvcached.core.pool import DevicePool, SlotPool
from kvcached.core.ranges import Ranges, append, chained, cut, no_ranges, slot_count
from kvcached.core.room import take_slots
from kvcached.core.run import KEY_SIZE
from kvcached.core.session import Session
from kvcached.core.states import SessionState, SlotState
from kvcached.core.storage import StorageSpec, StorageTier
from kvcached.core.tiers import Tiers
from kvcached.core.transfer import Transfer
from kvcached.core.tree import PrefixTree
from kvcached_client.errors import ErrorCode, request_error
from kvcached_client.types import FenceSequence, LeaseId, MissReason, SessionId, TransferId, WritePolicy

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
        attached: sessions of engines in attached mode, and their namespaces.
        effects: what the world is asked to do; the service takes them after each call.
        counters: totals since the start, by name.
        forgotten: what left the trees lately.
        clearings: namespaces of replicas that are being cleared.
        policy_changes: how often a namespace got another write policy.
        storage: the tier below the host pool.
        pins: prefixes that people keep cached.
        checks: what requests must satisfy.
    """

    def __init__(
        self,
        pools: list[PoolSpec],
        *,
        epoch: int,
        session_ttl_ms: int,
        host_slabs: int = 0,
        spaces_max: int = 0,
        host_eviction_policy: str = "lru",
        pin_quota_percent: int = 25,
        storage: StorageSpec | None = None,
    ) -> None:
        self.epoch = epoch
        self.session_ttl_ms = session_ttl_ms
        self.pools: dict[str, DevicePool] = {}
        self.sessions: dict[SessionId, Session] = {}
        self.effects: list[Effect] = []
        self.counters: Counter[str] = Counter()
        self.forgotten = ForgottenKeys()
        self.policy_changes = 0
        self.pins = Pins(self.counters, pin_quota_percent)
        self._tiers = Tiers(self.sessions, self.effects, self.counters, self.pins)
        self.clearings = Clearings(self.sessions, self._tiers, self.effects, self.counters, self._expire)
        self._trees: dict[str, PrefixTree] = {}
        self._block_sizes = {spec.name: spec.block_size for spec in pools}
        self.checks = Checks(self.sessions, self._block_sizes, session_ttl_ms)
        self._now_ms = 0
        self._next_session = 1
        self._last_lease = 0
        self._stock = stock = SlabStock(host_slabs, self.effects, host_eviction_policy)
        self.attached = Attached(
            stock, spaces_max, session_ttl_ms, self._tiers.book.next_id, self.effects, self.counters, self.forgotten
        )
        self.attached.spaces.pins = self.pins
        self.storage = StorageTier(
            storage or StorageSpec(), self._tiers.book.next_id, self._generation_of, self.effects, self.counters
        )
        self.clearings.holds = self.storage.holds
        self._tiers.book.let_go = self.storage.backups.let_go
        self.attached.tell_of_bad_slots(self.storage.backups.let_go)
        listener = self.attached.spaces.listener = self.storage.backups.candidates
        for tree in plant_all(
            pools, stock, epoch=epoch, counters=self.counters, forgotten=self.forgotten, listener=listener
        ):
            for pool in tree.pools:
                self.pools[pool.name] = pool
                self._trees[pool.name] = tree
        #: pools above a host pool, with their trees
        self._stored = [(tree, pool) for tree in self.trees for pool in tree.pools if tree.host is not None]

    def _generation_of(self, tree: PrefixTree) -> int | None:
        """Of a tree's namespace, as headers say it: replicas have another namespace instead."""
        return 0 if tree.pools else self.attached.spaces.generation_of(tree)

    @property
    def version(self) -> int:
        """Grows with what a successor has to know of this cache: who has which slab, namespaces, their policies."""
        return self._stock.version + self.attached.spaces.version + self.clearings.version + self.policy_changes

    @property
    def transfers(self) -> dict[TransferId, Transfer]:
        """Copies between tiers that have not ended."""
        return self._tiers.book.transfers

    @property
    def trees(self) -> list[PrefixTree]:
        """Every tree once, those of attached engines last."""
        return [*dict.fromkeys(self._trees.values()), *self.attached.spaces.trees]

    def tree_of(self, replica: str) -> PrefixTree:
        """The index that a replica's pool is in."""
        return self._trees[replica]

    # --- sessions ---------------------------------------------------------------------------------------------------

    def open_session(self, replica: str, now_ms: int, *, counted: bool = True) -> Session:
        """Give a replica's pool to a new session. One engine at a time is the service's business.

        What a session does that is not `counted` (a health check) is missing in the counters.
        """
        pool = self.pools[replica]
        if not pool.healthy:
            raise request_error(
                ErrorCode.WORKER_LOST,
                f"replica {replica!r} lost a worker; its workers are being restarted",
                "try again in some seconds; the daemon's log says why",
            )
        if pool.clearing:
            raise request_error(
                ErrorCode.CLEARING, f"the namespace of replica {replica!r} is being cleared", "try again in a moment"
            )
        session = Session(SessionId(self._next_session), self._trees[replica], pool, now_ms)
        if counted:
            session.counters = self.counters
            session.writes_through = session.tree.host is not None
        self._next_session += 1
        self.sessions[session.id] = session
        session.counters["sessions_opened"] += 1
        return session

    def open_attached(self, spec: SpaceSpec, now_ms: int) -> AttachedSession:
        """A session of an engine in attached mode.

        Raises:
            RequestError: see `Spaces.declare`.
        """
        session = self.attached.open(SessionId(self._next_session), spec, now_ms)
        self._next_session += 1
        return session

    def restore_session(self, replica: str) -> Session:
        """An engine of before a restart may write into all of a pool, which has outlived that: it is expired."""
        pool = self.pools[replica]
        session = Session(SessionId(self._next_session), self._trees[replica], pool, self._now_ms)
        self._next_session += 1
        session.restore()
        self.sessions[session.id] = session
        return session

    def restore_attached(self, root: bytes, slots: list[tuple[SlotPool, Ranges[int]]]) -> AttachedSession:
        """An engine of before a restart may write host slots, which are set aside: it is expired."""
        session = self.attached.restore(SessionId(self._next_session), root, slots)
        self._next_session += 1
        return session

    def heartbeat(self, session_id: SessionId, fence: FenceSequence, now_ms: int) -> Session:
        """The session lives, and its work up to `fence` is over."""
        session = self.checks.session(session_id)
        session.last_heard_ms = now_ms
        session.signal(fence)
        return session

    def close_session(self, session_id: SessionId) -> None:
        """Its processes say that none of them will touch the pool again.

        That does not tell what became of work whose fence has not signalled: blocks committed under it are dropped.
        """
        attached, session = self.attached.sessions.get(session_id), self.sessions.get(session_id)
        if attached is not None:
            self.attached.end(attached)
        elif session is not None:
            self._end(session)

    def handle(self, event: Event) -> None:
        """Take in what arrived by itself. Events about what is gone already change nothing."""
        match event:
            case ShardSettled():
                self._tiers.on_shard_settled(event)
            case Ticked():
                self._on_ticked(event.now_ms)
            case MemberLost():
                self._on_member_lost(event.session)
            case MembersDied():
                attached, session = self.attached.sessions.get(event.session), self.sessions.get(event.session)
                if attached is not None:
                    self.attached.end(attached)
                elif session is not None:
                    self._end(session)
            case WorkerDied():
                self._on_worker_died(self.pools[event.pool])
            case PoolRestored():
                self.pools[event.pool].healthy = True
            case _:
                self.storage.handle(event)
                self.attached.spaces.bury()

    def settle(self) -> None:
        """Decide what nobody waits for: what is stored, and what makes room. Call it after each request and event."""
        self.forgotten.trim()
        self.clearings.advance()
        for tree, pool in self._stored:
            if pool.unstored or pool.demand or pool.free < pool.watermark:
                self._tiers.stores.settle(tree, pool)
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
            RequestError: stale, over a limit, another request under a live request's id, or no capacity. Nothing was
                taken; what capacity would have to evict is still there.
        """
        session = self.checks.session_at(session_id, epoch)
        asked = Asked(tokens, len(keys) // KEY_SIZE, keys[-KEY_SIZE:], reserve, full)
        held = session.requests.get(request)
        if held is not None:
            return self._grant_again(session, held, asked)
        if len(session.leases) >= LEASES_PER_SESSION_MAX:
            raise request_error(ErrorCode.LIMIT, f"{len(session.leases)} leases are held", "release what has finished")
        tree, pool = session.tree, session.pool
        limit = self.checks.hit_limit(session, keys, tokens, full=full)
        run, depth = tree.match(keys, limit, pool.index)
        need = max(-(-tokens // self._block_sizes[pool.name]) - depth, 0) + reserve
        cause = f"acquire {request!r} by session {session.id}"
        ranges = no_ranges()
        tree.pin(run, depth, pool.index)
        try:
            tree.touch(run, pool.index, hit=depth, priority=priority)
            ranges = take_slots(session, self._tiers, need, cause)
            lease = Lease(self.next_lease(), request, asked, depth, run, depth, ranges, priority=priority)
            session.add(lease)
        except BaseException:
            pool.move(ranges, SlotState.LEASED, SlotState.FREE, f"rollback of {cause}")
            tree.unpin(run, depth, pool.index)
            raise
        session.counters["acquires"] += 1
        session.counters["hit_blocks"] += depth
        try:
            if tree.host is not None:
                self._acquire_from_host(session, lease, keys, limit)
                self.storage.backups.candidates.sighted(tree, lease.run, lease.depth)
            grant = lease.answer = self._tiers.book.grant(session, lease)
        except BaseException:
            session.release(lease, session.fence)
            raise
        session.counters["missed_blocks"] += len(keys) // KEY_SIZE - lease.hit
        return grant

    def load(self, session_id: SessionId, epoch: int, lease_id: LeaseId) -> Loaded | None:
        """What became of a lease's loads; None while some are under way, and `LoadsEnded` will follow.

        Raises:
            RequestError: stale, not the session's lease, or no capacity for the blocks that are missing from the hit:
                then nothing has changed, and asking again may help.
        """
        session = self.checks.session_at(session_id, epoch)
        lease = self.checks.lease(session, lease_id, self._last_lease)
        if lease.loads:
            return None
        self._replace_missing(session, lease)
        return Loaded(min(lease.hit, lease.depth), lease.replacement.tobytes())

    def vacancy(self, session_id: SessionId, epoch: int, blocks: int) -> int | None:
        """How many slots can be granted now; None if that is too few and transfers under way may change it."""
        session = self.checks.session_at(session_id, epoch)
        return self._tiers.vacancy(session.tree, session.pool, blocks)

    def allocate(self, session_id: SessionId, epoch: int, lease_id: LeaseId, blocks: int) -> bytes:
        """More exclusive slots for a lease, packed."""
        session = self.checks.session_at(session_id, epoch)
        lease = self.checks.lease(session, lease_id, self._last_lease)
        ranges = take_slots(session, self._tiers, blocks, f"allocate for lease {lease.id}")
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
            RequestError: stale, not the session's lease, `start` is not its depth, or the slots are not its own
                exclusive ones, one per key. Nothing has changed.
        """
        session = self.checks.session_at(session_id, epoch)
        lease = self.checks.lease(session, lease_id, self._last_lease)
        left = self.checks.commit(session, lease, start, keys, slots, fence)
        tree, pool = session.tree, session.pool
        if not keys:
            return Commitment(lease.depth, 0, 0)
        lease.fence = max(lease.fence, fence)
        count = self._tiers.loads.settled_blocks(session, lease, keys)
        if count < len(keys) // KEY_SIZE:
            keys, (slots, later) = keys[: count * KEY_SIZE], cut(slots, count)
            left = chained(later, left)  # in the order of their blocks, so that ranges may be named across the two
        if not count:
            return Commitment(lease.depth, 0, 0)
        held = tree.resolve(lease.run, lease.depth)
        run, duplicates = tree.commit(held, lease.depth, keys, slots, pool.index)
        depth = lease.depth + count
        tree.pin(run, depth, pool.index)
        tree.unpin(tree.resolve(held, lease.depth), lease.depth, pool.index)
        tree.touch(run, pool.index, priority=lease.priority)
        scratch, adopted = cut(slots, duplicates) if duplicates else (no_ranges(), slots)
        pool.move(adopted, SlotState.LEASED, SlotState.CACHED, f"commit by lease {lease.id}")
        stores = bool(adopted) and session.writes_through and tree.write_policy is WritePolicy.WRITE_THROUGH
        if fence > session.fence and adopted:
            tree.pin(run, depth, pool.index)
            unstored = {run: depth} if stores else {}
            session.holds.append(FenceHold(fence, run, depth, lease.depth + duplicates, no_ranges(), unstored))
        elif stores:
            session.counters["stores_forgotten"] += pool.note_unstored(run, depth)
        if duplicates:
            self._tiers.stores.note_hit(session, run, lease.depth + duplicates)
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

    def discard(self, replica: str, keys: bytes) -> None:
        """Drop the last run of a chain from a replica's pool; a no-op where it is not there or in use."""
        tree, pool = self._trees[replica], self.pools[replica]
        run, _ = tree.match(keys, len(keys) // KEY_SIZE, pool.index)
        segment = run.segments[pool.index]
        if run is not tree.root and segment is not None and not segment.protected:
            dropped = tree.drop(run, run.start, pool.index)
            pool.move(dropped, SlotState.CACHED, SlotState.FREE, "discard")

    # --- steps ------------------------------------------------------------------------------------------------------

    def _acquire_from_host(self, session: Session, lease: Lease, keys: bytes, limit: int) -> None:
        self._tiers.stores.note_hit(session, lease.run, lease.depth)
        self._tiers.loads.join(session, lease)
        self._tiers.loads.start(session, lease, keys, limit)
        session.tree.touch_host(lease.run, hit=lease.depth, priority=lease.priority)
        lease.hit = lease.depth

    def _grant_again(self, session: Session, lease: Lease, asked: Asked) -> Grant:
        if lease.asked != asked or lease.depth > lease.hit:
            raise request_error(
                ErrorCode.REQUEST_CONFLICT,
                f"request {lease.request!r} already holds lease {lease.id}, acquired for something else or in use",
                "release that lease first, or give every request an id of its own",
            )
        # What became of its loads is for `load` to tell, lest two answers to one request differ.
        return lease.answer or self._tiers.book.grant(session, lease)

    def _replace_missing(self, session: Session, lease: Lease) -> None:
        """Slots for blocks of the hit that could not be loaded."""
        missing = lease.hit - lease.depth
        if missing <= 0:
            return
        ranges = take_slots(session, self._tiers, missing, f"replacement for lease {lease.id}")
        lease.hit, lease.replacement = lease.depth, ranges
        lease.open = chained(ranges, lease.open)

    def _end(self, session: Session) -> None:
        """The one way out: everything a session holds is given back, however it went."""
        freed = session.end(self._tiers.cut_off)
        del self.sessions[session.id]
        session.counters["sessions_ended"] += 1
        self.effects.append(SessionEnded(session.id, freed))

    def _on_member_lost(self, session_id: SessionId) -> None:
        attached, session = self.attached.sessions.get(session_id), self.sessions.get(session_id)
        if attached is not None and attached.state is SessionState.ACTIVE:
            self.attached.lose_member(attached)
        elif session is not None and session.state is SessionState.ACTIVE:
            self._expire(session)

    def _on_ticked(self, now_ms: int) -> None:
        """Expire sessions that went silent. A tick that comes late itself (a suspended machine) expires nobody."""
        self._tiers.stores.try_again(self.pools.values())
        late = bool(self._now_ms) and now_ms - self._now_ms > self.session_ttl_ms // LATE_TICK_DIVISOR
        self._now_ms = now_ms
        self.storage.tick(now_ms)
        self.pins.tick(now_ms)
        self.attached.on_ticked(now_ms, late=late)
        for session in list(self.sessions.values()):
            if late:
                session.last_heard_ms = now_ms
            elif session.state is SessionState.ACTIVE and now_ms - session.last_heard_ms > self.session_ttl_ms:
                self._expire(session)

    def _expire(self, session: Session) -> None:
        """Its leases are over, but its processes may live: what they could write waits for their death."""
        session.expire(self._tiers.cut_off)
        session.counters["sessions_expired"] += 1
        self.effects.append(SessionExpired(session.id, slot_count(session.quarantined)))

    def _on_worker_died(self, pool: DevicePool) -> None:
        """The pool's memory is gone: so is its residency, its epoch, and what its sessions held."""
        tree = self._trees[pool.name]
        for session in [session for session in self.sessions.values() if session.pool is pool]:
            self._end(session)
        self._tiers.pool_lost(tree, pool)
        tree.drop(tree.root, 0, pool.index, MissReason.WORKER_LOST)
        tree.policies[pool.index].clear()
        pool.reset(pool.epoch + 1)
        pool.healthy = False
        self._tiers.fail_queued(pool, f"pool {pool.name} was lost")
        self.counters["workers_lost"] += 1
