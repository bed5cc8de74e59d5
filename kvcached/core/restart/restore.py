"""What a daemon before this one has left, back in the cache: blocks, namespaces, and engines that still live.

Done once, before the first request. Whoever reads the ledger and the headers says what there is; this fills the trees.
After a restart every block's header names its key, its parent's key and its depth. The host pool's blocks come first;
those of device pools, where every chain begins with its first block, are put beside them. A block counts if all before
it are there; of two copies of one key the newer one does. All steps but the last work on whole arrays: the last one
makes an object for each run.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvcached.core.cache import Cache
from kvcached.core.index import announcements
from kvcached.core.index.host_tree import HOST
from kvcached.core.index.run import KEY_SIZE, Run, Segment
from kvcached.core.index.run_tree import resident
from kvcached.core.index.tree import PrefixTree
from kvcached.core.namespaces import NamespaceSpec
from kvcached.core.slots.host_slots import HostPool
from kvcached.core.slots.ranges import Ranges, no_ranges, pairs, slot_count, subtract
from kvcached.core.slots.slots import DevicePool, SlotPool
from kvcached.core.slots.states import SlotState
from kvcached_client.types import SessionId, WritePolicy

_Ints = npt.NDArray[np.int64]
#: A session of an earlier daemon: that one's epoch, and the id there.
Owner: TypeAlias = tuple[int, int]
#: Slots that owners may still write.
Claims: TypeAlias = Mapping[Owner, _Ints]

_CAUSE = "found after a restart"


class StoredBlocks(NamedTuple):
    """Complete copies in the host pool, or complete blocks in a device pool, one row for each, in any order.

    Attributes:
        keys, parents: 16 bytes each, uint8; parents of first blocks are zero.
        depths: blocks before it in its chain.
        slots: where it lies; each is named once.
        ages: the larger, the later it was stored, or computed.
    """

    keys: npt.NDArray[np.uint8]
    parents: npt.NDArray[np.uint8]
    depths: _Ints
    slots: _Ints
    ages: _Ints


class RestoredCache:
    """Fills a cache that has served nobody yet.

    Attributes:
        blocks: host copies that are in the index again.
        device_blocks: blocks of device pools that are.
        namespaces_policy: write policy of new namespaces of engines in offload mode.
    """

    def __init__(self, cache: Cache) -> None:
        self.blocks = 0
        self.device_blocks = 0
        self._cache = cache
        self.namespaces_policy = cache.offload.namespaces.write_policy
        self._claimed: dict[Owner, list[tuple[SlotPool, Ranges[int]]]] = {}

    def replica(self, name: str, slabs: list[int], found: StoredBlocks) -> None:
        """The host copies of a replica's namespace; once for all replicas that share it."""
        self._fill(self._cache.tree_of(name), slabs, found, {})

    def device_pool(self, name: str, found: StoredBlocks) -> Ranges[int]:
        """The blocks in a replica's device pool, after the host copies of its namespace and before its engine.

        Returns the slots of those that are in the index again.
        """
        tree, pool = self._cache.tree_of(name), self._cache.pools[name]
        used = restore_device(tree, pool, found, _CAUSE)
        announcements.inherit(tree, pool)
        self.device_blocks += slot_count(used)
        return used

    def namespace(
        self,
        spec: NamespaceSpec,
        slabs: list[int],
        found: StoredBlocks,
        claims: Claims,
        write_policy: WritePolicy = WritePolicy.WRITE_THROUGH,
    ) -> None:
        """A namespace of engines in offload mode.

        Args:
            spec: as it was declared.
            slabs: that it had, those of earlier generations included.
            found: its blocks of its present generation.
            claims: slots that living sessions may still write. None of them holds a block.
            write_policy: that it has.
        """
        self._fill(self._cache.offload.namespaces.restore(spec, write_policy).tree, slabs, found, claims)

    def generation(self, storage_root: bytes) -> int:
        """In which generation namespaces of a storage root are: what was stored in another one is left behind."""
        return self._cache.generations.of(storage_root)

    def offload_session(self, owner: Owner, root: bytes) -> SessionId:
        """A session in a namespace that is there again, whose processes may live: expired, with what it had claimed."""
        return self._cache.restore_offload(root, self._claimed.pop(owner, [])).id

    def pool_session(self, replica: str) -> SessionId:
        """A session on a device pool whose memory is still the same: expired, with all slots that hold no block."""
        return self._cache.restore_session(replica).id

    def _fill(self, tree: PrefixTree, slabs: list[int], found: StoredBlocks, claims: Claims) -> None:
        host = tree.host
        if not isinstance(host, HostPool):
            return
        set_aside = no_ranges()
        for owner, slots in claims.items():
            ranges = ranges_of(np.sort(slots))
            self._claimed.setdefault(owner, []).append((host, ranges))
            set_aside.extend(ranges)
        self.blocks += restore(tree, host, slabs, found, set_aside, _CAUSE)
        announcements.inherit(tree, host)


