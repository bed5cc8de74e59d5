"""The write policy of a namespace is changed while it is used."""

from __future__ import annotations

from kvcached.core.cache import Cache
from kvcached.core.index.tree import PrefixTree
from kvcached_client.types import WritePolicy


def set_write_policy(cache: Cache, tree: PrefixTree, policy: WritePolicy) -> None:
    """Copy blocks of a tree by another policy from now on.

    Copies under way go on, and what the host pool has stays. Blocks that waited to be copied do so no more, unless the
    new policy is write-through: they are treated as it treats what is committed already.
    """
    if policy is tree.write_policy:
        return
    tree.write_policy = policy
    cache.policy_changes += 1
    if policy is WritePolicy.WRITE_THROUGH:
        return
    for pool in tree.pools:
        pool.unstored.clear()
        pool.failed_stores.clear()
    for session in cache.sessions.values():
        if session.tree is tree:
            for hold in session.holds:
                hold.unstored.clear()
