"""A small engine for core tests: makes keys, and speaks to a cache with the fewest words."""

from __future__ import annotations

import hashlib
from array import array

import pytest

from kvcached.core.cache import Cache
from kvcached.core.insight.invariants import check
from kvcached.core.messages import Commitment, Grant
from kvcached.core.namespaces import PoolSpec
from kvcached.core.refusals import Refusal
from kvcached.core.slots.ranges import Ranges, cut
from kvcached.core.slots.states import SlotState
from kvcached_client.types import FenceSequence, LeaseId, SessionId

BLOCK_SIZE = 4
EPOCH = 7
TTL_MS = 1000


class Injected(Exception):
    """Raised by a step that is made to fail."""


def keys_of(text: str) -> bytes:
    """Chained keys, one per letter: equal beginnings have equal keys."""
    keys, parent = [], b"root"
    for letter in text:
        parent = hashlib.blake2b(parent + letter.encode(), digest_size=16).digest()
        keys.append(parent)
    return b"".join(keys)


class Engine:
    """One session on one pool of a cache."""

    def __init__(self, cache: Cache, replica: str = "a") -> None:
        self.cache = cache
        self.replica = replica
        self.session: SessionId = cache.open_session(replica, 0).id
        self.epoch = cache.pools[replica].epoch
        self._requests = 0

    def acquire(self, text: str, *, reserve: int = 0, request: str = "", full: bool = True, tenant: str = "") -> Grant:
        self._requests += 1
        keys = keys_of(text)
        return self.cache.managed.acquire(
            self.session,
            self.epoch,
            request or f"request-{self.session}-{self._requests}",
            keys,
            len(text) * BLOCK_SIZE,
            reserve,
            full=full,
            tenant=tenant,
        )

    def commit(self, grant: Grant, text: str, *, fence: int = 0, slots: Ranges[int] | None = None) -> Commitment:
        """Commit the whole of `text` behind the hit."""
        keys = keys_of(text)[16 * grant.hit :]
        if slots is None:
            slots = cut(array("i", grant.ranges), len(keys) // 16)[0]
        return self.cache.managed.commit(
            self.session, self.epoch, grant.lease, grant.hit, keys, slots, FenceSequence(fence)
        )

    def release(self, grant: Grant, *, fence: int = 0) -> None:
        self.cache.managed.release(self.session, self.epoch, grant.lease, FenceSequence(fence))

    def release_id(self, lease: int) -> None:
        self.cache.managed.release(self.session, self.epoch, LeaseId(lease), FenceSequence(0))

    def store(self, text: str) -> None:
        """Compute and release a prompt."""
        grant = self.acquire(text)
        self.commit(grant, text)
        self.release(grant)

    def hit(self, text: str) -> int:
        return self.cache.managed.match(self.session, self.epoch, keys_of(text), len(text) * BLOCK_SIZE, full=True)[0]

    def signal(self, fence: int, now_ms: int = 0) -> None:
        self.cache.managed.heartbeat(self.session, FenceSequence(fence), now_ms)


def make_cache(slots: int = 16, names: str = "a") -> Cache:
    """A cache of pools with one-letter names in one namespace."""
    specs = [PoolSpec(name, b"namespace", BLOCK_SIZE, slots) for name in names]
    return Cache(specs, epoch=EPOCH, session_ttl_ms=TTL_MS, announces=True)


def states(cache: Cache, replica: str = "a") -> tuple[int, ...]:
    """Slots by state: free, leased, cached, fenced, quarantined."""
    return tuple(cache.pools[replica].counts[: SlotState.FILLING])


def snapshot(cache: Cache) -> object:
    """Everything that a refused operation must leave as it was."""
    trees = [
        [
            (
                bytes(run.keys),
                run.start,
                [seg and (seg.length, bytes(seg.ranges), dict(seg.locks or {})) for seg in run.segments],
            )
            for run in tree.runs()
        ]
        for tree in cache.trees
    ]
    leases = {
        session.id: {
            lease.id: (lease.depth, bytes(lease.open), bytes(lease.scratch)) for lease in session.leases.values()
        }
        for session in cache.managed.sessions.values()
    }
    return trees, leases, [(bytes(pool._states), pool.free_ranges(), pool.protected) for pool in cache.pools.values()]


def refused(code: str) -> pytest.RaisesExc[Refusal]:
    """A context that expects a typed refusal."""
    return pytest.raises(Refusal, match=f"^{code}: ")


def healthy(cache: Cache) -> bool:
    """Whether every invariant holds."""
    assert check(cache) == []
    return True
