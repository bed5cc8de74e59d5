"""Why a prompt missed: how far a replica or a namespace of offload engines has it, and what became of the next block.

Reads only. What an `acquire` would do is worked out here once more, and the tests hold the two together.
"""

from __future__ import annotations

from typing import NamedTuple

from kvcached.core.cache import Cache
from kvcached.core.index.host_tree import HOST
from kvcached.core.index.run import KEY_SIZE, Run
from kvcached.core.index.tree import PrefixTree
from kvcached.core.messages import TransferKind
from kvcached.core.slots.ranges import pairs
from kvcached.core.slots.slots import DevicePool
from kvcached.core.slots.states import SlotState
from kvcached.core.transfers.engine_copies import host_of
from kvcached.core.transfers.loads import LOAD_BLOCKS_MAX
from kvcached.core.transfers.store_waits import longest_hit
from kvcached_client.types import PROGRESS_SLOTS, MissReason


class Miss(NamedTuple):
    """What of a prompt an `acquire` would hit, and why no more.

    Attributes:
        device: leading blocks in the replica's device pool; 0 for engines in offload mode.
        host: further ones that the host pool has, of engines in offload mode complete.
        hit: blocks that an acquire would count as its hit.
        reason: of the block behind the hit.
        others: chains in the index that go on from the hit, but with other blocks.
    """

    device: int
    host: int
    hit: int
    reason: MissReason
    others: int


def explain(cache: Cache, tree: PrefixTree, pool: DevicePool | None, keys: bytes, limit: int) -> Miss:
    """Why a prompt with these keys, of which `limit` blocks may be a hit, hits no more of a tree.

    Args:
        cache: where the tree is.
        tree: of the namespace that the prompt is looked for in.
        pool: of the replica that asks; None for engines in offload mode.
        keys: of the prompt's full blocks.
        limit: how many of them may be a hit.
    """
    device, end = _held(tree, pool, keys, limit)
    host = end - device
    hit, cut = (end, None) if pool is None else _loaded(cache, pool, device, host)
    reason = cut or _reason_behind(cache, tree, pool, keys, hit, limit)
    return Miss(device, host, hit, reason, _others(tree, keys, hit))


def _held(tree: PrefixTree, pool: DevicePool | None, keys: bytes, limit: int) -> tuple[int, int]:
    """How far the device pool has a prompt, and how far that and the host pool have it."""
    if pool is None:
        return 0, longest_hit(tree, keys, limit).depth
    run, depth = tree.match(keys, limit, pool.index)
    return depth, depth if tree.host is None else tree.match_host(run, depth, keys, limit)[1]


def _loaded(cache: Cache, pool: DevicePool, device: int, host: int) -> tuple[int, MissReason | None]:
    """How far an acquire would get by loading, and why it loads no more, as `Loads.start` decides."""
    if not host:
        return device, None
    if not pool.copies:
        return device, MissReason.PAUSED if pool.healthy else MissReason.WORKER_LOST
    loads = [load for load in cache.transfers.values() if load.pool is pool and load.kind is TransferKind.LOAD]
    blocks = min(host, pool.load_quota - sum(load.blocks for load in loads))
    if blocks < max(pool.load_threshold, 1):
        return device, MissReason.BELOW_THRESHOLD if host < pool.load_threshold else MissReason.OVER_QUOTA
    blocks = min(blocks, (PROGRESS_SLOTS - len({load.progress for load in loads})) * LOAD_BLOCKS_MAX)
    return device + blocks, MissReason.OVER_QUOTA if blocks < host else None


def _reason_behind(
    cache: Cache, tree: PrefixTree, pool: DevicePool | None, keys: bytes, hit: int, limit: int
) -> MissReason:
    """What became of the first block that neither the device pool nor the host pool gives."""
    if hit == len(keys) // KEY_SIZE:
        return MissReason.HIT
    if hit == limit and _held(tree, pool, keys, limit + 1)[1] > limit:
        return MissReason.LAST_TOKEN
    run = _find(tree, keys, hit + 1)
    if run is not None:
        return _reason_in(tree, pool, run, hit)
    retired = (old for old in cache.offload.namespaces.retired if old.namespace == tree.namespace)
    if any(_find(old, keys, hit + 1) is not None for old in retired):
        return MissReason.CLEARED
    key = keys[hit * KEY_SIZE : (hit + 1) * KEY_SIZE]
    return cache.eviction_log.find(tree.namespace, key) or MissReason.NEVER_STORED


def _reason_in(tree: PrefixTree, pool: DevicePool | None, run: Run, depth: int) -> MissReason:
    """Why a block that is in the index is of no use to who asks."""
    offset = depth - run.start
    for other in tree.pools:
        segment = run.segments[other.index]
        if other is not pool and segment is not None and offset < segment.length:
            return MissReason.OTHER_REPLICA
    segment = run.segments[HOST]
    for first, count in pairs(segment.ranges) if segment is not None else ():
        if offset < count:
            filling = first >= 0 and host_of(tree).state_of(first + offset) is SlotState.FILLING
            return MissReason.FILLING if filling else MissReason.CORRUPT_OR_FAILED
        offset -= count
    return MissReason.CORRUPT_OR_FAILED


def _find(tree: PrefixTree, keys: bytes, blocks: int) -> Run | None:
    """The run that holds the last of a chain's first `blocks` blocks; None where the index does not know it."""
    run, depth = tree.known(keys, blocks)
    return run if depth == blocks else None


def _others(tree: PrefixTree, keys: bytes, hit: int) -> int:
    """How many chains go on from the hit otherwise than the prompt."""
    run, depth = tree.known(keys, hit)
    if depth < hit:
        return 0
    key = keys[hit * KEY_SIZE : (hit + 1) * KEY_SIZE]
    if depth < run.end:
        offset = (depth - run.start) * KEY_SIZE
        return int(run.keys[offset : offset + KEY_SIZE] != key)
    return sum(first != key for first in run.children or ())
