"""The index after a restart: what lies in the host pool is found again, and nothing that is not there."""

from __future__ import annotations

import hashlib
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcached.core.cache import Cache
from kvcached.core.generations import Edition, Generations
from kvcached.core.insight.invariants import check
from kvcached.core.messages import MembersDied, TransferKind
from kvcached.core.namespaces import NamespaceSpec, PoolSpec
from kvcached.core.restart.restore import Claims, RestoredCache, StoredBlocks, no_blocks, restore
from kvcached.core.slots.ranges import no_ranges, pairs
from kvcached.core.slots.states import SessionState, SlotState
from kvcached_client.types import SessionId

ROOT = b"r" * 32
PER_SLAB = 8
SLABS = 6
SPEC = NamespaceSpec(ROOT, "tiny", 4, 2, PER_SLAB)

#: Prompts as words: one letter a block, so that equal beginnings are equal prefixes.
WORDS = st.lists(st.text("ab", min_size=1, max_size=7), min_size=1, max_size=8)


def key_of(prefix: str) -> bytes:
    return hashlib.blake2b(prefix.encode(), digest_size=16).digest()


def keys_of(word: str) -> bytes:
    return b"".join(key_of(word[:end]) for end in range(1, len(word) + 1))


def blocks(places: dict[str, int], ages: dict[str, int] | None = None) -> StoredBlocks:
    """Blocks by the prefix that each ends, and where they are; the ages are those of the order, unless given."""
    return rows([(prefix, slot, (ages or {}).get(prefix, age)) for age, (prefix, slot) in enumerate(places.items())])


def rows(stored: list[tuple[str, int, int]]) -> StoredBlocks:
    if not stored:
        return no_blocks()
    prefixes = [prefix for prefix, _, _ in stored]
    parents = [key_of(prefix[:-1]) if len(prefix) > 1 else bytes(16) for prefix in prefixes]
    return StoredBlocks(
        np.frombuffer(b"".join(map(key_of, prefixes)), np.uint8).reshape(-1, 16),
        np.frombuffer(b"".join(parents), np.uint8).reshape(-1, 16),
        np.array([len(prefix) - 1 for prefix in prefixes], np.int64),
        np.array([slot for _, slot, _ in stored], np.int64),
        np.array([age for _, _, age in stored], np.int64),
    )


def revived(
    found: StoredBlocks, *, slabs: list[int] | None = None, claims: Claims | None = None, generation: int = 3
) -> tuple[Cache, RestoredCache]:
    """A cache whose one namespace has been found again."""
    generations = Generations(generation + 1, {SPEC.root: Edition(generation)})
    cache = Cache(
        [], epoch=7, session_ttl_ms=1000, host_slabs=SLABS, namespaces_max=2, generations=generations, announces=True
    )
    revival = RestoredCache(cache)
    revival.namespace(SPEC, list(range(SLABS)) if slabs is None else slabs, found, claims or {})
    assert claims or check(cache) == []
    return cache, revival


def hits(cache: Cache, *words: str) -> list[int]:
    """How much of each word is found."""
    session = cache.open_offload(SPEC, 0)
    found = [cache.offload.match(session.id, keys_of(word), 4 * len(word), full=True) for word in words]
    cache.close_session(session.id)
    return found


@given(WORDS, st.randoms(), st.integers(0, 4))
def test_chains_without_gap_are_found(words: list[str], chance: Random, missing: int) -> None:
    """Of every chain as much is hit as lies there without a gap, in the slots where it was, whatever the order."""
    prefixes = sorted({word[:end] for word in words for end in range(1, len(word) + 1)})
    slots = list(range(SLABS * PER_SLAB))
    chance.shuffle(slots)
    chance.shuffle(prefixes)
    places = dict(zip(prefixes[missing:], slots, strict=False))

    cache, revival = revived(blocks(places))

    expected = [next((end for end in range(len(word)) if word[: end + 1] not in places), len(word)) for word in words]
    assert hits(cache, *words) == expected
    whole = {word[:end] for word, hit in zip(words, expected, strict=True) for end in range(1, hit + 1)}
    assert revival.blocks == len(whole)
    tree = cache.offload.namespaces.by_root[ROOT].tree
    for word, hit in zip(words, expected, strict=True):
        run, depth = tree.match_host(tree.root, 0, keys_of(word), hit)
        found = tree.path_slots(run, 0, depth, -1)
        assert [slot for first, count in pairs(found) for slot in range(first, first + count)] == [
            places[word[:end]] for end in range(1, hit + 1)
        ]


