"""Engines on device pools of the daemon: a lease has slots there, and the daemon's workers copy for it.

A lease locks the prefix that its request hits, in the device pool; what only the host pool has is loaded into the first
of its exclusive slots. What it computes is committed. A call either has its whole effect or none: it checks, then takes
in an order in which what was taken can be given back, then records.
"""

from __future__ import annotations

from kvcached.core.index.host_tree import SLACK_DIVISOR
from kvcached.core.index.run import KEY_SIZE
from kvcached.core.index.tree import BATCH_DIVISOR, PrefixTree
from kvcached.core.lease import Asked, FenceHold, ManagedLease
from kvcached.core.managed_session import ManagedSession
from kvcached.core.messages import BlocksCached, Commitment, Grant, Loaded, SessionEnded, SessionExpired
from kvcached.core.refusals import Refusal, Why
from kvcached.core.session import Sessions
from kvcached.core.sleep import check_awake
from kvcached.core.slots.ranges import Ranges, append, chained, cut, no_ranges, slot_count
from kvcached.core.slots.slots import DevicePool
from kvcached.core.slots.states import PoolState, SlotState
from kvcached.core.transfers.prefix_locks import PrefixLocks
from kvcached.core.transfers.table import TransferTable
from kvcached.core.transfers.worker_copies import WorkerCopies
from kvcached_client.types import FenceSequence, LeaseId, SessionId, WritePolicy

#: Under these policies demotion keeps slots free, and what it drops has a copy: nothing is evicted ahead of need.
_DEMOTED = frozenset({WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK})


