"""A second opinion on the tiers: random engines, workers whose shards answer in any order, and what must be true.

As `tests.core.model`, with a host pool. The model does not decide what is evicted or stored; it knows what every slot
contains, what the engines hold, and where every committed block may have gone.
"""

from __future__ import annotations

from array import array
from collections import Counter

from kvcached.core.index.host_tree import HOST
from kvcached.core.insight.invariants import check
from kvcached.core.messages import Grant, TransferKind
from kvcached.core.refusals import Refusal
from kvcached.core.slots.states import SlotState
from kvcached_client.errors import ErrorCode
from kvcached_client.types import FenceSequence, ShardIndex, TransferId
from tests.core.history import Choose, Operation
from tests.core.model import BLOCK_SIZE, expand, tenant_of
from tests.core.tier_sessions import HeldLease, HeldSession, TierSessions
from tests.core.tier_world import NAMESPACES, SHARDS

NO_ROOM = {ErrorCode.NO_CAPACITY, ErrorCode.CAPACITY_PENDING}


class TierDriver(TierSessions):
    """Everything that happens to them, step by step."""

    def __init__(self, choose: Choose, *, namespaces_max: int = 0) -> None:
        super().__init__(choose, namespaces_max=namespaces_max)
        self.requests = 0
        self.weighted = [
            (self.acquire, 50),
            (self.settle_shard, 70),
            (self.commit, 40),
            (self.release, 36),
            (self.wait_loaded, 24),
            (self.crowd_out, 24),
            (self.acquire_again, 10),
            (self.signal, 12),
            (self.finish, 8),
            (self.open_session, 12),
            (self.allocate, 6),
            (self.vacancy, 5),
            (self.tick, 5),
            (self.stray_acknowledgement, 4),
            (self.rot, 4),
            (self.restore, 4),
            (self.leave, 1),
            (self.die, 1),
            (self.lose_member, 1),
            (self.lose_worker, 1),
            (self.pause, 1),
            (self.resume, 4),
            (self.clear, 1),
        ]

    # --- one step ---------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Do one random operation, and most of the time what the cache decides by itself; check after both."""
        super().step()
        if self.choose(6):
            self.do(self.settle)

    def do(self, operation: Operation) -> None:
        """Do it, carry out what the cache asks for, and check everything."""
        self.done[operation.__name__] += 1
        self.accounts.begin()
        operation()
        self.done.update(self.world.carry_out())
        violations = check(self.cache)
        assert violations == []
        self.world.check_bytes()
        self.check_leases()
        self.accounts.end()

    def check_leases(self) -> None:
        """What a lease reads is what was committed; what it writes to nobody else has written."""
        for session in self.sessions.values():
            for lease in session.leases.values():
                readable = lease.ready if lease.loading else len(lease.table)
                assert self.world.holds(session.pool, lease.table[:readable], lease.chain[:readable])
                assert self.world.holds(session.pool, lease.open, [self.mark(lease)] * len(lease.open))

    def mark(self, lease: HeldLease) -> bytes:
        return b"scratch of %d" % lease.id

    def end(self) -> None:
        """Everybody leaves and every copy ends: nothing is pinned or under way, and nobody was left waiting."""
        self.do(self.resume)
        while self.sessions:
            self.do(self.leave)
        while self.world.copies:
            self.do(self.settle_shard)
        self.do(self.settle)
        while self.world.copies:
            self.do(self.settle_shard)
        assert self.cache.transfers == {}
        for pool in self.cache.pools.values():
            assert (pool.protected, pool.orphaned) == (0, 0)
            assert pool.counts[SlotState.FREE] + pool.counts[SlotState.CACHED] == pool.slots
        for tree in self.cache.trees:
            assert tree.members[HOST].protected == 0
            assert tree.members[HOST].counts[SlotState.FILLING] == 0
        assert self.world.memory.held_units == 0

    # --- transfers --------------------------------------------------------------------------------------------------

    def settle_shard(self) -> None:
        waiting = [(transfer, shard) for transfer, copy in self.world.copies.items() for shard in sorted(copy.waiting)]
        if waiting:
            transfer, shard = waiting[self.choose(len(waiting))]
            error = "worker died" if self.world.copies[transfer].lost else "" if self.choose(12) else "copy failed"
            copy = self.world.copies[transfer]
            if copy.order.kind is TransferKind.LOAD:
                self.accounts.cutting(copy.order.pool, copy.blocks[0][0])
            for load in self.cache.transfers.values():  # those that this store fails with it
                if transfer in load.after:
                    self.accounts.cutting(load.pool.name, load.tree.path_keys(load.run, load.start, load.start + 1))
            self.world.settle_shard(transfer, shard, error)

    def stray_acknowledgement(self) -> None:
        """Late, double and invented ones change nothing."""
        counters = Counter(self.cache.counters)
        for transfer, copy in self.world.copies.items():
            for shard in {*range(SHARDS), SHARDS + 1} - copy.waiting:
                self.cache.worker_copies.shard_done(transfer, ShardIndex(shard), "stray", (0,))
        for transfer in (*self.world.over[-5:], *self.cache.transfers, TransferId(1 << 40)):
            if transfer not in self.world.copies:
                self.cache.worker_copies.shard_done(transfer, ShardIndex(0), "stray", (0,))
        assert counters == self.cache.counters

    def rot(self) -> None:
        """The bytes of a host copy change by themselves, on one shard."""
        name = "ac"[self.choose(2)]
        host = self.cache.managed.trees[name].members[HOST]
        slots = [slot for slot in self.world.index(name, HOST).values() if host.state_of(slot) is SlotState.CACHED]
        if slots:
            slot = slots[self.choose(len(slots))]
            self.world.host[NAMESPACES[name]][self.choose(SHARDS)][slot] = ("rotten", slot)

    # --- requests ---------------------------------------------------------------------------------------------------

    def acquire(self) -> None:
        if (session := self.pick_session()) is None:
            return
        chain, full, reserve = self.some_chain(), bool(self.choose(2)), self.choose(2)
        tokens = len(chain) * BLOCK_SIZE + self.choose(BLOCK_SIZE)
        limit = len(chain) if full else (tokens - 1) // BLOCK_SIZE
        pool, evicted = self.cache.pools[session.pool], self.cache.counters["evicted_blocks"]
        here, further = self.world.expect_hit(session.pool, chain[:limit])
        assert self.cache.managed.match(session.id, session.epoch, b"".join(chain), tokens, full=full) == (
            here,
            further,
        )
        room = pool.load_quota - sum(len(c.blocks) for c in self.world.loads_of(session.pool))
        queued = [each for each in self.cache.transfers.values() if each.pool is pool and each.after]
        self.requests += 1
        request = f"r{self.requests}"
        try:
            grant = self.cache.managed.acquire(
                session.id, session.epoch, request, b"".join(chain), tokens, reserve, full=full,
                tenant=tenant_of(chain, self.requests),
            )  # fmt: skip
        except Refusal as error:
            assert error.code in NO_ROOM
            need = -(-tokens // BLOCK_SIZE) - here + reserve
            reachable = pool.free + pool.counts[SlotState.CACHED] + pool.counts[SlotState.FILLING]
            assert need + here > pool.free + pool.evictable  # what it hits was pinned when it asked
            pending = self.under_way(session.pool) and need <= reachable
            assert (error.code is ErrorCode.CAPACITY_PENDING) == pending
            return
        loaded = min(further, room - sum(each.blocks for each in queued))
        if evicted == self.cache.counters["evicted_blocks"]:  # else it may have cost what lay in the host pool
            assert grant.hit == here + (
                loaded if loaded >= pool.load_threshold and pool.healthy and not pool.paused else 0
            )
        lease = HeldLease(grant.lease, request, chain, (tokens, reserve, full), 0, 0, 0, [], [], loading=False)
        session.leases[lease.id] = lease
        self.granted(session, lease, grant)
        assert here <= grant.hit <= limit
        assert len(lease.open) == -(-tokens // BLOCK_SIZE) - grant.hit + reserve

    def crowd_out(self) -> None:
        """A request of other blocks takes all the room there is, for a moment."""
        if (session := self.pick_session()) is not None:
            pool = self.cache.pools[session.pool]
            self.requests += 1
            tokens = self.choose(pool.free + pool.evictable + 1) * BLOCK_SIZE
            grant = self.cache.managed.acquire(
                session.id, session.epoch, f"r{self.requests}", b"", tokens, 0, full=True
            )
            self.world.write(session.pool, expand(grant.ranges), b"other blocks")
            self.cache.managed.release(session.id, session.epoch, grant.lease, FenceSequence(0))

    def granted(self, session: HeldSession, lease: HeldLease, grant: Grant) -> None:
        lease.grant = grant
        lease.table, lease.open = expand(grant.hit_ranges), expand(grant.ranges)
        lease.hit = lease.depth = grant.hit
        lease.ready, lease.loading = grant.ready, bool(grant.loads)
        assert len(lease.table) == grant.hit >= grant.ready
        assert lease.loading == (grant.ready < grant.hit)
        assert {load for load, _ in grant.loads} <= set(self.cache.transfers)
        self.world.write(session.pool, lease.open, self.mark(lease))

    def under_way(self, name: str) -> bool:
        return any(each.pool.name == name for each in self.cache.transfers.values())

    def acquire_again(self) -> None:
        """A retry of a request that has done nothing yet gets the answer that it got first."""
        if (picked := self.pick_lease()) is None:
            return
        session, lease = picked
        tokens, reserve, full = lease.asked
        keys = b"".join(lease.chain[: tokens // BLOCK_SIZE])
        try:
            grant = self.cache.managed.acquire(
                session.id, session.epoch, lease.request, keys, tokens, reserve, full=full
            )
        except Refusal as error:
            assert error.code is ErrorCode.REQUEST_CONFLICT
            assert lease.depth > lease.hit
            return
        assert lease.depth == lease.hit
        assert grant == lease.grant

    def wait_loaded(self) -> None:
        if (picked := self.pick_lease(loading=True)) is None:
            return
        session, lease = picked
        try:
            loaded = self.cache.managed.load(session.id, session.epoch, lease.id)
        except Refusal as error:
            assert error.code in NO_ROOM
            return
        if loaded is None:
            assert lease.id not in self.world.told
            self.still_loading(session, lease)
            return
        slots = expand(loaded.ranges)
        assert len(slots) == lease.hit - loaded.hit
        assert self.cache.managed.load(session.id, session.epoch, lease.id) == loaded
        lease.table, lease.open, lease.loading = lease.table[: loaded.hit], slots + lease.open, False
        lease.hit = lease.depth = loaded.hit
        self.done["hits cut short"] += bool(slots)
        self.world.write(session.pool, slots, self.mark(lease))

    def still_loading(self, session: HeldSession, lease: HeldLease) -> None:
        """Nothing can be committed on what is not there yet."""
        for call in (self.cache.managed.commit, self.cache.managed.finish):
            try:
                call(session.id, session.epoch, lease.id, lease.depth, b"", array("i"), FenceSequence(0))
            except Refusal as error:
                assert error.code is ErrorCode.STILL_LOADING
            else:
                raise AssertionError("a commit was taken while its hit was loading")

    def vacancy(self) -> None:
        if (session := self.pick_session()) is not None:
            blocks = 1 + self.choose(12)
            free = self.cache.managed.retry_when_freed(session.id, session.epoch, blocks)
            pool = self.cache.pools[session.pool]
            if free is None:
                assert self.under_way(session.pool)
                assert pool.free + pool.evictable < blocks
            else:
                assert free == pool.free + pool.evictable

    def allocate(self) -> None:
        if (picked := self.pick_lease()) is None:
            return
        session, lease = picked
        try:
            slots = expand(self.cache.managed.allocate(session.id, session.epoch, lease.id, 1 + self.choose(2)))
        except Refusal as error:
            assert error.code in NO_ROOM
            return
        lease.open += slots
        self.world.write(session.pool, slots, self.mark(lease))

    def commit(self) -> None:
        self._commit(finish=False)

    def finish(self) -> None:
        self._commit(finish=True)

    def _commit(self, *, finish: bool) -> None:
        if (picked := self.pick_lease(loading=False)) is None:
            return
        session, lease = picked
        count = min(len(lease.chain) - lease.depth, len(lease.open))
        if not self.choose(3):
            count = self.choose(count + 1)
        keys, slots = lease.chain[lease.depth : lease.depth + count], lease.open[:count]
        fence = session.next_fence if self.choose(3) == 0 else 0
        session.next_fence += bool(fence)
        pool = self.cache.pools[session.pool]
        here = self.world.index(session.pool, pool.index)
        known = [key in here for key in keys]
        ranges = array("i", [number for slot in slots for number in (slot, 1)])
        call = self.cache.managed.finish if finish else self.cache.managed.commit
        done = call(session.id, session.epoch, lease.id, lease.depth, b"".join(keys), ranges, FenceSequence(fence))
        taken = done.depth - lease.depth
        self.done["commits cut short"] += taken < count
        assert (done.duplicates, done.adopted) == (sum(known[:taken]), taken - sum(known[:taken]))
        assert taken == count or (known[taken] and pool.state_of(here[keys[taken]]) is SlotState.FILLING)
        for key, slot in zip(keys[:taken], slots, strict=False):
            self.world.write(session.pool, [slot], key)
        lease.table += [here.get(key, slot) for key, slot in zip(keys[:taken], slots, strict=False)]
        lease.open, lease.scratch = lease.open[taken:], lease.scratch + slots[: done.duplicates]
        lease.depth = done.depth
        if taken and fence > session.fence:
            self.world.unwritten[session.pool].update(slots[:taken])
            session.unwritten.append((fence, slots[:taken]))
        if finish:
            del session.leases[lease.id]

    def release(self) -> None:
        if (picked := self.pick_lease()) is None:
            return
        session, lease = picked
        fence = session.next_fence if self.choose(4) == 0 else 0
        session.next_fence += bool(fence)
        self.cache.managed.release(session.id, session.epoch, lease.id, FenceSequence(fence))
        del session.leases[lease.id]
