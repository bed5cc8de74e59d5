"""Requests that only read the daemon's state. They need no session."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from msgspec import structs

from kvcached import VERSION
from kvcached.core.cache import Cache
from kvcached.core.eviction.reuse import SIZE_RATIOS
from kvcached.core.index.tree import PrefixTree
from kvcached.core.insight.explain import explain
from kvcached.core.insight.invariants import check
from kvcached.core.insight.picture import TreePicture, draw
from kvcached.core.insight.sessions import SessionView, shown_sessions
from kvcached.core.insight.snapshot import RunView, depths_of, find, survey, trees_of
from kvcached.core.messages import TransferKind
from kvcached.core.namespaces import Namespace
from kvcached.core.session import LEASES_PER_SESSION_MAX
from kvcached.core.slots.host_slots import HostPool
from kvcached.core.slots.slots import DevicePool, SlotPool
from kvcached.core.slots.states import DaemonState, SlotState, TransferState
from kvcached.monitoring.timing import CopyTimes
from kvcached.recovery.engine_pools import EnginePools
from kvcached.service.admission import DrainState
from kvcached.service.pending import Answer, Verb
from kvcached.service.replica import NAMESPACE_SHOWN_BYTES, Replica, check_replica
from kvcached_client.protocol import engine as wire
from kvcached_client.types import KEY_SIZE_BYTES

_NAMESPACE_BYTES: Final = 32
#: How many shown names are remembered; the least recently shown are forgotten. Enough for several tree reports.
NAMES_MAX: Final = 16_384
#: The states that a slot of a device pool can have, and those of a slot of the host pool.
_DEVICE_STATES: Final = tuple(state for state in SlotState if state is not SlotState.ABSENT)
_HOST_STATES: Final = (SlotState.FREE, SlotState.CACHED, SlotState.FILLING, SlotState.QUARANTINED, SlotState.ABSENT)

Replicas = Mapping[str, Replica]


class ReportVerbs:
    """Answers requests from the present state.

    Args:
        offload: the host pool as it is offered to engines in offload mode; None if it is not.
        now_ms: the clock. The daemon's uptime counts from the construction of this object.
        drain_state: the daemon's state.
        engine_pools: device memory that is kept for engines.
        copy_times: what copies between tiers have moved.

    Attributes:
        by_type: the method that serves each kind of request.
        shown: names of the blocks that reports have shown.
    """

    def __init__(
        self,
        cache: Cache,
        replicas: Replicas,
        offload: wire.OffloadInfo | None,
        now_ms: Callable[[], int],
        drain_state: DrainState,
        engine_pools: EnginePools,
        copy_times: CopyTimes,
    ) -> None:
        self._cache = cache
        self._replicas = replicas
        self._offload = offload
        self._now_ms = now_ms
        self._drain_state = drain_state
        self._engine_pools = engine_pools
        self._copy_times = copy_times
        self._started_ms = now_ms()
        self.shown = ShownKeys()
        self.by_type: dict[type[wire.Header], Verb] = {
            wire.Stats: self._stats,
            wire.Check: self._check,
            wire.Describe: self._describe,
            wire.Tree: self._tree,
            wire.Inspect: self._inspect,
            wire.Explain: self._explain,
        }

    def draw(self) -> Iterator[list[TreePicture] | None]:
        """None after each step of a picture of the index, then the picture."""
        return draw(self._cache)

    def sessions(self) -> tuple[list[SessionView], int]:
        """The sessions, and the time."""
        return shown_sessions(self._cache), self._now_ms()

    def names_of(self, tree: PrefixTree) -> tuple[str, str]:
        """The first digits of a tree's namespace, and its label in offload mode."""
        space = _space_of(self._cache, tree)
        namespace = _namespace(self._cache, tree, self._replicas)[:NAMESPACE_SHOWN_BYTES].hex()
        return namespace, "" if space is None else space.spec.label

    def lasting_namespaces(self) -> dict[str, str]:
        """Digits by replica that tell its namespace from others; a clear changes its root, and these stay."""
        return {name: each.header_namespace[:NAMESPACE_SHOWN_BYTES].hex() for name, each in self._replicas.items()}

    def _stats(self, _: bytes, request: wire.Stats, __: list[bytes]) -> Answer:
        uptime_ms, state, pools = self._now_ms() - self._started_ms, self._drain_state.state, self._engine_pools
        host_bytes = _host_pool_bytes(self._replicas, self._offload)
        report = stats_report(request.id, self._cache, self._replicas, uptime_ms, state, pools, host_bytes)
        copied = {"_".join(copies): size for copies, size in self._copy_times.copied_bytes.items()}
        return Answer(structs.replace(report, copied_bytes=copied))

    def _check(self, _: bytes, request: wire.Check, __: list[bytes]) -> Answer:
        violations = tuple(check(self._cache))
        return Answer(wire.CheckReport(id=request.id, ok=not violations, violations=violations))

    def _describe(self, _: bytes, request: wire.Describe, __: list[bytes]) -> Answer:
        replicas = list(self._replicas.values())
        return Answer(description(request.id, self._cache.epoch, self._drain_state.state, replicas, self._offload))

    def _tree(self, _: bytes, request: wire.Tree, __: list[bytes]) -> Answer:
        check_replica(request.replica, self._replicas)
        report, nodes = tree_report(request, self._cache, self._replicas, self.shown)
        return Answer(report, (nodes,))

    def _inspect(self, _: bytes, request: wire.Inspect, __: list[bytes]) -> Answer:
        return Answer(inspect_report(request, self._cache, self._replicas, self.shown))

    def _explain(self, _: bytes, request: wire.Explain, frames: list[bytes]) -> Answer:
        check_replica(request.replica, self._replicas)
        return Answer(explained(request, frames[0], self._cache, self._replicas))