class Managed:
    """Sessions on device pools, and what they ask for.

    Args:
        sessions: none yet; `table` has the same.
        table: of all transfers.
        worker_copies: those that workers make.
        locks: of prefixes that sessions are about to acquire.
        trees: with the pools.

    Attributes:
        sessions: active and expired ones.
        pools: by replica name.
        trees: by replica name; replicas of one namespace share theirs.
        version: grows when an engine from before a restart is known to know that it is back.
    """

    def __init__(
        self,
        sessions: Sessions[ManagedSession, ManagedLease],
        table: TransferTable,
        worker_copies: WorkerCopies,
        locks: PrefixLocks,
        trees: list[PrefixTree],
    ) -> None:
        self.version = 0
        self.sessions = sessions
        self.pools: dict[str, DevicePool] = {pool.name: pool for tree in trees for pool in tree.pools}
        self.trees: dict[str, PrefixTree] = {pool.name: tree for tree in trees for pool in tree.pools}
        self._table = table
        self._effects, self._counters = table.effects, table.counters
        self._worker_copies = worker_copies
        self._locks = locks
        #: pools above a host pool, with their trees
        self._stored = [(tree, pool) for tree in trees for pool in tree.pools if tree.host is not None]

    # --- sessions ---------------------------------------------------------------------------------------------------

    def open(self, session_id: SessionId, replica: str, now_ms: int, *, counted: bool) -> ManagedSession:
        """Give a replica's pool to a new session.

        Raises:
            Refusal: the pool is not awake, or its namespace is being cleared.
        """
        pool = self.pools[replica]
        check_awake(pool)
        if pool.clearing:
            raise Refusal(Why.CLEARING, replica=replica)
        session = self.sessions[session_id] = ManagedSession(
            session_id, now_ms, self.trees[replica], pool, block_size=pool.block_size
        )
        if counted:
            session.count_in(self._counters)
        session.counters["sessions_opened"] += 1
        return session

    def restore(self, session_id: SessionId, replica: str, now_ms: int) -> ManagedSession:
        """An engine from before a restart may write into all of a pool, which has outlived that: it is expired."""
        pool = self.pools[replica]
        session = ManagedSession(session_id, now_ms, self.trees[replica], pool, block_size=pool.block_size)
        session.restore()
        self.sessions[session_id] = session
        return session

    def heartbeat(self, session_id: SessionId, fence: FenceSequence, now_ms: int) -> ManagedSession:
        """The session lives, and its work up to `fence` is over."""
        session = self.sessions.active(session_id)
        session.heard(now_ms)
        self.version += session.spoke()
        session.signal(fence)
        return session

    def expire(self, session: ManagedSession, over: Why = Why.SESSION_SILENT) -> None:
        """Its leases are over, but its processes may live: what they could write waits for their death."""
        self._locks.leave(session.id)
        session.expire(self._worker_copies.cut_off, over)
        session.counters["sessions_expired"] += 1
        self._effects.append(SessionExpired(session.id, slot_count(session.quarantined)))

    def end(self, session: ManagedSession) -> None:
        """The one way out: everything a session holds is given back, however it went."""
        self._locks.leave(session.id)
        freed = session.end(self._worker_copies.cut_off)
        del self.sessions[session.id]
        session.counters["sessions_ended"] += 1
        self._effects.append(SessionEnded(session.id, freed))

    def on_ticked(self, now_ms: int, *, late: bool) -> None:
        """Expire sessions that went silent, nobody where the tick itself was late; try copies that failed again."""
        self._worker_copies.stores.try_again(self.pools.values())
        for session in self.sessions.silent(now_ms, late=late):
            self.expire(session)

    def settle(self) -> None:
        """Start the copies that nobody waits for: what is stored, and what makes room."""
        for tree, pool in self._stored:
            if pool.state is PoolState.AWAKE and (
                pool.unstored or pool.doubtful or pool.demand or pool.free < pool.watermark
            ):
                self._worker_copies.stores.settle(tree, pool)

    def session_at(self, session_id: SessionId, epoch: int) -> ManagedSession:
        """An active session whose peer speaks of the pool's memory as it is now.

        Raises:
            Refusal: there is none, it has expired, or the peer speaks of an earlier life of the pool.
        """
        session = self.sessions.active(session_id)
        if epoch != session.pool.epoch:
            raise Refusal(Why.STALE_EPOCH, epoch=epoch, pool=session.pool.name, present=session.pool.epoch)
        self.version += session.spoke()
        return session

    # --- requests ---------------------------------------------------------------------------------------------------

    def match(self, session_id: SessionId, epoch: int, keys: bytes, tokens: int, *, full: bool) -> tuple[int, int]:
        """How many leading blocks the session's pool holds, and how many more the host pool. Changes nothing."""
        session = self.session_at(session_id, epoch)
        limit = session.hit_limit(keys, tokens, full=full)
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
        tenant: str = "",
    ) -> Grant:
        """Match, pin the hit, and reserve slots for the rest of the prompt and `reserve` blocks more.

        Raises:
            Refusal: stale, over a limit, another request under a live request's id, or no capacity. Nothing was
                taken; what capacity would have to evict is still there.
        """
        session = self.session_at(session_id, epoch)
        asked = Asked(tokens, len(keys) // KEY_SIZE, keys[-KEY_SIZE:], reserve, full)
        held = session.leases.granted(request, asked)
        if held is not None:
            # What became of its loads is for `load` to tell, lest two answers to one request differ.
            return held.answer or self._grant(session, held)
        tree, pool = session.tree, session.pool
        limit = session.hit_limit(keys, tokens, full=full)
        run, depth = tree.match(keys, limit, pool.index)
        need = max(-(-tokens // session.block_size) - depth, 0) + reserve
        cause = f"acquire {request!r} by session {session.id}"
        ranges = no_ranges()
        tree.lock(run, depth, pool.index)
        try:
            tree.touch(run, depth, pool.index, is_hit=True, priority=priority)
            ranges = self._take(session, need, cause)
            lease = ManagedLease(
                self.sessions.next_lease(), request, asked, depth, run, depth, ranges, priority=priority, tenant=tenant
            )
            session.leases.add(lease)
        except BaseException:
            pool.move(ranges, SlotState.LEASED, SlotState.FREE, f"rollback of {cause}")
            tree.unlock(run, depth, pool.index)
            raise
        session.counters["acquires"] += 1
        session.counters["hit_blocks"] += depth
        try:
            if tree.host is not None:
                self._acquire_from_host(session, lease, keys, limit)
            grant = lease.answered(self._grant(session, lease))
        except BaseException:
            session.release(lease, session.fence)
            raise
        if self._locks.waiting:
            self._locks.acquired(session.id, keys, limit)
        if session.reuse is not None:
            session.reuse.asked(keys)
        session.counters["missed_blocks"] += len(keys) // KEY_SIZE - lease.hit
        return grant

    def load(self, session_id: SessionId, epoch: int, lease_id: LeaseId) -> Loaded | None:
        """What became of a lease's loads; None while some are under way, and `LoadsEnded` will follow.

        Raises:
            Refusal: stale, not the session's lease, or no capacity for the blocks that are missing from the hit:
                then nothing has changed, and asking again may help.
        """
        session = self.session_at(session_id, epoch)
        lease = self.sessions.lease(session.leases, lease_id)
        if lease.loads:
            return None
        self._replace_missing(session, lease)
        return Loaded(min(lease.hit, lease.depth), lease.replacement.tobytes())

    def retry_when_freed(self, session_id: SessionId, epoch: int, blocks: int) -> int | None:
        """How many slots can be granted now; None if that is too few and transfers under way may change it."""
        session = self.session_at(session_id, epoch)
        return self._worker_copies.retry_when_freed(session.tree, session.pool, blocks)

    def allocate(self, session_id: SessionId, epoch: int, lease_id: LeaseId, blocks: int) -> bytes:
        """More exclusive slots for a lease, packed."""
        session = self.session_at(session_id, epoch)
        lease = self.sessions.lease(session.leases, lease_id)
        ranges = self._take(session, blocks, f"allocate for lease {lease.id}")
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
        session = self.session_at(session_id, epoch)
        lease = self.sessions.lease(session.leases, lease_id)
        left = session.slots_left(lease, start, keys, slots, fence)
        tree, pool = session.tree, session.pool
        if not keys:
            return Commitment(lease.depth, 0, 0)
        lease.written_until(fence)
        count = self._worker_copies.loads.settled_blocks(session, lease, keys)
        if count < len(keys) // KEY_SIZE:
            keys, (slots, later) = keys[: count * KEY_SIZE], cut(slots, count)
            left = chained(later, left)  # in the order of their blocks, so that ranges may be named across the two
        if not count:
            return Commitment(lease.depth, 0, 0)
        if session.reuse is not None:
            session.reuse.stored(keys)
        held = tree.resolve(lease.run, lease.depth)
        run, duplicates = tree.commit(held, lease.depth, keys, slots, pool.index)
        tree.belong(run, lease.tenant)
        depth = lease.depth + count
        tree.lock(run, depth, pool.index)
        tree.unlock(tree.resolve(held, lease.depth), lease.depth, pool.index)
        tree.touch(run, depth, pool.index, priority=lease.priority)
        scratch, adopted = cut(slots, duplicates) if duplicates else (no_ranges(), slots)
        pool.move(adopted, SlotState.LEASED, SlotState.CACHED, f"commit by lease {lease.id}")
        stores = bool(adopted) and session.writes_through and tree.write_policy is WritePolicy.WRITE_THROUGH
        if fence > session.fence and adopted:
            tree.lock(run, depth, pool.index)
            unstored = {run: depth} if stores else {}
            session.holds.append(FenceHold(fence, run, depth, lease.depth + duplicates, no_ranges(), unstored))
        elif adopted:
            first, known = lease.depth + duplicates, duplicates * KEY_SIZE
            before = (tree.path_keys(run, lease.depth - 1, lease.depth) if lease.depth else b"") + keys[:known]
            pool.note_cached(BlocksCached(pool.name, first, before[-KEY_SIZE:], keys[known:], adopted))
            if stores:
                session.counters["stores_forgotten"] += pool.note_unstored(run, depth)
        if duplicates:
            self._worker_copies.stores.note_hit(session, run, lease.depth + duplicates)
        lease.committed(run, depth, left, scratch)
        session.counters["committed_blocks"] += count - duplicates
        session.counters["duplicate_blocks"] += duplicates
        return Commitment(depth, count - duplicates, duplicates)

    def set_aside(self, session: ManagedSession, slots: Ranges[int]) -> bool:
        """See `ManagedSession.set_aside`."""
        return session.set_aside(slots, self._worker_copies.cut_off)

    def release(self, session_id: SessionId, epoch: int, lease_id: LeaseId, fence: FenceSequence) -> None:
        """Give a lease back: its pins and its exclusive slots, at once or when the fence signals."""
        session = self.session_at(session_id, epoch)
        lease = self.sessions.lease(session.leases, lease_id)
        session.check_fence(max(fence, lease.fence))
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
        session = self.session_at(session_id, epoch)
        session.check_fence(fence, holds=2)
        commitment = self.commit(session_id, epoch, lease_id, start, keys, slots, fence)
        self.release(session_id, epoch, lease_id, fence)
        return commitment

    def discard(self, replica: str, keys: bytes) -> None:
        """Drop the last run of a chain from a replica's pool; a no-op where it is not there or in use."""
        tree, pool = self.trees[replica], self.pools[replica]
        run, _ = tree.match(keys, len(keys) // KEY_SIZE, pool.index)
        segment = run.segments[pool.index]
        if run is not tree.root and segment is not None and not segment.protected:
            dropped = tree.drop(run, run.start, pool.index)
            pool.move(dropped, SlotState.CACHED, SlotState.FREE, "discard")

    # --- steps ------------------------------------------------------------------------------------------------------

    def _grant(self, session: ManagedSession, lease: ManagedLease) -> Grant:
        """What a lease holds, and the loads that part of its hit waits for."""
        run = session.tree.resolve(lease.run, lease.hit)
        hit_ranges = session.tree.path_ranges(run, lease.hit, session.pool.index)
        loads = [self._table.worker[transfer] for transfer in sorted(lease.loads)]
        ready = min((load.start for load in loads), default=lease.hit)
        tickets = tuple((load.id, load.progress) for load in loads)
        return Grant(lease.id, lease.hit, ready, tickets, hit_ranges, lease.open.tobytes())

    def _take(self, session: ManagedSession, count: int, cause: str) -> Ranges[int]:
        """Grant slots of a session's pool, evicting what is missing, or refuse without any loss.

        Raises:
            Refusal: nothing free and nothing evictable; `Why.SLOTS_PENDING` where transfers under way may change that,
                and under write-back where they are about to make room without loss.
        """
        if not count:
            return no_ranges()
        tree, pool = session.tree, session.pool
        if count > pool.free:
            if count - pool.free > pool.evictable or self._worker_copies.stores.write_back(tree, pool, count):
                raise self._no_capacity(session, count)
            _evict(session, count - pool.free, f"eviction for {cause}")
        pool.meet_demand()
        return pool.take(count, SlotState.LEASED, cause)

    def _no_capacity(self, session: ManagedSession, count: int) -> Refusal:
        pool = session.pool
        session.counters["no_capacity"] += 1
        reachable = pool.free + pool.counts[SlotState.CACHED] + pool.counts[SlotState.FILLING]
        about = {"wanted": count, "slots": pool.slots, "free": pool.free, "evictable": pool.evictable}
        copying = len(self._table.of_pool(pool))
        if copying and count <= reachable:
            return Refusal(Why.SLOTS_PENDING, **about, copying=copying)
        return Refusal(Why.NO_SLOTS, **about)

    def _replace_missing(self, session: ManagedSession, lease: ManagedLease) -> None:
        """Slots for blocks of a lease's hit that could not be loaded."""
        missing = lease.hit - lease.depth
        if missing > 0:
            lease.replace_missing(self._take(session, missing, f"replacement for lease {lease.id}"))

    def _acquire_from_host(self, session: ManagedSession, lease: ManagedLease, keys: bytes, limit: int) -> None:
        self._worker_copies.stores.note_hit(session, lease.run, lease.depth)
        self._worker_copies.loads.join(session, lease)
        self._worker_copies.loads.start(session, lease, keys, limit)
        session.tree.touch_host(lease.run, lease.depth, is_hit=True, priority=lease.priority)
        session.tree.belong(lease.run, lease.tenant)
        lease.promise(lease.depth)
        if session.tree.listener is not None:
            session.tree.listener.sighted(session.tree, lease.run, lease.depth)


def _evict(session: ManagedSession, shortage: int, cause: str) -> None:
    """Free what is short, unless demotion has done so already; a batch where nothing is demoted."""
    tree, pool = session.tree, session.pool
    if shortage <= 0:
        return
    if tree.host is None or tree.write_policy not in _DEMOTED:
        shortage = max(shortage, min(pool.slots // BATCH_DIVISOR, pool.evictable))
    tree.evict(shortage, pool.index, cause, slack=pool.slots // SLACK_DIVISOR)
