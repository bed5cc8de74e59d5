"""The cache: the one place that decides. Requests are direct calls, what arrives by itself is an event.

Nothing outside `kvcached.core` assigns to anything in here. A call either has its whole effect or none: it checks, then
takes in an order in which what was taken can be given back, then records.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kvcached.core.effects import Effect, SessionEnded, SessionExpired
from kvcached.core.events import Event, MemberLost, MembersDied, Ticked, WorkerDied
from kvcached.core.lease import Asked, FenceHold, Lease
from kvcached.core.policy import LeastRecentlyUsed
from kvcached.core.pool import DevicePool
from kvcached.core.ranges import Ranges, append, cut, no_ranges, slot_count, subtract
from kvcached.core.run import KEY_SIZE
from kvcached.core.session import Session
from kvcached.core.states import SessionState, SlotState
from kvcached.core.tree import PrefixTree
from kvcached_client.errors import ErrorCode, request_error
from kvcached_client.types import FenceSequence, LeaseId, SessionId

#: A scheduler runs hundreds of requests at once and queues thousands; beyond that something does not release.
LEASES_PER_SESSION_MAX = 16_384
#: A tick that comes later than this part of the TTL says that the daemon itself stood still. Ticks are at least three
#: times as frequent as the TTL, and heartbeats that arrived meanwhile have not been read yet.
LATE_TICK_DIVISOR = 2
#: Eviction may free this share of the pool more than it must where that leaves ranges of slots whole (decision 0008).
SLACK_DIVISOR = 256
#: A fence is one engine step; a session this far behind is not signalling at all.
FENCE_HOLDS_PER_SESSION_MAX = 65_536


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """A device pool to be: pools of one `namespace` share a tree."""

    name: str
    namespace: bytes
    block_size: int
    slots: int


@dataclass(frozen=True, slots=True)
class Grant:
    """Answer to acquire: `hit` blocks to read at `hit_ranges`, the rest to compute into `ranges` (both packed)."""

    lease: LeaseId
    hit: int
    hit_ranges: bytes
    ranges: bytes


@dataclass(frozen=True, slots=True)
class Commitment:
    """Answer to commit: the lease's new depth, and how many of the first blocks were there already."""

    depth: int
    adopted: int
    duplicates: int


