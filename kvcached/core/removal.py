"""Prefixes that an operator has removed: out of every pool, and a list of what storage is to delete.

Removal takes what eviction could take. What leases, copies under way, pins and prefetches hold stays, in memory and in
storage, and is counted: no lease breaks, and no generation ends. Who repeats it later gets the rest.

While storage deletes, prefetches that begin leave there what is removed: else they would bring it back to memory.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from kvcached.core.index.run import KEY_SIZE
from kvcached.core.index.tree import PrefixTree
from kvcached.core.namespaces import Namespaces
from kvcached.core.refusals import Refusal, Why
from kvcached.core.transfers.prefetch import Prefetches
from kvcached.core.transfers.storage_copies import unmark_deleted
from kvcached.core.transfers.storage_state import Prefetch

_CAUSE = "removed on request"


class Removal(NamedTuple):
    """What came of one request.

    Attributes:
        trees: of the namespaces whose blocks are the same in storage.
        device, host: copies that have left device pools and the host pool.
        in_use: blocks that stay.
        keys: of the blocks that storage is to delete, those of the prompt first, in its order.
    """

    trees: list[PrefixTree]
    device: int
    host: int
    in_use: int
    keys: bytes


class _Deletion(NamedTuple):
    """Storage has been told of a removal, and has not answered. Its first block is `key`, at the depth `start`."""

    removal: Removal
    start: int
    key: bytes


class Removals:
    """Removes prefixes.

    Args:
        namespaces: of engines in offload mode.
        prefetches: which may be about to bring blocks of a prefix.
        counters: of the cache.
    """

    def __init__(self, namespaces: Namespaces, prefetches: Prefetches, counters: Counter[str]) -> None:
        self._namespaces = namespaces
        self._prefetches = prefetches
        self._counters = counters
        self._deletions: list[_Deletion] = []

    def remove(self, tree: PrefixTree, keys: bytes, start: int) -> Removal:
        """Remove the blocks of a prompt from `start` on, and everything that continues them. `deleted` has to follow.

        Args:
            tree: of the prompt's namespace.
            keys: of the prompt's full blocks, more than `start`.
            start: how many leading blocks stay.

        Raises:
            Refusal: the namespace is being cleared.
        """
        for pool in tree.pools:
            if pool.clearing:
                raise Refusal(Why.CLEARING, replica=pool.name)
        trees = self._sharing(tree)
        removed = [each.remove(keys, start, _CAUSE) for each in trees]
        held = self._held(trees, keys, start)
        gone = dict.fromkeys(_split(keys[start * KEY_SIZE :] + b"".join(each.keys for each in removed)))
        left = (key for key in gone if key not in held) if held else gone
        device, host = sum(each.device for each in removed), sum(each.host for each in removed)
        self._counters["forgotten_blocks"] += device + host
        removal = Removal(trees, device, host, len(held), b"".join(left))
        self._deletions.append(_Deletion(removal, start, _key_at(keys, start)))
        return removal

    def stays_in_storage(self, tree: PrefixTree, keys: bytes, limit: int) -> int:
        """How many of the first `limit` blocks of a prompt are before what storage is deleting."""
        for removal, start, key in self._deletions:
            if tree in removal.trees and _key_at(keys, start) == key:
                limit = min(limit, start)
        return limit

    def deleted(self, removal: Removal, keys: bytes, start: int) -> None:
        """Storage has deleted, or tried to: what of that was computed again meanwhile may have to be written again."""
        self._deletions = [each for each in self._deletions if each.removal is not removal]
        for tree in removal.trees:
            if tree.known(keys, start + 1)[1] > start:
                unmark_deleted(tree, keys, start, set(_split(removal.keys)))

    def _sharing(self, tree: PrefixTree) -> list[PrefixTree]:
        """The trees of the namespaces whose blocks are the same in storage as this one's."""
        space = next((each for each in self._namespaces.by_root.values() if each.tree is tree), None)
        if space is None:
            return [tree]
        return [each.tree for each in self._namespaces.of_storage(space.spec.storage_root)]

    def _held(self, trees: list[PrefixTree], keys: bytes, start: int) -> set[bytes]:
        """The blocks that stay: those in the index, and those that a prefetch may bring there."""
        held: set[bytes] = set()
        for tree in trees:
            for run, offset in tree.behind(keys, start):
                held.update(_split(bytes(run.keys[offset * KEY_SIZE :])))
        for prefetch in self._prefetches.under_way.values():
            if prefetch.chain.tree in trees and _key_at(prefetch.chain.keys, start) == _key_at(keys, start):
                held.update(_coming(prefetch, start))
        return held


def _coming(prefetch: Prefetch, start: int) -> list[bytes]:
    """The blocks from `start` on that are not in the index yet by a prefetch."""
    return _split(prefetch.chain.keys[max(prefetch.inserted, start) * KEY_SIZE :])


def _key_at(keys: bytes, depth: int) -> bytes:
    return keys[depth * KEY_SIZE : (depth + 1) * KEY_SIZE]


def _split(keys: bytes) -> list[bytes]:
    return [keys[at : at + KEY_SIZE] for at in range(0, len(keys), KEY_SIZE)]
