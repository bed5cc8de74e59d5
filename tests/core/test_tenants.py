"""Tenants of one namespace share its host slots within floors and caps."""

from __future__ import annotations

import random

import pytest

from kvcached.core.cache import Cache
from kvcached.core.eviction.by_tenant import ByTenant
from kvcached.core.insight.invariants import check
from kvcached.core.slots.host_slots import HostQuota, QuotaRule
from kvcached.core.transfers import prefetch as prefetches
from kvcached.core.transfers.storage_state import Prefetch, PrefetchEnd
from tests.core.engine import EPOCH, TTL_MS, Engine, keys_of
from tests.core.host_tier import Workers, crowd_out, host_hit, make_tiers
from tests.core.offload_engine import OffloadEngine, space
from tests.core.slab_memory import SlabMemory
from tests.core.storage_world import StorageWorld
from tests.core.tier_world import keys_in

SLABS, PER_SLAB = 8, 5  #: 40 slots
CAPPED = QuotaRule("capped-*", cap_percent=25)  #: 10 slots each
KEPT = QuotaRule("kept", floor_percent=45)  #: 18 slots


class Tenants(OffloadEngine):
    """An engine that serves tenants: each has prompts whose first blocks are no others'."""

    def __init__(self, *rules: QuotaRule, policy: str = "lru", slabs: int = SLABS) -> None:
        cache = Cache(
            [], epoch=EPOCH, session_ttl_ms=TTL_MS, host_slabs=slabs, namespaces_max=2, host_eviction_policy=policy,
            host_quota=HostQuota(tenants=rules), announces=True,
        )  # fmt: skip
        super().__init__(cache, space(per_slab=PER_SLAB))

    def serve(self, text: str, tenant: str = "", priority: int = 0) -> int:
        """A request that stores what it lacks; how many blocks are there then."""
        lease = self.acquire(text, tenant=tenant, priority=priority)
        plan = self.prepare(lease, text)
        if plan.transfer:
            self.commit(plan.transfer)
        self.release(lease)
        assert check(self.cache) == []
        return plan.depth

    def fill(self, tenant: str, prompts: int, *, first: int = 0) -> list[str]:
        """Prompts of five blocks with nothing in common."""
        texts = [chr(0x4E00 + first + number) + "wxyz" for number in range(prompts)]
        for text in texts:
            self.serve(text, tenant)
        return texts

    @property
    def blocks(self) -> dict[str, int]:
        policy = self.core.namespaces.by_root[self.spec.root].tree.tenants
        assert isinstance(policy, ByTenant)
        return dict(policy.blocks)


def test_tenant_at_its_cap_loses_its_own_oldest_blocks() -> None:
    """A tenant that stores more than its cap evicts itself, though slots are free, and others keep everything."""
    engine = Tenants(CAPPED)
    others = engine.fill("", 3)
    mine = engine.fill("capped-a", 6, first=100)

    assert engine.blocks == {"capped-a": 10}
    assert [engine.hit(text) for text in mine] == [0, 0, 0, 0, 5, 5]
    assert [engine.hit(text) for text in others] == [5, 5, 5]


def test_each_tenant_of_a_pattern_has_a_cap_of_its_own() -> None:
    """A rule with a pattern bounds every tenant that matches it by itself."""
    engine = Tenants(CAPPED)
    for at, tenant in enumerate(("capped-a", "capped-b", "capped-c")):
        engine.fill(tenant, 4, first=100 * at)

    assert engine.blocks == {"capped-a": 10, "capped-b": 10, "capped-c": 10}


def test_floor_is_kept_from_others_and_not_from_its_tenant() -> None:
    """What a floor keeps stays, whoever stores how much; above it, the least recently used blocks go."""
    engine = Tenants(KEPT)
    mine = engine.fill("kept", 6)
    engine.fill("", 12, first=100)

    assert engine.blocks == {"kept": 18}
    assert [engine.hit(text) for text in mine] == [0, 0, 3, 5, 5, 5]
    newer = engine.fill("kept", 8, first=300)
    assert engine.blocks["kept"] == 40
    assert [engine.hit(text) for text in newer] == [5] * 8


def test_tenant_that_has_kept_its_floor_gives_once_it_has_more() -> None:
    """A tenant that had nothing to give while others made room does not keep what it gets above its floor later."""
    engine = Tenants(KEPT)
    engine.fill("kept", 3)
    nobodys = engine.fill("", 8, first=100)
    assert engine.blocks["kept"] == 15
    for text in nobodys[-3:]:
        engine.serve(text, "kept")
    assert engine.blocks["kept"] == 30

    engine.fill("", 8, first=300)
    assert engine.blocks["kept"] == 18


