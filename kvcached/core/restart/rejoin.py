"""After a restart an engine says what it holds: leases with the slots that it goes on working in.

Its pool has outlived the daemon with all its bytes, and every slot is set aside for it. What it declares becomes its
leases again, and findable where it had committed; what it does not declare is free when it says that this was all.
"""

from __future__ import annotations

from kvcached.core.cache import Cache
from kvcached.core.index.run import KEY_SIZE
from kvcached.core.lease import Asked, ManagedLease
from kvcached.core.managed_session import ManagedSession
from kvcached.core.refusals import Refusal, Why
from kvcached.core.slots.ranges import (
    Ranges,
    append,
    chained,
    cut,
    every_slot,
    from_slots,
    no_ranges,
    one_range,
    slot_count,
)
from kvcached.core.slots.states import SessionState
from kvcached_client.types import FenceSequence, LeaseId, SessionId


class Rejoin:
    """Sessions of before a restart that come back."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    def resume(self, session_id: SessionId, now_ms: int, fence: FenceSequence) -> ManagedSession:
        """The engine of an expired session from before the restart is back.

        If it may not have heard that it was back already, it comes back again, and declares all leases again.

        Args:
            session_id: of the session.
            now_ms: the time.
            fence: the highest that the session has named and that has not signalled; 0 where all have. Until this fence
                has signalled, what the session declares is for itself alone, and what it does not declare is not
                granted: another lease than the one that named the fence may hold its blocks, and leases that were
                released under it are not declared.

        Raises:
            Refusal: there is no such session, or its engine knows that it is back, or it began after the restart.
        """
        session = self._cache.managed.sessions.get(session_id)
        if session is None or not session.may_return:
            raise Refusal(Why.NOT_RESUMABLE, session=session_id)
        if session.state is SessionState.ACTIVE:
            session.expire(self._cache.worker_copies.cut_off, Why.SESSION_SILENT)
        session.resume(now_ms, fence)
        session.count_in(self._cache.counters)
        session.counters["sessions_resumed"] += 1
        return session

    def declare(
        self,
        session_id: SessionId,
        epoch: int,
        request: str,
        tokens: int,
        hit: int,
        keys: bytes,
        held: Ranges[int],
        own: Ranges[int],
    ) -> LeaseId:
        """A request of the engine holds slots.

        Args:
            session_id: a resumed one.
            epoch: of its pool now.
            request: the engine's id of it.
            tokens: of its prompt.
            hit: blocks that the engine was promised, at least as many as `keys`; those beyond were still loading, and
                `Managed.load` gives slots in their place.
            keys: of the blocks that are there, committed or a hit.
            held: where they are. Other declared leases may hold the same, whether or not the tree has the blocks there.
            own: its exclusive slots, in the order of the blocks that will lie in them. Blocks that are found in them
                are found no more: the engine has not heard of their commit, and may be writing them.

        Raises:
            Refusal: stale, not declaring, another lease of that name, over a limit, or slots that are not set
                aside for the session. Nothing has changed but that blocks in `own` may be found no more.
        """
        session = self._declaring(session_id, epoch)
        blocks = len(keys) // KEY_SIZE
        self._check(session, request, blocks, hit, held)
        tree, pool, fence = session.tree, session.pool, session.inherited_fence
        if not pool.has(own) or not self._cache.managed.set_aside(session, own):
            raise Refusal(Why.SLOTS_NOT_SET_ASIDE, request=request, session=session_id)
        run, depth = tree.match(keys, blocks, pool.index)
        known, rest = cut(held, depth)
        copies, mine = _other_slots(known, tree.path_slots(run, 0, depth, pool.index)), chained(rest, own)
        shared = session.copies_of_others(copies)
        copies = from_slots(slot for slot in every_slot(copies) if slot not in shared) if shared else copies
        if not session.take_back(chained(copies, mine)):
            raise Refusal(Why.SLOTS_NOT_SET_ASIDE, request=request, session=session_id)
        asked = Asked(tokens, blocks, keys[-KEY_SIZE:], 0, full=False)
        lease = ManagedLease(
            self._cache.managed.sessions.next_lease(), request, asked, depth, run, depth, mine, copies, fence
        )
        tree.lock(run, depth, pool.index)
        session.leases.add(lease)
        session.share_copies(lease, shared)
        self._cache.managed.commit(session_id, epoch, lease.id, depth, keys[depth * KEY_SIZE :], rest, fence)
        lease.promise(max(hit, lease.depth))
        session.counters["duplicate_blocks"] += slot_count(copies)
        session.counters["leases_declared"] += 1
        return lease.id

    def over(self, session_id: SessionId, epoch: int) -> int:
        """The engine has declared all that it holds. Returns how many slots are free now."""
        return self._declaring(session_id, epoch).declared()

    def _declaring(self, session_id: SessionId, epoch: int) -> ManagedSession:
        session = self._cache.managed.session_at(session_id, epoch)
        if not session.declaring:
            raise Refusal(Why.NOT_DECLARING, session=session_id)
        return session

    def _check(self, session: ManagedSession, request: str, blocks: int, hit: int, held: Ranges[int]) -> None:
        if request in session.leases.by_request:
            raise Refusal(Why.DECLARED_ALREADY, request=request)
        if slot_count(held) != blocks or hit < blocks:
            raise Refusal(Why.DECLARATION_OF_OTHER_LENGTH, keys=blocks, slots=slot_count(held), hit=hit)
        session.leases.check_room()
        session.check_fence(session.inherited_fence, holds=2)  # the commit's, and that of `over`


def _other_slots(held: Ranges[int], path: Ranges[int]) -> Ranges[int]:
    """Those of `held` that are not the same block's in `path`: copies of the lease's own."""
    copies = no_ranges()
    for mine, theirs in zip(every_slot(held), every_slot(path), strict=True):
        if mine != theirs:
            append(copies, one_range(mine, 1))
    return copies