def restore(
    tree: PrefixTree, pool: HostPool, slabs: list[int], found: StoredBlocks, set_aside: Ranges[int], cause: str
) -> int:
    """Fill an empty tree and its empty host pool, which gets these slabs. Returns how many blocks are in the tree.

    Args:
        tree: without runs.
        pool: its host pool, without slabs.
        slabs: those that hold the blocks; nobody has them.
        found: their blocks. Those whose chain has a gap before them are left out.
        set_aside: slots that somebody may still write, and that hold no block: QUARANTINED.
        cause: for the journal.

    Raises:
        ValueError: a slot is in none of the slabs.
    """
    runs = _chained(found)
    used = np.sort(found.slots[runs.order])
    pool.restore(slabs, _others(pool, slabs, used, set_aside), ranges_of(used), set_aside, cause)
    if len(runs.order):
        _grow(tree, found, runs)
    return len(runs.order)


def restore_device(tree: PrefixTree, pool: DevicePool, found: StoredBlocks, cause: str) -> Ranges[int]:
    """Put an empty device pool's blocks into its tree, beside what the host pool has. Returns the slots that they use.

    Args:
        tree: in which its host pool's blocks are already.
        pool: all of its slots are free.
        found: its blocks. Those whose chain has a gap before them are left out.
        cause: for the journal.
    """
    runs = _chained(found)
    if not len(runs.order):
        return no_ranges()
    used, every = ranges_of(np.sort(found.slots[runs.order])), pool.take(pool.free, SlotState.QUARANTINED, cause)
    pool.move(used, SlotState.QUARANTINED, SlotState.CACHED, cause)
    pool.move(subtract(every, used) or no_ranges(), SlotState.QUARANTINED, SlotState.FREE, cause)
    _grow_device(tree, pool, found, runs)
    return used


def ranges_of(slots: _Ints) -> Ranges[int]:
    """Slots as ranges, in their order."""
    ranges, _ = _packed(slots, np.zeros(0, np.int64))
    return ranges


def _others(pool: HostPool, slabs: list[int], used: _Ints, set_aside: Ranges[int]) -> Ranges[int]:
    """The slots of the slabs that are neither used nor set aside."""
    free = np.zeros(pool.slots, np.bool_)
    for slab in slabs:
        free[slab * pool.slots_per_slab : (slab + 1) * pool.slots_per_slab] = True
    for first, count in pairs(set_aside):
        free[first : first + count] = False
    free[used] = False
    return ranges_of(np.flatnonzero(free))


class _Runs(NamedTuple):
    """Rows of blocks whose chains are whole, by the runs that they form.

    Attributes:
        order: a run's rows together, in the order of the chain, and runs after those above them.
        starts: where in `order` each run begins.
        above: the run above each, counted from 1; 0 = the root.
    """

    order: _Ints
    starts: _Ints
    above: list[int]

    @property
    def bounds(self) -> list[int]:
        """Where each run begins, and where the last one ends."""
        return [*self.starts.tolist(), len(self.order)]

    def by_age(self, ages: _Ints) -> _Ints:
        """The runs, counted from 0, the one whose newest block is oldest first."""
        return np.argsort(np.maximum.reduceat(ages[self.order], self.starts), kind="stable")


