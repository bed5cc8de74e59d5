"""What host pools of other sizes would hit, estimated from a sample of the blocks that requests ask for.

A pool that evicts the least recently used block hits a block if all blocks used since its last use fit in beside it.
Their size is the reuse distance of the block. A block is in the sample if the hash of its key is below a limit: then
all its uses are, and each block of the sample stands for so many as the limit leaves out. The limit is its namespace's
own, and goes by the size of its blocks: many small blocks, of which few are sampled, take nothing from the estimates of
other namespaces.

Source: Waldspurger, Park, Garthwaite and Ahmad, "Efficient MRC Construction with SHARDS", FAST 2015: the variant with a
bounded sample, and its adjustment for blocks that are used far more often than others.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcached.core.index.run import KEY_SIZE

#: The sizes that are estimated, as multiples of the host pool's.
SIZE_RATIOS: Final[tuple[float, ...]] = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0)
SAMPLE_BLOCKS_MAX: Final = 4096
#: A namespace that was sampled less often tells nothing.
USES_MIN: Final = 64
#: After so many blocks a namespace's past counts half, so that the estimate follows the work.
HALVED_AFTER_BLOCKS: Final = 1 << 22
#: So many blocks are looked at together.
PENDING_BLOCKS: Final = 1024
_HASH_BITS: Final = 32
#: At most this part of all blocks is in the sample, however few the host pool holds.
RATE_MAX: Final = 1 / 64
#: When the sample is full, either this part of it is too old to matter, or a rate is halved.
_FREED_DIVISOR: Final = 8
_WORDS_PER_KEY: Final = KEY_SIZE // 8


class TreeReuse:
    """How the blocks of one namespace's tree are used again. A cleared namespace gets a new one, or begins anew.

    Attributes:
        asked_blocks: blocks of prompts that were asked for, as far back as they count.
        slabs_per_block: what a block takes.
        limit: hashes below it are sampled.
    """

    def __init__(self, sample: ReuseSample, slots_per_slab: int, limit: int) -> None:
        """Use `ReuseSample.of_tree`."""
        self.slabs_per_block = 1.0 / slots_per_slab
        self.limit = limit
        self._sample = sample
        self._reset()

    def _reset(self) -> None:
        self.asked_blocks = 0.0
        self._uses = 0
        self._sampled_blocks = 0.0
        self._by_size = [0.0] * len(SIZE_RATIOS)

    @property
    def weight(self) -> float:
        """How many blocks a sampled one stands for."""
        return (1 << _HASH_BITS) / self.limit

    def sample_fewer(self) -> None:
        """Sample half as many blocks from now on."""
        self.limit = max(self.limit // 2, 1)

    def forget(self) -> None:
        """The namespace was cleared: nothing of before counts, nor stands in the way of other namespaces' blocks."""
        self._sample.forget(self)
        self._reset()

    def asked(self, keys: bytes) -> None:
        """A request has asked for the blocks of its prompt."""
        self._sample.note(self, keys, is_asked=True)

    def stored(self, keys: bytes) -> None:
        """Blocks were computed and stored, so that they are as recent as if they had been asked for."""
        self._sample.note(self, keys, is_asked=False)

    def hit_ratios(self) -> list[float]:
        """The part of asked blocks that a pool of each of `SIZE_RATIOS` would hit; empty if too few were sampled."""
        self._sample.look()
        if self._uses < USES_MIN:
            return []
        hits, ratios = self.asked_blocks - self._sampled_blocks, []
        for blocks in self._by_size:
            hits += blocks
            ratios.append(min(max(hits / self.asked_blocks, 0.0), 1.0))
        return ratios

    def count(self, blocks: int) -> None:
        """So many blocks were asked for."""
        self.asked_blocks += blocks
        if self.asked_blocks > HALVED_AFTER_BLOCKS:
            self.asked_blocks /= 2
            self._sampled_blocks /= 2
            self._by_size = [blocks / 2 for blocks in self._by_size]

    def count_use(self, size_ratio: float, blocks: float) -> None:
        """A sampled block, which stands for so many, would be hit by a pool of this size and every larger one."""
        self._uses += 1
        self._sampled_blocks += blocks
        at = bisect_left(SIZE_RATIOS, size_ratio)
        if at < len(SIZE_RATIOS):
            self._by_size[at] += blocks


class _Noted(NamedTuple):
    """Blocks that were used; `stop` is where they end among all that were noted."""

    tree: TreeReuse
    keys: bytes
    stop: int
    is_asked: bool


