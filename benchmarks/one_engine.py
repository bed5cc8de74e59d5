"""A cache with one engine on one pool, driven as a scheduler does it: acquire, commit, release."""

from __future__ import annotations

from array import array
from time import perf_counter_ns
from typing import Final, NamedTuple

from benchmarks.shapes import BLOCK_SIZE
from kvcached.core.cache import Cache, PoolSpec
from kvcached.core.ranges import cut
from kvcached.core.run import KEY_SIZE
from kvcached.core.states import SlotState
from kvcached_client.types import FenceSequence

_DONE: Final = FenceSequence(0)
_SESSION_TTL_MS: Final = 1_000_000


class Spent(NamedTuple):
    """Nanoseconds inside each call of one request."""

    acquire: int
    commit: int
    release: int


class OneEngine:
    """The cache and its only session.

    Attributes:
        hit_blocks: blocks that requests found, all together.
        granted_ranges: ranges that the last request's new slots came in.
    """

    def __init__(self, slots: int) -> None:
        self.cache = Cache([PoolSpec("only", bytes(32), BLOCK_SIZE, slots)], epoch=1, session_ttl_ms=_SESSION_TTL_MS)
        self.pool = self.cache.pools["only"]
        self.session = self.cache.open_session("only", 0)
        self.tree = self.session.tree
        self.hit_blocks = 0
        self.granted_ranges = 0
        self._requests = 0

    @property
    def cached_blocks(self) -> int:
        """Blocks in the pool that a prompt could hit."""
        return self.pool.counts[SlotState.CACHED]

    def request(self, keys: bytes) -> Spent:
        """A prompt from its arrival to its end. It has one token more than `keys` names, so all of them may hit.

        Slots go from the grant to the commit outside of the measured time: that is the engine's part.
        """
        cache, session, epoch = self.cache, self.session.id, self.pool.epoch
        blocks = len(keys) // KEY_SIZE
        self._requests += 1
        name = str(self._requests)
        start = perf_counter_ns()
        grant = cache.acquire(session, epoch, name, keys, blocks * BLOCK_SIZE + 1, 0, full=False)
        acquired = perf_counter_ns()
        self.hit_blocks += grant.hit
        granted = array("i", grant.ranges)
        self.granted_ranges = len(granted) // 2
        slots, _ = cut(granted, blocks - grant.hit)
        missing = keys[grant.hit * KEY_SIZE :]
        commit = perf_counter_ns()
        if missing:
            cache.commit(session, epoch, grant.lease, grant.hit, missing, slots, _DONE)
        committed = perf_counter_ns()
        cache.release(session, epoch, grant.lease, _DONE)
        released = perf_counter_ns()
        return Spent(acquired - start, committed - commit, released - committed)

    def match(self, keys: bytes) -> int:
        """Cached leading blocks of a prompt."""
        tokens = len(keys) // KEY_SIZE * BLOCK_SIZE
        return self.cache.match(self.session.id, self.pool.epoch, keys, tokens, full=True)

    def evict(self, blocks: int) -> int:
        """Free so many slots; nanoseconds."""
        start = perf_counter_ns()
        self.tree.evict(blocks, self.pool.index, "benchmark")
        return perf_counter_ns() - start
