"""Several lives of a core whose storage lasts, and clears between: nothing of an earlier generation is ever fetched."""

from __future__ import annotations

from collections.abc import Mapping

from kvcached.core.cache import Cache
from kvcached.core.generations import Edition, Generations
from kvcached.core.transfers.prefetch import PrefetchLimits
from kvcached.core.transfers.storage import StorageSpec
from kvcached.core.transfers.storage_copies import BackupPolicy
from tests.core.engine import EPOCH, TTL_MS
from tests.core.offload_engine import OffloadEngine
from tests.core.storage_world import Named, StorageWorld
from tests.core.test_storage import store


class Life:
    """One life: an engine, and storage that has what an earlier life has left."""

    def __init__(
        self, first: int, held: set[Named] | None = None, editions: Mapping[bytes, Edition] | None = None
    ) -> None:
        storage = StorageSpec(BackupPolicy.EVERY, 0, PrefetchLimits())
        self.generations = Generations(first, editions)
        cache = Cache(
            [], epoch=EPOCH, session_ttl_ms=TTL_MS, host_slabs=4, namespaces_max=2, storage=storage,
            generations=self.generations,
        )  # fmt: skip
        self.world = StorageWorld(cache)
        self.world.held = set(held or ())
        self.engine = OffloadEngine(cache)

    def clear(self) -> None:
        """Other weights. Storage is away, and forgets nothing."""
        self.engine.core.clear(self.engine.session)
        self.world.take()

    def store(self) -> None:
        store(self.world, self.engine, "abc")
        self.world.answer_all()

    def fetched(self) -> int:
        prefetch = self.world.prefetch(self.engine.session, "abc")
        self.world.answer_all()
        return prefetch.fetched


def test_generation_of_an_earlier_life_is_not_used_again() -> None:
    """Where nothing is written down, blocks that storage remembers are found in no generation of the next life."""
    before = Life(100)
    before.store()
    before.clear()
    before.store()
    after = Life(200, before.world.held)
    assert after.fetched() == 0
    after.clear()

    assert (after.fetched(), after.engine.hit("abc")) == (0, 0)


def test_blocks_of_the_present_generation_are_found_by_the_next_life() -> None:
    """Where it is written down, what was stored after the last clear is fetched, and nothing after the next clear."""
    before = Life(100)
    before.store()
    before.clear()
    before.store()
    after = Life(200, before.world.held, before.generations.editions)
    assert (after.fetched(), after.engine.hit("abc")) == (3, 3)
    after.clear()

    assert (after.fetched(), after.engine.hit("abc")) == (0, 0)
