"""Estimates of what host pools of other sizes would hit, beside pools that are played."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from random import Random

import pytest

from kvcached.core.cache import Cache
from kvcached.core.eviction.reuse import HALVED_AFTER_BLOCKS, PENDING_BLOCKS, SIZE_RATIOS, ReuseSample, TreeReuse
from kvcached.core.index.run import KEY_SIZE
from tests.core.offload_engine import OffloadEngine, make_offload

_SLABS, _SLOTS_PER_SLAB = 50, 40


def prompt(name: str, blocks: int) -> bytes:
    """The keys of a prompt, which shares none with others."""
    return b"".join(hashlib.blake2b(f"{name}/{at}".encode(), digest_size=KEY_SIZE).digest() for at in range(blocks))


def played(requests: list[bytes], slots: int) -> float:
    """The part of all blocks that a pool of so many slots hits, which evicts the least recently used block."""
    pool: OrderedDict[bytes, None] = OrderedDict()
    hits = asked = 0
    for keys in requests:
        blocks = [keys[at : at + KEY_SIZE] for at in range(0, len(keys), KEY_SIZE)]
        asked += len(blocks)
        hits += next((depth for depth, block in enumerate(blocks) if block not in pool), len(blocks))
        for block in reversed(blocks):
            pool[block] = None
            pool.move_to_end(block)
        while len(pool) > slots:
            pool.popitem(last=False)
    return hits / asked


def zipf(random: Random, prompts: int, requests: int) -> list[bytes]:
    """Prompts of which some are asked for far more often than others."""
    known = [prompt(str(number), random.randrange(10, 60)) for number in range(prompts)]
    return random.choices(known, [1 / (rank + 1) ** 0.7 for rank in range(prompts)], k=requests)


def loop(random: Random, prompts: int, requests: int) -> list[bytes]:
    """Prompts in turn: a pool that does not hold all of them hits nothing."""
    known = [prompt(str(number), random.randrange(10, 60)) for number in range(prompts)]
    return [known[number % prompts] for number in range(requests)]


def chat(random: Random, requests: int) -> list[bytes]:
    """All prompts begin alike, and nothing else is asked for twice."""
    system = prompt("system", 25)
    return [system + prompt(f"{random.random()}", 25) for _ in range(requests)]


def sampled(requests: list[bytes], blocks_max: int = 4096, rate_max: float = 0.5) -> TreeReuse:
    sample = ReuseSample(_SLABS, blocks_max, rate_max)
    tree = sample.of_tree(_SLOTS_PER_SLAB)
    for keys in requests:
        tree.asked(keys)
        if sample.pending_blocks >= PENDING_BLOCKS:
            sample.look()
    return tree


@pytest.mark.parametrize("blocks_max", [4096, 1024])
def test_estimates_are_those_of_pools_that_are_played(blocks_max: int) -> None:
    """On prompts of unequal popularity every estimate is within four points of a pool of that size."""
    requests = zipf(Random(7), prompts=500, requests=2000)
    estimated = sampled(requests, blocks_max).hit_ratios()
    assert len(estimated) == len(SIZE_RATIOS)
    for ratio, hits in zip(SIZE_RATIOS, estimated, strict=True):
        assert hits == pytest.approx(played(requests, round(ratio * _SLABS * _SLOTS_PER_SLAB)), abs=0.04)


def test_blocks_that_all_prompts_begin_with_count_though_few_are_sampled() -> None:
    """Few blocks may be half of what is asked for: how many of them are in the sample does not matter."""
    requests = chat(Random(7), 2000)
    assert sampled(requests, rate_max=1 / 32).hit_ratios() == pytest.approx([0.5] * len(SIZE_RATIOS), abs=0.03)


def test_cliff_is_where_all_prompts_fit() -> None:
    """Where prompts come in turn, a pool for most of them is estimated to hit nothing, and a larger one all."""
    requests = loop(Random(7), prompts=100, requests=1000)  # about 3,500 blocks, 1.7 pools
    ratios = dict(zip(SIZE_RATIOS, sampled(requests).hit_ratios(), strict=True))
    assert ratios[1.0] < 0.05
    assert ratios[1.5] < 0.05
    assert ratios[3.0] > 0.9


def test_estimate_of_few_blocks_is_none() -> None:
    """A namespace of which little was sampled tells nothing."""
    assert sampled([prompt("once", 500)] * 3, rate_max=1 / 32).hit_ratios() == []


def test_past_counts_half_after_a_while() -> None:
    """When the work changes, the estimate follows."""
    requests = [prompt("popular", 400)] * (HALVED_AFTER_BLOCKS // 400 + 1)
    tree = sampled(requests, rate_max=1 / 64)
    assert tree.asked_blocks == pytest.approx(HALVED_AFTER_BLOCKS / 2, rel=0.01)
    before = tree.hit_ratios()[0]
    for number in range(300):
        tree.asked(prompt(f"cold {number}", 1000))
    assert (before > 0.95, tree.hit_ratios()[-1] < 0.9) == (True, True)


def test_namespace_of_tiny_blocks_changes_no_estimate_of_the_others() -> None:
    """Few of its own blocks are sampled, and as many of the others' as without it."""
    requests = zipf(Random(7), prompts=200, requests=500)
    sample = ReuseSample(_SLABS, rate_max=0.5)
    tree = sample.of_tree(_SLOTS_PER_SLAB)
    for turn, keys in enumerate(requests):
        if turn == 100:
            tiny = sample.of_tree(1000 * _SLOTS_PER_SLAB)
            tiny.asked(Random(7).randbytes(100_000 * KEY_SIZE))
        tree.asked(keys)
    assert tree.hit_ratios() == pytest.approx(sampled(requests).hit_ratios(), abs=0.02)
    assert 0 < len([each for each, _ in sample._places if each is tiny]) < 500


