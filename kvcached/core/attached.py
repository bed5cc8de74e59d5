"""Engines in attached mode: they keep their device memory and copy by themselves; this decides what lies where.

A lease pins a prefix in the host pool. A load is announced before an engine's processes read slots, a store before they
write them, and each of the engine's shards says when it is through. Until then nobody else gets those slots: where a
process goes silent they wait for its confirmed death.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from kvcached.core.attached_state import AttachedLease, AttachedSession, Exchange, SpaceSpec
from kvcached.core.bad_blocks import LetGo
from kvcached.core.checks import check_alive, hit_limit
from kvcached.core.effects import Effect, SessionEnded, SessionExpired, SlotsHandedOut, TransferKind
from kvcached.core.exchanges import EVERY_SHARD, Exchanges, StorePlan, host_of
from kvcached.core.forgotten import ForgottenKeys
from kvcached.core.host_pool import SlabStock
from kvcached.core.lease import Asked
from kvcached.core.pool import SlotPool
from kvcached.core.ranges import Ranges, no_ranges, pairs, slot_count
from kvcached.core.run import KEY_SIZE, Run
from kvcached.core.sightings import Sightings
from kvcached.core.spaces import Spaces
from kvcached.core.states import SessionState, SlotState
from kvcached.core.tree import HOST, Piece, PrefixTree
from kvcached_client.errors import ErrorCode, request_error
from kvcached_client.types import LeaseId, MissReason, SessionId, TransferId, WritePolicy

#: As for engines on device pools.
ATTACHED_LEASES_MAX = 16_384
#: Copies of one session under way. A store has as many blocks as its message, so this is far above what engines need.
EXCHANGES_PER_SESSION_MAX = 16_384


class LoadPlan(NamedTuple):
    """Answer to `prepare_load`: where the blocks lie."""

    transfer: TransferId
    generation: int
    slots: Ranges[int]


class Attached:
    """Sessions of engines in attached mode, and what they ask for.

    Args:
        stock: slabs of the host pool.
        spaces_max: how many namespaces there may be.
        next_transfer: gives transfer ids.
        forgotten: where trees note what leaves them.

    Attributes:
        sessions: active and expired ones.
        spaces: namespaces.
        paused: no copies are started, because somebody has asked for that.
    """

    def __init__(
        self,
        stock: SlabStock,
        spaces_max: int,
        session_ttl_ms: int,
        next_transfer: Callable[[], TransferId],
        effects: list[Effect],
        counters: Counter[str],
        forgotten: ForgottenKeys,
    ) -> None:
        self.sessions: dict[SessionId, AttachedSession] = {}
        self.spaces = Spaces(stock, spaces_max, self.sessions, counters, forgotten)
        self._exchanges = Exchanges(self.sessions, next_transfer, effects, counters)
        self._session_ttl_ms = session_ttl_ms
        self._effects = effects
        self._counters = counters
        self._last_lease = 0
        self._sightings = Sightings()
        self.paused = False

    @property
    def exchanges(self) -> list[Exchange]:
        """Copies of all sessions that are under way."""
        return self._exchanges.all()

    def tell_of_bad_slots(self, let_go: LetGo) -> None:
        """Somebody beside engines may read host slots whose blocks prove bad."""
        self._exchanges.let_go = let_go

    # --- sessions ---------------------------------------------------------------------------------------------------

    def open(self, session_id: SessionId, spec: SpaceSpec, now_ms: int) -> AttachedSession:
        """A session in a namespace, which is made if nobody has declared it yet.

        Raises:
            RequestError: there are too many namespaces, a block does not fit a slab, or another shape was declared.
        """
        session = AttachedSession(session_id, self.spaces.declare(spec), now_ms)
        self.sessions[session_id] = session
        self._counters["sessions_opened"] += 1
        return session

    def restore(self, session_id: SessionId, root: bytes, slots: list[tuple[SlotPool, Ranges[int]]]) -> AttachedSession:
        """A session of before a restart, in a namespace that is there again: its slots are set aside already."""
        session = AttachedSession(session_id, self.spaces.by_root[root], 0, quarantined=slots)
        session.enter(SessionState.EXPIRED)
        self.sessions[session_id] = session
        for _, ranges in slots:  # under the name that it has now, lest this daemon is killed, too
            self._effects.append(SlotsHandedOut(session_id, root, ranges))
        return session

    def heartbeat(self, session_id: SessionId, now_ms: int) -> AttachedSession:
        """The session lives."""
        session = self._active(session_id)
        session.last_heard_ms = now_ms
        return session

    def lose_member(self, session: AttachedSession) -> None:
        """One of its processes is gone, others may still copy: the session is over, once they have nothing to copy."""
        if session.exchanges:
            self.expire(session)
        else:
            self.end(session)

    def expire(self, session: AttachedSession) -> None:
        """Its leases are over. What its processes may still read stays as it is, what they may write is set aside.

        Where there is neither, nothing of it is left.
        """
        for lease in list(session.leases.values()):
            self._release(session, lease)
        for exchange in list(session.exchanges.values()):
            if exchange.kind is TransferKind.STORE:
                self._exchanges.drop_store(session, exchange, SlotState.QUARANTINED)
        self.spaces.bury()
        session.enter(SessionState.EXPIRED)
        self._counters["sessions_expired"] += 1
        self._effects.append(SessionExpired(session.id, sum(slot_count(slots) for _, slots in session.quarantined)))
        if not session.exchanges and not session.quarantined:
            self.end(session)

    def end(self, session: AttachedSession) -> None:
        """None of its processes touches a slot any more: everything that it held is given back."""
        freed = 0
        for lease in list(session.leases.values()):
            self._release(session, lease)
        for exchange in list(session.exchanges.values()):
            if exchange.kind is TransferKind.STORE:
                freed += exchange.blocks
                self._exchanges.drop_store(session, exchange, SlotState.FREE)
            else:
                exchange.failure = exchange.failure or "the session is over"
                self._exchanges.end_load(session, exchange)
        for pool, slots in session.quarantined:
            pool.move(slots, SlotState.QUARANTINED, SlotState.FREE, f"end of session {session.id}")
            freed += slot_count(slots)
        session.quarantined.clear()
        session.enter(SessionState.ENDED)
        del self.sessions[session.id]
        self._counters["sessions_ended"] += 1
        self.spaces.leave(session.space)
        self._effects.append(SessionEnded(session.id, freed))

    def on_ticked(self, now_ms: int, *, late: bool) -> None:
        """Expire sessions that went silent; nobody where the tick itself was late."""
        for session in list(self.sessions.values()):
            if late:
                session.last_heard_ms = now_ms
            elif session.state is SessionState.ACTIVE and now_ms - session.last_heard_ms > self._session_ttl_ms:
                self.expire(session)

    # --- requests ---------------------------------------------------------------------------------------------------

    def match(self, session_id: SessionId, keys: bytes, tokens: int, *, full: bool) -> int:
        """How many leading blocks the host pool holds. Changes nothing."""
        session = self._active(session_id)
        return longest_hit(session.space.tree, keys, _hit_limit(session, keys, tokens, full=full))[1]

    def acquire(
        self, session_id: SessionId, request: str, keys: bytes, tokens: int, *, full: bool, priority: int = 0
    ) -> AttachedLease:
        """Pin the longest prefix that the host pool holds complete. Asking again gives the same lease.

        Raises:
            RequestError: over a limit, or another request under a live request's id.
        """
        session = self._active(session_id)
        asked = Asked(tokens, len(keys) // KEY_SIZE, keys[-KEY_SIZE:], 0, full)
        held = session.requests.get(request)
        if held is not None:
            if held.asked != asked or held.reached > held.hit:
                raise request_error(
                    ErrorCode.REQUEST_CONFLICT,
                    f"request {request!r} already holds lease {held.id}, acquired for something else or in use",
                    "release that lease first, or give every request an id of its own",
                )
            return held
        if len(session.leases) >= ATTACHED_LEASES_MAX:
            raise request_error(ErrorCode.LIMIT, f"{len(session.leases)} leases are held", "release what has finished")
        tree = session.space.tree
        run, depth = longest_hit(tree, keys, _hit_limit(session, keys, tokens, full=full))
        tree.pin(run, depth, HOST)
        tree.touch(run, HOST, hit=depth, priority=priority)
        if tree.listener is not None:
            tree.listener.sighted(tree, run, depth)
        self._last_lease += 1
        lease = AttachedLease(
            LeaseId(self._last_lease),
            request,
            asked,
            tree,
            session.space.generation,
            depth,
            run,
            depth,
            priority=priority,
        )
        session.leases[lease.id] = session.requests[request] = lease
        self._counters["acquires"] += 1
        self._counters["host_hit_blocks"] += depth
        self._counters["missed_blocks"] += len(keys) // KEY_SIZE - depth
        return lease

    def release(self, session_id: SessionId, lease_id: LeaseId) -> None:
        """Give a lease back. Copies under way for it go on."""
        session = self._active(session_id)
        self._release(session, self._lease(session, lease_id))
        self._counters["releases"] += 1
        self.spaces.bury()

    def prepare_load(self, session_id: SessionId, lease_id: LeaseId, start: int, blocks: int) -> LoadPlan:
        """The engine's shards are about to read blocks of a lease's hit.

        Raises:
            RequestError: not the session's lease, not within its hit, over a limit, or the namespace was cleared since.
        """
        session = self._active(session_id)
        lease = self._lease(session, lease_id)
        if blocks < 1 or start + blocks > lease.hit:
            raise request_error(
                ErrorCode.BAD_VALUE,
                f"blocks {start} to {start + blocks} of a hit of {lease.hit}",
                "load one or more blocks of the hit",
            )
        if lease.tree is not session.space.tree:
            raise request_error(
                ErrorCode.HIT_GONE, f"the namespace was cleared after lease {lease.id}", "compute the prompt"
            )
        if self.paused:
            raise request_error(ErrorCode.PAUSED, "copies are paused", "compute the prompt")
        self._check_room(session)
        tree, run = lease.tree, lease.tree.resolve(lease.run, start + blocks)
        slots = tree.path_slots(run, start, start + blocks, HOST)
        host = host_of(tree)
        if not all(host.holds(first, count, SlotState.CACHED) for first, count in pairs(slots)):
            raise request_error(
                ErrorCode.HIT_GONE, f"blocks of the hit of lease {lease.id} proved bad meanwhile", "compute them"
            )
        piece = Piece(start, start + blocks)
        exchange = self._exchanges.start(session, TransferKind.LOAD, tree, run, [piece], slots)
        return LoadPlan(exchange.id, lease.generation, slots)

    def complete_load(
        self, session_id: SessionId, transfer: TransferId, shard: int, error: str, corrupt: tuple[int, ...]
    ) -> None:
        """A shard reads a load's slots no more. What it says of a load that has ended changes nothing."""
        session, exchange = self._exchange(session_id, transfer, shard, TransferKind.LOAD)
        if exchange is None:
            return
        exchange.corrupt.update(block for block in corrupt if 0 <= block < exchange.blocks)
        if self._exchanges.settled(exchange, shard, error):
            self._exchanges.end_load(session, exchange)
            self.spaces.bury()

    def prepare_store(self, session_id: SessionId, lease_id: LeaseId, start: int, keys: bytes) -> StorePlan:
        """The engine has computed the lease's next blocks: which of its path lack a copy, and slots for them.

        The lease reaches as far as there is room: blocks behind that may be offered again. Earlier blocks whose copy
        was lost meanwhile are asked for, too. Blocks that the write policy does not have copied are passed over: they,
        and those behind them, wait for another request.

        Raises:
            RequestError: not the session's lease, `start` is not where it is, or over a limit. Nothing has changed.
        """
        session = self._active(session_id)
        lease = self._lease(session, lease_id)
        if lease.tree is not session.space.tree:  # what continues a cleared prefix is of no use
            return StorePlan(TransferId(0), start + len(keys) // KEY_SIZE, lease.generation, [], no_ranges())
        if start != lease.reached:
            raise request_error(
                ErrorCode.OUT_OF_ORDER,
                f"the store starts at block {start}, lease {lease.id} is at {lease.reached}",
                "offer blocks in the order of the chain, each once",
            )
        if self.paused:  # as where there is no room: what is offered behind the lease's depth may be offered again
            return StorePlan(TransferId(0), start, lease.generation, [], no_ranges())
        wanted = self._wanted(lease, keys)
        if not wanted and keys:
            return self._pass_over(lease, keys)
        self._check_room(session)
        plan = self._plan_store(session, lease, start, keys[: wanted * KEY_SIZE])
        if plan.depth < start + wanted or wanted == len(keys) // KEY_SIZE:
            return plan
        return plan._replace(depth=self._pass_over(lease, keys[wanted * KEY_SIZE :]).depth)

    def _plan_store(self, session: AttachedSession, lease: AttachedLease, start: int, keys: bytes) -> StorePlan:
        tree, end = lease.tree, start + len(keys) // KEY_SIZE
        run = tree.extend_host(tree.resolve(lease.run, start), start, keys)
        tree.pin(run, end, HOST)  # or the room would be made by evicting what this continues
        try:
            return self._exchanges.plan_store(session, lease, run, end)
        finally:
            tree.unpin_host(run, end, MissReason.NO_ROOM)
            tree.drop_lost(run, MissReason.NO_ROOM)

    def commit_store(self, session_id: SessionId, transfer: TransferId, shard: int, error: str) -> None:
        """A shard has written a store's slots, or gives it up; the last one ends it."""
        session, exchange = self._exchange(session_id, transfer, shard, TransferKind.STORE)
        if exchange is not None and self._exchanges.settled(exchange, shard, error):
            self._exchanges.end_store(session, exchange)
            self.spaces.bury()

    def clear(self, session_id: SessionId) -> tuple[int, int]:
        """A new generation of the session's namespace: nothing stored before is matched again.

        Returns:
            The generation, and how many blocks the old one held.
        """
        space = self._active(session_id).space
        blocks = self.spaces.clear(space)
        return space.generation, blocks

    # --- steps ------------------------------------------------------------------------------------------------------

    def _wanted(self, lease: AttachedLease, keys: bytes) -> int:
        """How many leading blocks of an offer the write policy has copied.

        The daemon does not see such an engine's device memory, so that write-back is write-through here.
        """
        policy = lease.tree.write_policy
        if lease.passed or policy is WritePolicy.NEVER:
            return 0
        if policy is WritePolicy.WRITE_THROUGH_SELECTIVE:
            return self._sightings.depth(lease.tree.namespace, lease.generation, keys)
        return len(keys) // KEY_SIZE

    def _pass_over(self, lease: AttachedLease, keys: bytes) -> StorePlan:
        """The policy does not have the next blocks copied: there is nothing to do for the engine."""
        if lease.tree.write_policy is WritePolicy.WRITE_THROUGH_SELECTIVE:
            self._sightings.note(lease.tree.namespace, lease.generation, keys)
        lease.passed += len(keys) // KEY_SIZE
        self._counters["store_declined_blocks"] += len(keys) // KEY_SIZE
        return StorePlan(TransferId(0), lease.reached, lease.generation, [], no_ranges())

    def _release(self, session: AttachedSession, lease: AttachedLease) -> None:
        del session.leases[lease.id], session.requests[lease.request]
        run = lease.tree.resolve(lease.run, lease.depth)
        lease.tree.touch(run, HOST, priority=lease.priority)
        lease.tree.unpin_host(run, lease.depth)
        lease.tree.drop_lost(run)

    def _active(self, session_id: SessionId) -> AttachedSession:
        session = self.sessions.get(session_id)
        state = None if session is None else session.state
        check_alive(session_id, state, self._session_ttl_ms)
        return self.sessions[session_id]

    def _lease(self, session: AttachedSession, lease_id: LeaseId) -> AttachedLease:
        lease = session.leases.get(lease_id)
        if lease is not None:
            return lease
        if any(lease_id in other.leases for other in self.sessions.values()):
            raise request_error(
                ErrorCode.FOREIGN_LEASE, f"lease {lease_id} belongs to another session", "use your own lease ids"
            )
        if 0 < lease_id <= self._last_lease:
            raise request_error(
                ErrorCode.ALREADY_RELEASED, f"lease {lease_id} has been released", "release a lease once"
            )
        raise request_error(ErrorCode.UNKNOWN_LEASE, f"there has been no lease {lease_id}", "use the id from acquire")

    def _exchange(
        self, session_id: SessionId, transfer: TransferId, shard: int, kind: TransferKind
    ) -> tuple[AttachedSession, Exchange | None]:
        """A copy that a shard speaks of; None where it is over."""
        session = self._active(session_id)
        exchange = session.exchanges.get(transfer)
        if not EVERY_SHARD <= shard < session.space.spec.shards or (exchange is not None and exchange.kind is not kind):
            raise request_error(
                ErrorCode.BAD_VALUE,
                f"shard {shard} of {session.space.spec.shards} says that {kind} {transfer} is over",
                "commit_store ends stores, complete_load ends loads; shards are counted from 0",
            )
        return session, exchange

    def _check_room(self, session: AttachedSession) -> None:
        if len(session.exchanges) >= EXCHANGES_PER_SESSION_MAX:
            raise request_error(
                ErrorCode.LIMIT,
                f"{len(session.exchanges)} copies are under way",
                "wait until shards are through with some",
            )


def longest_hit(tree: PrefixTree, keys: bytes, limit: int) -> tuple[Run, int]:
    """The longest prefix of a chain whose copies in the host pool are complete, up to `limit` blocks."""
    run, depth = tree.match_host(tree.root, 0, keys, limit)
    pool = host_of(tree)
    if pool.counts[SlotState.FILLING]:
        whole = 0
        for first, count in pairs(tree.path_slots(run, 0, depth, HOST)):
            whole += count
            if not pool.holds(first, count, SlotState.CACHED):
                states = (pool.state_of(slot) is SlotState.CACHED for slot in range(first, first + count))
                depth = whole - count + list(states).index(False)
                break
    return tree.resolve(run, depth), depth


def _hit_limit(session: AttachedSession, keys: bytes, tokens: int, *, full: bool) -> int:
    return hit_limit(len(keys) // KEY_SIZE, session.space.spec.block_size, tokens, full=full)
