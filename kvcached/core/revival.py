"""A new daemon's cache takes over what one before it has left: host copies, namespaces, and engines that still live.

Done once, before the first request. Whoever reads the ledger and the headers says what there is; this fills the trees.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvcached.core.attached_state import SpaceSpec
from kvcached.core.cache import Cache
from kvcached.core.host_pool import HostPool
from kvcached.core.pool import SlotPool
from kvcached.core.ranges import Ranges, no_ranges
from kvcached.core.restore import StoredBlocks, ranges_of, restore
from kvcached.core.tree import PrefixTree
from kvcached_client.types import SessionId, WritePolicy

#: A session of an earlier daemon: that one's epoch, and the id there.
Owner: TypeAlias = tuple[int, int]
#: Slots that owners may still write.
Claims: TypeAlias = Mapping[Owner, npt.NDArray[np.int64]]

_CAUSE = "found after a restart"


class Revival:
    """Fills a cache that has served nobody yet.

    Attributes:
        blocks: host copies that are in the index again.
        spaces_policy: write policy of new namespaces of engines in attached mode.
    """

    def __init__(self, cache: Cache) -> None:
        self.blocks = 0
        self._cache = cache
        self.spaces_policy = cache.attached.spaces.write_policy
        self._claimed: dict[Owner, list[tuple[SlotPool, Ranges[int]]]] = {}

    def replica(self, name: str, slabs: list[int], found: StoredBlocks) -> None:
        """The host copies of a replica's namespace; once for all replicas that share it."""
        self._fill(self._cache.tree_of(name), slabs, found, {})

    def space(
        self,
        spec: SpaceSpec,
        generation: int,
        slabs: list[int],
        found: StoredBlocks,
        claims: Claims,
        write_policy: WritePolicy = WritePolicy.WRITE_THROUGH,
    ) -> None:
        """A namespace of engines in attached mode.

        Args:
            spec: as it was declared.
            generation: that it had.
            slabs: that it had, those of earlier generations included.
            found: its blocks of this generation.
            claims: slots that living sessions may still write. None of them holds a block.
            write_policy: that it has.
        """
        self._fill(self._cache.attached.spaces.restore(spec, generation, write_policy).tree, slabs, found, claims)

    def attached_session(self, owner: Owner, root: bytes) -> SessionId:
        """A session in a namespace that is there again, whose processes may live: expired, with what it had claimed."""
        return self._cache.restore_attached(root, self._claimed.pop(owner, [])).id

    def pool_session(self, replica: str) -> SessionId:
        """A session on a device pool whose memory is still the same: expired, with all slots of the pool."""
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
