"""Prefixes that an operator removes: what goes, what stays because something uses it, and what storage is to delete."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvcached.core.cache import Cache
from kvcached.core.insight.explain import explain
from kvcached.core.messages import BlocksRemoved, BlocksUncached, StartBackup, StorageReady
from kvcached.core.namespaces import NamespaceSpec
from kvcached.core.removal import Removal
from kvcached.core.transfers.storage import StorageSpec
from kvcached.core.transfers.storage_copies import BackupPolicy
from kvcached_client.types import MissReason
from tests.core.engine import BLOCK_SIZE, Engine, healthy, keys_of, refused
from tests.core.host_tier import Workers, host_hit, make_tiers, stored
from tests.core.offload_engine import OffloadEngine, space
from tests.core.storage_world import StorageWorld
from tests.core.test_storage import shelved, store, storing
from tests.core.tier_world import keys_in

MakeTiers = Callable[..., Cache]


def remove(cache: Cache, text: str, start: int = 0, replica: str = "a") -> Removal:
    """Remove a prompt from a replica's namespace."""
    removal = cache.removals.remove(cache.tree_of(replica), keys_of(text), start)
    assert healthy(cache)
    return removal


def counted(removal: Removal) -> tuple[int, int, int]:
    """Copies that are gone from devices and from the host pool, and blocks that stay."""
    return removal.device, removal.host, removal.in_use


@pytest.fixture
def world() -> StorageWorld:
    """Two replicas and engines in offload mode above storage that gets every block."""
    made = StorageWorld(make_tiers("ab", host_slabs=4, spaces=2, storage=StorageSpec(BackupPolicy.EVERY)))
    made.cache.handle(StorageReady())
    return made


def test_prompt_and_what_continues_it_leave_every_pool(new_tiers: MakeTiers) -> None:
    """Behind the blocks that stay nothing is hit any more, on no replica; prompts that part before are as they were."""
    cache = new_tiers("ab", threshold=99)
    engine, other = stored(cache, "abcdef"), stored(cache, "abcxy", "b")
    stored(cache, "abq", "b")

    assert counted(remove(cache, "abcd", start=2)) == (7, 6, 0)  # cdef on one device, cxy on the other
    assert (host_hit(engine, "abcdef"), host_hit(other, "abcxy"), host_hit(other, "abq")) == ((2, 0), (2, 0), (3, 0))
    assert counted(remove(cache, "abcd", start=2)) == (0, 0, 0)
    assert counted(remove(cache, "abcd")) == (5, 3, 0)  # ab on both, and q
    assert cache.counters["forgotten_blocks"] == 21


def test_removed_block_is_explained_and_announced(new_tiers: MakeTiers) -> None:
    """Who asks why a prompt missed is told that it was removed; routers are told of each copy, headers of each slot."""
    cache = new_tiers()
    stored(cache, "abcd")
    cache.index_changes.clear()
    cache.header_changes.clear()
    remove(cache, "abcd", start=1)

    miss = explain(cache, cache.tree_of("a"), cache.pools["a"], keys_of("abcd"), 4)
    assert (miss.hit, miss.reason) == (1, MissReason.FORGOTTEN)
    removed = [each for each in cache.index_changes if isinstance(each, BlocksRemoved)]
    assert {(each.tier.replica, each.keys) for each in removed} == {(name, keys_of("abcd")[16:]) for name in ("a", "")}
    assert [type(each) for each in cache.header_changes] == [BlocksUncached]


def test_what_a_lease_holds_stays_until_its_release(new_tiers: MakeTiers) -> None:
    """The request goes on as if nothing was, and what it computes is cached; the next removal takes it."""
    cache = new_tiers()
    engine = stored(cache, "abcdef")
    grant = engine.acquire("abcxyz")

    assert counted(remove(cache, "abcd")) == (3, 6, 3)
    assert engine.commit(grant, "abcxyz").depth == 6
    engine.release(grant)
    Workers(cache).answer_all()
    assert engine.hit("abcxyz") == 6
    assert counted(remove(cache, "abcd")) == (6, 6, 0)


