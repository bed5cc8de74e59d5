"""Why a prompt missed: every reason, and that the hit that is told is the hit that an acquire gets."""

from __future__ import annotations

import random

import pytest

from kvcached.core.cache import Cache
from kvcached.core.insight.explain import Miss, explain
from kvcached.core.messages import WorkerDied
from kvcached.core.refusals import Refusal
from kvcached_client.types import MissReason, TransferId
from tests.core.engine import Engine, keys_of, make_cache
from tests.core.host_tier import Workers, crowd_out, make_tiers, stored
from tests.core.offload_engine import OffloadEngine, make_offload, space


def why(cache: Cache, text: str, replica: str = "a", *, limit: int | None = None) -> Miss:
    """What is told of a prompt; without a limit every block may be a hit."""
    pool = cache.pools[replica]
    return explain(cache, cache.managed.trees[replica], pool, keys_of(text), len(text) if limit is None else limit)


# --- device pools ---------------------------------------------------------------------------------------------------


def test_a_prompt_that_is_there_is_a_hit() -> None:
    """Where every full block is a hit, nothing is missing."""
    cache = make_cache()
    Engine(cache).store("abc")

    assert why(cache, "abc") == Miss(device=3, host=0, hit=3, reason=MissReason.HIT, others=0)
    assert why(cache, "") == Miss(0, 0, 0, MissReason.HIT, 1)


def test_the_block_of_the_last_token_is_computed() -> None:
    """A cached block that holds the prompt's last token is told as such; one that is not cached by its own reason."""
    cache = make_cache()
    Engine(cache).store("abc")

    assert why(cache, "abc", limit=2)[2:] == (2, MissReason.LAST_TOKEN, 0)
    assert why(cache, "abd", limit=2)[2:] == (2, MissReason.NEVER_STORED, 1)


@pytest.mark.parametrize(
    ("text", "hit", "others"), [("xyz", 0, 1), ("abxy", 2, 1), ("abcdx", 4, 2), ("abcdefgh", 6, 0)]
)
def test_a_prompt_that_diverges_was_never_stored(text: str, hit: int, others: int) -> None:
    """The first block that nobody stored is named, and how many other prompts go on from there."""
    cache = make_cache()
    engine = Engine(cache)
    engine.store("abcdef")
    engine.store("abcdgh")

    assert why(cache, text) == Miss(hit, 0, hit, MissReason.NEVER_STORED, others)


def test_an_evicted_block_is_told() -> None:
    """What went for others says so, block by block: what is left of the prompt before it is a hit."""
    cache = make_cache(slots=8)
    engine = Engine(cache)
    engine.store("abcdef")
    engine.store("uvwx")

    assert why(cache, "abcdef")[2:4] == (4, MissReason.EVICTED)
    engine.store("mnopqrst")
    assert why(cache, "abcdef")[2:4] == (0, MissReason.EVICTED)


def test_host_blocks_that_no_worker_can_load_are_told() -> None:
    """While a worker is dead, blocks in host memory alone are missed for that reason, and not for a pause."""
    cache = make_tiers()
    crowd_out(stored(cache, "abc"))
    cache.handle(WorkerDied("a"))

    assert why(cache, "abc")[2:4] == (0, MissReason.WORKER_LOST)


def test_a_block_of_another_replica_is_told() -> None:
    """Without a host tier a replica cannot use what another one computed."""
    cache = make_cache(names="ab")
    Engine(cache, "a").store("abc")
    Engine(cache, "b").store("ab")

    assert why(cache, "abc", "b")[2:4] == (2, MissReason.OTHER_REPLICA)


# --- host pool ------------------------------------------------------------------------------------------------------


def test_the_host_pool_counts_for_the_hit() -> None:
    """Blocks in the host pool follow those in the device pool."""
    cache = make_tiers("ab")
    stored(cache, "abcdef")
    Engine(cache, "b").acquire("ab")
    Workers(cache).answer_all()

    assert why(cache, "abcdef", "b") == Miss(2, 4, 6, MissReason.HIT, 0)