def test_newer_copy_counts() -> None:
    """A block of which an evicted copy still lies around is where it was stored last; the other slot is free."""
    cache, revival = revived(rows([("a", 5, 9), ("ab", 6, 3), ("a", 1, 2)]))
    host = cache.offload.namespaces.by_root[ROOT].host

    assert (revival.blocks, hits(cache, "ab")) == (2, [2])
    assert [host.state_of(slot) for slot in (1, 5, 6)] == [SlotState.FREE, SlotState.CACHED, SlotState.CACHED]


@given(WORDS, st.randoms())
def test_keys_that_begin_alike_are_told_apart(words: list[str], chance: Random) -> None:
    """Keys with the same first half are other keys: each chain is found as it lies there, older copies are not."""
    prefixes = sorted({word[:end] for word in words for end in range(1, len(word) + 1)})
    twice = [(prefix, age) for prefix in prefixes for age in (1, 2)][: SLABS * PER_SLAB]
    slots = chance.sample(range(SLABS * PER_SLAB), len(twice))
    stored = [(prefix, slot, age) for (prefix, age), slot in zip(twice, slots, strict=True)]
    chance.shuffle(stored)
    found = rows(stored)
    keys, parents = found.keys.copy(), found.parents.copy()
    keys[:, :8] = parents[found.depths > 0, :8] = 7
    newest = {
        key.tobytes(): int(slot) for key, slot, age in zip(keys, found.slots, found.ages, strict=True) if age == 2
    }

    cache, _ = revived(found._replace(keys=keys, parents=parents))

    tree = cache.offload.namespaces.by_root[ROOT].tree
    for word in words:
        own = [bytes([7] * 8) + key_of(word[:end])[8:] for end in range(1, len(word) + 1)]
        there = next((depth for depth, key in enumerate(own) if key not in {k.tobytes() for k in keys}), len(own))
        run, depth = tree.match_host(tree.root, 0, b"".join(own), len(own))
        assert depth == there
        places = [
            slot for first, count in pairs(tree.path_slots(run, 0, depth, -1)) for slot in range(first, first + count)
        ]
        assert all(place == newest.get(key, place) for place, key in zip(places, own, strict=False))


@pytest.mark.parametrize("parent", [b"x" * 16, key_of("b")])
def test_block_whose_parent_is_another_is_left_out(parent: bytes) -> None:
    """A block that names a parent which is not there, or is not one block before it, is not found."""
    found = blocks({"a": 0, "ab": 1, "b": 2, "ba": 3})
    parents = found.parents.copy()
    parents[1] = np.frombuffer(parent, np.uint8)
    depths = found.depths.copy()
    depths[1] = 2
    _, revival = revived(found._replace(parents=parents, depths=depths))

    assert revival.blocks == 3


def test_parent_that_begins_like_another_is_missing() -> None:
    """A block whose parent is not there is left out, though another block's key has the first half of its name."""
    found = blocks({"a": 0, "ab": 1})
    parents = found.parents.copy()
    parents[1, 8:] ^= 1
    _, revival = revived(found._replace(parents=parents))

    assert revival.blocks == 1


def test_first_block_that_names_a_parent_is_left_out() -> None:
    """A first block has no parent: one that names some is no block of ours."""
    found = blocks({"a": 0})
    _, revival = revived(found._replace(parents=found.keys))

    assert revival.blocks == 0


def test_blocks_that_name_each_other_are_left_out() -> None:
    """Forged headers in a ring neither hang the start nor get into the tree."""
    found = blocks({"a": 0, "b": 1})
    ring = found._replace(parents=found.keys[::-1].copy(), depths=np.array([1, 2], np.int64))
    _, revival = revived(ring)

    assert revival.blocks == 0