def test_what_a_pin_holds_stays_until_it_ends(new_tiers: MakeTiers) -> None:
    """A pinned prefix stays in both pools, without what continues it."""
    cache = new_tiers()
    engine = stored(cache, "abcdef")
    tree, pool = cache.tree_of("a"), cache.pools["a"]
    cache.pins.pin(tree, pool, keys_of("abc"), 100)

    assert counted(remove(cache, "ab")) == (3, 3, 3)
    assert engine.hit("abcdef") == 3
    cache.pins.unpin(tree, pool, keys_of("abc"))
    assert counted(remove(cache, "ab")) == (3, 3, 0)


def test_copies_under_way_stay_until_their_end(new_tiers: MakeTiers) -> None:
    """What workers read and write is in use; no removal frees a slot under them."""
    cache = new_tiers()
    engine, workers = Engine(cache), Workers(cache)
    engine.store("abcd")
    (order,) = workers.started()

    assert counted(remove(cache, "abcd")) == (0, 0, 4)
    workers.answer(order)
    assert counted(remove(cache, "abcd")) == (4, 4, 0)


def test_pool_of_an_engine_that_has_not_declared_its_leases_keeps_its_blocks(new_tiers: MakeTiers) -> None:
    """After a restart, any block of such a pool may be in use; the host copies go."""
    cache = new_tiers()
    engine = stored(cache, "abcd")
    cache.close_session(engine.session)
    cache.restore_session("a")

    assert cache.pools["a"].frozen
    assert counted(remove(cache, "abcd")) == (0, 4, 4)


def test_namespace_that_is_being_cleared_is_refused(new_tiers: MakeTiers) -> None:
    """All of it is about to go: nothing is removed beside that."""
    cache = new_tiers()
    engine = Engine(cache)
    engine.store("abcd")
    Workers(cache).started()
    cache.clearings.begin(cache.tree_of("a"), b"anew")

    with refused("clearing"):
        remove(cache, "abcd")


def test_storage_is_to_delete_the_prompt_and_what_memory_knew_behind_it(world: StorageWorld) -> None:
    """The prompt's blocks come first, also those that memory does not have; what stays is not among them."""
    engine = OffloadEngine(world.cache)
    store(world, engine, "abcd")
    world.answer_all()
    tree = engine.core.namespaces.by_root[engine.spec.root].tree
    lease = engine.acquire("ab")
    removal = world.cache.removals.remove(tree, keys_of("abx"), 1)
    assert keys_in(removal.keys) == keys_in(keys_of("abx"))[2:] + keys_in(keys_of("abcd"))[2:]
    assert counted(removal) == (0, 2, 1)

    engine.release(lease)
    assert keys_in(world.cache.removals.remove(tree, keys_of("abx"), 1).keys) == keys_in(keys_of("abx"))[1:]
    world.check()


def test_backup_under_way_keeps_its_blocks_in_memory_and_in_storage(world: StorageWorld) -> None:
    """What storage is just writing cannot be deleted for good: it counts as in use. A backup not begun never begins."""
    engine = OffloadEngine(world.cache)
    store(world, engine, "abcd")
    tree = engine.core.namespaces.by_root[engine.spec.root].tree
    removal = world.cache.removals.remove(tree, keys_of("abcd"), 0)
    assert counted(removal) == (0, 4, 0)  # the backup was planned
    assert not [each for each in world.take() if isinstance(each, StartBackup)]

    store(world, engine, "abcd")
    assert [each for each in world.take() if isinstance(each, StartBackup)]
    removal = world.cache.removals.remove(tree, keys_of("abcd"), 0)
    assert (counted(removal), removal.keys) == ((0, 0, 4), b"")
    world.answer_all()
    assert counted(world.cache.removals.remove(tree, keys_of("abcd"), 0)) == (0, 4, 0)
    world.check()


def test_prefetch_under_way_keeps_what_it_is_to_bring(world: StorageWorld) -> None:
    """Its blocks are in use although the index does not have them: when they have come, the next removal takes them."""
    engine = shelved(world, "abcd")
    tree = engine.core.namespaces.by_root[engine.spec.root].tree
    world.prefetch(engine.session, "abcd")
    removal = world.cache.removals.remove(tree, keys_of("abcdef"), 1)
    assert (counted(removal), keys_in(removal.keys)) == ((0, 0, 3), keys_in(keys_of("abcdef"))[4:])

    world.answer_all()
    lease = engine.acquire("abcd")
    assert lease.hit == 4
    engine.release(lease)
    assert counted(world.cache.removals.remove(tree, keys_of("abcdef"), 1)) == (0, 3, 0)
    world.check()


