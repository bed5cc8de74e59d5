"""The index as people look at it: a bounded picture of the trees, and one block's places. Reads only.

Both may walk a whole tree. They are for people, who ask seldom.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from heapq import nlargest
from itertools import islice, pairwise
from typing import Final, NamedTuple

from kvcached.core.cache import Cache
from kvcached.core.index.host_tree import HOST
from kvcached.core.index.run import KEY_SIZE, Run, Segment
from kvcached.core.index.tree import PrefixTree
from kvcached.core.lease import Lease
from kvcached.core.messages import TransferKind
from kvcached.core.slots.ranges import Ranges, pairs, slot_count, without_holes
from kvcached.core.transfers.transfer import EngineTransfer, WorkerTransfer

#: A block of a system prompt may be held by every lease there is.
HOLDERS_SHOWN_MAX: Final = 32
#: Parts of all blocks, in percent, for which the depth is told within which they lie.
_PARTS: Final = (50, 90)


class RunView(NamedTuple):
    """A run, or the root of a tree, in a picture of the index.

    Attributes:
        tree: where it is.
        level: distance from the root, which has 0.
        key: of its first block; empty for a root.
        start: depth of its first block.
        blocks: its length.
        tiers: blocks of it by the pool that holds them, without pools that hold none; for a root 0 for every pool.
        loading: blocks in device pools that a load still writes.
        pins: leases, fences and transfers that end in it. What pins device and host pool alike counts once.
        children: continuations.
        hidden: those of them that the picture leaves out.
    """

    tree: PrefixTree
    level: int
    key: bytes
    start: int
    blocks: int
    tiers: dict[str, int]
    loading: int
    pins: int
    children: int
    hidden: int


class Place(NamedTuple):
    """One copy of a block."""

    tier: str
    slot: int
    state: str


class Found(NamedTuple):
    """A block of the index.

    Attributes:
        tree: where it is.
        depth: blocks before it.
        run_start, run_blocks, children: of the run that it is in.
        parent: key of the block before it; empty for the first of a chain.
        places: its copies.
        leases: requests that hold it, at most `HOLDERS_SHOWN_MAX`.
        transfers: copies that read or write it, in words.
    """

    tree: PrefixTree
    depth: int
    run_start: int
    run_blocks: int
    children: int
    parent: bytes
    places: list[Place]
    leases: list[str]
    transfers: list[str]


def trees_of(cache: Cache, replica: str) -> list[PrefixTree]:
    """The tree that a replica works in; all of them for ""."""
    return [tree for tree in cache.trees if not replica or any(pool.name == replica for pool in tree.pools)]


class Depths(NamedTuple):
    """How deep trees are, in blocks from the root.

    Attributes:
        blocks: different blocks that they name, wherever their copies are.
        deepest: the depth behind the deepest of them.
        half, nine_tenths: the smallest depths within which that part of the blocks lies.
    """

    blocks: int
    deepest: int
    half: int
    nine_tenths: int


def depths_of(trees: list[PrefixTree]) -> Depths:
    """How deep trees are. Walks them once."""
    changes: Counter[int] = Counter()  #: at which depth how many runs begin, less those that end
    for tree in trees:
        for run in tree.runs():
            changes[run.start] += 1
            changes[run.end] -= 1
    blocks = -sum(depth * change for depth, change in changes.items())
    places = sorted(changes)
    half, nine_tenths = (_within(changes, places, blocks, percent) for percent in _PARTS)
    return Depths(blocks, places[-1] if places else 0, half, nine_tenths)


def _within(changes: Counter[int], places: list[int], blocks: int, percent: int) -> int:
    """The smallest depth within which this part of the blocks lies."""
    wanted, abreast = -(-blocks * percent // 100), 0
    for place, following in pairwise(places):
        abreast += changes[place]
        here = abreast * (following - place)
        if wanted <= here:
            return place + -(-wanted // abreast)
        wanted -= here
    return 0


def survey(cache: Cache, replica: str, levels: int, children: int, nodes_max: int) -> list[RunView]:
    """A picture of the trees in preorder: the longest `children` of each run, `levels` deep.

    Upper levels come first where `nodes_max` does not suffice. It is at least the number of trees.
    """
    trees = trees_of(cache, replica)
    shown = _choose(trees, levels, children, nodes_max)
    loading = _loading(cache)
    views: list[RunView] = []
    for tree in trees:
        waiting = [(tree.root, 0)]
        while waiting:
            run, level = waiting.pop()
            below = shown.get(run, [])
            views.append(_view(tree, run, level, len(below), loading.get(run, 0)))
            waiting.extend((child, level + 1) for child in reversed(below))
    return views


def find(cache: Cache, key: bytes) -> Found | None:
    """Where the block with this key is, and who holds it."""
    for tree in cache.trees:
        for run in tree.runs():
            offset = _offset(run, key)
            if offset is not None:
                return _found(cache, tree, run, offset)
    return None


def _choose(trees: list[PrefixTree], levels: int, children: int, nodes_max: int) -> dict[Run, list[Run]]:
    """Which children to show of which run, level by level."""
    shown: dict[Run, list[Run]] = {}
    left = nodes_max - len(trees)
    waiting = deque((tree.root, 0) for tree in trees)
    while waiting and left > 0:
        run, level = waiting.popleft()
        if run.children and level < levels:
            shown[run] = nlargest(min(children, left), run.children.values(), key=_length)
            left -= len(shown[run])
            waiting.extend((child, level + 1) for child in shown[run])
    return shown


def _length(run: Run) -> int:
    return run.length


def _loading(cache: Cache) -> dict[Run, int]:
    """How many blocks of each run a load still writes."""
    blocks: dict[Run, int] = {}
    for transfer in cache.transfers.values():
        if transfer.kind is not TransferKind.LOAD or transfer.orphaned:
            continue
        for start, end in transfer.pieces:
            run = transfer.tree.resolve(transfer.run, end)
            while run.parent is not None and run.end > start:
                blocks[run] = blocks.get(run, 0) + min(end, run.end) - max(start, run.start)
                run = run.parent
    return blocks


def _view(tree: PrefixTree, run: Run, level: int, shown: int, loading: int) -> RunView:
    segments = list(_segments(tree, run))
    children = len(run.children or ())
    return RunView(
        tree=tree,
        level=level,
        key=run.first_key,
        start=run.start,
        blocks=run.length,
        tiers={name: held for name, _, held in segments if held or run.parent is None},
        loading=loading,
        pins=max((sum((segment.locks or {}).values()) for _, segment, _ in segments if segment is not None), default=0),
        children=children,
        hidden=children - shown,
    )


def _segments(tree: PrefixTree, run: Run) -> Iterator[tuple[str, Segment | None, int]]:
    """For each pool its name, its segment of the run, and how many blocks that holds."""
    for pool in tree.pools:
        segment = run.segments[pool.index]
        yield pool.name, segment, segment.length if segment is not None else 0
    if tree.host is not None:
        segment = run.segments[HOST]
        yield tree.host.name, segment, slot_count(without_holes(segment.ranges)) if segment is not None else 0


def _offset(run: Run, key: bytes) -> int | None:
    """Which block of the run has this key."""
    position = run.keys.find(key)
    while position >= 0:
        if position % KEY_SIZE == 0:
            return position // KEY_SIZE
        position = run.keys.find(key, position + 1)
    return None


def _found(cache: Cache, tree: PrefixTree, run: Run, offset: int) -> Found:
    depth = run.start + offset
    before = run.keys[: offset * KEY_SIZE] if offset or run.parent is None else run.parent.keys
    leases: list[Lease] = [
        lease
        for session in cache.managed.sessions.values()
        if session.tree is tree
        for lease in session.leases.values()
    ]
    offload = (lease for session in cache.offload.sessions.values() for lease in session.leases.values())
    leases.extend(lease for lease in offload if lease.tree is tree)
    holders = (lease.request for lease in leases if lease.depth > depth and tree.resolve(lease.run, depth + 1) is run)
    return Found(
        tree=tree,
        depth=depth,
        run_start=run.start,
        run_blocks=run.length,
        children=len(run.children or ()),
        parent=bytes(before[-KEY_SIZE:]),
        places=list(_places(tree, run, offset)),
        leases=list(islice(holders, HOLDERS_SHOWN_MAX)),
        transfers=[
            f"{transfer.kind} {transfer.id} of replica {transfer.pool.name}, {transfer.state}"
            for transfer in cache.transfers.values()
            if transfer.tree is tree and _copies(transfer, run, depth)
        ]
        + [
            f"{copy.kind} {copy.id} by an engine in offload mode"
            for copy in cache.offload.transfers
            if copy.tree is tree and _copies(copy, run, depth)
        ],
    )


def _places(tree: PrefixTree, run: Run, offset: int) -> Iterator[Place]:
    for pool in (*tree.pools, *([tree.host] if tree.host is not None else [])):
        segment = run.segments[tree.members.index(pool)]
        slot = _slot(segment.ranges, offset) if segment is not None else -1
        if slot >= 0:
            yield Place(pool.name, slot, pool.state_of(slot).name.lower())


def _slot(ranges: Ranges[int], offset: int) -> int:
    """The slot of a block of a segment; negative where it has none."""
    for first, count in pairs(ranges):
        if offset < count:
            return first + offset if first >= 0 else -1
        offset -= count
    return -1


def _copies(transfer: WorkerTransfer | EngineTransfer, run: Run, depth: int) -> bool:
    """Whether a transfer reads or writes a block."""
    if not any(start <= depth < end for start, end in transfer.pieces):
        return False
    return transfer.tree.resolve(transfer.run, depth + 1) is run