def test_too_few_blocks_to_load_are_told() -> None:
    """Fewer blocks than the threshold are computed although the host pool has them."""
    cache = make_tiers(threshold=3)
    engine = stored(cache, "ab")
    crowd_out(engine)

    assert why(cache, "ab") == Miss(0, 2, 0, MissReason.BELOW_THRESHOLD, 0)
    assert engine.acquire("ab").hit == 0


def test_a_load_beyond_the_quota_is_told() -> None:
    """What the quota leaves is a hit, the rest is told; with too little left nothing is loaded."""
    cache = make_tiers(quota=4)
    engine = stored(cache, "abcdef")
    crowd_out(engine)

    assert why(cache, "abcdef") == Miss(0, 6, 4, MissReason.OVER_QUOTA, 0)
    engine.acquire("abcdef")
    assert why(cache, "abcdef")[2:4] == (4, MissReason.OVER_QUOTA)


def test_a_corrupt_copy_is_told() -> None:
    """A block that a load found damaged, and all behind it, are told as such when they are nowhere else."""
    cache = make_tiers()
    engine = stored(cache, "abcd")
    crowd_out(engine)
    grant = engine.acquire("abcd")
    workers = Workers(cache)
    (order,) = workers.started()
    workers.answer(order, corrupt=(1,))
    engine.release(grant)

    assert why(cache, "abcd")[2:4] == (1, MissReason.CORRUPT_OR_FAILED)


@pytest.mark.parametrize("seed", range(12))
def test_the_hit_that_is_told_is_the_hit_of_an_acquire(seed: int) -> None:
    """Whatever was stored, evicted, failed and is under way: an acquire gets the hit that was told just before."""
    source = random.Random(seed)
    cache = make_tiers(
        "ab", slots=12, host_slabs=3, slots_per_slab=4, threshold=source.randint(1, 3), quota=source.randint(1, 6)
    )
    engines, workers = [Engine(cache, "a"), Engine(cache, "b")], Workers(cache)
    seen = set()
    for _ in range(120):
        engine = source.choice(engines)
        text = "".join(source.choice("ab") for _ in range(source.randint(1, 7)))
        told = why(cache, text, engine.replica)
        try:
            grant = engine.acquire(text)
        except Refusal:
            continue  # no capacity: nothing is held for long, so later ones find some
        assert (grant.hit, text) == (told.hit, text)
        assert (told.reason is MissReason.HIT) == (told.hit == len(text))
        seen.add(told.reason)
        if not grant.loads:
            engine.commit(grant, text)
        engine.release(grant)
        for order in workers.started() + list(workers.under_way.values()):
            if source.random() < 0.7 and order.transfer in workers.under_way:
                workers.answer(order, source.choice(["", "", "", "failed"]))
    assert len(seen) >= 3


# --- offload mode ---------------------------------------------------------------------------------------------------


def offload(*, slabs: int = 2) -> OffloadEngine:
    """An engine in a namespace with slabs of four blocks."""
    return OffloadEngine(make_offload(slabs=slabs))


def why_offload(engine: OffloadEngine, text: str, *, limit: int | None = None) -> Miss:
    """What is told of a prompt in an engine's namespace."""
    tree = engine.core.namespaces.by_root[engine.spec.root].tree
    return explain(engine.cache, tree, None, keys_of(text), len(text) if limit is None else limit)


def begin_store(engine: OffloadEngine, text: str) -> TransferId:
    """A prompt is computed; its copies are under way, and nothing else holds it."""
    lease = engine.acquire(text)
    plan = engine.prepare(lease, text)
    engine.release(lease)
    return plan.transfer