def _chained(found: StoredBlocks) -> _Runs:
    """The runs of all blocks that have no gap before them."""
    parents, rows = _linked(found)
    heads = _run_heads(parents, rows)
    depths = found.depths
    order = rows[np.lexsort((depths[rows], heads[rows], depths[heads[rows]]))]
    starts = np.flatnonzero(np.diff(heads[order], prepend=-1))
    run_at = np.zeros(len(parents), np.int64)  # of a row
    run_at[order] = np.repeat(np.arange(1, len(starts) + 1), np.diff([*starts.tolist(), len(order)]))
    return _Runs(order, starts, run_at[parents[order[starts]]].tolist())


def _linked(found: StoredBlocks) -> tuple[_Ints, _Ints]:
    """The row of every block's parent, and the rows whose chains are whole.

    Beyond the rows stand two more: the root, which is its own parent, and what is lost.
    """
    count = len(found.slots)
    root, lost = count, count + 1
    index = _NewestRows(found.keys, found.ages)
    chosen = index.rows
    known = _row_before(found, chosen, lost)
    unknown = np.flatnonzero(known == lost)
    known[unknown] = index.find(found.parents[chosen[unknown]], lost)
    depths = np.append(found.depths, (-1, -2))  # of the root, and of nothing
    parents = np.full(count + 2, lost)
    parents[root] = root
    first = found.depths[chosen] == 0
    known[first] = np.where(found.parents[chosen[first]].any(axis=1), lost, root)
    parents[chosen] = np.where(depths[known] == found.depths[chosen] - 1, known, lost)
    return parents, np.flatnonzero(_followed(parents)[:count] == root)


def _row_before(found: StoredBlocks, chosen: _Ints, missing: int) -> _Ints:
    """The parent of each chosen row where that is the row before, as it mostly is: slots are taken in order."""
    keys, parents = found.keys.view(np.uint64), found.parents.view(np.uint64)
    is_next = np.diff(chosen, prepend=-2) == 1
    same = keys[chosen - 1] == parents[chosen]
    return np.where(is_next & same[:, 0] & same[:, 1], chosen - 1, missing)


class _NewestRows:
    """Which row has a key; of several rows with one key the newest.

    Rows are sorted by the first halves of their keys. The few that share theirs, copies of one key mostly, are told
    apart by a dictionary.

    Attributes:
        rows: the newest row of each key.
    """

    def __init__(self, keys: npt.NDArray[np.uint8], ages: _Ints) -> None:
        halves = keys.view(np.uint64)
        order = np.argsort(halves[:, 0])
        self._heads, self._tails, self._order = halves[order, 0], halves[order, 1], order
        same = self._heads[1:] == self._heads[:-1]
        self._is_shared = np.zeros(len(order), np.bool_)
        self._is_shared[1:] = same
        self._is_shared[:-1] |= same
        shared = np.sort(order[self._is_shared])
        shared = shared[np.argsort(ages[shared], kind="stable")]
        self._told_apart = dict(zip(_as_bytes(keys[shared]), shared.tolist(), strict=True))
        others = np.fromiter(self._told_apart.values(), np.int64, len(self._told_apart))
        self.rows = np.sort(np.concatenate((order[~self._is_shared], others)))

    def find(self, keys: npt.NDArray[np.uint8], missing: int) -> _Ints:
        """The row of each key, `missing` where there is none."""
        halves = np.ascontiguousarray(keys).view(np.uint64)
        ascending = np.argsort(halves[:, 0])  # near each other in memory: many times as fast as in any order
        heads = halves[ascending, 0]
        at = np.minimum(np.searchsorted(self._heads, heads), len(self._heads) - 1)
        is_same = self._heads[at] == heads
        rows = np.where(is_same & (self._tails[at] == halves[ascending, 1]), self._order[at], missing)
        shared = np.flatnonzero(is_same & self._is_shared[at])
        rows[shared] = [self._told_apart.get(key, missing) for key in _as_bytes(keys[ascending[shared]])]
        found = np.empty_like(rows)
        found[ascending] = rows
        return found


def _as_bytes(keys: npt.NDArray[np.uint8]) -> list[bytes]:
    one_by_one: list[bytes] = keys.view(f"V{KEY_SIZE}").ravel().tolist()
    return one_by_one