def test_tenant_that_has_kept_its_floor_gives_to_itself() -> None:
    """What a tenant at its floor stores goes in place of its own blocks, where those were used longest ago."""
    engine = Tenants(KEPT)
    mine = engine.fill("kept", 3)
    engine.fill("", 8, first=100)
    engine.fill("kept", 1, first=200)

    assert engine.blocks["kept"] == 15
    assert [engine.hit(text) for text in mine] == [0, 5, 5]


def test_tenant_that_has_kept_its_floor_gives_once_that_is_lower() -> None:
    """Where the namespace has lost slabs, a floor is a part of what is left, also one that others met before."""
    engine = Tenants(KEPT)
    mine = engine.fill("kept", 3)
    engine.fill("", 8, first=100)
    for text in mine:
        engine.serve(text, "kept")  # so that slabs of others are taken
    other = OffloadEngine(engine.cache, space("n", per_slab=PER_SLAB))
    for number in range(4):
        other.store(chr(0x5E00 + number) * 5)
    tenants = engine.core.namespaces.by_root[engine.spec.root].tree.tenants
    assert tenants is not None
    assert (engine.blocks["kept"], tenants.bounds("kept")[0]) == (15, 9)

    engine.fill("", 8, first=300)
    assert engine.blocks["kept"] == 9


def test_without_a_floor_the_least_recently_used_go_whosever_they_are() -> None:
    """Between tenants, last use decides, as it does without quotas."""
    engine = Tenants(QuotaRule("a"), QuotaRule("b"))
    first = engine.fill("a", 4)
    second = engine.fill("b", 4, first=100)
    for text in first:
        engine.serve(text, "a")
    engine.fill("", 4, first=200)

    assert [engine.hit(text) for text in first] == [5] * 4
    assert [engine.hit(text) for text in second] == [0] * 4


def test_priorities_go_before_last_use_between_tenants() -> None:
    """A tail of lower priority goes first, although another tenant's was used longer ago."""
    engine = Tenants(QuotaRule("a"), QuotaRule("b"))
    old = "aAxxx"
    engine.serve(old, "a")
    low = [f"{letter}Bxxx" for letter in "bcdefgh"]
    for text in low:
        engine.serve(text, "b", priority=-1)
    engine.serve("zzzzz")

    assert engine.hit(old) == 5
    assert [engine.hit(text) for text in low] == [0] + [5] * 6


def test_blocks_that_somebody_uses_bound_what_a_capped_tenant_stores() -> None:
    """At its cap, with all its blocks in use, a tenant stores as much as there is room for, and may offer the rest."""
    engine = Tenants(CAPPED)
    text = "a" + "bcdefghijklmno"  # 15 blocks
    lease = engine.acquire(text, tenant="capped-a")
    plan = engine.prepare(lease, text)

    assert (plan.depth, engine.blocks) == (10, {"capped-a": 10})
    engine.commit(plan.transfer)
    assert engine.prepare(lease, text).depth == 10
    engine.release(lease)
    assert check(engine.cache) == []


def test_prefix_of_nobody_becomes_the_first_tenants_with_all_that_continues_it() -> None:
    """Blocks whose tenant is not known, as after a restart, belong to the tenant whose request hits them."""
    engine = Tenants(CAPPED, KEPT)
    engine.serve("abcde")
    engine.serve("abxyz")
    assert engine.blocks == {}

    engine.serve("abcde", "kept")
    assert engine.blocks == {"kept": 8}
    engine.serve("abxyzuv", "capped-a")
    assert engine.blocks == {"kept": 10}


def test_tenants_without_a_rule_have_no_bounds() -> None:
    """A tenant that no rule names counts as nobody's, and costs no memory."""
    engine = Tenants(CAPPED)
    engine.fill("other", 8)

    assert engine.blocks == {}
    assert engine.host.free == 0


def test_bounds_follow_what_the_namespace_could_have() -> None:
    """Where another namespace has taken slabs, a tenant's part is of what is left."""
    engine = Tenants(CAPPED)
    tree = engine.core.namespaces.by_root[engine.spec.root].tree
    assert tree.tenants is not None
    assert tree.tenants.bounds("capped-a") == (0, 10)
    other = OffloadEngine(engine.cache, space("n", per_slab=PER_SLAB))
    for number in range(4):
        other.store(chr(0x5E00 + number) * 5)

    assert tree.tenants.bounds("capped-a") == (0, 5)


def test_a_clear_forgets_whose_blocks_they_were() -> None:
    """A floor keeps nothing from a clear, and the next generation begins with nobody's blocks."""
    engine = Tenants(KEPT)
    engine.fill("kept", 4)
    engine.fill("", 6, first=100)  # which the floor has withstood
    engine.core.clear(engine.session)

    assert check(engine.cache) == []
    assert (engine.core.namespaces.retired, engine.cache.slab_allocator.unallocated) == ([], SLABS)
    engine.fill("kept", 1)
    assert engine.blocks == {"kept": 5}


