"""Pools beside keys and values, through SGLang's calls of version 2, on a real daemon."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvcached_client import Admin
from tests.sglang.conftest import Make, Storage
from tests.sglang.fake_sglang import (
    PAGE_SIZE,
    FakeSglang,
    MambaPoolHost,
    MHATokenToKVPoolHost,
    PoolTransfer,
    behind,
    hashes,
    places,
    replace_weights,
)

WINDOW = 2


def indexer(seed: int = 0) -> Any:
    return type("MHATokenToKOnlyPoolHost", (MHATokenToKVPoolHost,), {})(seed)


def of(name: str, keys: list[str], pages: list[int], **more: Any) -> PoolTransfer:
    size = 1 if name == "mamba" else PAGE_SIZE
    return PoolTransfer(name, keys, places(*pages, size=size), **more)


def trailing(name: str, keys: list[str], pages: list[int]) -> PoolTransfer:
    return of(name, keys, pages, hit_policy="trailing_pages")


def ask(name: str, window: int = 1) -> PoolTransfer:
    """What SGLang asks with before it knows which pages are meant."""
    return PoolTransfer(name, ["__placeholder__"] * window, hit_policy="trailing_pages")


def store(storage: Storage, keys: list[str]) -> None:
    """Keys and values of a prompt, in the first pages of the pool."""
    assert all(storage.batch_set_v1(keys, places(*range(len(keys))), behind()))


def test_states_come_back_at_the_ends_that_have_one(make: Make) -> None:
    """Of a prompt with states behind two of its pages, the longest part that ends with one is a hit, and is loaded."""
    keys, source, target = hashes(6), MambaPoolHost(1), MambaPoolHost(2)
    first = make(MHATokenToKVPoolHost(), beside={"mamba": source})
    second = make(MHATokenToKVPoolHost(), beside={"mamba": target})
    store(first, keys)
    for page, slot in ((1, 7), (4, 3)):
        told = first.batch_set_v2([trailing("mamba", [keys[page]], [slot])], behind(*keys[:page]))
        assert told == {"mamba": [True]}

    result = second.batch_exists_v2(keys, [ask("mamba")], behind())
    assert (result.kv_hit_pages, result.extra_pool_hit_pages) == (5, {"kv": 6, "mamba": 5})
    assert second.batch_exists_v2(keys[:4], [ask("mamba")], behind()).kv_hit_pages == 2
    assert second.batch_exists_v2(keys[2:4], [ask("mamba")], behind(*keys[:2])).kv_hit_pages == 0
    assert second.batch_get_v2([trailing("mamba", [keys[4]], [9])], behind(*keys[:4])) == {"mamba": [True]}
    assert target.page(9) == source.page(3)
    assert second.batch_get_v2([trailing("mamba", [keys[2]], [9])], behind(*keys[:2])) == {"mamba": [False]}


def test_states_of_other_numbers_are_not_found(make: Make) -> None:
    """States in bfloat16 and in float16 have as many bytes, in the same places, and mean something else."""
    keys = hashes(1)
    for dtype in ("torch.bfloat16", "torch.float16"):
        storage = make(MHATokenToKVPoolHost(), beside={"mamba": MambaPoolHost(temporal_dtype=dtype)})
        store(storage, keys)
        assert storage.batch_exists_v2(keys, [ask("mamba")], behind()).kv_hit_pages == 0
        storage.batch_set_v2([trailing("mamba", keys, [0])], behind())
        assert storage.batch_exists_v2(keys, [ask("mamba")], behind()).kv_hit_pages == 1


def test_windows_come_back_whole_or_not(make: Make) -> None:
    """A prompt may end where all pages of its window are stored, whichever node of the tree they were stored for."""
    keys, source, target = hashes(6), MHATokenToKVPoolHost(1), MHATokenToKVPoolHost(2)
    first = make(MHATokenToKVPoolHost(), beside={"swa": source})
    second = make(MHATokenToKVPoolHost(), beside={"swa": target})
    store(first, keys)
    first.batch_set_v2([trailing("swa", keys[1:3], [5, 6])], behind(keys[0]))
    first.batch_set_v2([trailing("swa", keys[3:4], [7])], behind(*keys[:3]))
    first.batch_set_v2([trailing("swa", keys[5:], [8])], behind(*keys[:5]))

    result = second.batch_exists_v2(keys, [ask("swa", WINDOW)], behind())
    assert (result.kv_hit_pages, result.extra_pool_hit_pages["swa"]) == (4, 4)
    assert second.batch_exists_v2(keys, [ask("swa", 1)], behind()).kv_hit_pages == 6
    told = second.batch_get_v2([trailing("swa", keys[2:4], [1, 2])], behind(*keys[:2]))
    assert (told, [target.page(1), target.page(2)]) == ({"swa": [True, True]}, [source.page(6), source.page(7)])


def test_ranks_are_told_every_end(make: Make) -> None:
    """Where several ranks agree on an end, each of them hears of all ends that it has; one alone, of the last."""
    keys = hashes(4)
    for ranks, ends in ((1, [4]), (2, [2, 4])):
        storage = make(MHATokenToKVPoolHost(), beside={"mamba": MambaPoolHost()}, tp_size=ranks)
        store(storage, keys)
        for page in (1, 3):
            storage.batch_set_v2([trailing("mamba", [keys[page]], [page])], behind(*keys[:page]))
        assert storage.batch_exists_v2(keys, [ask("mamba")], behind()).restorable_prefix_pages == ends


def test_pool_that_needs_every_page_ends_the_hit(make: Make) -> None:
    """Of an indexer every page has to be there; its pages come back with those of keys and values."""
    keys, source, target = hashes(5), indexer(1), indexer(2)
    first = make(MHATokenToKVPoolHost(), beside={"indexer": source})
    second = make(MHATokenToKVPoolHost(), beside={"indexer": target})
    store(first, keys)
    assert first.batch_set_v2([of("indexer", keys[:3], [0, 1, 2])], behind()) == {"indexer": [True] * 3}

    result = second.batch_exists_v2(keys, [PoolTransfer("indexer")], behind())
    assert (result.kv_hit_pages, result.restorable_prefix_pages) == (3, [1, 2, 3])
    assert second.batch_exists_v2(keys[1:], [PoolTransfer("indexer")], behind(keys[0])).kv_hit_pages == 2
    told = second.batch_get_v2([of("indexer", keys[1:], [6, 7, 8, 9])], behind(keys[0]))
    assert told == {"indexer": [True, True, False, False]}
    assert [target.page(6), target.page(7)] == [source.page(1), source.page(2)]


def test_model_with_another_pool_is_refused_unless_it_is_asked_for(make: Make) -> None:
    """Nobody has proven its outputs, so whoever wants it says so; SGLang tells of the pool before it serves."""
    storage = make(MHATokenToKVPoolHost())
    with pytest.raises(ValueError, match=r"host pool 'swa' beside .* \"kvcached\": {\"side_pools\": true}"):
        storage.register_mem_host_pool_v2(MHATokenToKVPoolHost(1), "swa")


def test_refused_pool_leaves_no_session(make: Make, run_dir: Path) -> None:
    """SGLang closes no storage that refuses a pool, so that each attempt to attach it would leave sessions behind."""
    storage = make(MHATokenToKVPoolHost())
    with Admin.connect(run_dir) as admin:
        before = admin.stats().hosts
        with pytest.raises(ValueError, match=r"use no kvcached$"):
            storage.register_mem_host_pool_v2(MambaPoolHost(), "mamba")
        assert sum(host.sessions for host in admin.stats().hosts) == sum(host.sessions for host in before) - 2
    assert storage.batch_exists(hashes(1)) == 0


def test_refused_pool_of_a_running_sglang_says_what_to_do(make: Make, fake: FakeSglang) -> None:
    """SGLang takes the storage for attached, and refuses to attach another before it is detached."""
    fake.bags["memory"].hicache_storage_backend = None
    storage = make(MHATokenToKVPoolHost())
    with pytest.raises(ValueError, match="detach the storage before attaching it again"):
        storage.register_mem_host_pool_v2(MambaPoolHost(), "mamba")


def test_every_pool_has_to_agree(make: Make) -> None:
    """With several pools a prompt ends where all of them let it, though each alone would let it end later."""
    keys = hashes(6)
    beside = {"mamba": MambaPoolHost(), "swa": MHATokenToKVPoolHost(1), "indexer": indexer()}
    storage = make(MHATokenToKVPoolHost(), beside=beside)
    store(storage, keys)
    storage.batch_set_v2([of("indexer", keys[:5], [*range(5)])], behind())
    for page in (1, 3, 4):
        storage.batch_set_v2([trailing("mamba", [keys[page]], [page])], behind(*keys[:page]))
    storage.batch_set_v2([trailing("swa", keys[:4], [*range(4)])], behind())
    asked = [ask("mamba"), ask("swa", WINDOW), PoolTransfer("indexer")]
    result = storage.batch_exists_v2(keys, asked, behind())
    assert (result.kv_hit_pages, result.restorable_prefix_pages) == (4, [2, 4])
    assert result.extra_pool_hit_pages == {"kv": 6, "indexer": 5, "mamba": 5, "swa": 4}
    assert storage.batch_exists_v2(hashes(6, "other"), asked, behind()).kv_hit_pages == 0


def test_states_are_each_ranks_own(make: Make) -> None:
    """With latent attention ranks share keys and values and what belongs to them, but no states."""
    keys, both = hashes(2), {"mamba": MambaPoolHost(), "indexer": indexer()}
    first, second = (
        make(MHATokenToKVPoolHost(), beside=both, tp_size=2, tp_rank=rank, is_mla_model=True) for rank in range(2)
    )
    store(first, keys)
    first.batch_set_v2([trailing("mamba", keys[1:], [1]), of("indexer", keys, [0, 1])], behind(keys[0]))
    first.batch_set_v2([of("indexer", keys, [0, 1])], behind())
    assert second.batch_exists_v2(keys, [PoolTransfer("indexer")], behind()).kv_hit_pages == 2
    assert second.batch_exists_v2(keys, [ask("mamba")], behind()).kv_hit_pages == 0
    assert first.batch_exists_v2(keys, [ask("mamba")], behind()).kv_hit_pages == 2


def test_clear_and_new_weights_are_for_all_pools(make: Make) -> None:
    """What is cleared, and what was stored before weights were replaced, is found in no pool."""
    keys = hashes(1)
    storage = make(MHATokenToKVPoolHost(), beside={"mamba": MambaPoolHost()})
    for forget in (storage.clear, replace_weights, replace_weights):
        store(storage, keys)
        storage.batch_set_v2([trailing("mamba", keys, [0])], behind())
        assert storage.batch_exists_v2(keys, [ask("mamba")], behind()).kv_hit_pages == 1
        forget()
        store(storage, keys)
        assert storage.batch_exists_v2(keys, [ask("mamba")], behind()).kv_hit_pages == 0


def test_what_sglang_cannot_mean_is_not_stored(make: Make) -> None:
    """Places that are not one for each page, none at all, and prefixes that are not told, store and load nothing."""
    keys, storage = hashes(2), make(MHATokenToKVPoolHost(), beside={"mamba": MambaPoolHost()})
    short, none = trailing("mamba", keys, [0]), PoolTransfer("mamba", keys, None, "trailing_pages")
    for wrong in (short, none):
        assert storage.batch_set_v2([wrong], behind()) == {"mamba": [False, False]}
        assert storage.batch_get_v2([wrong], behind()) == {"mamba": [False, False]}
    assert storage.batch_set_v2([trailing("mamba", keys, [0, 1])], None) == {"mamba": [False, False]}
    assert storage.batch_set_v2([of("other", keys, [0, 1])], behind()) == {"other": [False, False]}
    store(storage, keys)
    assert storage.batch_exists_v2(keys, [PoolTransfer("other")], behind()).kv_hit_pages == 0


@pytest.mark.parametrize(
    ("name", "pool", "words"),
    [
        ("deepseek_v4_c4", MHATokenToKVPoolHost(), "is not served here: no pool would be"),
        ("mamba", MHATokenToKVPoolHost(), "MHATokenToKVPoolHost is not served here: MambaPoolHost would be"),
        ("mamba", MambaPoolHost(pages=2), "too small"),
    ],
)
def test_pools_that_are_not_served_are_refused(make: Make, name: str, pool: Any, words: str) -> None:
    """SGLang does not start with a pool of which it is not known what its pages hold."""
    with pytest.raises(ValueError, match=words):
        make(MHATokenToKVPoolHost(), beside={name: pool})


def test_pool_that_tells_no_places_is_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """States with more beside them than SGLang tells storages are refused, with its words."""

    def refuse(_: Any, __: Any) -> Any:
        raise NotImplementedError("side states are not carried")

    monkeypatch.setattr(MambaPoolHost, "get_page_buffer_meta", refuse)
    with pytest.raises(ValueError, match="side states are not carried"):
        make(MHATokenToKVPoolHost(), beside={"mamba": MambaPoolHost()})
