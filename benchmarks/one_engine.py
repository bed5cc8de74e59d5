"""A cache with one engine on one pool, driven as a scheduler and the daemon's service do it together."""

from __future__ import annotations

from array import array
from time import perf_counter_ns
from typing import Final

from benchmarks.shapes import BLOCK_SIZE
from kvcached.core.cache import Cache
from kvcached.core.index.run import KEY_SIZE
from kvcached.core.messages import StartTransfer
from kvcached.core.namespaces import PoolSpec
from kvcached.core.slots.ranges import cut
from kvcached.core.slots.states import SlotState
from kvcached_client.blocks.host_layout import slots_per_slab
from kvcached_client.types import FenceSequence, ShardIndex

#: Parts that every slot has, and every transfer's end waits for.
SHARDS: Final = 2

_DONE: Final = FenceSequence(0)
_SESSION_TTL_MS: Final = 1_000_000
#: A block of 512 KiB on both shards together.
_SLOTS_PER_SLAB: Final = slots_per_slab(64 << 20, (512 << 10) // SHARDS, SHARDS)
#: As configured by default: one slot of so many is kept free, and shorter hits in the host pool are computed again.
_WATERMARK_DIVISOR: Final = 50
_LOAD_THRESHOLD_BLOCKS: Final = 2


class OneEngine:
    """The cache and its only session.

    Args:
        slots: of the device pool.
        host_slots: of the host pool, rounded up to whole slabs; 0 for no host tier.

    Attributes:
        hit_blocks: blocks that requests found, all together.
        granted_ranges: ranges that the last request's new slots came in.
    """

    def __init__(self, slots: int, host_slots: int = 0) -> None:
        spec = PoolSpec("only", bytes(32), BLOCK_SIZE, slots)
        if host_slots:
            spec = PoolSpec(
                "only",
                bytes(32),
                BLOCK_SIZE,
                slots,
                shards=SHARDS,
                host_slots_per_slab=_SLOTS_PER_SLAB,
                watermark=slots // _WATERMARK_DIVISOR,
                load_threshold=_LOAD_THRESHOLD_BLOCKS,
            )
        slabs = -(-host_slots // _SLOTS_PER_SLAB)
        self.cache = Cache([spec], epoch=1, session_ttl_ms=_SESSION_TTL_MS, host_slabs=slabs)
        self.pool = self.cache.pools["only"]
        self.session = self.cache.open_session("only", 0)
        self.tree = self.session.tree
        self.hit_blocks = 0
        self.granted_ranges = 0
        self._requests = 0

    @property
    def cached_blocks(self) -> int:
        """Blocks in the device pool that a prompt could hit."""
        return self.pool.counts[SlotState.CACHED]

    @property
    def indexed_blocks(self) -> int:
        """Blocks in the tree, each counted once, whatever tiers hold it."""
        return sum(run.length for run in self.tree.runs())

    @property
    def freed_blocks(self) -> int:
        """Blocks that have left the device pool to make room."""
        return self.cache.counters["evicted_blocks"] + self.cache.counters["demoted_blocks"]

    def request(self, keys: bytes) -> int:
        """A prompt from its arrival to its end; nanoseconds inside the core.

        The prompt has one token more than `keys` names, so all of them may hit. After each call comes what the service
        does then: `Cache.settle`, and every transfer that was started is over at once, on shard after shard. Slots go
        from the grant to the commit outside of the measured time: that is the engine's part.
        """
        cache, session, epoch = self.cache, self.session.id, self.pool.epoch
        blocks = len(keys) // KEY_SIZE
        self._requests += 1
        name = str(self._requests)
        start = perf_counter_ns()
        grant = cache.managed.acquire(session, epoch, name, keys, blocks * BLOCK_SIZE + 1, 0, full=False)
        self._settle()
        if grant.loads:
            cache.managed.load(session, epoch, grant.lease)
        spent = perf_counter_ns() - start
        self.hit_blocks += grant.hit
        granted = array("i", grant.ranges)
        self.granted_ranges = len(granted) // 2
        slots, _ = cut(granted, blocks - grant.hit)
        missing = keys[grant.hit * KEY_SIZE :]
        start = perf_counter_ns()
        if missing:
            cache.managed.commit(session, epoch, grant.lease, grant.hit, missing, slots, _DONE)
            self._settle()
        cache.managed.release(session, epoch, grant.lease, _DONE)
        self._settle()
        return spent + perf_counter_ns() - start

    def match(self, keys: bytes) -> int:
        """Leading blocks of a prompt that some tier holds."""
        device, host = self.hit(keys)
        return device + host

    def hit(self, keys: bytes) -> tuple[int, int]:
        """The same by tiers: blocks on the device, and blocks behind those in the host pool."""
        tokens = len(keys) // KEY_SIZE * BLOCK_SIZE
        return self.cache.managed.match(self.session.id, self.pool.epoch, keys, tokens, full=True)

    def evict(self, blocks: int) -> int:
        """Free so many device slots; nanoseconds."""
        start = perf_counter_ns()
        self.tree.evict(blocks, self.pool.index, "benchmark")
        spent = perf_counter_ns() - start
        self.cache.header_changes.clear()
        return spent

    def _settle(self) -> None:
        cache = self.cache
        cache.settle()
        cache.header_changes.clear()  # the service writes them down here, outside of the core
        effects = cache.effects
        while effects:
            effect = effects.pop(0)
            if isinstance(effect, StartTransfer):
                for shard in range(SHARDS):
                    cache.worker_copies.shard_done(effect.transfer, ShardIndex(shard))
                    cache.settle()
                    cache.header_changes.clear()