class ShownKeys:
    """Names that reports show for blocks instead of their keys. They have a key's size and differ between daemons.

    Whoever knows a block's key can acquire the block and read it, without the prompt or its salt. A name only serves to
    ask about the block again.
    """

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)
        self._keys: OrderedDict[bytes, bytes] = OrderedDict()

    def name_of(self, key: bytes) -> bytes:
        """The name to show for a key; empty for an empty key."""
        if not key:
            return b""
        name = hashlib.blake2b(key, digest_size=KEY_SIZE_BYTES, key=self._secret).digest()
        self._keys[name] = key
        self._keys.move_to_end(name)
        if len(self._keys) > NAMES_MAX:
            self._keys.popitem(last=False)
        return name

    def key_of(self, name: bytes) -> bytes:
        """The key that this name stands for. A value that is not a shown name is taken as a key."""
        return self._keys.get(name, name)


def stats_report(
    request_id: int,
    cache: Cache,
    replicas: Replicas,
    uptime_ms: int,
    state: DaemonState,
    engine_pools: EnginePools,
    host_pool_bytes: int,
) -> wire.StatsReport:
    """Counters and gauges of every pool."""
    return wire.StatsReport(
        id=request_id,
        daemon_epoch=cache.epoch,
        state=state,
        offload_paused=cache.offload.paused,
        uptime_ms=uptime_ms,
        sessions=len(cache.managed.sessions) + len(cache.offload.sessions),
        runs=sum(tree.run_count for tree in cache.trees),
        cached_blocks=sum(pool.counts[SlotState.CACHED] for pool in cache.pools.values()),
        pools=tuple(_pool_stats(cache, pool, replicas[name]) for name, pool in sorted(cache.pools.items())),
        hosts=tuple(_host_stats(cache, tree, tree.host, replicas) for tree in cache.trees if tree.host is not None),
        engine_pools=engine_pools.stats(),
        device_memory_bytes=engine_pools.limit_bytes,
        host_pool_bytes=host_pool_bytes,
        transfers=_transfer_counts(cache),
        counters=dict(sorted(cache.counters.items())),
    )


def _pool_stats(cache: Cache, pool: DevicePool, replica: Replica) -> wire.PoolStats:
    sessions = [session for session in cache.managed.sessions.values() if session.pool is pool]
    return wire.PoolStats(
        replica=pool.name,
        state=pool.state,
        epoch=pool.epoch,
        slots=pool.slots,
        states=_states(pool, _DEVICE_STATES),
        evictable=pool.evictable,
        leases=sum(len(session.leases) for session in sessions),
        session=sessions[0].id if sessions else 0,
        healthy=pool.healthy and not replica.trouble,
        degraded=replica.is_degraded,
        restarts=replica.workers.restarts,
        paused=pool.paused,
        pinned=cache.pins.blocks(cache.tree_of(pool.name), pool),
        registered=replica.workers.registered,
        trouble=replica.trouble or replica.last_loss,
    )


