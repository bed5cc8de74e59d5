"""Storage for core tests: carries out what the cache asks of it when told to, and compares what lies where."""

from __future__ import annotations

from kvcached.core.cache import Cache
from kvcached.core.index.host_tree import HOST
from kvcached.core.index.tree import PrefixTree
from kvcached.core.insight.invariants import check
from kvcached.core.messages import (
    BackupSettled,
    Effect,
    FetchSettled,
    QueryStorage,
    Span,
    StartBackup,
    StartFetch,
    StartTransfer,
    StorageAnswered,
    StorageLost,
    StorageReady,
    TransferKind,
)
from kvcached.core.slots.ranges import cut
from kvcached.core.slots.states import SlotState
from kvcached.core.transfers.storage_state import Prefetch
from kvcached_client.types import SessionId, ShardIndex
from tests.core.engine import BLOCK_SIZE, keys_of
from tests.core.slab_memory import Content, SlabMemory
from tests.core.tier_world import keys_in, slots_of, solid_slots

#: A block: namespace, generation, key.
Named = tuple[bytes, int, bytes]


class StorageWorld:
    """Memory of the host pool by the names of the blocks in it, storage, and workers that copy at once.

    Attributes:
        held: what storage has.
        under_way: what it was asked for and has not answered.
        now_us: time.
    """

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.host = SlabMemory(1, units=48)
        self.held: set[Named] = set()
        self.under_way: list[QueryStorage | StartFetch | StartBackup] = []
        self.now_us = 0
        cache.handle(StorageReady())

    # --- what the cache asks for ------------------------------------------------------------------------------------

    def take(self) -> list[Effect]:
        """What the cache has asked for since the last time, after it has decided what it decides by itself."""
        self.cache.settle()
        effects, self.cache.effects[:] = self.cache.effects[:], []
        for effect in effects:
            if isinstance(effect, QueryStorage | StartFetch | StartBackup):
                self.under_way.append(effect)
        for effect in effects:
            if isinstance(effect, StartTransfer):
                self._copy(effect)
        return effects

    def answer_all(self) -> None:
        """Until nothing is under way."""
        while self.take() or self.under_way:
            if self.under_way:
                self.answer(0)

    def answer(self, index: int, *, good: int | None = None) -> None:
        """Carry out one thing that was asked for, the first `good` blocks of it at least as far as they are there."""
        self.now_us += 1000
        asked = self.under_way.pop(index)
        if isinstance(asked, QueryStorage):
            found = _leading([self._name(asked, key) in self.held for key in keys_in(asked.keys)])
            self.cache.handle(StorageAnswered(asked.query, found, self.now_us))
        elif isinstance(asked, StartFetch):
            self._fetch(asked, good)
        else:
            self._back_up(asked, good)

    def lose(self) -> None:
        """The storage process dies: what it was writing may be anything."""
        self.take()
        for asked in self.under_way:
            if isinstance(asked, StartFetch):
                self._write(asked, asked.span, torn=True)
        self.under_way.clear()
        self.cache.handle(StorageLost())

    # --- what is where ----------------------------------------------------------------------------------------------

    def wrote(self, tree: PrefixTree, generation: int, keys: bytes, slots: list[int]) -> None:
        """An engine or worker has written blocks into host slots."""
        for key, slot in zip(keys_in(keys), slots, strict=True):
            self._put(tree, slot, (tree.namespace, generation, key))

    def check(self) -> None:
        """Invariants hold, and every host slot that can be hit holds its block."""
        assert check(self.cache) == []
        for tree in self.cache.trees:
            generation = self._generation(tree)
            for run in tree.runs():
                if tree.host is None or generation is None:
                    continue
                for key, slot in solid_slots(run, HOST).items():
                    if tree.host.state_of(slot) is SlotState.CACHED:
                        assert self._content(tree, slot) == (tree.namespace, generation, key)

    def prefetch(
        self, session: SessionId, text: str, *, epoch: int = 0, rate: float = 0.0, tenant: str = ""
    ) -> Prefetch:
        keys, tokens = keys_of(text), len(text) * BLOCK_SIZE
        return self.cache.prefetch(session, epoch, keys, tokens, rate, full=True, tenant=tenant)

    # --- steps ------------------------------------------------------------------------------------------------------

    def _copy(self, order: StartTransfer) -> None:
        pool = self.cache.pools[order.pool]
        tree = self.cache.tree_of(order.pool)
        if order.kind is TransferKind.STORE:
            for span in order.spans:
                self.wrote(tree, 0, span.keys, slots_of(span.host))
        for shard in range(pool.shards):
            self.cache.worker_copies.shard_done(order.transfer, ShardIndex(shard))

    def _fetch(self, asked: StartFetch, good: int | None) -> None:
        there = _leading([self._name(asked, key) in self.held for key in keys_in(asked.span.keys)])
        good = there if good is None else min(good, there)
        self._write(asked, asked.span, torn=True)
        self._write(asked, asked.span._replace(keys=asked.span.keys[: good * 16], host=cut(asked.span.host, good)[0]))
        self.cache.handle(FetchSettled(asked.transfer, good, self.now_us))

    def _back_up(self, asked: StartBackup, good: int | None) -> None:
        written = 0
        for span in asked.spans:
            tree = self._tree(asked)
            for key, slot in zip(keys_in(span.keys), slots_of(span.host), strict=True):
                assert self._content(tree, slot) == self._name(asked, key), "storage would get another block"
                if good is None or written < good:
                    self.held.add(self._name(asked, key))
                    written += 1
        self.cache.handle(BackupSettled(asked.transfer, written))

    def _write(self, asked: StartFetch, span: Span, *, torn: bool = False) -> None:
        tree = self._tree(asked)
        for key, slot in zip(keys_in(span.keys), slots_of(span.host), strict=True):
            assert tree.host is not None
            assert tree.host.state_of(slot) is SlotState.FILLING, "somebody else may have this slot"
            self._put(tree, slot, (b"torn", 0, b"") if torn else self._name(asked, key))

    def _put(self, tree: PrefixTree, slot: int, block: Named) -> None:
        assert tree.host is not None
        self.host.write(0, tree.host.slots_per_slab, slot, block)

    def _content(self, tree: PrefixTree, slot: int) -> Content:
        assert tree.host is not None
        return self.host.read(0, tree.host.slots_per_slab, slot)

    def _tree(self, asked: StartFetch | StartBackup) -> PrefixTree:
        return next(copy.tree for copy in self.cache.storage.copies if copy.id == asked.transfer)

    def _generation(self, tree: PrefixTree) -> int | None:
        return 0 if tree.pools else self.cache.offload.namespaces.generation_of(tree)

    def _name(self, asked: QueryStorage | StartFetch | StartBackup, key: bytes) -> Named:
        return asked.namespace, asked.generation, key


def _leading(there: list[bool]) -> int:
    return there.index(False) if False in there else len(there)
