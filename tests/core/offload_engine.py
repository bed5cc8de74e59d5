"""An engine in offload mode for core tests: speaks to a cache with the fewest words."""

from __future__ import annotations

from collections import Counter

from kvcached.core.cache import Cache
from kvcached.core.lease import OffloadLease
from kvcached.core.messages import Effect, SessionEnded, SessionExpired, Ticked, TransferKind
from kvcached.core.namespaces import NamespaceSpec
from kvcached.core.offload import LoadPlan
from kvcached.core.slots.host_slots import RESTING_MS, HostPool
from kvcached.core.slots.states import SlotState
from kvcached.core.transfers.engine_copies import StorePlan
from kvcached_client.types import LeaseId, TransferId
from tests.core.engine import BLOCK_SIZE, EPOCH, TTL_MS, keys_of
from tests.core.tier_world import slots_of

SHARDS = 2


def make_offload(*, slabs: int = 4, spaces: int = 2) -> Cache:
    """A cache for engines in offload mode only."""
    return Cache([], epoch=EPOCH, session_ttl_ms=TTL_MS, host_slabs=slabs, namespaces_max=spaces, announces=True)


def space(letter: str = "m", per_slab: int = 4, shards: int = SHARDS) -> NamespaceSpec:
    """A namespace by a letter."""
    return NamespaceSpec(letter.encode() * 32, f"model {letter}", BLOCK_SIZE, shards, per_slab)


def endings(cache: Cache) -> list[Effect]:
    """The effects that say of sessions that they are over."""
    return [effect for effect in cache.effects if isinstance(effect, SessionEnded | SessionExpired)]


def let_rest(cache: Cache) -> None:
    """Time passes in which no namespace is used, and no session heard of: the machine was asleep."""
    used_ms = cache.storage.locks.now_ms + 1
    cache.handle(Ticked(used_ms))
    cache.handle(Ticked(used_ms + RESTING_MS))


def counting_walks(cache: Cache) -> Counter[str]:
    """Counts, under "walks", how often a namespace is looked through for slabs."""
    stock, counts = cache.slab_allocator, Counter[str]()
    evict = stock.evict_slabs
    assert evict is not None

    def counted(host: HostPool, count: int) -> int:
        counts["walks"] += 1
        return evict(host, count)

    stock.evict_slabs = counted
    return counts


class OffloadEngine:
    """One session in a namespace."""

    def __init__(self, cache: Cache, spec: NamespaceSpec | None = None, *, read_only: bool = False) -> None:
        self.cache = cache
        self.core = cache.offload
        self.spec = space() if spec is None else spec
        self.session = cache.open_offload(self.spec, 0, read_only=read_only).id
        self._requests = 0

    @property
    def host(self) -> HostPool:
        """Host slots of its namespace."""
        return self.core.namespaces.by_root[self.spec.root].host

    @property
    def states(self) -> tuple[int, int, int, int]:
        """Host slots of its namespace that are FREE, FILLING, CACHED and QUARANTINED."""
        counts = self.host.counts
        return (
            counts[SlotState.FREE],
            counts[SlotState.FILLING],
            counts[SlotState.CACHED],
            counts[SlotState.QUARANTINED],
        )

    def hit(self, text: str) -> int:
        return self.core.match(self.session, keys_of(text), len(text) * BLOCK_SIZE, full=True)

    def acquire(
        self, text: str, *, request: str = "", full: bool = True, tenant: str = "", priority: int = 0
    ) -> OffloadLease:
        self._requests += 1
        name = request or f"request-{self.session}-{self._requests}"
        tokens = len(text) * BLOCK_SIZE
        return self.core.acquire(self.session, name, keys_of(text), tokens, full=full, tenant=tenant, priority=priority)

    def release(self, lease: OffloadLease | LeaseId) -> None:
        self.core.release(self.session, lease if isinstance(lease, int) else lease.id)

    def prepare(self, lease: OffloadLease, text: str, start: int | None = None) -> StorePlan:
        """The engine has computed the whole of `text`, from the lease's depth on."""
        first = lease.depth if start is None else start
        return self.core.prepare_store(self.session, lease.id, first, keys_of(text)[16 * first :])

    def commit(self, transfer: TransferId, *errors: str) -> None:
        """Each shard is through with a store, with the errors given, the others with none."""
        for shard in range(self.spec.shards):
            error = errors[shard] if shard < len(errors) else ""
            self.core.transfer_done(self.session, TransferKind.STORE, transfer, shard, error)

    def load(self, lease: OffloadLease, start: int = 0, blocks: int | None = None) -> LoadPlan:
        count = lease.hit - start if blocks is None else blocks
        return self.core.prepare_load(self.session, lease.id, start, count)

    def complete(self, transfer: TransferId, *corrupt: int, error: str = "") -> None:
        """Each shard is through with a load; the last one found blocks corrupt, or says what failed."""
        for shard in range(self.spec.shards - 1):
            self.core.transfer_done(self.session, TransferKind.LOAD, transfer, shard, "", ())
        self.core.transfer_done(self.session, TransferKind.LOAD, transfer, self.spec.shards - 1, error, corrupt)

    def store(self, text: str) -> list[int]:
        """Compute, copy and release a prompt; the slots that it was copied to."""
        lease = self.acquire(text)
        plan = self.prepare(lease, text)
        if plan.transfer:
            self.commit(plan.transfer)
        self.release(lease)
        return slots_of(plan.slots)