def _host_stats(cache: Cache, tree: PrefixTree, host: HostPool, replicas: Replicas) -> wire.HostStats:
    space = _space_of(cache, tree)
    sessions = [session for session in cache.offload.sessions.values() if session.namespace is space]
    return wire.HostStats(
        namespace=_namespace(cache, tree, replicas)[:NAMESPACE_SHOWN_BYTES].hex(),
        replicas=tuple(pool.name for pool in tree.pools),
        label="" if space is None else space.spec.label,
        generation=_generation(tree, space, replicas),
        sessions=len(sessions),
        leases=sum(len(session.leases) for session in sessions),
        slots=host.slots,
        slabs=len(host.slabs),
        write_policy=tree.write_policy,
        pinned=cache.pins.blocks(tree, None),
        states=_states(host, _HOST_STATES),
        asked_blocks=0 if tree.reuse is None else round(tree.reuse.asked_blocks),
        hit_estimates=() if tree.reuse is None else tuple(map(wire.HitEstimate, SIZE_RATIOS, tree.reuse.hit_ratios())),
        tenants=() if tree.tenants is None else tuple(wire.TenantStats(*each) for each in tree.tenants.shares()),
    )


def _host_pool_bytes(replicas: Replicas, offload: wire.OffloadInfo | None) -> int:
    if offload is not None:
        return offload.slabs * offload.slab_bytes
    return next((each.slabs * each.slab_bytes for one in replicas.values() if (each := one.host_geometry)), 0)


def _generation(tree: PrefixTree, space: Namespace | None, replicas: Replicas) -> int:
    """The generation of a tree's namespace; 0 if the namespace is gone."""
    if tree.pools:
        return replicas[tree.pools[0].name].generation
    return 0 if space is None else space.generation


def _space_of(cache: Cache, tree: PrefixTree) -> Namespace | None:
    """The namespace of engines in offload mode whose tree it is; None for trees of replicas, and retired ones."""
    return next((space for space in cache.offload.namespaces.by_root.values() if space.tree is tree), None)


def _states(pool: SlotPool, states: Iterable[SlotState]) -> dict[str, int]:
    return {state.name.lower(): pool.counts[state] for state in states}


def _transfer_counts(cache: Cache) -> dict[str, int]:
    """Transfers that have not ended, counted as ``<state>_<kind>s``."""
    counts = Counter((transfer.state, transfer.kind) for transfer in cache.transfers.values())
    counts.update((exchange.state, exchange.kind) for exchange in cache.offload.transfers)
    return {
        f"{state}_{kind}s": counts[state, kind]
        for state in (TransferState.QUEUED, TransferState.RUNNING)
        for kind in TransferKind
    }


def _namespace(cache: Cache, tree: PrefixTree, replicas: Replicas) -> bytes:
    """The root of a tree's keys; 32 zeros if the tree is of an earlier generation."""
    if tree.pools:
        return replicas[tree.pools[0].name].namespace
    space = _space_of(cache, tree)
    return bytes(_NAMESPACE_BYTES) if space is None else space.spec.root


def tree_report(
    request: wire.Tree, cache: Cache, replicas: Replicas, shown: ShownKeys
) -> tuple[wire.TreeReport, bytes]:
    """The report about the index, and the frame with its runs.

    Raises:
        BadRequest: the runs do not fit into a frame.
    """
    views = survey(cache, request.replica, request.levels, request.children, wire.TREE_NODES_MAX)
    trees = trees_of(cache, request.replica)
    depths = depths_of(trees)
    report = wire.TreeReport(
        id=request.id,
        runs=sum(tree.run_count for tree in trees),
        blocks=depths.blocks,
        shown=len(views),
        deepest=depths.deepest,
        half_depth=depths.half,
        nine_tenths_depth=depths.nine_tenths,
    )
    return report, wire.pack_tree_nodes([_tree_node(cache, view, replicas, shown) for view in views])


