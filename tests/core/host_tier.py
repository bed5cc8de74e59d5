"""Caches with a host pool for single tests, and workers that carry out what is asked when a test says so."""

from __future__ import annotations

from kvcached.core.cache import Cache
from kvcached.core.messages import Effect, Grant, Span, StartTransfer, TransferKind
from kvcached.core.namespaces import PoolSpec
from kvcached.core.slots.host_slots import HostPool, HostQuota
from kvcached.core.slots.ranges import Ranges, pairs, slot_count
from kvcached.core.slots.slots import SlotPool
from kvcached.core.slots.states import SlotState
from kvcached.core.transfers.storage import StorageSpec
from kvcached_client.types import ShardIndex, TransferId
from tests.core.engine import BLOCK_SIZE, EPOCH, TTL_MS, Engine, keys_of


def make_tiers(
    names: str = "a",
    *,
    slots: int = 16,
    host_slabs: int = 2,
    slots_per_slab: int = 16,
    shards: int = 1,
    watermark: int = 0,
    threshold: int = 1,
    quota: int | None = None,
    spaces: int = 0,
    storage: StorageSpec | None = None,
    host_quota: HostQuota | None = None,
) -> Cache:
    """A cache of pools with one-letter names: small letters in one namespace, each capital in one of its own."""
    specs = [
        PoolSpec(
            name,
            b"namespace" if name.islower() else name.encode(),
            BLOCK_SIZE,
            slots,
            shards,
            slots_per_slab,
            watermark,
            threshold,
            quota,
        )
        for name in names
    ]
    return Cache(
        specs,
        epoch=EPOCH,
        session_ttl_ms=TTL_MS,
        host_slabs=host_slabs,
        namespaces_max=spaces,
        storage=storage,
        host_quota=host_quota,
        announces=True,
    )


class Workers:
    """The workers of all pools of a cache."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.under_way: dict[TransferId, StartTransfer] = {}

    def take(self) -> list[Effect]:
        """What the cache has asked for since the last time."""
        effects, self.cache.effects[:] = self.cache.effects[:], []
        self.under_way.update((effect.transfer, effect) for effect in effects if isinstance(effect, StartTransfer))
        return effects

    def started(self) -> list[StartTransfer]:
        """The transfers among it, after the cache has decided what it decides by itself."""
        self.cache.settle()
        return [effect for effect in self.take() if isinstance(effect, StartTransfer)]

    def answer(self, order: StartTransfer, error: str = "", corrupt: tuple[int, ...] = ()) -> None:
        """Every shard is through with a transfer."""
        self.take()
        del self.under_way[order.transfer]
        for shard in range(self.cache.pools[order.pool].shards):
            self.cache.worker_copies.shard_done(order.transfer, ShardIndex(shard), error, corrupt)

    def answer_all(self, error: str = "") -> None:
        """Until nothing is under way."""
        self.started()
        while self.under_way:
            self.answer(next(iter(self.under_way.values())), error)
            self.started()


def stored(cache: Cache, text: str, replica: str = "a") -> Engine:
    """An engine that has computed and released a prompt, which is in the host pool now."""
    engine = Engine(cache, replica)
    engine.store(text)
    Workers(cache).answer_all()
    return engine


def crowd_out(engine: Engine) -> None:
    """Evict everything that can be from the engine's pool."""
    pool = engine.cache.pools[engine.replica]
    count = pool.free + pool.evictable
    engine.release(engine.acquire("", reserve=count))


def host_of(cache: Cache, replica: str = "a") -> HostPool:
    """The host pool of a replica's namespace."""
    host = cache.managed.trees[replica].host
    assert host is not None
    return host


def host_hit(engine: Engine, text: str) -> tuple[int, int]:
    """Blocks on the engine's device, and further ones in the host pool."""
    return engine.cache.managed.match(engine.session, engine.epoch, keys_of(text), len(text) * BLOCK_SIZE, full=True)


def spans(order: StartTransfer) -> list[tuple[int, int]]:
    """First depth and number of blocks of each piece."""
    return [(span.depth, len(span.keys) // 16) for span in order.spans]


def keys_match(order: StartTransfer, text: str) -> bool:
    """Whether every span names the keys of its part of a prompt, and the key before them."""
    return all(_key_match(span, keys_of(text)) for span in order.spans)


def _key_match(span: Span, keys: bytes) -> bool:
    start, size = span.depth * 16, len(span.keys)
    counts = {slot_count(span.device), slot_count(span.host), size // 16}
    return (span.keys, span.parent) == (keys[start : start + size], keys[max(start - 16, 0) : start]) and len(
        counts
    ) == 1


def loads(effects: list[Effect]) -> list[StartTransfer]:
    """The loads among effects."""
    return [each for each in effects if isinstance(each, StartTransfer) and each.kind is TransferKind.LOAD]


def state_of(pool: SlotPool, ranges: Ranges[int]) -> set[str]:
    """The states of some slots."""
    return {pool.state_of(slot).name for first, count in pairs(ranges) for slot in range(first, first + count)}


def loading(engine: Engine, workers: Workers, text: str) -> tuple[Grant, list[StartTransfer]]:
    """Acquire a prompt that comes from the host pool at least in part."""
    grant = engine.acquire(text)
    return grant, loads(workers.take())


def host_counts(cache: Cache, replica: str = "a") -> tuple[int, int, int]:
    """Host slots that are FREE, FILLING and CACHED."""
    counts = host_of(cache, replica).counts
    return counts[SlotState.FREE], counts[SlotState.FILLING], counts[SlotState.CACHED]
