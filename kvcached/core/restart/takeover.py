"""A new daemon's cache takes over what one before it has left: blocks, namespaces, and engines that still live.

Done once, before the first request. Whoever reads the ledger and the headers says what there is; this fills the trees.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvcached.core.cache import Cache
from kvcached.core.index.tree import PrefixTree
from kvcached.core.namespaces import NamespaceSpec
from kvcached.core.restart.restore import StoredBlocks, ranges_of, restore, restore_device
from kvcached.core.slots.host_slots import HostPool
from kvcached.core.slots.ranges import Ranges, no_ranges, slot_count
from kvcached.core.slots.slots import SlotPool
from kvcached_client.types import SessionId, WritePolicy

#: A session of an earlier daemon: that one's epoch, and the id there.
Owner: TypeAlias = tuple[int, int]
#: Slots that owners may still write.
Claims: TypeAlias = Mapping[Owner, npt.NDArray[np.int64]]

_CAUSE = "found after a restart"


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

    def generation(self, root: bytes) -> int:
        """In which generation the namespace of a root is: what was stored in another one is left behind."""
        return self._cache.generations.of(root)

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