def test_runs_are_not_cut_without_need() -> None:
    """One long chain is one run, a fork makes three."""
    cache, _ = revived(blocks({"a": 0, "aa": 1, "aaa": 2, "aaaa": 3}))
    assert cache.offload.namespaces.by_root[ROOT].tree.run_count == 1
    cache, _ = revived(blocks({"a": 0, "aa": 1, "aaa": 2, "aab": 3}))
    assert cache.offload.namespaces.by_root[ROOT].tree.run_count == 3


def test_longest_unused_goes_first() -> None:
    """What was stored first is evicted first after a restart, too."""
    cache, _ = revived(blocks({"a": 0, "b": 1, "c": 2}, ages={"a": 20, "b": 10, "c": 30}), slabs=[0])
    tree = cache.offload.namespaces.by_root[ROOT].tree

    left = []
    for _ in range(3):
        tree.shed_host("test", 1)
        left.append(hits(cache, "a", "b", "c"))

    assert left == [[1, 0, 1], [0, 0, 1], [0, 0, 0]]


def test_engine_goes_on_where_it_was() -> None:
    """What was found is continued by stores, and its slots are evicted for others when room is needed."""
    cache, _ = revived(blocks({"a": 0, "ab": 1}), slabs=[0, 1])
    session = cache.open_offload(SPEC, 0)
    lease = cache.offload.acquire(session.id, "r", keys_of("abcd"), 16, full=True)
    plan = cache.offload.prepare_store(session.id, lease.id, 2, keys_of("abcd")[32:])
    for shard in range(2):
        cache.offload.transfer_done(session.id, TransferKind.STORE, plan.transfer, shard, "")
    cache.offload.release(session.id, lease.id)

    assert (lease.hit, plan.depth, check(cache)) == (2, 4, [])
    many = "c" * 40
    lease = cache.offload.acquire(session.id, "s", keys_of(many), 160, full=True)
    plan = cache.offload.prepare_store(session.id, lease.id, 0, keys_of(many))
    assert plan.depth == 40
    assert check(cache) == []


def test_claimed_slots_wait_for_their_owner() -> None:
    """Slots that a living engine may still write are neither found nor granted until it is dead."""
    owner = (6, 2)
    cache, revival = revived(blocks({"a": 0}), slabs=[0], claims={owner: np.array([4, 3], np.int64)})
    session = revival.offload_session(owner, ROOT)
    host = cache.offload.namespaces.by_root[ROOT].host

    assert cache.offload.sessions[session].state is SessionState.EXPIRED
    assert host.counts[SlotState.QUARANTINED] == 2
    assert check(cache) == []
    cache.handle(MembersDied(session))
    assert (host.counts[SlotState.QUARANTINED], host.counts[SlotState.FREE]) == (0, 7)
    assert check(cache) == []


def test_generation_goes_on() -> None:
    """A namespace has the generation that it had."""
    cache, _ = revived(no_blocks(), generation=5)
    session = cache.open_offload(SPEC, 0)
    assert (session.namespace.generation, cache.offload.clear(session.id)) == (5, (6, 0))


def test_slot_outside_the_slabs_is_refused() -> None:
    """A ledger and headers that contradict each other are not believed."""
    cache = Cache([], epoch=7, session_ttl_ms=1000, host_slabs=SLABS, namespaces_max=2)
    space = cache.offload.namespaces.restore(SPEC)
    with pytest.raises(ValueError, match="slots in 1 slabs"):
        restore(space.tree, space.host, [0], blocks({"a": PER_SLAB}), no_ranges(), "test")


def test_pool_that_outlived_the_daemon_is_set_aside() -> None:
    """All of a device pool belongs to the engine of before, until its processes are dead."""
    cache = Cache([PoolSpec("a", ROOT, 4, 16)], epoch=7, session_ttl_ms=1000)
    session = RestoredCache(cache).pool_session("a")

    assert cache.pools["a"].counts[SlotState.QUARANTINED] == 16
    assert check(cache) == []
    cache.handle(MembersDied(SessionId(session)))
    assert (cache.pools["a"].free, check(cache)) == (16, [])
