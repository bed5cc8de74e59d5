"""Namespaces, each with its tree: those of replicas, there from the start, and those that offload engines declare.

A namespace of replicas has a device pool for each of them, and a part of the host pool. One of offload engines has its
blocks in the host pool alone; it is made when the first engine declares it, cleared on request, and forgotten when
others need its memory.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial

from kvcached.core.eviction.by_priority import make_policy
from kvcached.core.eviction.by_tenant import ByTenant
from kvcached.core.eviction.eviction_log import EvictionLog
from kvcached.core.eviction.lru import EvictionPolicy
from kvcached.core.eviction.reuse import ReuseSample, TreeReuse
from kvcached.core.generations import Generations
from kvcached.core.index import announcements
from kvcached.core.index.announcements import Announcements
from kvcached.core.index.tree import Listener, PrefixTree
from kvcached.core.messages import HeaderChange
from kvcached.core.pins import Pins
from kvcached.core.refusals import Refusal, Why
from kvcached.core.slots.host_slots import HostPool, SlabAllocator
from kvcached.core.slots.slots import DevicePool
from kvcached.core.slots.states import SlotState
from kvcached.core.transfers.prefix_locks import PrefixLocks
from kvcached_client.types import MissReason, WritePolicy


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """A device pool to be: pools of one `namespace` share a tree, and with it the host slots.

    Attributes:
        host_slots_per_slab: blocks of this layout in a slab of the host pool; the same for a whole namespace.
        watermark, load_threshold, load_quota: see `DevicePool`.
        write_policy: the same for a whole namespace.
        eviction_policy: of this pool; see `kvcached.core.eviction.policies`.
        generation: of the namespace.
    """

    name: str
    namespace: bytes
    block_size: int
    slots: int
    shards: int = 1
    host_slots_per_slab: int = 0
    watermark: int = 0
    load_threshold: int = 1
    load_quota: int | None = None
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    eviction_policy: str = "lru"
    generation: int = 0


@dataclass(frozen=True, slots=True)
class NamespaceSpec:
    """A namespace as an engine declares it.

    Attributes:
        root: 32 bytes; engines that give the same share their prefixes.
        label: what people call it.
        host_slots_per_slab: its blocks, with all their shards, in a slab of the host pool.
        canonical_root: 32 bytes that all namespaces have whose blocks are the same in storage; empty = no other's are.
    """

    root: bytes
    label: str
    block_size: int
    shards: int
    host_slots_per_slab: int
    canonical_root: bytes = b""

    @property
    def storage_root(self) -> bytes:
        """Under which root storage has its blocks. Namespaces of one storage root have the same generation."""
        return self.canonical_root or self.root


@dataclass(slots=True, eq=False)
class Namespace:
    """A namespace, whose tree is in the host pool only.

    Attributes:
        spec: as it was declared.
        host: its host slots.
        tree: of the present generation.
        generation: grows when the namespace is cleared.
        sessions: how many are in it, expired ones included.
    """

    spec: NamespaceSpec
    host: HostPool
    tree: PrefixTree
    generation: int = 0
    sessions: int = 0


class Namespaces:
    """The namespaces, and trees of earlier generations.

    Args:
        trees: builds them.
        most: how many namespaces there may be.
        locks: of prefixes; those of a namespace that is cleared, or that nobody uses when others need its memory, end.
        generations: of namespaces; a forgotten one that is declared again has the generation that it had.
        pins: what people keep cached; those of a namespace that nobody uses end when others need its memory.
        write_policy: see there.

    Attributes:
        by_root: the namespaces; the one where a session began or ended last comes last.
        retired: trees of earlier generations that something still holds.
        version: grows whenever a namespace is made, cleared or forgotten.
        write_policy: of new namespaces.
    """

    def __init__(
        self,
        trees: Trees,
        most: int,
        locks: PrefixLocks,
        generations: Generations,
        pins: Pins,
        write_policy: WritePolicy = WritePolicy.WRITE_THROUGH,
    ) -> None:
        self.by_root: dict[bytes, Namespace] = {}
        self.retired: list[PrefixTree] = []
        self.version = 0
        self._trees = trees
        self._allocator = trees.allocator
        self.most = most
        self.write_policy = write_policy
        self._pins = pins
        self._locks = locks
        self._generations = generations

    @property
    def trees(self) -> list[PrefixTree]:
        """Every tree once, those of earlier generations last."""
        return [*(namespace.tree for namespace in self.by_root.values()), *self.retired]

    def enter(self, spec: NamespaceSpec) -> Namespace:
        """The namespace of an engine that begins a session, made if nobody has declared it yet.

        Raises:
            Refusal: there are too many namespaces, a block does not fit a slab, or another shape was declared.
        """
        namespace = self.by_root.pop(spec.root, None)
        if namespace is None:
            namespace = self._make(spec)
        self.by_root[spec.root] = namespace
        if _shape(namespace.spec) != _shape(spec):
            raise Refusal(Why.OTHER_SHAPE, label=namespace.spec.label)
        namespace.sessions += 1
        return namespace

    def reenter(self, root: bytes) -> Namespace:
        """The namespace of a session from before a restart, which is there again."""
        namespace = self.by_root[root]
        namespace.sessions += 1
        return namespace

    def leave(self, namespace: Namespace) -> None:
        """A session has ended in a namespace."""
        namespace.sessions -= 1
        self._allocator.look_again(namespace.host)
        self.by_root[namespace.spec.root] = self.by_root.pop(namespace.spec.root)
        self.drop_retired()

    def clear(self, namespace: Namespace) -> int:
        """Begin a new generation: nothing stored before is matched again. Returns how many blocks that is.

        Namespaces of the same storage root are cleared with it: what they have in storage is the same blocks.
        """
        storage_root = namespace.spec.storage_root
        return self._begin_all(storage_root, self._generations.renew(storage_root))

    def enter_generation(self, storage_root: bytes, generation: int) -> int:
        """The same for a storage root, with a generation that another daemon has begun."""
        return self._begin_all(storage_root, self._generations.enter(storage_root, generation))

    def in_use(self) -> set[bytes]:
        """The storage roots of all namespaces."""
        return {each.spec.storage_root for each in self.by_root.values()}

    def _begin_all(self, storage_root: bytes, generation: int) -> int:
        blocks = sum(self._begin(each, generation) for each in self.of_storage(storage_root))
        self._trees.counters["cleared_blocks"] += blocks
        self.drop_retired()
        self.version += 1
        return blocks

    def of_storage(self, storage_root: bytes) -> list[Namespace]:
        """The namespaces whose blocks are the same in storage."""
        return [each for each in self.by_root.values() if each.spec.storage_root == storage_root]

    def _begin(self, namespace: Namespace, generation: int) -> int:
        """Give a namespace an empty tree, of another generation. Returns how many blocks the one before held."""
        self._let_go(namespace.tree)
        blocks = namespace.host.counts[SlotState.CACHED]
        self._trees.listener.cleared(namespace.spec.root, namespace.generation)
        self._retire(namespace.tree)
        if namespace.tree.reuse is not None:
            namespace.tree.reuse.forget()
        policy, namespace.generation = namespace.tree.write_policy, generation
        namespace.host, namespace.tree = self._trees.of_host(namespace.spec, policy, generation)
        return blocks

    def _let_go(self, tree: PrefixTree) -> None:
        self._locks.drop(tree)
        self._pins.drop(tree)

    def _retire(self, tree: PrefixTree) -> None:
        announcements.end(tree)
        self.retired.append(tree)

    def drop_retired(self) -> None:
        """Drop of retired trees what nothing holds any longer."""
        for tree in self.retired[:]:
            tree.shed_host("namespace cleared", reason=MissReason.CLEARED)
            if tree.host is None or self._allocator.retire(tree.host):
                self.retired.remove(tree)

    def _make(self, spec: NamespaceSpec) -> Namespace:
        if not spec.host_slots_per_slab:
            raise Refusal(Why.BLOCK_TOO_LARGE)
        if len(self.by_root) >= self.most:
            idle = self._idle()
            if not idle:
                raise Refusal(Why.NAMESPACES_FULL, namespaces=len(self.by_root))
            self._forget(idle[0])
        generation = self._generations.of(spec.storage_root)
        host, tree = self._trees.of_host(spec, self.write_policy, generation)
        self.version += 1
        return Namespace(spec, host, tree, generation)

    def restore(self, spec: NamespaceSpec, write_policy: WritePolicy = WritePolicy.WRITE_THROUGH) -> Namespace:
        """A namespace from before a restart, at the generation that it had, without slabs; it may be above `most`."""
        generation = self._generations.of(spec.storage_root)
        host, tree = self._trees.of_host(spec, write_policy, generation)
        namespace = self.by_root[spec.root] = Namespace(spec, host, tree, generation)
        return namespace

    def generation_of(self, tree: PrefixTree) -> int | None:
        """The generation that a tree is of, as headers say it; None for one that is cleared or forgotten.

        Replicas get another namespace instead of another generation, once all copies have ended.
        """
        if tree.pools:
            return None if any(pool.clearing for pool in tree.pools) else 0
        return next((namespace.generation for namespace in self.by_root.values() if namespace.tree is tree), None)

    def _forget(self, namespace: Namespace) -> None:
        self._let_go(namespace.tree)
        self._retire(namespace.tree)
        self.version += 1
        del self.by_root[namespace.spec.root]
        namespace.tree.shed_host(f"namespace {namespace.spec.label!r} forgotten")
        self.drop_retired()

    def _idle(self) -> list[Namespace]:
        """Namespaces without a session; the one that has been without for longest comes first."""
        return [namespace for namespace in self.by_root.values() if not namespace.sessions]

    def make_room(self, taker: HostPool) -> bool:
        """Take slabs from a namespace without a session, or forget one that has no others; whether there were any.

        Those that were without for longest come first. Their share is theirs for a while: an engine may come back.
        """
        others = (each for each in self._idle() if each.host is not taker)  # whose session ended while it fetched
        return any(self._give_room(each, taker) for each in others)

    def _give_room(self, namespace: Namespace, taker: HostPool) -> bool:
        """The same of one namespace: it may have to give nothing, and storage may read something in each slab of it."""
        host, allocator = namespace.host, self._allocator
        if host.slabs or host.floor:
            due = allocator.due(host, taker, keep=0, runs=namespace.tree.run_count)
            if due <= 0 or (host.is_barren and not host.empty):
                return False
            self._let_go(namespace.tree)
            if not host.empty:
                allocator.free_slabs(host, due)
        if host.empty == host.slabs and not host.floor:
            self._forget(namespace)  # no slab is held back for it, either
            return True
        return allocator.take_back(host, keep=host.floor)


def _shape(spec: NamespaceSpec) -> tuple[int, int, int]:
    return spec.block_size, spec.shards, spec.host_slots_per_slab


class Trees:
    """Builds empty trees, all of which share what they note evictions in, and whom they tell.

    Args:
        allocator: slabs of the host pool; without any, replicas have no host tier.
        counters: of the cache.
        eviction_log: where trees note what leaves them.
        listener: of every tree.
        announcements: what routers are told of every tree.
        reuse: what the blocks of every tree are sampled for; None without a host pool.
    """

    def __init__(
        self,
        allocator: SlabAllocator,
        counters: Counter[str],
        eviction_log: EvictionLog,
        listener: Listener,
        announcements: Announcements,
        reuse: ReuseSample | None,
    ) -> None:
        self.allocator = allocator
        self.counters = counters
        self.listener = listener
        self._eviction_log = eviction_log
        self._announcements = announcements
        self._reuse = reuse

    def of_host(self, spec: NamespaceSpec, policy: WritePolicy, generation: int) -> tuple[HostPool, PrefixTree]:
        """One of engines in offload mode, which is in the host pool only."""
        host = HostPool(self.allocator, spec.host_slots_per_slab, spec.root, [spec.label])
        tree = self._build([], [], host, spec.root, policy)
        self._announcements.begin(tree, spec.label, generation, spec.block_size)
        return host, tree

    def of_pools(self, pools: list[PoolSpec], epoch: int, header_changes: list[HeaderChange]) -> list[PrefixTree]:
        """One for each namespace of replicas, whose pools begin at this epoch.

        What is the same for a whole namespace is taken from its first pool.
        """
        by_namespace: dict[bytes, list[PoolSpec]] = {}
        for spec in pools:
            by_namespace.setdefault(spec.namespace, []).append(spec)
        return [self._of_replicas(specs, epoch, header_changes) for specs in by_namespace.values()]

    def _of_replicas(self, specs: list[PoolSpec], epoch: int, header_changes: list[HeaderChange]) -> PrefixTree:
        pools = [
            DevicePool(
                spec.name,
                index,
                spec.slots,
                epoch,
                block_size=spec.block_size,
                shards=spec.shards,
                watermark=spec.watermark,
                load_threshold=spec.load_threshold,
                load_quota=spec.load_quota,
                header_changes=header_changes,
            )
            for index, spec in enumerate(specs)
        ]
        first, host = specs[0], None
        if self.allocator.count:
            labels = [spec.name for spec in specs]
            host = HostPool(self.allocator, first.host_slots_per_slab, first.namespace, labels)
        policies = [make_policy(spec.eviction_policy, spec.slots) for spec in specs]
        tree = self._build(pools, policies, host, first.namespace, first.write_policy)
        self._announcements.begin(tree, first.name, first.generation, first.block_size)
        return tree

    def _build(
        self,
        pools: list[DevicePool],
        policies: list[EvictionPolicy],
        host: HostPool | None,
        namespace: bytes,
        write_policy: WritePolicy,
    ) -> PrefixTree:
        return PrefixTree(
            pools,
            [*policies, self._host_policy(host)],
            host,
            self.counters,
            namespace=namespace,
            eviction_log=self._eviction_log,
            write_policy=write_policy,
            listener=self.listener,
            reuse=self._reuse_of(host),
        )

    def _host_policy(self, host: HostPool | None) -> EvictionPolicy:
        make = partial(make_policy, self.allocator.eviction_policy, 0 if host is None else host.slots)
        tenants = self.allocator.quota.tenants
        return ByTenant(make, tenants, host) if tenants and host is not None else make()

    def _reuse_of(self, host: HostPool | None) -> TreeReuse | None:
        """None without a host pool, and where a slab has no room for a block."""
        if self._reuse is None or host is None or not host.slots_per_slab:
            return None
        return self._reuse.of_tree(host.slots_per_slab)