class Cache:
    """Trees, pools, sessions and leases of one daemon.

    Attributes:
        epoch: of this daemon's start; pools begin theirs there.
        pools: by replica name.
        sessions: active and expired ones.
        effects: what the world is asked to do; the service takes them after each call.
        counters: totals since the start, by name.
    """

    def __init__(self, pools: list[PoolSpec], *, epoch: int, session_ttl_ms: int) -> None:
        self.epoch = epoch
        self.session_ttl_ms = session_ttl_ms
        self.pools: dict[str, DevicePool] = {}
        self.sessions: dict[SessionId, Session] = {}
        self.effects: list[Effect] = []
        self.counters: Counter[str] = Counter()
        self._trees: dict[str, PrefixTree] = {}
        self._block_sizes = {spec.name: spec.block_size for spec in pools}
        self._now_ms = 0
        self._next_session = 1
        self._next_lease = 1
        by_namespace: dict[bytes, list[PoolSpec]] = {}
        for spec in pools:
            by_namespace.setdefault(spec.namespace, []).append(spec)
        for specs in by_namespace.values():
            members = [DevicePool(spec.name, index, spec.slots, epoch) for index, spec in enumerate(specs)]
            tree = PrefixTree(members, [LeastRecentlyUsed() for _ in members])
            for pool in members:
                self.pools[pool.name] = pool
                self._trees[pool.name] = tree

    @property
    def trees(self) -> list[PrefixTree]:
        """Every tree once."""
        return list(dict.fromkeys(self._trees.values()))

    # --- sessions ---------------------------------------------------------------------------------------------------

    def open_session(self, replica: str, now_ms: int, *, counted: bool = True) -> Session:
        """Give a replica's pool to a new session. One engine at a time is the service's business.

        What a session does that is not `counted` (a health check) is missing in the counters.
        """
        pool = self.pools[replica]
        if not pool.healthy:
            raise request_error(
                ErrorCode.WORKER_LOST, f"replica {replica!r} lost a worker", "restart the daemon; see its log"
            )
        session = Session(SessionId(self._next_session), self._trees[replica], pool, now_ms)
        if counted:
            session.counters = self.counters
        self._next_session += 1
        self.sessions[session.id] = session
        session.counters["sessions_opened"] += 1
        return session

    def heartbeat(self, session_id: SessionId, fence: FenceSequence, now_ms: int) -> Session:
        """The session lives, and its work up to `fence` is over."""
        session = self._session(session_id)
        session.last_heard_ms = now_ms
        session.signal(fence)
        return session

    def close_session(self, session_id: SessionId) -> None:
        """Its processes say that none of them will touch the pool again: all its work is over."""
        session = self.sessions.get(session_id)
        if session is not None:
            session.signal(max((hold.fence for hold in session.holds), default=session.fence))
            self._end(session)

    def handle(self, event: Event) -> None:
        """Take in what arrived by itself. Events about what is gone already change nothing."""
        match event:
            case Ticked():
                self._on_ticked(event.now_ms)
            case MemberLost():
                session = self.sessions.get(event.session)
                if session is not None and session.state is SessionState.ACTIVE:
                    self._expire(session)
            case MembersDied():
                session = self.sessions.get(event.session)
                if session is not None:
                    self._end(session)
            case WorkerDied():
                self._on_worker_died(self.pools[event.pool])

    # --- requests ---------------------------------------------------------------------------------------------------

    def match(self, session_id: SessionId, epoch: int, keys: bytes, tokens: int, *, full: bool) -> int:
        """How many leading blocks the session's pool holds. Changes nothing."""
        session = self._session_at(session_id, epoch)
        _, depth = session.tree.match(keys, self._hit_limit(session, keys, tokens, full=full), session.pool.index)
        return depth

    def acquire(
        self, session_id: SessionId, epoch: int, request: str, keys: bytes, tokens: int, reserve: int, *, full: bool
    ) -> Grant:
        """Match, pin the hit, and reserve slots for the rest of the prompt and `reserve` blocks more.

        Raises:
            RequestError: stale, over a limit, another request under a live request's id, or no capacity. Nothing was
                taken; what capacity would have to evict is still there.
        """
        session = self._session_at(session_id, epoch)
        asked = Asked(tokens, len(keys) // KEY_SIZE, keys[-KEY_SIZE:], reserve, full)
        held = session.requests.get(request)
        if held is not None:
            return self._grant_again(session, held, asked)
        if len(session.leases) >= LEASES_PER_SESSION_MAX:
            raise request_error(ErrorCode.LIMIT, f"{len(session.leases)} leases are held", "release what has finished")
        tree, pool = session.tree, session.pool
        run, depth = tree.match(keys, self._hit_limit(session, keys, tokens, full=full), pool.index)
        need = max(-(-tokens // self._block_sizes[pool.name]) - depth, 0) + reserve
        cause = f"acquire {request!r} by session {session.id}"
        ranges = no_ranges()
        tree.pin(run, depth, pool.index)
        try:
            hit_ranges = tree.path_ranges(run, depth, pool.index)
            tree.touch(run, pool.index)
            ranges = self._take(session, need, cause)
            lease = Lease(LeaseId(self._next_lease), request, asked, depth, ranges, run, depth, ranges[:])
            session.add(lease)
        except BaseException:
            pool.move(ranges, SlotState.LEASED, SlotState.FREE, f"rollback of {cause}")
            tree.unpin(run, depth, pool.index)
            raise
        self._next_lease += 1
        session.counters["acquires"] += 1
        session.counters["hit_blocks"] += depth
        session.counters["missed_blocks"] += len(keys) // KEY_SIZE - depth
        return Grant(lease.id, depth, hit_ranges, ranges.tobytes())

    def allocate(self, session_id: SessionId, epoch: int, lease_id: LeaseId, blocks: int) -> bytes:
        """More exclusive slots for a lease, packed."""
        session = self._session_at(session_id, epoch)
        lease = self._lease(session, lease_id)
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

        Raises:
            RequestError: stale, not the session's lease, `start` is not its depth, or the slots are not its own
                exclusive ones, one per key. Nothing has changed.
        """
        session = self._session_at(session_id, epoch)
        lease = self._lease(session, lease_id)
        left = self._check_commit(session, lease, start, keys, slots, fence)
        tree, pool = session.tree, session.pool
        count = len(keys) // KEY_SIZE
        if not count:
            return Commitment(lease.depth, 0, 0)
        held = tree.resolve(lease.run, lease.depth)
        run, duplicates = tree.commit(held, lease.depth, keys, slots, pool.index)
        depth = lease.depth + count
        tree.pin(run, depth, pool.index)
        tree.unpin(tree.resolve(held, lease.depth), lease.depth, pool.index)
        tree.touch(run, pool.index)
        scratch, adopted = cut(slots, duplicates)
        pool.move(adopted, SlotState.LEASED, SlotState.CACHED, f"commit by lease {lease.id}")
        if fence > session.fence and adopted:
            tree.pin(run, depth, pool.index)
            session.holds.append(FenceHold(fence, run, depth, lease.depth + duplicates, no_ranges()))
        lease.run, lease.depth, lease.open, lease.fence = run, depth, left, max(lease.fence, fence)
        append(lease.scratch, scratch)
        session.counters["committed_blocks"] += count - duplicates
        session.counters["duplicate_blocks"] += duplicates
        return Commitment(depth, count - duplicates, duplicates)

    def release(self, session_id: SessionId, epoch: int, lease_id: LeaseId, fence: FenceSequence) -> None:
        """Give a lease back: its pins and its exclusive slots, at once or when the fence signals."""
        session = self._session_at(session_id, epoch)
        lease = self._lease(session, lease_id)
        self._check_fence(session, max(fence, lease.fence))
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
        session = self._session_at(session_id, epoch)
        self._check_fence(session, fence, holds=2)
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

    # --- checks, which change nothing -------------------------------------------------------------------------------

    def _session(self, session_id: SessionId) -> Session:
        session = self.sessions.get(session_id)
        if session is None:
            raise request_error(ErrorCode.NO_SESSION, f"session {session_id} is not open", "attach and say hello again")
        if session.state is not SessionState.ACTIVE:
            raise request_error(
                ErrorCode.SESSION_EXPIRED,
                f"session {session_id} sent no heartbeat for {self.session_ttl_ms} ms, or lost one of its processes",
                "stop using its slots, end its processes, then attach and say hello again",
            )
        return session

    def _session_at(self, session_id: SessionId, epoch: int) -> Session:
        session = self._session(session_id)
        if epoch != session.pool.epoch:
            raise request_error(
                ErrorCode.STALE_EPOCH,
                f"epoch {epoch} of pool {session.pool.name!r} is over, it is {session.pool.epoch} now",
                "attach and say hello again",
            )
        return session

    def _lease(self, session: Session, lease_id: LeaseId) -> Lease:
        lease = session.leases.get(lease_id)
        if lease is not None:
            return lease
        if any(lease_id in other.leases for other in self.sessions.values()):
            raise request_error(
                ErrorCode.FOREIGN_LEASE, f"lease {lease_id} belongs to another session", "use your own lease ids"
            )
        if 0 < lease_id < self._next_lease:
            raise request_error(
                ErrorCode.ALREADY_RELEASED, f"lease {lease_id} has been released", "release a lease once"
            )
        raise request_error(ErrorCode.UNKNOWN_LEASE, f"there has been no lease {lease_id}", "use the id from acquire")

    def _hit_limit(self, session: Session, keys: bytes, tokens: int, *, full: bool) -> int:
        blocks, block_size = len(keys) // KEY_SIZE, self._block_sizes[session.pool.name]
        if blocks * block_size > tokens:
            raise request_error(
                ErrorCode.BAD_VALUE,
                f"{blocks} keys of {block_size} tokens for a prompt of {tokens} tokens",
                "send the keys of the prompt's full blocks only",
            )
        return blocks if full else min(blocks, max(tokens - 1, 0) // block_size)

    def _check_commit(
        self, session: Session, lease: Lease, start: int, keys: bytes, slots: Ranges[int], fence: FenceSequence
    ) -> Ranges[int]:
        """Refuse what does not fit; return the lease's exclusive slots without the committed ones."""
        self._check_fence(session, fence)
        if start != lease.depth:
            raise request_error(
                ErrorCode.OUT_OF_ORDER,
                f"commit starts at block {start}, lease {lease.id} is at {lease.depth}",
                "commit blocks in the order of the chain, each once",
            )
        if slot_count(slots) != len(keys) // KEY_SIZE:
            raise request_error(
                ErrorCode.BAD_VALUE,
                f"{len(keys) // KEY_SIZE} keys and {slot_count(slots)} slots",
                "name one slot per key",
            )
        left = subtract(lease.open, slots)
        if left is None:
            raise request_error(
                ErrorCode.UNKNOWN_SLOT,
                f"the commit names slots that lease {lease.id} does not hold for writing",
                "name slots from acquire or allocate, each once, that no commit has named",
            )
        return left

    def _check_fence(self, session: Session, fence: FenceSequence, holds: int = 1) -> None:
        if fence > session.fence and len(session.holds) + holds > FENCE_HOLDS_PER_SESSION_MAX:
            raise request_error(
                ErrorCode.LIMIT, f"{len(session.holds)} fences are pending", "signal them in the heartbeat"
            )

    # --- steps ------------------------------------------------------------------------------------------------------

    def _grant_again(self, session: Session, lease: Lease, asked: Asked) -> Grant:
        if lease.asked != asked or lease.depth != lease.hit:
            raise request_error(
                ErrorCode.REQUEST_CONFLICT,
                f"request {lease.request!r} already holds lease {lease.id}, acquired for something else or in use",
                "release that lease first, or give every request an id of its own",
            )
        run = session.tree.resolve(lease.run, lease.depth)
        hit_ranges = session.tree.path_ranges(run, lease.depth, session.pool.index)
        return Grant(lease.id, lease.hit, hit_ranges, lease.granted.tobytes())

    def _take(self, session: Session, count: int, cause: str) -> Ranges[int]:
        """Grant slots, evicting what is missing, or change nothing."""
        if not count:
            return no_ranges()
        pool = session.pool
        shortage = count - pool.free
        if shortage > 0:
            if shortage > pool.evictable:
                session.counters["no_capacity"] += 1
                raise request_error(
                    ErrorCode.NO_CAPACITY,
                    f"{count} slots wanted; of {pool.slots} are {pool.free} free and {pool.evictable} evictable",
                    "release leases and try again, or configure more slots",
                )
            slack = pool.slots // SLACK_DIVISOR
            evicted = session.tree.evict(shortage, pool.index, f"eviction for {cause}", slack=slack)
            self.counters["evicted_blocks"] += evicted
        return pool.take(count, cause)

    def _end(self, session: Session) -> None:
        """The one way out: everything a session holds is given back, however it went."""
        freed = session.end()
        del self.sessions[session.id]
        session.counters["sessions_ended"] += 1
        self.effects.append(SessionEnded(session.id, freed))

    def _on_ticked(self, now_ms: int) -> None:
        """Expire sessions that went silent. A tick that comes late itself (a suspended machine) expires nobody."""
        late = self._now_ms and now_ms - self._now_ms > self.session_ttl_ms // LATE_TICK_DIVISOR
        self._now_ms = now_ms
        for session in list(self.sessions.values()):
            if late:
                session.last_heard_ms = now_ms
            elif session.state is SessionState.ACTIVE and now_ms - session.last_heard_ms > self.session_ttl_ms:
                self._expire(session)

    def _expire(self, session: Session) -> None:
        """Its leases are over, but its processes may live: what they could write waits for their death."""
        session.expire()
        session.counters["sessions_expired"] += 1
        self.effects.append(SessionExpired(session.id, slot_count(session.quarantined)))

    def _on_worker_died(self, pool: DevicePool) -> None:
        """The pool's memory is gone: so is its residency, its epoch, and what its sessions held."""
        tree = self._trees[pool.name]
        for session in [session for session in self.sessions.values() if session.pool is pool]:
            self._end(session)
        tree.drop(tree.root, 0, pool.index)
        tree.policies[pool.index].clear()
        pool.reset(pool.epoch + 1)
        pool.healthy = False
        self.counters["workers_lost"] += 1
