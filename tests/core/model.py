"""A second opinion on the core: plain dictionaries, no tree, no ranges, and what may and must be true after each step.

The driver plays engines against `Cache`.
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass, field

from kvcached.core.cache import Cache
from kvcached.core.insight.invariants import check
from kvcached.core.messages import Grant, MemberLost, MembersDied, PoolRestored, Ticked, WorkerDied
from kvcached.core.namespaces import PoolSpec
from kvcached.core.refusals import Refusal
from kvcached.core.slots.host_slots import HostQuota, QuotaRule
from kvcached.core.slots.states import SlotState
from kvcached_client.errors import ErrorCode
from kvcached_client.types import FenceSequence, LeaseId, SessionId, unpack_ranges
from tests.core.history import Choose, History, Operation
from tests.core.tier_world import solid_slots

BLOCK_SIZE = 4
SLOTS = 20
TTL_MS = 1000


def chain_keys(symbols: tuple[int, ...]) -> list[bytes]:
    """Chained keys of a sequence of symbols, one per block."""
    keys, parent = [], b"root"
    for symbol in symbols:
        parent = hashlib.blake2b(parent + bytes([symbol]), digest_size=16).digest()
        keys.append(parent)
    return keys


KEPT_PERCENT = 20
#: Of the tenants whose prompts the models serve.
TENANT_QUOTA = HostQuota(tenants=(QuotaRule("capped", cap_percent=30), QuotaRule("kept", floor_percent=KEPT_PERCENT)))


#: By their prompts' first blocks; most prompts of the models begin with 0.
_TENANTS = {chain_keys((symbol,))[0]: name for symbol, name in enumerate(("kept", "capped", ""))}


def tenant_of(chain: list[bytes], request: int) -> str:
    """Whose request that is: a tenant has first blocks of its own, but now and then somebody asks without a name."""
    return _TENANTS.get(chain[0], "unbounded") if chain and request % 5 else ""


def expand(packed: bytes) -> list[int]:
    """Packed ranges as single slots."""
    return [slot for first, count in unpack_ranges(packed) for slot in range(first, first + count)]


@dataclass
class ModelLease:
    """What the model believes one request holds."""

    id: LeaseId
    request: str
    chain: list[bytes]
    asked: tuple[int, int, bool]
    hit: int
    depth: int
    open: list[int]
    scratch: list[int] = field(default_factory=list)
    grant: Grant | None = None
    fence: int = 0


@dataclass
class ModelSession:
    """What the model believes one engine holds."""

    id: SessionId
    pool: str
    epoch: int
    heard_ms: int
    expired: bool = False
    fence: int = 0
    next_fence: int = 1
    leases: dict[LeaseId, ModelLease] = field(default_factory=dict)
    #: (fence, pinned chain prefix, suspect keys, fenced slots)
    holds: list[tuple[int, list[bytes], list[bytes], list[int]]] = field(default_factory=list)
    quarantined: list[int] = field(default_factory=list)


class Driver(History):
    """Random engines on two pools of one namespace and one of another, checked step by step."""

    def __init__(self, choose: Choose) -> None:
        super().__init__(choose)
        self.restart()

    def restart(self) -> None:
        """A new cache and an empty model."""
        self.cache = Cache(
            [
                PoolSpec("a", b"one", BLOCK_SIZE, SLOTS),
                PoolSpec("b", b"one", BLOCK_SIZE, SLOTS),
                PoolSpec("c", b"two", BLOCK_SIZE, SLOTS),
            ],
            epoch=7,
            session_ttl_ms=TTL_MS,
        )
        self.now_ms = 1
        self.ticked = False
        self.requests = 0
        self.ended: list[tuple[SessionId, LeaseId]] = []
        self.sessions: dict[SessionId, ModelSession] = {}
        #: per pool: key -> slot that caches it; and slot -> key that an engine wrote into it last
        self.cached: dict[str, dict[bytes, int]] = {name: {} for name in "abc"}
        self.written: dict[str, dict[int, bytes]] = {name: {} for name in "abc"}
        self.parent: dict[bytes, bytes] = {}

    # --- one step ---------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Do one random operation."""
        self.weighted = [
            (self.acquire, 24),
            (self.commit, 24),
            (self.release, 14),
            (self.finish, 6),
            (self.allocate, 8),
            (self.match, 6),
            (self.acquire_again, 3),
            (self.signal, 6),
            (self.misuse, 8),
            (self.open_session, 3),
            (self.leave, 1),
            (self.die, 1),
            (self.tick, 1),
            (self.lose_member, 1),
            (self.lose_worker, 0 if self.choose(8) else 1),
        ]
        super().step()

    def do(self, operation: Operation) -> None:
        """Do it, and check everything."""
        self.done[operation.__name__] += 1
        operation()
        self.check()

    def end(self) -> None:
        """Everybody leaves."""
        while self.sessions:
            self.do(self.leave)

    def check(self) -> None:
        """The core's invariants hold, and the core agrees with the model on every slot."""
        violations = check(self.cache)
        assert violations == []
        for name, pool in self.cache.pools.items():
            expected = [SlotState.FREE] * SLOTS
            claims = [(list(self.cached[name].values()), SlotState.CACHED)]
            for session in self.sessions.values():
                if session.pool == name:
                    claims += [(lease.open + lease.scratch, SlotState.LEASED) for lease in session.leases.values()]
                    claims += [(slots, SlotState.FENCED) for _, _, _, slots in session.holds]
                    claims.append((session.quarantined, SlotState.QUARANTINED))
            for slots, state in claims:
                for slot in slots:
                    expected[slot] = state
            assert pool._states == bytes(expected)
            assert self.resident(name) == self.cached[name]

    def resident(self, name: str) -> dict[bytes, int]:
        """Key -> slot, read from the tree."""
        pool = self.cache.pools[name]
        tree = self.cache.managed.trees[name]
        found: dict[bytes, int] = {}
        for run in tree.runs():
            slots = solid_slots(run, pool.index)
            assert not found.keys() & slots.keys()
            found.update(slots)
        return found

    # --- what the model knows ---------------------------------------------------------------------------------------

    def pick_session(self) -> ModelSession | None:
        active = [session for session in self.sessions.values() if not session.expired]
        return active[self.choose(len(active))] if active else None

    def pick_lease(self) -> tuple[ModelSession, ModelLease] | None:
        session = self.pick_session()
        if session is None or not session.leases:
            return None
        return session, list(session.leases.values())[self.choose(len(session.leases))]

    def some_chain(self) -> list[bytes]:
        symbols = tuple(self.choose(2) if index in (1, 3) else 0 for index in range(self.choose(8)))
        tail = self.choose(3)
        keys = chain_keys((*symbols, tail) if self.choose(2) else symbols)
        for before, key in zip([b"", *keys], keys, strict=False):
            self.parent[key] = before
        return keys

    def pinned_keys(self, name: str) -> set[bytes]:
        pinned: set[bytes] = set()
        for session in self.sessions.values():
            if session.pool == name:
                for lease in session.leases.values():
                    pinned.update(lease.chain[: lease.depth])
                for _, chain, _, _ in session.holds:
                    pinned.update(chain)
        return pinned

    def free_slots(self, name: str) -> int:
        return self.cache.pools[name].free

    def expect_hit(self, name: str, chain: list[bytes], tokens: int, *, full: bool) -> int:
        limit = len(chain) if full else min(len(chain), max(tokens - 1, 0) // BLOCK_SIZE)
        hit = 0
        while hit < limit and chain[hit] in self.cached[name]:
            hit += 1
        return hit

    def evicted(self, name: str, count: int, pinned: set[bytes]) -> None:
        """`count` blocks must have gone: unpinned ones, and none that another cached block still builds on."""
        now = self.resident(name)
        gone = set(self.cached[name]) - set(now)
        assert len(gone) == count
        assert not gone & pinned
        assert not {self.parent[key] for key in now} & gone
        for key in gone:
            del self.cached[name][key]

    # --- operations -------------------------------------------------------------------------------------------------

    def open_session(self) -> None:
        name = "abc"[self.choose(3)]
        if any(session.pool == name for session in self.sessions.values()):
            return
        session = self.cache.open_session(name, self.now_ms)
        self.sessions[session.id] = ModelSession(session.id, name, session.pool.epoch, self.now_ms)

    def match(self) -> None:
        session = self.pick_session()
        if session is None:
            return
        chain, full = self.some_chain(), bool(self.choose(2))
        tokens = len(chain) * BLOCK_SIZE + self.choose(BLOCK_SIZE)
        hit, _ = self.cache.managed.match(session.id, session.epoch, b"".join(chain), tokens, full=full)
        assert hit == self.expect_hit(session.pool, chain, tokens, full=full)

    def acquire(self) -> None:
        session = self.pick_session()
        if session is None:
            return
        chain, full = self.some_chain(), bool(self.choose(2))
        tokens = len(chain) * BLOCK_SIZE + self.choose(BLOCK_SIZE)
        reserve = self.choose(3)
        self.requests += 1
        request = f"r{self.requests}"
        hit = self.expect_hit(session.pool, chain, tokens, full=full)
        need = -(-tokens // BLOCK_SIZE) - hit + reserve
        pinned = self.pinned_keys(session.pool) | set(chain[:hit])
        free = self.free_slots(session.pool)
        evictable = len(set(self.cached[session.pool]) - pinned)
        try:
            grant = self.cache.managed.acquire(
                session.id, session.epoch, request, b"".join(chain), tokens, reserve, full=full
            )
        except Refusal as error:
            assert error.code is ErrorCode.NO_CAPACITY
            assert need > free + evictable
            return
        assert need <= free + evictable
        self.evicted(session.pool, max(need - free, 0), pinned)
        assert grant.hit == hit
        hit_slots = expand(grant.hit_ranges)
        assert [self.written[session.pool][slot] for slot in hit_slots] == chain[:hit]
        open_slots = expand(grant.ranges)
        assert len(open_slots) == need
        asked = (tokens, reserve, full)
        session.leases[grant.lease] = ModelLease(grant.lease, request, chain, asked, hit, hit, open_slots, grant=grant)

    def acquire_again(self) -> None:
        picked = self.pick_lease()
        if picked is None:
            return
        session, lease = picked
        tokens, reserve, full = lease.asked
        first = len(lease.grant.hit_ranges) if lease.grant else 0
        keys = b"".join(lease.chain[: max(tokens // BLOCK_SIZE, 0)])
        try:
            grant = self.cache.managed.acquire(
                session.id, session.epoch, lease.request, keys, tokens, reserve, full=full
            )
        except Refusal as error:
            assert error.code is ErrorCode.REQUEST_CONFLICT
            assert lease.depth != lease.hit or len(lease.chain) * BLOCK_SIZE > tokens
            return
        assert lease.grant is not None
        assert (grant.lease, grant.hit, grant.ranges) == (lease.grant.lease, lease.grant.hit, lease.grant.ranges)
        assert expand(grant.hit_ranges) == expand(lease.grant.hit_ranges)
        assert first <= len(grant.hit_ranges) * 8

    def allocate(self) -> None:
        picked = self.pick_lease()
        if picked is None:
            return
        session, lease = picked
        count = 1 + self.choose(4)
        pinned, free = self.pinned_keys(session.pool), self.free_slots(session.pool)
        evictable = len(set(self.cached[session.pool]) - pinned)
        try:
            slots = expand(self.cache.managed.allocate(session.id, session.epoch, lease.id, count))
        except Refusal as error:
            assert error.code is ErrorCode.NO_CAPACITY
            assert count > free + evictable
            return
        assert len(slots) == count
        self.evicted(session.pool, max(count - free, 0), pinned)
        lease.open += slots

    def commit(self) -> None:
        self._commit(finish=False)

    def finish(self) -> None:
        self._commit(finish=True)

    def _commit(self, *, finish: bool) -> None:
        picked = self.pick_lease()
        if picked is None:
            return
        session, lease = picked
        if self.choose(3) == 0 and len(lease.chain) < 12:  # decoding: the chain grows by an output block
            grown = hashlib.blake2b((lease.chain or [b""])[-1] + b"out", digest_size=16).digest()
            self.parent[grown] = (lease.chain or [b""])[-1]
            lease.chain = [*lease.chain, grown]
        count = self.choose(min(len(lease.chain) - lease.depth, len(lease.open)) + 1)
        keys = lease.chain[lease.depth : lease.depth + count]
        offset = self.choose(len(lease.open) - count + 1)
        slots = lease.open[offset : offset + count]
        fence = session.next_fence if self.choose(3) == 0 else 0
        session.next_fence += bool(fence)
        ranges = array("i", [number for slot in slots for number in (slot, 1)])
        call = self.cache.managed.finish if finish else self.cache.managed.commit
        done = call(session.id, session.epoch, lease.id, lease.depth, b"".join(keys), ranges, FenceSequence(fence))
        known = [index for index, key in enumerate(keys) if key in self.cached[session.pool]]
        assert known == list(range(done.duplicates))
        assert (done.adopted, done.duplicates, done.depth) == (count - len(known), len(known), lease.depth + count)
        for index, (key, slot) in enumerate(zip(keys, slots, strict=True)):
            self.written[session.pool][slot] = key
            lease.open.remove(slot)
            if index in known:
                lease.scratch.append(slot)
            else:
                self.cached[session.pool][key] = slot
        lease.depth += count
        if count:
            lease.fence = max(lease.fence, fence)
        if fence > session.fence and count > len(known):
            suspect = keys[len(known) :]
            session.holds.append((fence, lease.chain[: lease.depth], suspect, []))
        if finish:
            self._released(session, lease, fence)

    def release(self) -> None:
        picked = self.pick_lease()
        if picked is None:
            return
        session, lease = picked
        fence = session.next_fence if self.choose(3) == 0 else 0
        session.next_fence += bool(fence)
        self.cache.managed.release(session.id, session.epoch, lease.id, FenceSequence(fence))
        self._released(session, lease, fence)

    def _released(self, session: ModelSession, lease: ModelLease, fence: int) -> None:
        del session.leases[lease.id]
        self.ended.append((session.id, lease.id))
        fence = max(fence, lease.fence)
        if fence > session.fence:
            session.holds.append((fence, lease.chain[: lease.depth], [], lease.open + lease.scratch))

    def signal(self) -> None:
        session = self.pick_session()
        if session is None:
            return
        session.fence = max(session.fence, self.choose(session.next_fence + 1))
        session.heard_ms = self.now_ms
        self.cache.managed.heartbeat(session.id, FenceSequence(session.fence), self.now_ms)
        session.holds = [hold for hold in session.holds if hold[0] > session.fence]

    def tick(self) -> None:
        gap_ms = 1 + self.choose(TTL_MS)
        self.now_ms += gap_ms
        self.cache.handle(Ticked(self.now_ms))
        late = self.ticked and gap_ms > TTL_MS // 2  # the daemon itself stood still: silence counts anew
        self.ticked = True
        for session in self.sessions.values():
            if late:
                session.heard_ms = self.now_ms
            elif not session.expired and self.now_ms - session.heard_ms > TTL_MS:
                self._strip(session, quarantine=True)
                session.expired = True

    def _strip(self, session: ModelSession, *, quarantine: bool) -> None:
        for lease in session.leases.values():
            if quarantine:
                session.quarantined += lease.open + lease.scratch
            self.ended.append((session.id, lease.id))
        session.leases.clear()
        suspects = {key for _, _, keys, _ in session.holds for key in keys}
        while True:  # whatever builds on a suspect goes with it
            more = {key for key in self.cached[session.pool] if self.parent[key] in suspects} - suspects
            if not more:
                break
            suspects |= more
        first_writer_only = suspects & set(self.cached[session.pool])
        for key in first_writer_only:
            slot = self.cached[session.pool].pop(key)
            if quarantine:
                session.quarantined.append(slot)
        session.holds = [(fence, [], [], slots) for fence, _, _, slots in session.holds]

    def die(self) -> None:
        if not self.sessions:
            return
        session = list(self.sessions.values())[self.choose(len(self.sessions))]
        self.cache.handle(MembersDied(session.id))
        self.cache.handle(MembersDied(session.id))  # the news may come twice
        self._strip(session, quarantine=False)
        del self.sessions[session.id]

    def lose_member(self) -> None:
        if not self.sessions:
            return
        session = list(self.sessions.values())[self.choose(len(self.sessions))]
        self.cache.handle(MemberLost(session.id))
        if not session.expired:
            self._strip(session, quarantine=True)
            session.expired = True

    def leave(self) -> None:
        if not self.sessions:
            return
        session = list(self.sessions.values())[self.choose(len(self.sessions))]
        self.cache.close_session(session.id)
        self._strip(session, quarantine=False)
        del self.sessions[session.id]

    def lose_worker(self) -> None:
        name = "abc"[self.choose(3)]
        self.cache.handle(WorkerDied(name))
        self.check()
        self.cache.handle(PoolRestored(name))
        self.restart()

    def misuse(self) -> None:  # noqa: C901 - a list of cases, one after the other
        """Something an engine must not do: a typed refusal, and nothing has changed."""
        session = self.pick_session()
        if session is None:
            return
        lease = next(iter(session.leases.values()), None)
        foreign = [
            (other.id, held) for other in self.sessions.values() if other is not session for held in other.leases
        ]
        call = self.cache.managed
        kind = self.choose(9)
        expected: ErrorCode | None = None
        try:
            if kind == 0:
                expected = ErrorCode.STALE_EPOCH
                call.match(session.id, session.epoch + 1, b"", 0, full=False)
            elif kind == 1:
                expected = ErrorCode.UNKNOWN_LEASE
                call.release(session.id, session.epoch, LeaseId(1 << 40), FenceSequence(0))
            elif kind == 2 and self.ended:
                expected = ErrorCode.ALREADY_RELEASED
                call.release(session.id, session.epoch, self.ended[self.choose(len(self.ended))][1], FenceSequence(0))
            elif kind == 3 and foreign:
                expected = ErrorCode.FOREIGN_LEASE
                call.release(session.id, session.epoch, foreign[0][1], FenceSequence(0))
            elif kind == 4 and lease is not None:
                expected = ErrorCode.OUT_OF_ORDER
                call.commit(session.id, session.epoch, lease.id, lease.depth + 1, b"", array("i"), FenceSequence(0))
            elif kind == 5 and lease is not None:
                expected = ErrorCode.UNKNOWN_SLOT
                bad = [slot for slot in range(-2, SLOTS + 2) if slot not in lease.open]
                slot = bad[self.choose(len(bad))]
                ranges = array("i", (slot, 1))
                call.commit(session.id, session.epoch, lease.id, lease.depth, bytes(16), ranges, FenceSequence(0))
            elif kind == 6 and lease is not None and lease.open:
                expected = ErrorCode.UNKNOWN_SLOT  # one slot named twice
                ranges = array("i", (lease.open[0], 1, lease.open[0], 1))
                call.commit(session.id, session.epoch, lease.id, lease.depth, bytes(32), ranges, FenceSequence(0))
            elif kind == 7 and lease is not None and lease.open:
                expected = ErrorCode.BAD_VALUE
                ranges = array("i", (lease.open[0], 1))
                call.commit(session.id, session.epoch, lease.id, lease.depth, bytes(32), ranges, FenceSequence(0))
            elif kind == 8:
                expected = ErrorCode.BAD_VALUE
                call.acquire(session.id, session.epoch, "bad", bytes(32), BLOCK_SIZE, 0, full=False)
        except Refusal as error:
            assert error.code is expected
        else:
            assert expected is None
