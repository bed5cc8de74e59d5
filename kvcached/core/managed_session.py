"""A session on a device pool: what it may still write when it is silent, and the one way to give all of it back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from kvcached.core.eviction.reuse import TreeReuse
from kvcached.core.index.run import KEY_SIZE, Run
from kvcached.core.index.run_tree import resident
from kvcached.core.index.tree import PrefixTree
from kvcached.core.lease import FenceHold, FenceHolds, ManagedLease, SharedCopy
from kvcached.core.refusals import Refusal, Why
from kvcached.core.session import Leases, Session
from kvcached.core.slots.ranges import (
    Ranges,
    append,
    every_slot,
    from_slots,
    join,
    no_ranges,
    one_range,
    slot_count,
    subtract,
)
from kvcached.core.slots.slots import DevicePool
from kvcached.core.slots.states import SessionState, SlotState
from kvcached_client.types import NO_FENCE, FenceSequence

#: A fence is one engine step; a session this far behind is not signalling at all.
FENCE_HOLDS_PER_SESSION_MAX = 65_536
#: Told before a pool's part of the path to a run ends at a depth.
CutOff = Callable[[PrefixTree, DevicePool, Run, int], None]


@dataclass(slots=True, eq=False)
class ManagedSession(Session):
    """An engine group on one device pool, and the one way to give back all that it holds.

    Attributes:
        tree, pool: where it works.
        fence: the highest fence that has signalled.
        holds: what later fences hold.
        quarantined: slots that it could write when it expired.
        counters: where what it does is counted.
        writes_through: what it commits is to be copied to the host pool, when the policy says so.
        reuse: told of what it asks for and commits; None for a health check, whose keys nobody asks for again, and
            without a host pool.
        declaring: it is from before a restart, and has not said yet what it holds. All that it could write is in
            `quarantined` until it has.
        returning: its engine has come back after a restart, and may not have heard that all is declared: then it knows
            the session by its name from before, and comes back again. See `spoke`.
        shared_copies: slots that two declared leases or more hold beside the tree's, LEASED as the scratch of one is.
        inherited_fence: the highest fence that it named before the restart. Until this fence has signalled, work may be
            queued on every slot that the session has ever held.
        freezes: it is from before a restart, and its engine may use any block that was cached then: see
            `DevicePool.frozen`.
    """

    leases: Leases[ManagedLease] = field(default_factory=Leases, kw_only=True)
    tree: PrefixTree
    pool: DevicePool
    fence: FenceSequence = NO_FENCE
    holds: FenceHolds = field(default_factory=FenceHolds)
    quarantined: Ranges[int] = field(default_factory=no_ranges)
    counters: Counter[str] = field(default_factory=Counter)
    writes_through: bool = False
    reuse: TreeReuse | None = None
    declaring: bool = False
    returning: bool = False
    shared_copies: dict[int, SharedCopy] = field(default_factory=dict)
    inherited_fence: FenceSequence = NO_FENCE
    freezes: bool = False

    @property
    def may_return(self) -> bool:
        """Whether its engine from before a restart may come back: it has not yet, or may not know that it has."""
        return self.returning or (self.declaring and self.state is SessionState.EXPIRED)

    def check_fence(self, fence: FenceSequence, holds: int = 1) -> None:
        """Refuse a session that may not have so many fences more."""
        if fence > self.fence and len(self.holds) + holds > FENCE_HOLDS_PER_SESSION_MAX:
            raise Refusal(Why.FENCES_FULL, fences=len(self.holds))

    def count_in(self, counters: Counter[str]) -> None:
        """It is an engine's, not a health check's: what it does is counted, sampled, and copied to the host pool."""
        self.counters = counters
        self.writes_through = self.tree.host is not None
        self.reuse = self.tree.reuse

    def slots_left(
        self, lease: ManagedLease, start: int, keys: bytes, slots: Ranges[int], fence: FenceSequence
    ) -> Ranges[int]:
        """Refuse a commit that does not fit; return the lease's exclusive slots without the committed ones."""
        self.check_fence(fence)
        if lease.loads:
            raise Refusal(Why.STILL_LOADING, lease=lease.id)
        if start != lease.depth:
            raise Refusal(Why.COMMIT_OUT_OF_ORDER, start=start, lease=lease.id, depth=lease.depth)
        if slot_count(slots) != len(keys) // KEY_SIZE:
            raise Refusal(Why.COMMIT_OF_OTHER_LENGTH, keys=len(keys) // KEY_SIZE, slots=slot_count(slots))
        left = subtract(lease.open, slots)
        if left is None:
            raise Refusal(Why.COMMIT_OF_FOREIGN_SLOTS, lease=lease.id)
        return left

    def release(self, lease: ManagedLease, fence: FenceSequence) -> None:
        """Give a lease's lock and exclusive slots back, at once or when this fence and its commits' have signalled."""
        lease.fence = max(fence, lease.fence)
        cause = f"release of lease {lease.id}"
        slots = self._take_off(lease)
        fence = lease.fence
        if fence > self.fence:
            self.pool.move(slots, SlotState.LEASED, SlotState.FENCED, cause)
            self.holds.append(FenceHold(fence, lease.run, lease.depth, lease.depth, slots))
        else:
            self.pool.move(slots, SlotState.LEASED, SlotState.FREE, cause)
            self._unlock(lease.run, lease.depth)

    def signal(self, fence: FenceSequence) -> None:
        """The engine's work up to `fence` is over: give back what it held. An earlier fence changes nothing."""
        if fence <= self.fence:
            return
        self.fence = fence
        for hold in self.holds.take(fence):
            if hold.suspect < hold.depth:
                self.pool.note_cached(self.tree.cached_blocks(hold.run, hold.suspect, hold.depth, self.pool))
            self.pool.move(hold.slots, SlotState.FENCED, SlotState.FREE, f"fence {hold.fence} of session {self.id}")
            self._unlock(hold.run, hold.depth)
            for run, depth in hold.unstored.items():
                self.counters["stores_forgotten"] += self.pool.note_unstored(run, depth)
        if not self.declaring and fence >= self.inherited_fence:
            self.thaw()

    def expire(self, cut_off: CutOff, over: Why) -> None:
        """Its leases are over, but its processes may live: what they could write is quarantined.

        An engine that may come back again finds all as it was before it came: see `returning`.
        """
        self.thaw()
        self.quarantined.extend(self._strip(SlotState.QUARANTINED, f"expiry of session {self.id}", cut_off))
        self.enter_expired(over)
        if self.returning:
            self.returning = False
            self._await_engine(f"session {self.id}, whose engine may come back again")

    def restore(self) -> None:
        """It is from before a restart: it could write every slot that is not known to be cached, and use the others."""
        self._await_engine(f"session {self.id} from before the restart")
        self.enter(SessionState.EXPIRED)

    def _await_engine(self, cause: str) -> None:
        pool = self.pool
        self.freezes = True
        pool.freeze()
        # joined: what the engine declares may reach from one range to the next
        self.quarantined = join([self.quarantined, pool.take(pool.free, SlotState.QUARANTINED, cause)])
        self.declaring = True

    def resume(self, now_ms: int, fence: FenceSequence) -> None:
        """Its engine has come back, and is about to say what it holds. `fence` becomes `inherited_fence`."""
        self.heard(now_ms)
        self.inherited_fence = fence
        self.returning = True
        self.enter(SessionState.ACTIVE)

    def spoke(self) -> bool:
        """Its engine has asked for something else than to declare; whether that is news: it knows that it is back."""
        knows = self.returning and not self.declaring
        if knows:
            self.returning = False
        return knows

    def take_back(self, slots: Ranges[int]) -> bool:
        """Slots that it says are a lease's: LEASED again. Where they are not set aside: False, nothing has changed."""
        left = subtract(self.quarantined, slots)
        if left is None:
            return False
        self.pool.move(slots, SlotState.QUARANTINED, SlotState.LEASED, f"declared by session {self.id}")
        self.quarantined = left
        return True

    def copies_of_others(self, copies: Ranges[int]) -> list[int]:
        """Which of these slots other declared leases have taken back as copies of their own."""
        if subtract(self.quarantined, copies) is not None:
            return []
        taken = {slot for lease in self.leases.values() for slot in every_slot(lease.scratch)}
        return [slot for slot in every_slot(copies) if slot in taken or slot in self.shared_copies]

    def share_copies(self, lease: ManagedLease, slots: list[int]) -> None:
        """A lease reads what `copies_of_others` has found; a slot is free when the last of its leases is released."""
        alone = set(slots) - self.shared_copies.keys()
        for other in self.leases.values() if alone else ():
            own = [slot for slot in every_slot(other.scratch) if slot in alone]
            if own:
                other.keep_scratch(from_slots(slot for slot in every_slot(other.scratch) if slot not in alone))
                self.shared_copies.update((slot, SharedCopy({other.id})) for slot in own)
        for slot in slots:
            self.shared_copies[slot].leases.add(lease.id)

    def void(self) -> None:
        """What it held before the restart is void: its namespace is being cleared."""
        self.declaring = self.returning = False
        self.thaw()

    def forget_unstored(self) -> None:
        """None of its blocks waits any more to be copied to the host pool."""
        for hold in self.holds:
            hold.unstored.clear()

    def set_aside(self, slots: Ranges[int], cut_off: CutOff) -> bool:
        """Set aside slots that its engine says it may be writing: what was cached in them leaves the tree.

        They are in the tree where the engine has not heard of its commit. Where something is locked that one of them
        is needed for: False, and blocks that come before it may have left.
        """
        pool, tree, parts = self.pool, self.tree, [self.quarantined]
        cached = [slot for slot in every_slot(slots) if pool.holds(slot, 1, SlotState.CACHED)]
        places = tree.find(sorted(cached), pool.index) if cached else {}
        is_locked = False
        for slot in cached:
            if slot not in places or not pool.holds(slot, 1, SlotState.CACHED):
                continue  # it has left together with one before
            run, depth = places[slot]
            cut_off(tree, pool, run, depth)
            is_locked = resident(run, pool.index).protected > depth - run.start
            if is_locked:
                break
            parts.append(tree.drop(run, depth, pool.index))
            pool.move(parts[-1], SlotState.CACHED, SlotState.QUARANTINED, f"of session {self.id}, says its engine")
        if len(parts) > 1:
            self.quarantined = join(parts)  # what it declares may reach from one to the other
        return not is_locked

    def thaw(self) -> None:
        """Its engine uses none of the pool's blocks any more but those that its leases have locked."""
        if self.freezes:
            self.freezes = False
            self.pool.thaw()

    def declared(self) -> int:
        """It has declared everything. Slots that it has not named are free, at once or when `inherited_fence` signals.

        Returns how many are free now.
        """
        rest, cause = self.quarantined, f"not declared by session {self.id}"
        self.quarantined = no_ranges()
        self.declaring = False
        if self.inherited_fence > self.fence:
            # A lease that was released before the restart may have had one of these slots, with work queued on it.
            self.pool.move(rest, SlotState.QUARANTINED, SlotState.FENCED, cause)
            self.holds.append(FenceHold(self.inherited_fence, self.tree.root, 0, 0, rest))
            return 0
        self.thaw()
        self.pool.move(rest, SlotState.QUARANTINED, SlotState.FREE, cause)
        return slot_count(rest)

    def end(self, cut_off: CutOff) -> int:
        """None of its processes can write any more: everything it held is free. Returns the number of such slots."""
        cause = f"end of session {self.id}"
        self.thaw()
        freed = slot_count(self._strip(SlotState.FREE, cause, cut_off))
        for hold in self.holds:
            self.pool.move(hold.slots, SlotState.FENCED, SlotState.FREE, cause)
            freed += slot_count(hold.slots)
        self.holds.clear()
        self.pool.move(self.quarantined, SlotState.QUARANTINED, SlotState.FREE, cause)
        freed += slot_count(self.quarantined)
        self.quarantined = no_ranges()
        self.enter(SessionState.ENDED)
        return freed

    def _take_off(self, lease: ManagedLease) -> Ranges[int]:
        """Take a lease off the books; its lock and its slots (returned, LEASED still) are the caller's to give back."""
        self.leases.remove(lease)
        lease.loads.clear()
        if self.shared_copies:
            self._leave_copies(lease)
        slots = lease.open
        append(slots, lease.scratch)
        return slots

    def _leave_copies(self, lease: ManagedLease) -> None:
        """Copies that a lease shared stay with the others; of the last one they are scratch like its own."""
        for slot, copy in [each for each in self.shared_copies.items() if lease.id in each[1].leases]:
            copy.leases.remove(lease.id)
            copy.fence = max(copy.fence, lease.fence)
            if not copy.leases:
                del self.shared_copies[slot]
                append(lease.scratch, one_range(slot, 1))
                lease.fence = copy.fence

    def _unlock(self, run: Run, depth: int) -> None:
        owner = self.tree.resolve(run, depth)
        self.tree.touch(owner, depth, self.pool.index)
        self.tree.unlock(owner, depth, self.pool.index)

    def _strip(self, target: SlotState, cause: str, cut_off: CutOff) -> Ranges[int]:
        """Give back every lease, lock and suspect block; what its processes could write goes to `target`.

        Returns the slots that did. Fenced ones stay FENCED, in `holds`: their fence cannot signal any more.
        """
        stripped = no_ranges()
        for lease in list(self.leases.values()):
            slots = self._take_off(lease)
            self.pool.move(slots, SlotState.LEASED, target, cause)
            self._unlock(lease.run, lease.depth)
            stripped.extend(slots)
        for hold in self.holds:
            self._unlock(hold.run, hold.depth)
        for hold in self.holds:
            dropped = self._drop_suspects(hold, cut_off)
            self.pool.move(dropped, SlotState.CACHED, target, cause)
            stripped.extend(dropped)
            hold.reach(self.tree.root, 0)
        return stripped

    def _drop_suspects(self, hold: FenceHold, cut_off: CutOff) -> Ranges[int]:
        """Blocks committed under a fence that never signalled may hold anything: they leave the tree."""
        run = self.tree.resolve(hold.run, hold.suspect + 1)
        segment = run.segments[self.pool.index]
        if hold.suspect >= hold.depth or segment is None or segment.length <= hold.suspect - run.start:
            return no_ranges()
        cut_off(self.tree, self.pool, run, hold.suspect)
        return self.pool.having(self.tree.drop(run, hold.suspect, self.pool.index), SlotState.CACHED)
