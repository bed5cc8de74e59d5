"""Namespaces in use share the slabs of the host pool: fairly, within floors and caps, and without thrashing."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from kvcached.core.cache import Cache
from kvcached.core.insight.invariants import check
from kvcached.core.messages import MemberLost, MembersDied, StorageReady, StorageSuspended, Ticked
from kvcached.core.namespaces import NamespaceSpec
from kvcached.core.slots.host_slots import BATCH_DIVISOR, RESTING_MS, HostQuota, QuotaRule
from kvcached.core.slots.ranges import slot_count
from kvcached.core.transfers.prefetch import PrefetchLimits
from kvcached.core.transfers.storage import StorageSpec
from kvcached.core.transfers.storage_copies import BackupPolicy
from tests.core.engine import BLOCK_SIZE, EPOCH, TTL_MS, Engine, keys_of
from tests.core.host_tier import Workers, make_tiers
from tests.core.offload_engine import OffloadEngine, counting_walks, let_rest, space

MakeOffload = Callable[..., Cache]
SIXTEEN = "0123456789ABCDEF"


def shared(slabs: int, *rules: QuotaRule, spaces: int = 4) -> Cache:
    """A cache for engines in offload mode only, with a quota."""
    return Cache(
        [], epoch=EPOCH, session_ttl_ms=TTL_MS, host_slabs=slabs, namespaces_max=spaces, host_quota=HostQuota(rules)
    )


def texts(first: int, count: int, length: int = 4) -> list[str]:
    """Prompts that have nothing in common with each other."""
    symbols = (chr(0x4E00 + at) for at in range(first * length, (first + count) * length))
    return ["".join(next(symbols) for _ in range(length)) for _ in range(count)]


def slabs_of(*engines: OffloadEngine) -> list[int]:
    return [len(engine.host.slabs) for engine in engines]


def fill(engine: OffloadEngine, first: int, count: int) -> None:
    """Store some prompts of a slab each, then look at the whole cache."""
    for text in texts(first, count):
        engine.store(text)
    assert check(engine.cache) == []


def test_newcomer_gets_its_share_of_a_full_pool() -> None:
    """A model that joins beside one that has filled the pool and is still there stores all it has, and hits it."""
    cache = shared(64)
    old = OffloadEngine(cache)
    fill(old, 0, 200)
    assert slabs_of(old) == [64]
    new, hot = OffloadEngine(cache, space("n")), texts(500, 20)
    for text in hot:
        new.store(text)
    assert check(cache) == []

    assert [new.hit(text) for text in hot] == [4] * 20
    assert cache.counters["store_refused_blocks"] == 0
    assert slabs_of(old, new) == [44, 20]


def test_newcomer_takes_no_more_than_half() -> None:
    """However much a newcomer stores, a model that is used keeps its share, and its latest prompts with it."""
    cache = shared(16)
    old, new = OffloadEngine(cache), OffloadEngine(cache, space("n"))
    fill(old, 0, 16)
    fill(new, 100, 60)

    assert slabs_of(old, new) == [8, 8]
    assert [old.hit(text) for text in texts(0, 16)] == [0] * 8 + [4] * 8


def test_two_models_that_want_everything_do_not_steal_to_and_fro() -> None:
    """Once both have their share, no slab changes hands again, however long both want more than there is."""
    cache = shared(16)
    one, two = OffloadEngine(cache), OffloadEngine(cache, space("n"))
    fill(one, 0, 40)
    fill(two, 100, 40)
    settled = cache.counters["reclaimed_slabs"]
    for at in range(200):
        one.store(texts(1000 + at, 1)[0])
        two.store(texts(2000 + at, 1)[0])
    assert check(cache) == []

    assert settled == 7  # beside the one that was held back for it
    assert cache.counters["reclaimed_slabs"] == settled
    assert slabs_of(one, two) == [8, 8]
    assert cache.counters["store_refused_blocks"] == 0


def test_model_below_its_share_is_left_alone() -> None:
    """Two models that want more share what a third one does not need; that one loses nothing."""
    cache = shared(12)
    small, one, two = (OffloadEngine(cache, space(letter)) for letter in "mno")
    fill(small, 0, 2)
    fill(one, 100, 30)
    fill(two, 200, 30)

    assert slabs_of(small, one, two) == [2, 5, 5]
    assert [small.hit(text) for text in texts(0, 2)] == [4, 4]


def test_model_that_rests_gives_all_but_one_slab_and_comes_back() -> None:
    """A model that nobody has used for long yields to one that is used, and gets its share again when it is used."""
    cache = shared(8)
    old = OffloadEngine(cache)
    fill(old, 0, 8)
    new = OffloadEngine(cache, space("n"))
    let_rest(cache)
    fill(new, 100, 20)
    assert slabs_of(old, new) == [1, 7]

    cache.offload.heartbeat(old.session, cache.storage.locks.now_ms)
    fill(old, 200, 20)
    assert slabs_of(old, new) == [4, 4]


def test_engine_that_starts_again_finds_its_share() -> None:
    """A model whose engine has just gone keeps its share, whatever another one needs; after a while it gives more."""
    cache = shared(8)
    old, new = OffloadEngine(cache), OffloadEngine(cache, space("n"))
    fill(old, 0, 8)
    cache.handle(MembersDied(old.session))
    fill(new, 100, 20)
    assert len(new.host.slabs) == 4
    let_rest(cache)
    fill(new, 200, 20)

    assert (len(new.host.slabs), list(cache.offload.namespaces.by_root)) == (8, [b"n" * 32])


def test_least_recently_used_blocks_go() -> None:
    """What a model has just hit stays, whatever slab it lies in, when it has to give some."""
    cache = shared(8)
    old, new = OffloadEngine(cache), OffloadEngine(cache, space("n"))
    prompts = texts(0, 7)
    for text in prompts:
        old.store(text)
    for text in prompts[:3]:
        old.release(old.acquire(text))
    fill(new, 100, 3)

    assert [old.hit(text) for text in prompts] == [4, 4, 4, 0, 0, 4, 4]


def test_prefix_that_others_continue_is_as_recent_as_they_are() -> None:
    """A slab with the beginning of prompts that are used is not chosen for its age."""
    cache = shared(6)
    old, new = OffloadEngine(cache), OffloadEngine(cache, space("n"))
    old.store("abcd")
    fill(old, 0, 3)
    old.store("abcdefgh")
    fill(new, 100, 2)

    assert (old.hit("abcdefgh"), slabs_of(old, new)) == (8, [4, 2])


def test_what_is_held_stays() -> None:
    """Slots of leases, of copies under way and of silent processes are never taken, even if nothing is left to give."""
    cache = shared(5)
    old, new = OffloadEngine(cache), OffloadEngine(cache, space("n"))
    leased, copied, lost = texts(0, 3)
    old.store(leased)
    lease = old.acquire(leased)
    plan = old.prepare(old.acquire(copied), copied)
    silent = OffloadEngine(cache)
    silent.prepare(silent.acquire(lost), lost)
    cache.handle(MemberLost(silent.session))
    assert old.states[1:] == (4, 4, 4)
    old.store("wxyz")
    fill(new, 100, 3)

    assert (old.hit("wxyz"), slabs_of(old, new)) == (0, [3, 2])
    assert (cache.counters["store_refused_blocks"], old.hit(leased)) == (0, 4)
    old.commit(plan.transfer)
    assert (old.hit(copied), slot_count(old.load(lease).slots)) == (4, 4)


def test_model_whose_slabs_are_all_held_is_asked_once_a_tick() -> None:
    """Where nothing can be freed, each request is not made to look through everything in vain."""
    cache = shared(4)
    old, new = OffloadEngine(cache), OffloadEngine(cache, space("n"))
    for text in texts(0, 3):
        old.store(text)
        old.acquire(text)
    looked = counting_walks(cache)
    fill(new, 100, 10)
    assert (looked["walks"], slabs_of(old, new)) == (1, [3, 1])
    cache.handle(Ticked(1))
    fill(new, 200, 10)
    assert looked["walks"] == 2


def test_slabs_that_an_engine_held_are_given_when_it_dies() -> None:
    """That nothing could be freed is no longer true when the engine is gone: the next request looks again."""
    cache = shared(4)
    old, new = OffloadEngine(cache), OffloadEngine(cache, space("n"))
    for text in texts(0, 3):
        old.store(text)
        old.acquire(text)
    fill(new, 100, 2)
    assert slabs_of(old, new) == [3, 1]
    cache.handle(MembersDied(old.session))
    fill(new, 200, 2)

    assert slabs_of(old, new) == [2, 2]


def test_large_pools_change_hands_in_batches() -> None:
    """Half of a large pool goes to a newcomer in so many steps, each of which looks through the other model once."""
    cache = shared(512)
    old = OffloadEngine(cache, space(per_slab=1))
    for text in texts(0, 128):
        old.store(text)
    looked = counting_walks(cache)
    new = OffloadEngine(cache, space("n", per_slab=1))
    for text in texts(500, 128):
        new.store(text)

    assert (slabs_of(old, new), looked["walks"]) == ([256, 256], 256 // (512 // BATCH_DIVISOR))
    assert check(cache) == []


# --- namespaces without an engine -------------------------------------------------------------------------------------


def test_idle_namespace_that_cannot_give_is_passed_over() -> None:
    """One with a floor and no slabs, or one that hanging storage reads, ends no search; and is looked through once."""
    storage = StorageSpec(BackupPolicy.EVERY)
    quota = HostQuota((QuotaRule("model m", floor_percent=20),))
    cache = Cache(
        [], epoch=EPOCH, session_ttl_ms=TTL_MS, host_slabs=8, namespaces_max=4, storage=storage, host_quota=quota,
        pin_quota_percent=100,
    )  # fmt: skip
    cache.handle(MembersDied(OffloadEngine(cache).session))  # it has stored nothing
    read, pinned = OffloadEngine(cache, space("n")), OffloadEngine(cache, space("o"))
    cache.handle(StorageReady())
    fill(read, 0, 3)
    cache.settle()
    cache.handle(StorageSuspended())
    fill(pinned, 100, 4)
    tree = cache.offload.namespaces.by_root[pinned.spec.root].tree
    for text in texts(100, 4):
        cache.pins.pin(tree, None, keys_of(text), TTL_MS + 3 * RESTING_MS)
    for engine in (read, pinned):
        cache.handle(MembersDied(engine.session))
    let_rest(cache)
    looked, new = counting_walks(cache), OffloadEngine(cache, space("p"))
    fill(new, 200, 4)

    assert [new.hit(text) for text in texts(200, 4)] == [4] * 4
    assert (slabs_of(read, new), looked["walks"]) == ([3, 4], 5)


# --- floors and caps ------------------------------------------------------------------------------------------------


def test_floor_is_never_taken() -> None:
    """A model keeps its floor, though it rests or has no engine, and however much others want."""
    cache = shared(16, QuotaRule("model m", floor_percent=75))
    old, new = OffloadEngine(cache), OffloadEngine(cache, space("n"))
    fill(old, 0, 16)
    fill(new, 100, 30)
    assert slabs_of(old, new) == [12, 4]
    let_rest(cache)
    cache.handle(MembersDied(old.session))
    fill(new, 200, 30)

    assert slabs_of(old, new) == [12, 4]


def test_floor_is_given_to_who_comes_late() -> None:
    """A model with a floor gets that much of a full pool, though it is more than a share."""
    cache = shared(16, QuotaRule("model n", floor_percent=75))
    old, new = OffloadEngine(cache), OffloadEngine(cache, space("n"))
    fill(old, 0, 40)
    fill(new, 100, 40)

    assert slabs_of(old, new) == [4, 12]


def test_cap_is_never_passed() -> None:
    """A model has at most its cap, though nobody else wants the rest; the first rule that matches holds."""
    cache = shared(16, QuotaRule("model m", cap_percent=25), QuotaRule("model *", cap_percent=50))
    one, two = OffloadEngine(cache), OffloadEngine(cache, space("n"))
    fill(one, 0, 40)
    fill(two, 100, 40)

    assert slabs_of(one, two) == [4, 8]
    assert cache.counters["store_refused_blocks"] == 0


def test_rule_names_a_namespace_by_its_replicas() -> None:
    """The namespace of replicas is meant by the name of one of them."""
    quota = HostQuota((QuotaRule("b", cap_percent=10), QuotaRule(floor_percent=5)))

    assert quota.bounds(["a", "b"], 100) == (0, 10)
    assert quota.bounds(["c"], 100) == (5, 100)
    assert quota.bounds(["b"], 5) == (0, 1)  # one slab is the least


# --- together -------------------------------------------------------------------------------------------------------


class PressingTenants:
    """Replicas and offload models of several shapes press on each other, at random."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        rules = (QuotaRule("model n", floor_percent=30), QuotaRule("a", cap_percent=50))
        storage = StorageSpec(BackupPolicy.NEVER, 0, PrefetchLimits())
        self.cache = make_tiers(
            "aX", slots=12, host_slabs=8, slots_per_slab=4, spaces=3, storage=storage, host_quota=HostQuota(rules)
        )
        self.workers = Workers(self.cache)
        self.engines = [Engine(self.cache, "a"), Engine(self.cache, "X")]
        self.specs = [space("m"), space("n", per_slab=3), NamespaceSpec(b"o" * 32, "model o", BLOCK_SIZE, 1, 5)]
        self.offload = [OffloadEngine(self.cache, spec) for spec in self.specs]
        self.now_ms = 0

    def play(self, steps: int) -> Cache:
        for _ in range(steps):
            before = {pool: len(pool.slabs) for pool in self.cache.slab_allocator.pools}
            self._step()
            assert check(self.cache) == []
            for pool, slabs in before.items():
                if pool in self.cache.slab_allocator.pools and pool.floor:
                    assert len(pool.slabs) >= min(slabs, pool.floor)
        return self.cache

    def _step(self) -> None:
        kind = self.random.random()
        if kind < 0.3:
            engine = self.random.choice(self.engines)
            text = self._text()
            grant = engine.acquire(text)
            self.workers.answer_all()  # nothing is committed behind a load
            engine.commit(grant, text)
            engine.release(grant)
            self.workers.answer_all()
        elif kind < 0.85:
            self._use(self.random.choice(self.offload))
        elif kind < 0.9:
            place = self.random.randrange(len(self.offload))
            self.cache.handle(MembersDied(self.offload[place].session))
            self.offload[place] = OffloadEngine(self.cache, self.specs[place])
        elif kind < 0.93:
            self.cache.offload.clear(self.random.choice(self.offload).session)
        else:
            self.now_ms += self.random.choice((100, RESTING_MS))
            for engine in self.engines:
                self.cache.managed.sessions[engine.session].last_heard_ms = self.now_ms
            for offload in self.offload:
                self.cache.offload.heartbeat(offload.session, self.now_ms)
            self.cache.handle(Ticked(self.now_ms))

    def _use(self, engine: OffloadEngine) -> None:
        text = self._text()
        lease = engine.acquire(text)
        plan = engine.prepare(lease, text)
        if plan.transfer and self.random.random() < 0.9:
            engine.commit(plan.transfer)
        if self.random.random() < 0.9:
            engine.release(lease)

    def _text(self) -> str:
        return "".join(self.random.choice("ab" if at else "abcdef") for at in range(self.random.randint(1, 9)))


def play(seeds: range, steps: int) -> Counter[str]:
    counted: Counter[str] = Counter()
    for seed in seeds:
        counted += PressingTenants(seed).play(steps).counters
    return counted


def test_slabs_change_hands_and_nothing_that_is_held_is_touched() -> None:
    """Whatever models of both kinds do, each slab has one owner, floors and caps hold, and every invariant does."""
    assert play(range(4), 200)["reclaimed_slabs"] >= 10


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(100, 200, 25))
def test_slabs_change_hands_over_long_histories(first: int) -> None:
    """The same for many histories."""
    assert play(range(first, first + 12), 600)["reclaimed_slabs"] >= 12