def test_blocks_of_device_pools_count_where_they_are_stored() -> None:
    """In managed mode, a request's tenant bounds what the host pool has of its prompts, and hits there count, too."""
    cache = make_tiers(slots=64, host_slabs=SLABS, slots_per_slab=PER_SLAB, host_quota=HostQuota(tenants=(CAPPED,)))
    engine, texts = Engine(cache), [chr(0x4E00 + number) + "wxyz" for number in range(5)]
    for text in texts:
        grant = engine.acquire(text, tenant="capped-a")
        engine.commit(grant, text)
        engine.release(grant)
        Workers(cache).answer_all()
    tenants = cache.trees[0].tenants
    assert tenants is not None
    assert (dict(tenants.blocks), check(cache)) == ({"capped-a": 10}, [])

    nobodys = chr(0x4E00 + 100) + "wxyz"
    engine.store(nobodys)
    Workers(cache).answer_all()
    crowd_out(engine)
    assert host_hit(engine, nobodys) == (0, 5)
    engine.release(engine.acquire(nobodys, tenant="capped-b"))
    assert tenants.blocks["capped-b"] == 5


@pytest.fixture
def stored() -> tuple[Tenants, StorageWorld]:
    """An engine that serves tenants, and storage."""
    engine = Tenants(CAPPED)
    world = StorageWorld(engine.cache)
    world.host = SlabMemory(1, units=PER_SLAB)
    return engine, world


def fetch(engine: Tenants, world: StorageWorld, *texts: str, tenant: str) -> list[Prefetch]:
    """Prefetches that are under way together, until all are over."""
    generation = engine.core.namespaces.by_root[engine.spec.root].generation
    world.held |= {(engine.spec.root, generation, key) for text in texts for key in keys_in(keys_of(text))}
    begun = [world.prefetch(engine.session, text, tenant=tenant) for text in texts]
    world.answer_all()
    assert check(engine.cache) == []
    return begun


def test_cap_holds_for_blocks_from_storage(stored: tuple[Tenants, StorageWorld]) -> None:
    """What is fetched for a tenant takes the place of its own oldest blocks, and of nobody else's."""
    engine, world = stored
    others = engine.fill("paying", 2)
    mine = [chr(0x5E00 + number) + "wxyz" for number in range(8)]
    for text in mine:
        (prefetch,) = fetch(engine, world, text, tenant="capped-a")
        assert (prefetch.end, engine.serve(text, "capped-a")) == (PrefetchEnd.FETCHED, 5)

    assert engine.blocks == {"capped-a": 10}
    assert [engine.hit(text) for text in mine] == [0] * 6 + [5] * 2
    assert [engine.hit(text) for text in others] == [5, 5]


def test_cap_holds_for_fetches_under_way_together(
    stored: tuple[Tenants, StorageWorld], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots of copies that have not ended count, too: those of one prompt, and of several."""
    engine, world = stored
    monkeypatch.setattr(prefetches, "FETCH_BLOCKS_MAX", 2)
    (long,) = fetch(engine, world, "a" + "bcdefghijklmno", tenant="capped-a")
    assert (long.end, engine.blocks) == (PrefetchEnd.NO_ROOM, {"capped-a": 10})
    several = fetch(engine, world, *(chr(0x5E00 + number) + "wxyz" for number in range(4)), tenant="capped-b")

    assert sum(prefetch.fetched for prefetch in several) == 10
    assert engine.blocks == {"capped-a": 10, "capped-b": 10}


def test_prefetch_of_a_known_prompt_is_its_tenants(stored: tuple[Tenants, StorageWorld]) -> None:
    """What continues a tenant's blocks is that tenant's, whoever asks for it."""
    engine, world = stored
    engine.serve("ab", "capped-a")
    fetch(engine, world, "abcde", tenant="capped-b")

    assert engine.blocks == {"capped-a": 5}


@pytest.mark.parametrize("policy", ["lru", "slru"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 4))])
def test_bounds_hold_after_any_history(policy: str, seed: int) -> None:
    """Whatever tenants do, no one has more than its cap, and a floor that was filled stays filled."""
    choose = random.Random(seed)
    salts = {"capped-a": "a", "capped-b": "b", "kept": "k", "other": "o", "": "n"}
    engine = Tenants(CAPPED, KEPT, policy=policy)
    reached = False
    for _ in range(600):
        tenant = choose.choice(list(salts))
        text = salts[tenant] + "".join(choose.choice("0123") for _ in range(choose.randint(1, 7)))
        engine.serve(text, tenant, priority=choose.choice([0, 0, 0, 1]))
        blocks = engine.blocks
        assert max(blocks.get("capped-a", 0), blocks.get("capped-b", 0)) <= 10
        reached = reached or blocks.get("kept", 0) >= 18
        assert not reached or blocks.get("kept", 0) >= 18
    assert reached