class ReuseSample:
    """The sample, which is one for all namespaces, as the host pool is.

    Nothing is done while a request waits: `note` remembers keys, and `look` looks at them later.

    Args:
        slabs: of the host pool.
        blocks_max: of the sample.
        rate_max: part of all blocks that may be in it.

    Attributes:
        pending_blocks: blocks that were noted and not looked at.
    """

    def __init__(self, slabs: int, blocks_max: int = SAMPLE_BLOCKS_MAX, rate_max: float = RATE_MAX) -> None:
        self.pending_blocks = 0
        self._slabs = slabs
        self._blocks_max = blocks_max
        self._limit_max = int(rate_max * (1 << _HASH_BITS))
        self._pending: list[_Noted] = []
        self._now = 0
        #: The place of each block in the arrays, by its tree and key.
        self._places: dict[tuple[TreeReuse, int], int] = {}
        self._free = list(range(blocks_max))
        self._hashes = np.zeros(blocks_max, np.uint64)
        self._last_use = np.zeros(blocks_max, np.int64)
        self._sizes = np.zeros(blocks_max)  #: of what a block stands for, in slabs; 0 where there is no block

    def of_tree(self, slots_per_slab: int) -> TreeReuse:
        """For a new tree whose blocks have this size.

        Blocks that the largest of the pools holds are to fit into the sample, whatever part of them is the tree's.
        """
        largest = SIZE_RATIOS[-1] * self._slabs * slots_per_slab
        limit = max(int(self._blocks_max / largest * (1 << _HASH_BITS)), 1)
        return TreeReuse(self, slots_per_slab, min(self._limit_max, limit))

    def note(self, tree: TreeReuse, keys: bytes, *, is_asked: bool) -> None:
        """Blocks are used."""
        if not keys:
            return  # it would be kept until others bring blocks
        if is_asked:
            tree.count(len(keys) // KEY_SIZE)
        self.pending_blocks += len(keys) // KEY_SIZE
        self._pending.append(_Noted(tree, keys, self.pending_blocks, is_asked))

    def look(self) -> None:
        """Look at what was noted."""
        if not self._pending:
            return
        pending, self._pending, self.pending_blocks = self._pending, [], 0
        words = np.frombuffer(b"".join([noted.keys for noted in pending]), np.uint64).reshape(-1, _WORDS_PER_KEY)
        hashes = words[:, 1] & np.uint64((1 << _HASH_BITS) - 1)
        limits = np.array([noted.tree.limit for noted in pending], np.uint64)
        limits = np.repeat(limits, [len(noted.keys) // KEY_SIZE for noted in pending])
        sampled, first, end = np.flatnonzero(hashes < limits).tolist(), 0, 0
        for tree, _, stop, is_asked in pending:
            while end < len(sampled) and sampled[end] < stop:
                end += 1
            # The deepest block first: pools evict tails, so that the beginning of a prompt is the last to go.
            for block in reversed(sampled[first:end]):
                self._use(tree, int(words[block, 0]), int(hashes[block]), is_asked=is_asked)
            first = end

    def forget(self, tree: TreeReuse) -> None:
        """Drop the blocks of a tree: nobody finds them again, and they take no room in a pool of any size."""
        self.look()
        is_dropped = np.zeros(self._blocks_max, np.bool_)
        is_dropped[[place for (each, _), place in self._places.items() if each is tree]] = True
        self._drop(is_dropped)

    def _use(self, tree: TreeReuse, name: int, hashed: int, *, is_asked: bool) -> None:
        if hashed >= tree.limit:
            return  # the limit has just been lowered
        place = self._places.get((tree, name))
        if is_asked:
            distance = float("inf")
            if place is not None:
                later = float(self._sizes[self._last_use > self._last_use[place]].sum())
                distance = later + tree.slabs_per_block
            tree.count_use(distance / self._slabs, tree.weight)
        if place is None:
            place = self._take_place(tree, name, hashed)
            if place is None:
                return
        self._now += 1
        self._last_use[place] = self._now

    def _take_place(self, tree: TreeReuse, name: int, hashed: int) -> int | None:
        """A place for a new block; None if there is none, or if the limit that makes room leaves the block out."""
        if not self._free:
            self._make_room()
            if hashed >= tree.limit or not self._free:  # keys that an engine has chosen may all have the same hash
                return None
        place = self._free.pop()
        self._places[tree, name] = place
        self._hashes[place], self._sizes[place] = hashed, tree.slabs_per_block * tree.weight
        return place

    def _make_room(self) -> None:
        """Drop blocks that no pool of interest would hold; if these are few, half of those of the tree with most."""
        newest_first = np.argsort(-self._last_use)
        distances = np.empty(len(newest_first))
        distances[newest_first] = np.cumsum(self._sizes[newest_first])
        dropped = distances > SIZE_RATIOS[-1] * self._slabs
        if np.count_nonzero(dropped) < len(newest_first) // _FREED_DIVISOR:
            most = Counter(tree for tree, _ in self._places).most_common(1)[0][0]
            most.sample_fewer()
            own = [place for (tree, _), place in self._places.items() if tree is most]
            dropped[own] |= self._hashes[own] >= most.limit
            self._sizes[own] = most.slabs_per_block * most.weight
        self._drop(dropped)

    def _drop(self, dropped: NDArray[np.bool_]) -> None:
        """Drop the blocks at these places."""
        for block, place in list(self._places.items()):
            if dropped[place]:
                del self._places[block]
                self._sizes[place] = self._last_use[place] = 0
                self._free.append(place)
