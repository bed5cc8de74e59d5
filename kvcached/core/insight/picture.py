"""A bounded picture of the index for people who watch it: its largest runs, and those that were used last.

It is made in steps. Between two of them the index may change; the last step reads again what the picture shows. Reads
only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from heapq import nlargest, nsmallest
from itertools import islice
from typing import Final, NamedTuple

from kvcached.core.cache import Cache
from kvcached.core.index.run import Run, Segment
from kvcached.core.index.tree import PrefixTree
from kvcached.core.slots.ranges import slot_count, without_holes


class Bounds(NamedTuple):
    """Of a picture.

    Attributes:
        looked: runs that are looked at, of all trees. A run takes two microseconds.
        per_step: so many of them in one step.
        largest, latest: runs that are shown for their size, and for their use; with them those that lead to them.
    """

    looked: int = 8192
    per_step: int = 256
    largest: int = 192
    latest: int = 64


BOUNDS: Final = Bounds()


class ShownRun(NamedTuple):
    """A run in a picture.

    Attributes:
        above: the place of the run that it continues in the picture; -1 for the first run of a chain.
        key: of its first block.
        start: depth of its first block.
        blocks: its length.
        held: blocks of it by the pool that holds them, without pools that hold none.
        pins: leases, fences and transfers that end in it.
        children: runs that continue it.
        below: blocks of all runs below it, as far as they were looked at.
        idle: how often runs of a pool were touched since this one, or one below it, was touched last there. An acquire
            touches a run, and so does what is computed behind it.
    """

    above: int
    key: bytes
    start: int
    blocks: int
    held: dict[str, int]
    pins: int
    children: int
    below: int
    idle: int


class TreePicture(NamedTuple):
    """A tree in a picture.

    Attributes:
        tree: which one.
        chains: runs that begin a chain.
        looked: runs of it that were looked at: the upper levels first, and of each run the newest continuations.
        blocks: of those runs.
        shown: some of those runs, each behind the one that it continues, and the larger one first.
    """

    tree: PrefixTree
    chains: int
    looked: int
    blocks: int
    shown: list[ShownRun]


class _Seen:
    """A run that was looked at: its blocks with those below, and how long ago any of these was used."""

    __slots__ = ("above", "blocks", "idle", "run", "total")

    def __init__(self, run: Run, above: _Seen | None, idle: int) -> None:
        self.run = run
        self.above = above
        self.blocks = self.total = run.length
        self.idle = idle


def draw(cache: Cache, bounds: Bounds = BOUNDS) -> Iterator[list[TreePicture] | None]:
    """None after each step, and the picture after the last one."""
    looks = [_Look(tree, most, bounds.per_step) for tree, most in _shares(cache.trees, bounds.looked).items()]
    for look in looks:
        yield from look.steps()
    every = [each for look in looks for each in look.seen]
    chosen = nlargest(bounds.largest, every, key=_total)
    yield None
    chosen += nsmallest(bounds.latest, every, key=_idle)
    yield None
    by_run = {each.run: each for each in chosen}
    present = {look.tree: look for look in looks}
    yield [_picture(present[tree], by_run) for tree in cache.trees if tree in present]


def _shares(trees: list[PrefixTree], left: int) -> dict[PrefixTree, int]:
    """How many runs of each tree are looked at: small trees are looked at whole, the others get what is left."""
    shares: dict[PrefixTree, int] = {}
    for place, tree in enumerate(sorted(trees, key=_run_count)):
        shares[tree] = min(tree.run_count, left // (len(trees) - place))
        left -= shares[tree]
    return shares


class _Look:
    """What was seen of a tree, of which up to `most` runs are looked at: parents before children."""

    __slots__ = ("blocks", "most", "per_step", "seen", "tree")

    def __init__(self, tree: PrefixTree, most: int, per_step: int) -> None:
        self.tree = tree
        self.most = most
        self.per_step = per_step
        self.seen: list[_Seen] = []
        self.blocks = 0

    def steps(self) -> Iterator[None]:
        """Look at the runs, then carry blocks and uses up to the runs above."""
        waiting: deque[tuple[Run, _Seen | None]] = deque([(self.tree.root, None)])
        while waiting and len(self.seen) < self.most:
            run, above = waiting.popleft()
            each: _Seen | None = None
            if run.parent is not None:
                each = _Seen(run, above, _idle_of(self.tree, run))
                self.seen.append(each)
                if len(self.seen) % self.per_step == 0:
                    yield
            if run.children:
                newest = islice(reversed(run.children.values()), self.most - len(self.seen))
                waiting.extend((child, each) for child in newest)
        for place in range(len(self.seen) - 1, -1, -1):
            self._add_up(self.seen[place])
            if place % self.per_step == 0:
                yield

    def _add_up(self, each: _Seen) -> None:
        self.blocks += each.blocks
        if each.above is not None:
            each.above.total += each.total
            each.above.idle = min(each.above.idle, each.idle)


def _idle_of(tree: PrefixTree, run: Run) -> int:
    """Touches of a pool since that of this run, in the pool that has touched it last."""
    return min(
        (
            pool.clock - segment.latest_use
            for pool, segment in zip(tree.members, run.segments, strict=True)
            if segment is not None
        ),
        default=0,
    )


def _picture(look: _Look, chosen: dict[Run, _Seen]) -> TreePicture:
    """What is shown of a tree, as it is now: runs may have been split, have grown, or have left it since."""
    tree = look.tree
    below: dict[Run, list[Run]] = {}
    placed = {tree.root}
    for run in chosen:
        _show(run, below, placed)
    totals: dict[Run, tuple[int, int]] = {}
    for run in reversed(_preorder(tree, below, {})):
        total, idle = run.length, _idle_of(tree, run)
        for child in below.get(run, ()):
            child_total, child_idle = totals[child]
            total, idle = total + child_total, min(idle, child_idle)
        seen = chosen.get(run)
        if seen is not None:
            total, idle = max(total, run.length + seen.total - seen.blocks), min(idle, seen.idle)
        totals[run] = total, idle
    shown: list[ShownRun] = []
    places: dict[Run, int] = {tree.root: -1}
    for run in _preorder(tree, below, totals):
        total, idle = totals[run]
        places[run] = len(shown)
        shown.append(_shown(tree, run, places[run.parent or tree.root], total, idle))
    return TreePicture(tree, len(tree.root.children or ()), len(look.seen), look.blocks, shown)


def _show(run: Run, below: dict[Run, list[Run]], placed: set[Run]) -> None:
    """Put a run, and those that lead to it, below the runs that they continue, unless it has left the tree."""
    path: list[Run] = []
    at = run
    while at not in placed:
        if at.parent is None or not at.keys or (at.parent.children or {}).get(at.first_key) is not at:
            return
        path.append(at)
        at = at.parent
    for each in path:
        placed.add(each)
        if each.parent is not None:
            below.setdefault(each.parent, []).append(each)


def _preorder(tree: PrefixTree, below: dict[Run, list[Run]], totals: dict[Run, tuple[int, int]]) -> list[Run]:
    """The runs that are shown, each behind the one that it continues; the larger one first where `totals` are known."""
    order: list[Run] = []
    waiting = [tree.root]
    while waiting:
        run = waiting.pop()
        if run.parent is not None:
            order.append(run)
        children = below.get(run, [])
        waiting.extend(sorted(children, key=lambda child: (totals[child][0], child.first_key)) if totals else children)
    return order


def _shown(tree: PrefixTree, run: Run, above: int, total: int, idle: int) -> ShownRun:
    held: dict[str, int] = {}
    pins = 0
    for pool, segment in zip(tree.members, run.segments, strict=True):
        if segment is not None:
            pins = max(pins, sum((segment.locks or {}).values()))
            if blocks := _blocks(segment):
                held[pool.name] = blocks
    return ShownRun(
        above, run.first_key, run.start, run.length, held, pins, len(run.children or ()), total - run.length, idle
    )


def _blocks(segment: Segment) -> int:
    return slot_count(without_holes(segment.ranges)) if segment.solid < segment.length else segment.length


def _run_count(tree: PrefixTree) -> int:
    return tree.run_count


def _total(seen: _Seen) -> int:
    return seen.total


def _idle(seen: _Seen) -> int:
    return seen.idle