def _tree_node(cache: Cache, view: RunView, replicas: Replicas, shown: ShownKeys) -> wire.TreeNode:
    return wire.TreeNode(
        level=view.level,
        key=shown.name_of(view.key) if view.level else _namespace(cache, view.tree, replicas),
        start=view.start,
        blocks=view.blocks,
        tiers=view.tiers,
        loading=view.loading,
        pins=view.pins,
        children=view.children,
        hidden=view.hidden,
    )


def inspect_report(request: wire.Inspect, cache: Cache, replicas: Replicas, shown: ShownKeys) -> wire.InspectReport:
    """Where the copies of a block are, and which leases and transfers hold it."""
    found = find(cache, shown.key_of(request.key))
    if found is None:
        return wire.InspectReport(id=request.id, found=False)
    return wire.InspectReport(
        id=request.id,
        found=True,
        namespace=_namespace(cache, found.tree, replicas)[:NAMESPACE_SHOWN_BYTES].hex(),
        depth=found.depth,
        run_start=found.run_start,
        run_blocks=found.run_blocks,
        parent=shown.name_of(found.parent),
        children=found.children,
        places=tuple(wire.BlockPlace(tier=place.tier, slot=place.slot, state=place.state) for place in found.places),
        leases=tuple(found.leases),
        transfers=tuple(found.transfers),
    )


def explained(request: wire.Explain, keys: bytes, cache: Cache, replicas: Replicas) -> wire.Explained:
    """Why a prompt's hit is not longer, for each replica and each namespace of engines in offload mode."""
    found: list[wire.Explanation] = []
    for name, replica in replicas.items():
        if request.replica in {"", name} and replica.namespace.hex().startswith(request.namespace):
            (tree,) = trees_of(cache, name)
            size, pool = replica.layout.block_size, cache.pools[name]
            found.append(_explanation(request, keys, cache, tree, size, replica.generation, pool=pool))
    for root, space in cache.offload.namespaces.by_root.items():
        if not request.replica and root.hex().startswith(request.namespace):
            size = space.spec.block_size
            found.append(_explanation(request, keys, cache, space.tree, size, space.generation, space=space))
    return wire.Explained(id=request.id, explanations=tuple(found))


def _explanation(
    request: wire.Explain,
    keys: bytes,
    cache: Cache,
    tree: PrefixTree,
    block_size: int,
    generation: int,
    *,
    pool: DevicePool | None = None,
    space: Namespace | None = None,
) -> wire.Explanation:
    """What a prompt would hit on the replica of `pool`, or in the offload namespace `space`."""
    blocks = len(keys) // KEY_SIZE_BYTES
    limit = blocks if request.full else min(blocks, max(request.tokens - 1, 0) // block_size)
    miss = explain(cache, tree, pool, keys, limit)
    return wire.Explanation(
        namespace=tree.namespace[:NAMESPACE_SHOWN_BYTES].hex(),
        replica="" if pool is None else pool.name,
        label="" if space is None else space.spec.label,
        generation=generation,
        block_size=block_size,
        device=miss.device,
        host=miss.host,
        hit=miss.hit,
        key=keys[miss.hit * KEY_SIZE_BYTES : (miss.hit + 1) * KEY_SIZE_BYTES],
        reason=miss.reason,
        others=miss.others,
    )


def description(
    request_id: int,
    daemon_epoch: int,
    state: DaemonState,
    replicas: list[Replica],
    offload: wire.OffloadInfo | None,
) -> wire.Description:
    """Versions, replicas and limits."""
    return wire.Description(
        id=request_id,
        version=VERSION,
        protocol_min=wire.PROTOCOL_VERSION_MIN,
        protocol_max=wire.PROTOCOL_VERSION,
        daemon_epoch=daemon_epoch,
        state=state,
        pid=os.getpid(),
        replicas=tuple(replica.info() for replica in replicas),
        offload=offload,
        limits={
            "header_bytes": wire.HEADER_SIZE_BYTES_MAX,
            "frame_bytes": wire.FRAME_SIZE_BYTES_MAX,
            "blocks_per_message": wire.BLOCKS_PER_MESSAGE_MAX,
            "tokens_per_message": wire.TOKENS_PER_MESSAGE_MAX,
            "leases_per_session": LEASES_PER_SESSION_MAX,
        },
    )