def _run_heads(parents: _Ints, rows: _Ints) -> _Ints:
    """The first row of the run that each row is in: a run goes on where a block is its parent's only child."""
    root = len(parents) - 2
    children = np.bincount(parents[rows], minlength=len(parents))
    starts = np.ones(len(parents), np.bool_)
    starts[rows] = (parents[rows] == root) | (children[parents[rows]] > 1)
    return _followed(np.where(starts, np.arange(len(parents)), parents))


def _followed(pointers: _Ints) -> _Ints:
    """Where each row gets by following pointers, all of which end in a row that points at itself."""
    while True:
        further = pointers[pointers]
        if np.array_equal(further, pointers):
            return pointers
        pointers = further


def _grow(tree: PrefixTree, found: StoredBlocks, runs: _Runs) -> None:
    """Make the runs of an empty tree."""
    order, starts, bounds = runs.order, runs.starts, runs.bounds
    stamps = np.empty(len(starts), np.int64)
    stamps[runs.by_age(found.ages)] = np.arange(1, len(starts) + 1)
    depths = found.depths[order[starts]].tolist()
    keys = found.keys[order].tobytes()
    ranges, places = _packed(found.slots[order], starts)
    segments = [resident(tree.root, HOST)]
    members = len(tree.members)
    for (first, end), start, parent, stamp, (begin, stop) in zip(
        pairwise(bounds), depths, runs.above, stamps.tolist(), pairwise([*places, len(ranges)]), strict=True
    ):
        upper = segments[parent]
        run = Run(keys[first * KEY_SIZE : end * KEY_SIZE], start, upper.run, members)
        if upper.run.children is None:
            upper.run.children = {}
        upper.run.children[keys[first * KEY_SIZE : (first + 1) * KEY_SIZE]] = run
        upper.resident_children += 1
        segment = run.segments[HOST] = Segment(run, upper, ranges[begin:stop], end - first, stamp)
        segments.append(segment)
    tree.run_count = len(starts)
    tree.members[HOST].clock = len(starts)
    for segment in sorted(segments[1:], key=attrgetter("last_used")):
        if not segment.resident_children:
            tree.policies[HOST].add(segment)


def _grow_device(tree: PrefixTree, pool: DevicePool, found: StoredBlocks, runs: _Runs) -> None:
    """Put the runs into a tree that may have some of their blocks in other pools already."""
    keys = found.keys[runs.order].tobytes()
    ranges, places = _packed(found.slots[runs.order], runs.starts)
    ends = [(tree.root, 0)]
    for (first, end), above, (begin, stop) in zip(
        pairwise(runs.bounds), runs.above, pairwise([*places, len(ranges)]), strict=True
    ):
        run, depth = ends[above]
        own = keys[first * KEY_SIZE : end * KEY_SIZE]
        grown = tree.commit(tree.resolve(run, depth), depth, own, ranges[begin:stop], pool.index)
        ends.append((grown.run, depth + end - first))
    for number in runs.by_age(found.ages).tolist():
        run = tree.resolve(*ends[1 + number])
        tree.touch(run, run.end, pool.index)
        segment = resident(run, pool.index)
        if not segment.resident_children:
            tree.policies[pool.index].add(segment)
            depth = run.start + segment.length
            is_copied = tree.host is not None and tree.write_policy is WritePolicy.WRITE_THROUGH
            if is_copied and tree.missing_in_host(run, depth):
                pool.note_unstored(run, depth)


def _packed(slots: _Ints, starts: _Ints) -> tuple[Ranges[int], list[int]]:
    """Slots as ranges, none of which reaches over a start; and where in the ranges each start's first one is."""
    breaks = np.diff(slots, prepend=-2) != 1
    breaks[starts] = True
    at = np.flatnonzero(breaks)
    pairs = np.empty((len(at), 2), np.int32)
    pairs[:, 0] = slots[at]
    pairs[:, 1] = np.diff(at, append=len(slots))
    ranges = no_ranges()
    ranges.frombytes(pairs.tobytes())
    return ranges, (2 * np.searchsorted(at, starts)).tolist()


def no_blocks() -> StoredBlocks:
    """None at all."""
    none = np.zeros(0, np.int64)
    return StoredBlocks(np.zeros((0, KEY_SIZE), np.uint8), np.zeros((0, KEY_SIZE), np.uint8), none, none, none)