def test_prefetch_brings_nothing_that_storage_is_deleting(world: StorageWorld) -> None:
    """It ends where the removed blocks begin; when storage has deleted them, prefetches ask for the whole prompt."""
    engine = shelved(world, "abcd")
    tree = engine.core.namespaces.by_root[engine.spec.root].tree
    removal = world.cache.removals.remove(tree, keys_of("abcd"), 2)
    world.prefetch(engine.session, "abcd")
    world.answer_all()
    assert engine.hit("abcd") == 2
    world.cache.removals.deleted(removal, keys_of("abcd"), 2)  # it failed

    world.prefetch(engine.session, "abcd")
    world.answer_all()
    assert engine.hit("abcd") == 4


def test_block_that_was_computed_during_its_deletion_is_written_again(world: StorageWorld) -> None:
    """Storage said that it has the block, and then deleted it: its next request has it written anew."""
    engine = shelved(world, "abcd")
    tree = engine.core.namespaces.by_root[engine.spec.root].tree
    removal = world.cache.removals.remove(tree, keys_of("abcd"), 0)
    store(world, engine, "abcd")
    world.answer_all()  # it has all of them already
    world.held.clear()
    world.cache.removals.deleted(removal, keys_of("abcd"), 0)

    engine.release(engine.acquire("abcd"))
    world.answer_all()
    assert len(world.held) == 4


def test_block_that_stays_in_storage_is_not_written_again(world: StorageWorld) -> None:
    """What was in use when the prompt was removed is in storage still: nothing of it is handed over anew."""
    engine = OffloadEngine(world.cache)
    store(world, engine, "abcd")
    world.answer_all()
    tree = engine.core.namespaces.by_root[engine.spec.root].tree
    lease = engine.acquire("abc")
    removal = world.cache.removals.remove(tree, keys_of("abcd"), 0)
    world.cache.removals.deleted(removal, keys_of("abcd"), 0)
    engine.release(lease)
    engine.release(engine.acquire("abc"))

    assert not [each for each in world.take() if isinstance(each, StartBackup)]
    assert counted(world.cache.removals.remove(tree, keys_of("abcd"), 0)) == (0, 3, 0)


def test_namespaces_that_share_their_blocks_in_storage_lose_them_together(world: StorageWorld) -> None:
    """Storage has one block for both layouts: it is out of the memory of both, and in use if one of them uses it."""
    specs = [NamespaceSpec(name * 32, "model", BLOCK_SIZE, 1, 4, b"c" * 32) for name in (b"x", b"y")]
    first, second = (OffloadEngine(world.cache, spec) for spec in specs)
    for engine in (first, second):
        store(world, engine, "abc")
        world.answer_all()
    lease = second.acquire("ab")
    tree = first.core.namespaces.by_root[first.spec.root].tree

    removal = world.cache.removals.remove(tree, keys_of("abc"), 0)
    assert (counted(removal), removal.keys) == ((0, 4, 2), keys_of("abc")[32:])
    second.release(lease)
    assert counted(world.cache.removals.remove(tree, keys_of("abc"), 0)) == (0, 2, 0)
    assert (first.hit("abc"), second.hit("abc")) == (0, 0)


def test_stores_that_wait_for_their_end_keep_their_blocks(world: StorageWorld) -> None:
    """What an engine is copying to the host pool is in use until every shard has said that it is through."""
    engine = OffloadEngine(world.cache, space("m"))
    plan = storing(engine, "abcd")
    tree = engine.core.namespaces.by_root[engine.spec.root].tree

    assert counted(world.cache.removals.remove(tree, keys_of("abcd"), 0)) == (0, 0, 4)
    engine.commit(plan.transfer, "no memory")
    assert counted(world.cache.removals.remove(tree, keys_of("abcd"), 0)) == (0, 0, 0)
