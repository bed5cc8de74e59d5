"""Engines in offload mode: they keep their device memory and copy by themselves; this decides what lies where.

A lease locks a prefix in the host pool. A load is announced before an engine's processes read slots, a store before
they write them, and each of the engine's shards says when it is through. Until then nobody else gets those slots: where
a process goes silent they wait for its confirmed death.
"""

from __future__ import annotations

from typing import NamedTuple

from kvcached.core.index.host_tree import HOST
from kvcached.core.index.pieces import Piece
from kvcached.core.index.run import KEY_SIZE
from kvcached.core.lease import Asked, OffloadLease
from kvcached.core.messages import SessionEnded, SessionExpired, SlotsHandedOut, SlotsReclaimed, TransferKind
from kvcached.core.namespaces import Namespaces, NamespaceSpec
from kvcached.core.refusals import Refusal, Why
from kvcached.core.session import OffloadSession, Sessions
from kvcached.core.slots.ranges import Ranges, no_ranges, pairs, slot_count
from kvcached.core.slots.slots import SlotPool
from kvcached.core.slots.states import SessionState, SlotState, TransferState
from kvcached.core.transfers.engine_copies import EVERY_SHARD, EngineCopies, StorePlan, host_of
from kvcached.core.transfers.prefix_locks import PrefixLocks
from kvcached.core.transfers.store_waits import longest_hit
from kvcached.core.transfers.table import TransferTable
from kvcached.core.transfers.transfer import EngineTransfer
from kvcached_client.types import LeaseId, SessionId, ShardIndex, TransferId

#: Copies of one session under way. A store has as many blocks as its message, so this is far above what engines need.
TRANSFERS_PER_SESSION_MAX = 16_384
#: The failure of a copy whose session has expired or ended.
_OVER = "the session is over"
#: The failure of a copy that a shard had not made when it left.
_LEFT = "a shard has left the session"


class LoadPlan(NamedTuple):
    """A load that is announced: where the blocks lie."""

    transfer: TransferId
    generation: int
    slots: Ranges[int]