@pytest.mark.parametrize("blocks_max", [4096, 1024])
def test_blocks_count_by_their_size(blocks_max: int) -> None:
    """Small blocks push large ones out of the pool, and large ones small ones, by as much as they take of it."""
    random, own = Random(7), [prompt(f"large {part}", 40) for part in range(20)]  # 800 blocks of 2,000
    sample = ReuseSample(_SLABS, blocks_max, rate_max=0.5)
    large, small = sample.of_tree(_SLOTS_PER_SLAB), sample.of_tree(16 * _SLOTS_PER_SLAB)
    again = random.randbytes(16 * 100 * KEY_SIZE)  # as much as 100 of the large blocks
    for _ in range(30):
        for keys in own:
            large.asked(keys)
        small.asked(random.randbytes(16 * 2500 * KEY_SIZE))
        small.asked(again)
        sample.look()
    # The room of 3,400 large blocks, 1.7 pools, lies between two uses. Of 2,600 small blocks 100 are used again.
    for tree, most, error in ((large, 29 / 30, 0.1), (small, 29 / 30 * 100 / 2600, 0.015)):
        ratios = dict(zip(SIZE_RATIOS, tree.hit_ratios(), strict=True))
        assert (ratios[1.25], ratios[3.0]) == pytest.approx((0, most), abs=error)


def test_keys_with_one_hash_fill_the_sample_and_break_nothing() -> None:
    """An engine chooses its keys: where no rate leaves any of them out, no more of them are kept."""
    sample = ReuseSample(16, 64, rate_max=1)
    tree = sample.of_tree(1)
    for number in range(200):
        tree.asked(number.to_bytes(8, "little") + bytes(8))
    sample.look()
    assert 0 < len(sample._places) <= 64


def test_cleared_namespace_begins_anew_and_is_in_nobodys_way() -> None:
    """Its estimates begin anew. Other namespaces' are as if nothing had lain between the two uses of a block."""
    own = [prompt(f"own {part}", 40) for part in range(30)]  # 1,200 blocks of 2,000
    sample = ReuseSample(_SLABS, rate_max=0.5)
    stays, cleared = sample.of_tree(_SLOTS_PER_SLAB), sample.of_tree(_SLOTS_PER_SLAB)
    for number in range(8):
        for keys in own:
            stays.asked(keys)
        cleared.asked(prompt(f"other {number}", 2000))
        cleared.stored(prompt(f"other {number}", 2000))
        cleared.forget()

    assert (cleared.asked_blocks, cleared.hit_ratios()) == (0, [])
    assert stays.hit_ratios() == sampled(own * 8).hit_ratios()


def test_each_namespace_competes_for_the_pool() -> None:
    """Blocks of one namespace push those of another out: the estimates are of one pool for both."""
    own = [prompt(f"small {part}", 40) for part in range(20)]  # 800 blocks of 2,000
    sample = ReuseSample(_SLABS, rate_max=0.5)
    small, large = sample.of_tree(_SLOTS_PER_SLAB), sample.of_tree(_SLOTS_PER_SLAB)
    for number in range(30):
        for keys in own:
            small.asked(keys)
        large.asked(prompt(f"large {number}", 2500))
        sample.look()
    assert sampled(own * 30).hit_ratios()[1] > 0.9
    ratios = dict(zip(SIZE_RATIOS, small.hit_ratios(), strict=True))
    assert (ratios[1.0] < 0.1, ratios[3.0] > 0.9) == (True, True)
    assert max(large.hit_ratios()) < 0.05


def test_cache_samples_what_engines_ask_for_and_store() -> None:
    """An acquire counts the blocks of its prompt, and a stored block is as recent as one that was asked for."""
    cache: Cache = make_offload(slabs=4)
    engine = OffloadEngine(cache)
    tree = cache.offload.sessions[engine.session].tree
    assert tree.reuse is not None
    engine.store("abcd")
    engine.acquire("abcdef")
    cache.settle()
    assert tree.reuse.asked_blocks == 10


def test_cleared_generation_of_offload_engines_leaves_the_sample() -> None:
    """What engines in offload mode asked for before a clear counts no longer, also while something holds their tree."""
    cache: Cache = make_offload(slabs=4)
    engine = OffloadEngine(cache)
    before = cache.offload.sessions[engine.session].tree.reuse
    engine.store("abcd")
    engine.acquire("abcd")
    cache.offload.clear(engine.session)
    after = cache.offload.sessions[engine.session].tree.reuse
    assert before is not None
    assert after is not None
    assert cache._reuse is not None
    assert (before.asked_blocks, after.asked_blocks, cache._reuse.pending_blocks) == (0, 0, 0)


def test_prompts_without_a_full_block_are_not_kept() -> None:
    """However many requests have no full block, nothing of them waits to be looked at."""
    sample = ReuseSample(_SLABS)
    tree = sample.of_tree(_SLOTS_PER_SLAB)
    for _ in range(10):
        tree.asked(b"")
        tree.stored(b"")
    assert (sample._pending, sample.pending_blocks) == ([], 0)


def test_what_was_noted_is_looked_at_before_there_is_much() -> None:
    """The cache looks at blocks after the request that brings so many, so that they take no memory."""
    cache: Cache = make_offload(slabs=4)
    engine = OffloadEngine(cache)
    tree = cache.offload.sessions[engine.session].tree
    for number in range(40):
        engine.core.acquire(engine.session, str(number), prompt(str(number), 50), 50 * 4, full=True)
        cache.settle()
        assert cache._reuse is not None
        assert cache._reuse.pending_blocks < PENDING_BLOCKS
    assert tree.reuse is not None
    assert tree.reuse.asked_blocks == 2000