def test_offload_hits_and_divergence() -> None:
    """An engine in offload mode has no device pool; the rest is as for replicas."""
    engine = offload()
    engine.store("abcd")

    assert why_offload(engine, "abcd") == Miss(0, 4, 4, MissReason.HIT, 0)
    assert why_offload(engine, "abcd", limit=3)[2:4] == (3, MissReason.LAST_TOKEN)
    assert why_offload(engine, "abx") == Miss(0, 2, 2, MissReason.NEVER_STORED, 1)


def test_offload_store_under_way_is_told() -> None:
    """A block that an engine is writing right now is on its way; where that fails, it is told as failed."""
    engine = offload()
    engine.store("ab")
    transfer = begin_store(engine, "abcd")
    assert why_offload(engine, "abcd")[2:4] == (2, MissReason.FILLING)

    engine.commit(transfer, "disk on fire")
    assert why_offload(engine, "abcd")[2:4] == (2, MissReason.CORRUPT_OR_FAILED)


def test_offload_damaged_copy_is_told() -> None:
    """A block that a load found damaged is told as such, and so are those that hang on it."""
    engine = offload()
    engine.store("abcd")
    lease = engine.acquire("abcd")
    engine.complete(engine.load(lease).transfer, 1)
    assert why_offload(engine, "abcd")[2:4] == (1, MissReason.CORRUPT_OR_FAILED)

    engine.release(lease)
    assert why_offload(engine, "abcd")[2:4] == (1, MissReason.CORRUPT_OR_FAILED)


def test_offload_eviction_is_told() -> None:
    """The least recently used prompt went for the next ones."""
    engine = offload(slabs=1)
    engine.store("abc")
    engine.store("wxyz")

    assert why_offload(engine, "abc")[2:4] == (0, MissReason.EVICTED)


def test_offload_blocks_that_found_no_room_are_told() -> None:
    """Blocks that were offered while every slot was in use are not told as evicted: they were never stored."""
    engine = offload(slabs=1)
    begin_store(engine, "abc")
    transfer = begin_store(engine, "wxyz")

    assert why_offload(engine, "wxyz")[2:4] == (0, MissReason.FILLING)
    engine.commit(transfer)
    assert why_offload(engine, "wxyz")[2:4] == (1, MissReason.NO_ROOM)


@pytest.mark.parametrize("held", [False, True])
def test_offload_clear_is_told(held: bool) -> None:
    """What was stored before a clear is told as cleared, while a request holds it, too; once stored it is back."""
    engine = offload()
    engine.store("abc")
    if held:
        engine.acquire("abc")
    engine.core.clear(engine.session)

    assert why_offload(engine, "abc")[2:4] == (0, MissReason.CLEARED)
    engine.store("ab")
    assert why_offload(engine, "abc")[2:4] == (2, MissReason.CLEARED)


def test_offload_namespaces_do_not_explain_each_other() -> None:
    """A block that left one namespace was never stored in another one, though its key is the same."""
    engine = offload()
    other = OffloadEngine(engine.cache, space("o"))
    engine.store("abc")
    engine.core.clear(engine.session)

    assert why_offload(other, "abc")[2:4] == (0, MissReason.NEVER_STORED)


def test_offload_namespace_that_made_room_was_evicted() -> None:
    """A namespace that nobody used and that was forgotten for another one is told as evicted when it comes back."""
    first = offload()
    first.store("abc")
    first.cache.close_session(first.session)
    others = [OffloadEngine(first.cache, space(letter)) for letter in "op"]
    first.cache.close_session(others[-1].session)

    assert why_offload(OffloadEngine(first.cache), "abc")[2:4] == (0, MissReason.EVICTED)


def test_explaining_changes_nothing() -> None:
    """Asking twice gives the same answer, and what was asked about is still the first to go."""
    engine = offload(slabs=1)
    engine.store("ab")
    engine.store("uv")
    first = why_offload(engine, "ab")

    assert why_offload(engine, "ab") == first
    engine.store("wx")
    assert [why_offload(engine, text).hit for text in ("ab", "uv", "wx")] == [0, 2, 2]