class Offload:
    """Sessions of engines in offload mode, and what they ask for.

    Args:
        table: of all transfers.
        locks: of prefixes that sessions are about to acquire.

    Attributes:
        sessions: active and expired ones.
        namespaces: where they are.
    """

    def __init__(
        self,
        namespaces: Namespaces,
        session_ttl_ms: int,
        table: TransferTable,
        locks: PrefixLocks,
    ) -> None:
        self.sessions = Sessions[OffloadSession, OffloadLease](session_ttl_ms)
        self.namespaces = namespaces
        self._table = table
        self._copies = EngineCopies(table)
        self._effects = table.effects
        self._counters = table.counters
        self._locks = locks

    @property
    def transfers(self) -> list[EngineTransfer]:
        """Copies of all sessions that are under way."""
        return self._copies.all()

    @property
    def paused(self) -> bool:
        """Whether no copies are started, because somebody has asked for that."""
        return self._table.paused

    # --- sessions ---------------------------------------------------------------------------------------------------

    def open(
        self, session_id: SessionId, spec: NamespaceSpec, now_ms: int, *, read_only: bool = False
    ) -> OffloadSession:
        """A session in a namespace, which is made if nobody has declared it yet.

        Raises:
            Refusal: there are too many namespaces, a block does not fit a slab, or another shape was declared.
        """
        namespace = self.namespaces.enter(spec)
        session = OffloadSession(session_id, now_ms, namespace, block_size=spec.block_size, read_only=read_only)
        self.sessions[session_id] = session
        self._counters["sessions_opened"] += 1
        return session

    def restore(self, session_id: SessionId, root: bytes, slots: list[tuple[SlotPool, Ranges[int]]]) -> OffloadSession:
        """A session of before a restart, in a namespace that is there again: its slots are set aside already."""
        namespace = self.namespaces.reenter(root)
        session = OffloadSession(session_id, 0, namespace, quarantined=slots, block_size=namespace.spec.block_size)
        session.enter(SessionState.EXPIRED)
        self.sessions[session_id] = session
        for _, ranges in slots:  # under the name that it has now, lest this daemon is killed, too
            self._effects.append(SlotsHandedOut(session_id, root, ranges))
        return session

    def heartbeat(self, session_id: SessionId, now_ms: int) -> OffloadSession:
        """The session lives."""
        session = self.sessions.active(session_id)
        session.heard(now_ms)
        return session

    def lose_member(self, session: OffloadSession) -> None:
        """One of its processes is gone, others may still copy: the session is over, once they have nothing to copy."""
        if session.transfers:
            self.expire(session, Why.SESSION_LOST_MEMBER)
        else:
            self.end(session)

    def expire(self, session: OffloadSession, over: Why = Why.SESSION_SILENT) -> None:
        """Its leases are over. What its processes may still read stays as it is, what they may write is set aside.

        Where there is neither, nothing of it is left.
        """
        self._locks.leave(session.id)
        for lease in list(session.leases.values()):
            self._release(session, lease)
        for copy in list(session.transfers.values()):
            if copy.kind is TransferKind.STORE:
                copy.fail(_OVER)
                self._copies.end(session, copy, SlotState.QUARANTINED)
        self.namespaces.drop_retired()
        session.enter_expired(over)
        self._counters["sessions_expired"] += 1
        self._effects.append(SessionExpired(session.id, sum(slot_count(slots) for _, slots in session.quarantined)))
        self._end_if_nothing_is_left(session)

    def end(self, session: OffloadSession) -> None:
        """None of its processes touches a slot any more: everything that it held is given back."""
        freed = 0
        self._locks.leave(session.id)
        for lease in list(session.leases.values()):
            self._release(session, lease)
        for copy in list(session.transfers.values()):
            freed += copy.blocks if copy.kind is TransferKind.STORE else 0
            copy.fail(_OVER)
            self._copies.end(session, copy)
        for pool, slots in session.quarantined:
            pool.move(slots, SlotState.QUARANTINED, SlotState.FREE, f"end of session {session.id}")
            freed += slot_count(slots)
            self._effects.append(SlotsReclaimed(session.namespace.spec.root, slots))
        session.quarantined.clear()
        session.enter(SessionState.ENDED)
        del self.sessions[session.id]
        self._counters["sessions_ended"] += 1
        self.namespaces.leave(session.namespace)
        self._effects.append(SessionEnded(session.id, freed))

    def on_ticked(self, now_ms: int, *, late: bool) -> None:
        """Expire sessions that went silent; nobody where the tick itself was late."""
        for session in self.sessions.silent(now_ms, late=late):
            self.expire(session)

    def shard_joined(self, session_id: SessionId, shard: ShardIndex) -> None:
        """A process copies as this shard from now on."""
        self.sessions.active(session_id).left.discard(shard)

    def shard_left(self, session_id: SessionId, shard: ShardIndex) -> list[TransferId]:
        """No process reads or writes slots as this shard any more: what it has not copied fails.

        Returns the copies that nobody else is to make. Until a process has joined as this shard, no other is started.
        """
        session = self.sessions[session_id]
        session.left.add(shard)
        waiting = [copy for copy in session.transfers.values() if shard in copy.waiting]
        ended = [copy for copy in waiting if self._copies.settled(copy, shard, _LEFT)]
        for copy in ended:
            self._copies.end(session, copy)
        self.namespaces.drop_retired()
        if session.state is SessionState.EXPIRED:
            self._end_if_nothing_is_left(session)
        return [copy.id for copy in ended]

    # --- requests ---------------------------------------------------------------------------------------------------

    def match(self, session_id: SessionId, keys: bytes, tokens: int, *, full: bool) -> int:
        """How many leading blocks the host pool holds. Changes nothing."""
        session = self.sessions.active(session_id)
        return longest_hit(session.tree, keys, session.hit_limit(keys, tokens, full=full)).depth

    def acquire(
        self,
        session_id: SessionId,
        request: str,
        keys: bytes,
        tokens: int,
        *,
        full: bool,
        priority: int = 0,
        tenant: str = "",
        load_from: int | None = None,
    ) -> OffloadLease:
        """Lock the longest prefix that the host pool holds complete. Asking again gives the same lease.

        With `load_from`, a load of the hit's blocks from that depth on is announced, too, as by `prepare_load`; but
        not if others are storing blocks behind the hit: the engine may rather wait for these.

        Raises:
            Refusal: over a limit, or another request under a live request's id.
        """
        session = self.sessions.active(session_id)
        asked = Asked(tokens, len(keys) // KEY_SIZE, keys[-KEY_SIZE:], 0, full, load_from)
        held = session.leases.granted(request, asked)
        if held is not None:
            return held
        tree = session.tree
        limit = session.hit_limit(keys, tokens, full=full)
        found = longest_hit(tree, keys, limit)
        run, depth = found.run, found.depth
        tree.lock(run, depth, HOST)
        if self._locks.waiting:
            self._locks.acquired(session.id, keys, limit)
        tree.touch(run, depth, HOST, is_hit=True, priority=priority)
        tree.belong(run, tenant)
        if tree.listener is not None:
            tree.listener.sighted(tree, run, depth)
        lease = OffloadLease(
            self.sessions.next_lease(),
            request,
            asked,
            depth,
            run,
            depth,
            tree,
            session.namespace.generation,
            priority=priority,
            tenant=tenant,
            filling=found.filling if self._copies.is_stored_by_another(session, found, tree, keys) else 0,
        )
        session.leases.add(lease)
        if load_from is not None and load_from < depth and not lease.filling and self._may_copy(session):
            lease.load_with(self._start_load(session, lease, load_from, depth).id)
        if tree.reuse is not None:
            tree.reuse.asked(keys)
        self._counters["acquires"] += 1
        self._counters["host_hit_blocks"] += depth
        self._counters["missed_blocks"] += len(keys) // KEY_SIZE - depth
        return lease

    def release(self, session_id: SessionId, lease_id: LeaseId) -> None:
        """Give a lease back. Copies under way for it go on."""
        session = self.sessions.active(session_id)
        self._release(session, self.sessions.lease(session.leases, lease_id))
        self._counters["releases"] += 1
        self.namespaces.drop_retired()

    def prepare_load(self, session_id: SessionId, lease_id: LeaseId, start: int, blocks: int) -> LoadPlan:
        """The engine's shards are about to read blocks of a lease's hit.

        Raises:
            Refusal: not the session's lease, not within its hit, over a limit, or the namespace was cleared since.
        """
        session = self.sessions.active(session_id)
        lease = self.sessions.lease(session.leases, lease_id)
        if blocks < 1 or start + blocks > lease.hit:
            raise Refusal(Why.LOAD_BEHIND_HIT, start=start, end=start + blocks, hit=lease.hit)
        if lease.tree is not session.tree:
            raise Refusal(Why.HIT_CLEARED, lease=lease.id)
        if self.paused:
            raise Refusal(Why.COPIES_PAUSED)
        self._check_room(session)
        copy = self._start_load(session, lease, start, start + blocks)
        return LoadPlan(copy.id, lease.generation, copy.host)

    def announced_load(self, session_id: SessionId, lease: OffloadLease) -> LoadPlan | None:
        """The load that a lease's acquire has announced; None if there is none, or it is over."""
        copy = self.sessions.active(session_id).transfers.get(lease.load)
        return None if copy is None else LoadPlan(copy.id, lease.generation, copy.host)

    def transfer_done(
        self,
        session_id: SessionId,
        kind: TransferKind,
        transfer: TransferId,
        shard: int,
        error: str = "",
        corrupt: tuple[int, ...] = (),
    ) -> TransferState | None:
        """A shard no longer reads or writes the slots of a copy, well or with an error; the last shard ends the copy.

        A report about a copy that has ended changes nothing, nor does a second one of a shard. Returns the state of the
        copy now; None for one that had ended before.

        Args:
            session_id: the shard's session.
            kind: of the copy.
            transfer: the copy.
            shard: the shard; `EVERY_SHARD` if no shard will copy.
            error: why the copy failed; "" if it did not.
            corrupt: blocks of a load that differ from what was stored, counted from its first block.

        Raises:
            Refusal: no such shard, a copy of the other kind, corrupt blocks of a store, or the session is over: then
                the slots of a load are free all the same.
        """
        try:
            session, copy = self._transfer(session_id, transfer, shard)
        except Refusal:
            self._hear_late(session_id, transfer, shard, error, corrupt)
            raise
        if copy is None:
            return None
        if copy.kind is not kind:
            raise Refusal(Why.OTHER_KIND, transfer=transfer, present=copy.kind, kind=kind)
        if corrupt and copy.kind is not TransferKind.LOAD:
            raise Refusal(Why.CORRUPT_STORE, transfer=transfer)
        if shard != EVERY_SHARD and shard not in copy.waiting:  # it has said so before
            return copy.state
        copy.corrupt.update(block for block in corrupt if 0 <= block < copy.blocks)
        if self._copies.settled(copy, shard, error):
            self._copies.end(session, copy)
            self.namespaces.drop_retired()
        return copy.state

    def prepare_store(self, session_id: SessionId, lease_id: LeaseId, start: int, keys: bytes) -> StorePlan:
        """The engine has computed the lease's next blocks: which of its path lack a copy, and slots for them.

        The lease reaches as far as there is room: blocks behind that may be offered again. Earlier blocks whose copy
        was lost meanwhile are asked for, too. Blocks that the write policy does not have copied, and all of a session
        that is read-only, are passed over: they, and those behind them, wait for another request.

        Raises:
            Refusal: not the session's lease, `start` is not where it is, or over a limit. Nothing has changed.
        """
        session = self.sessions.active(session_id)
        lease = self.sessions.lease(session.leases, lease_id)
        if lease.tree is not session.tree:  # what continues a cleared prefix is of no use
            return StorePlan(TransferId(0), start + len(keys) // KEY_SIZE, lease.generation, [], no_ranges())
        if start != lease.reached:
            raise Refusal(Why.STORE_OUT_OF_ORDER, start=start, lease=lease.id, reached=lease.reached)
        if self._table.paused:  # as where there is no room: what is behind the lease's depth may be offered again
            return StorePlan(TransferId(0), start, lease.generation, [], no_ranges())
        may_store = self._copies.may_store(session, lease)
        wanted = self._copies.wanted(lease, keys) if may_store else 0
        if not wanted and (keys or not may_store):
            return self._copies.pass_over(lease, keys)
        self._check_room(session)
        if lease.tree.reuse is not None:
            lease.tree.reuse.stored(keys)
        plan = self._copies.plan_store(session, lease, keys[: wanted * KEY_SIZE])
        if plan.depth < start + wanted or wanted == len(keys) // KEY_SIZE:
            return plan
        return plan._replace(depth=self._copies.pass_over(lease, keys[wanted * KEY_SIZE :]).depth)

    def clear(self, session_id: SessionId) -> tuple[int, int]:
        """A new generation of the session's namespace: nothing stored before is matched again.

        Returns:
            The generation, and how many blocks the old one held.
        """
        namespace = self.sessions.active(session_id).namespace
        blocks = self.namespaces.clear(namespace)
        return namespace.generation, blocks

    # --- steps ------------------------------------------------------------------------------------------------------

    def _release(self, session: OffloadSession, lease: OffloadLease) -> None:
        session.leases.remove(lease)
        run = lease.tree.resolve(lease.run, lease.depth)
        lease.tree.touch(run, lease.depth, HOST, priority=lease.priority)
        lease.tree.unlock_host(run, lease.depth)
        lease.tree.drop_lost(run)

    def _transfer(
        self, session_id: SessionId, transfer: TransferId, shard: int
    ) -> tuple[OffloadSession, EngineTransfer | None]:
        """The copy that a shard reports on; None if it is over."""
        session = self.sessions.active(session_id)
        copy = session.transfers.get(transfer)
        if not EVERY_SHARD <= shard < session.namespace.spec.shards:
            raise Refusal(Why.WRONG_SHARD, shard=shard, shards=session.namespace.spec.shards, transfer=transfer)
        return session, copy

    def _hear_late(
        self, session_id: SessionId, transfer: TransferId, shard: int, error: str, corrupt: tuple[int, ...]
    ) -> None:
        """The report of a load came behind the goodbye, by another connection. Only deaths would end the load else."""
        session = self.sessions.get(session_id)
        copy = None if session is None else session.transfers.get(transfer)  # of an expired one: loads only
        if session is None or session.state is not SessionState.EXPIRED or copy is None or shard not in copy.waiting:
            return
        copy.corrupt.update(block for block in corrupt if 0 <= block < copy.blocks)
        if self._copies.settled(copy, shard, error):
            self._copies.end(session, copy)
            self.namespaces.drop_retired()
            self._end_if_nothing_is_left(session)

    def _end_if_nothing_is_left(self, session: OffloadSession) -> None:
        """Its processes may live, and touch nothing any more."""
        if not session.transfers and not session.quarantined:
            self.end(session)

    def _start_load(self, session: OffloadSession, lease: OffloadLease, start: int, end: int) -> EngineTransfer:
        """Announce that a session's shards will read blocks of a lease's hit.

        Raises:
            Refusal: some of the blocks proved bad meanwhile.
        """
        tree, run = lease.tree, lease.tree.resolve(lease.run, end)
        slots = tree.path_slots(run, start, end, HOST)
        host = host_of(tree)
        if not all(host.holds(first, count, SlotState.CACHED) for first, count in pairs(slots)):
            raise Refusal(Why.HIT_CORRUPT, lease=lease.id)
        return self._copies.start(session, TransferKind.LOAD, tree, run, [Piece(start, end)], slots)

    def _may_copy(self, session: OffloadSession) -> bool:
        return not (self.paused or session.left) and len(session.transfers) < TRANSFERS_PER_SESSION_MAX

    def _check_room(self, session: OffloadSession) -> None:
        if session.left:
            raise Refusal(Why.SHARD_LEFT, shard=min(session.left), session=session.id)
        if len(session.transfers) >= TRANSFERS_PER_SESSION_MAX:
            raise Refusal(Why.TRANSFERS_FULL, transfers=len(session.transfers))
