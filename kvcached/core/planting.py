"""The trees of replicas as they are at the start: empty device pools, a host pool, the order of eviction in each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvcached.core.answers import PoolSpec
from kvcached.core.eviction import make_policy
from kvcached.core.forgotten import ForgottenKeys
from kvcached.core.host_pool import HostPool, SlabStock
from kvcached.core.pool import DevicePool
from kvcached.core.tree import Listener, PrefixTree


def plant_all(
    pools: list[PoolSpec],
    stock: SlabStock,
    *,
    epoch: int,
    counters: Counter[str],
    forgotten: ForgottenKeys,
    listener: Listener,
) -> list[PrefixTree]:
    """A tree for each namespace; pools that share one are in the same tree."""
    by_namespace: dict[bytes, list[PoolSpec]] = {}
    for spec in pools:
        by_namespace.setdefault(spec.namespace, []).append(spec)
    trees = [_plant(specs, epoch, stock, counters, forgotten) for specs in by_namespace.values()]
    for tree in trees:
        tree.listener = listener
    return trees


def _plant(
    specs: Sequence[PoolSpec], epoch: int, stock: SlabStock, counters: Counter[str], forgotten: ForgottenKeys
) -> PrefixTree:
    """An empty tree for pools of one namespace.

    Args:
        specs: of the pools; what is the same for a whole namespace is taken from the first.
        epoch: that the pools begin at.
        stock: slabs of the host pool; without any there is no host tier.
        counters: of the cache.
        forgotten: of the cache.
    """
    pools = [
        DevicePool(
            spec.name,
            index,
            spec.slots,
            epoch,
            shards=spec.shards,
            watermark=spec.watermark,
            load_threshold=spec.load_threshold,
            load_quota=spec.load_quota,
        )
        for index, spec in enumerate(specs)
    ]
    first = specs[0]
    host = HostPool(stock, first.host_slots_per_slab, first.namespace) if stock.count else None
    policies = [make_policy(spec.eviction_policy, spec.slots) for spec in specs]
    policies.append(make_policy(stock.eviction_policy, 0 if host is None else host.slots))
    return PrefixTree(
        pools,
        policies,
        host,
        counters,
        namespace=first.namespace,
        forgotten=forgotten,
        write_policy=first.write_policy,
    )
