"""What SGLang loads, on a real daemon, with as much of SGLang as it sees."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvcached_client.engines import one_process
from kvcached_client.engines.one_process import OneProcessEngine
from kvcached_client.offload_shard import OffloadShard
from kvcached_client.protocol.fields import BLOCKS_PER_MESSAGE_MAX, TOKENS_PER_MESSAGE_MAX
from kvcached_client.sglang.host_pages import pages_of
from kvcached_client.sglang.page_store import PageStore
from tests.project.daemon_process import running_daemon
from tests.sglang import fake_sglang
from tests.sglang.conftest import CONFIG, Make
from tests.sglang.fake_sglang import (
    FakeSglang,
    MHATokenToKVPoolHost,
    PoolTransfer,
    UnifiedRadixCache,
    behind,
    hashes,
    places,
)


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "layer_first"])
def test_pages_come_back_as_they_were(make: Make, layout: str) -> None:
    """Another process gets the same bytes into pages elsewhere in its pool, from the first page that is asked for."""
    keys, source, target = hashes(4), MHATokenToKVPoolHost(1, layout=layout), MHATokenToKVPoolHost(2, layout=layout)
    first, second = make(source), make(target)
    assert first.batch_exists(keys) == 0
    assert first.batch_set_v1(keys, places(7, 2, 3, 19), behind()) == [True] * 4
    assert second.batch_exists([*keys, *hashes(1, "other")]) == 4
    assert second.batch_exists(keys[2:], behind(*keys[:2])) == 2
    assert second.batch_get_v1(keys[1:], places(5, 6, 11), behind(keys[0])) == [True] * 3
    assert [target.page(page) for page in (5, 6, 11)] == [source.page(page) for page in (2, 3, 19)]
    untouched = MHATokenToKVPoolHost(2, layout=layout)
    assert [target.page(page) for page in (0, 7)] == [untouched.page(page) for page in (0, 7)]


def test_layouts_share_nothing(make: Make) -> None:
    """Pages of another order of bytes, or of other weights, are not found."""
    keys = hashes(2)
    make(MHATokenToKVPoolHost()).batch_set_v1(keys, places(0, 1), behind())
    assert make(MHATokenToKVPoolHost(layout="layer_first")).batch_exists(keys) == 0
    assert make(MHATokenToKVPoolHost()).batch_exists(keys) == 2


@pytest.mark.parametrize("device_layout", ["hnd", "vectorized_5d"])
def test_layouts_on_the_device_share_nothing(make: Make, device_layout: str) -> None:
    """SGLang copies rows of its device pool as they are, so that heads and tokens change places in other layouts."""
    keys = hashes(2)
    make(MHATokenToKVPoolHost()).batch_set_v1(keys, places(0, 1), behind())
    other = make(MHATokenToKVPoolHost(device_layout=device_layout))
    assert other.batch_exists(keys) == 0
    assert other.batch_set_v1(keys, places(0, 1), behind()) == [True, True]
    assert make(MHATokenToKVPoolHost(device_layout=device_layout)).batch_exists(keys) == 2
    assert make(MHATokenToKVPoolHost()).batch_exists(keys) == 2


def test_usual_layout_on_the_device_is_not_described() -> None:
    """Pages of pools that say nothing of the device are those of pools in SGLang's usual layout."""
    said, unsaid = MHATokenToKVPoolHost(), MHATokenToKVPoolHost()
    del unsaid._buffer_infos
    assert pages_of(said).fingerprint == pages_of(unsaid).fingerprint


def test_ranks_share_nothing_unless_they_hold_the_same(make: Make) -> None:
    """Each rank finds its own part of the heads; with latent attention all ranks find what the first has stored."""
    keys, pool = hashes(2), MHATokenToKVPoolHost()
    make(pool, tp_size=2).batch_set_v1(keys, places(0, 1), behind())
    assert make(pool, tp_size=2).batch_exists(keys) == 2
    assert make(pool, tp_size=2, tp_rank=1).batch_exists(keys) == 0
    assert make(pool).batch_exists(keys) == 0
    make(pool, tp_size=2, is_mla_model=True).batch_set_v1(keys, places(0, 1), behind())
    assert make(pool, tp_size=4, tp_rank=3, is_mla_model=True).batch_exists(keys) == 2


def test_other_models_find_nothing(make: Make, fake: FakeSglang) -> None:
    """One byte of the weights, or one setting, makes another model; how it was loaded and where from does not."""
    keys, pool = hashes(2), MHATokenToKVPoolHost()
    make(pool).batch_set_v1(keys, places(0, 1), behind())
    model = Path(fake.bags["model"].model_path)
    fake.bags["model"].model_path = str(model.rename(model.with_name("elsewhere")))
    fake.bags["model"].weight_loader_disable_mmap = True
    fake.bags["model"].context_length = 100
    fake.config["_name_or_path"] = "elsewhere"
    assert make(pool).batch_exists(keys) == 2
    fake.bags["model"].quantization = "fp8"
    assert make(pool).batch_exists(keys) == 0
    fake.bags["model"].quantization = None
    weight_file = model.with_name("elsewhere") / "model.safetensors"
    weight_file.write_bytes(weight_file.read_bytes()[:-1] + b"?")
    assert make(pool).batch_exists(keys) == 0


def test_pages_behind_missing_ones_are_not_stored(make: Make) -> None:
    """The daemon keeps no page whose prefix it has not; SGLang is told that nothing was stored."""
    keys, storage = hashes(4), make(MHATokenToKVPoolHost())
    assert storage.batch_set_v1(keys[2:], places(2, 3), behind(*keys[:2])) == [False, False]
    assert storage.batch_set_v1(keys[:2], places(0, 1), behind()) == [True, True]
    assert storage.batch_set_v1(keys[2:], places(2, 3), behind(*keys[:2])) == [True, True]
    assert storage.batch_set_v1(keys[1:3], places(1, 2), behind(keys[0])) == [True, True]  # they are there


def test_sglang_that_names_no_prefixes_is_told_once(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """Without the key in SGLang's configuration nothing is stored, and the log says which key is missing."""
    keys, storage = hashes(1), make(MHATokenToKVPoolHost())
    for _ in range(2):
        assert storage.batch_set_v1(keys, places(0), SimpleNamespace(prefix_keys=None)) == [False]
    (record,) = [each for each in caplog.records if "hicache_storage_pass_prefix_keys" in each.message]
    assert record.levelno == logging.ERROR


def test_clear_is_for_all(make: Make) -> None:
    """Nobody with the model finds what was stored before; what is stored later is found."""
    keys, first, second = hashes(2), make(MHATokenToKVPoolHost()), make(MHATokenToKVPoolHost())
    first.batch_set_v1(keys, places(0, 1), behind())
    second.clear()
    assert first.batch_exists(keys) == 0
    assert first.batch_set_v1(keys, places(0, 1), behind()) == [True, True]
    assert second.batch_exists(keys) == 2


def test_clear_that_nobody_hears_is_made_up_for(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang finds nothing until the daemon has been told, as it reports to the user that everything was cleared."""
    keys, storage = hashes(2), make(MHATokenToKVPoolHost())
    storage.batch_set_v1(keys, places(0, 1), behind())
    with monkeypatch.context() as patch:
        patch.setattr(PageStore, "clear", lambda _: False)
        storage.clear()
        assert storage.batch_exists(keys) == 0
        assert storage.batch_set_v1(keys, places(0, 1), behind()) == [False, False]
    assert caplog.text.count("nothing is cleared yet") == 1
    assert storage.batch_exists(keys) == 0
    assert storage.batch_set_v1(keys, places(0, 1), behind()) == [True, True]
    assert storage.batch_exists(keys) == 2


def test_sglang_asks_with_whole_prefixes(make: Make) -> None:
    """SGLang's own prefix leaves out the last node that a prompt shares with its tree; the hook puts it in."""
    make(MHATokenToKVPoolHost())
    tree = UnifiedRadixCache(["a", "b"], ["c"])
    tree.prefetch_from_storage("request", 2, [1, 2, 3], "c", ["a", "b"])
    assert tree.told == ["a", "b", "c"]
    tree.prefetch_from_storage("request", 0, [1, 2, 3])
    assert tree.told == []


@pytest.mark.parametrize("pool_transfers", [[], [PoolTransfer("swa", hashes(1))]])
def test_decoding_sglang_is_promised_nothing(
    make: Make, caplog: pytest.LogCaptureFixture, pool_transfers: list[PoolTransfer]
) -> None:
    """The scheduler of an SGLang that decodes, which ends requests without their pages, finds none; threads do."""
    keys, storage = hashes(2), make(MHATokenToKVPoolHost())
    storage.batch_set_v1(keys, places(0, 1), behind())
    tree = UnifiedRadixCache()
    tree.storage, tree.pool_transfers = storage, pool_transfers
    assert [tree.query_storage_hit_length(0, keys, cache_salt="salt") for _ in range(3)] == [0, 0, 0]
    assert caplog.text.count("stores pages here, but finds none") == 1
    assert storage.batch_exists(keys) == 2


def test_scheduler_is_answered_without_the_daemon(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the scheduler itself asks waits neither for the daemon nor for its storage."""
    storage = make(MHATokenToKVPoolHost())
    tree = UnifiedRadixCache()
    tree.storage = storage
    with monkeypatch.context() as patch:
        patch.setattr(OneProcessEngine, "guarded", None)
        assert tree.query_storage_hit_length(0, hashes(2)) == 0


@pytest.mark.parametrize(("version", "warnings"), [("0.5.23", 0), ("0.5.24", 1)])
def test_versions_that_were_not_tested_are_told(
    make: Make, fake: FakeSglang, caplog: pytest.LogCaptureFixture, version: str, warnings: int
) -> None:
    """Another version is served if it has what is needed, and the log says that it was not tested."""
    fake.version = version
    make(MHATokenToKVPoolHost())
    assert caplog.text.count("was tested with 0.5.23") == warnings


def test_sglang_without_what_is_needed_is_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version whose functions have other names or arguments is not served."""
    with monkeypatch.context() as patch:
        patch.delattr(UnifiedRadixCache, "query_storage_hit_length")
        with pytest.raises(ValueError, match=r"this version of SGLang is not served: .*query_storage_hit_length"):
            make(MHATokenToKVPoolHost())
    with monkeypatch.context() as patch:
        patch.setattr(UnifiedRadixCache, "prefetch_from_storage", lambda self, node: None)
        with pytest.raises(ValueError, match="has other arguments"):
            make(MHATokenToKVPoolHost())
        patch.delattr(UnifiedRadixCache, "prefetch_from_storage")
        with pytest.raises(ValueError, match="this version of SGLang is not served"):
            make(MHATokenToKVPoolHost())


def test_daemon_that_comes_and_goes(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a daemon every page is a miss; one that comes is used, and nothing fails when it is killed."""
    monkeypatch.setattr(one_process, "RETRY_S", 0.0)
    keys, directory = hashes(2), tmp_path / "run"
    storage = make(MHATokenToKVPoolHost(), directory)
    for _ in range(2):
        assert storage.batch_exists(keys) == 0
        assert storage.batch_set_v1(keys, places(0, 1), behind()) == [False, False]
        assert storage.batch_get_v1(keys, places(0, 1), behind()) == [False, False]
        storage.clear()
        with running_daemon(CONFIG, directory) as daemon:
            assert storage.batch_set_v1(keys, places(0, 1), behind()) == [True, True]
            assert storage.batch_get_v1(keys, places(2, 3), behind()) == [True, True]
            daemon.kill()


def test_damaged_page_ends_what_is_loaded(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages before one that differs from what was stored count, it and those behind it do not."""
    keys, load, storage = hashes(5), OffloadShard.load, make(MHATokenToKVPoolHost())
    storage.batch_set_v1(keys, places(*range(5)), behind())
    monkeypatch.setattr(OffloadShard, "load", lambda shard, job: [*load(shard, job), 2, 3])
    told = storage.batch_get_v1(keys[1:], places(6, 7, 8, 9), behind(keys[0]))
    assert told == [True, True, False, False]


def test_refused_request_keeps_the_session(make: Make) -> None:
    """A request that the daemon refuses is a miss, and the next one is served at once."""
    keys, storage = hashes(2), make(MHATokenToKVPoolHost())
    storage.batch_set_v1(keys, places(0, 1), behind())
    storage._pages._pages_max += 1
    assert storage.batch_exists(hashes(BLOCKS_PER_MESSAGE_MAX + 1)) == 0
    assert storage.batch_exists(keys) == 2


@pytest.mark.parametrize("page_size", [1, 64])
def test_long_prompts_find_their_beginning(make: Make, monkeypatch: pytest.MonkeyPatch, page_size: int) -> None:
    """Of a prompt with more pages or more tokens than a message may have, what a message has room for is served."""
    monkeypatch.setattr(fake_sglang, "PAGE_SIZE", page_size)
    served = min(BLOCKS_PER_MESSAGE_MAX, TOKENS_PER_MESSAGE_MAX // page_size)
    keys, storage = hashes(served + 10), make(MHATokenToKVPoolHost())
    three = places(0, 1, 2, size=page_size)
    assert storage.batch_set_v1(keys[:3], three, behind()) == [True] * 3
    assert storage.batch_exists(keys) == 3
    assert storage.batch_exists(keys[2:], behind(*keys[:2])) == 1
    assert storage.batch_get_v1(keys, places(*range(served + 10), size=page_size), behind())[:4] == [*[True] * 3, False]
    for call in (storage.batch_set_v1, storage.batch_get_v1):
        assert call(keys[-3:], three, behind(*keys[:-3])) == [False] * 3


@pytest.mark.parametrize("policy", ["write_through_selective", "never"])
def test_pages_that_the_daemon_does_not_copy_are_not_stored(make: Make, tmp_path: Path, policy: str) -> None:
    """SGLang is told which pages are stored, and not which the daemon has seen and left out for its policy."""
    config = tmp_path / "policy.toml"
    config.write_text(f'{CONFIG.read_text()}write_policy = "{policy}"\n')
    keys, pool = hashes(4), places(0, 1, 2, 3)
    with running_daemon(config, tmp_path / "run"):
        storage = make(MHATokenToKVPoolHost(), tmp_path / "run")
        assert storage.batch_set_v1(keys, pool, behind()) == [False] * 4
        again = storage.batch_set_v1(keys, pool, behind())
        assert again == [policy == "write_through_selective"] * 4
        assert storage.batch_exists(keys) == sum(again)


def test_gap_before_pages_is_told_once(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """If SGLang stores ends before beginnings, which it may be told while it runs, one warning says why none stays."""
    keys, storage = hashes(4), make(MHATokenToKVPoolHost())
    for page in (3, 2, 1):
        assert storage.batch_set_v1(keys[page : page + 1], places(page), behind(*keys[:page])) == [False]
    (record,) = [each for each in caplog.records if "has 0 of the 3 pages before them" in each.message]
    assert (record.levelno, "write_back" in record.message) == (logging.WARNING, True)


def test_no_room_is_told(make: Make, tmp_path: Path) -> None:
    """Pages for which the daemon has no room are not stored; those before them are."""
    config = tmp_path / "small.toml"
    config.write_text('[host]\nsize_bytes = "64KiB"\nslab_bytes = "64KiB"\n\n[offload]\nnamespaces_max = 1\n')
    with running_daemon(config, tmp_path / "run"):
        storage = make(MHATokenToKVPoolHost(), tmp_path / "run")
        told = storage.batch_set_v1(hashes(20), places(*range(20)), behind())
        assert 0 < sum(told) < 20
        assert told == sorted(told, reverse=True)
        assert storage.batch_exists(hashes(20)) == sum(told)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({}, '"interface_v1": 1'),
        ({"interface_v1": 1, "kvcached": {"runs": "x"}}, "unknown field `runs`"),
        ({"interface_v1": 1, "kvcached": {"deadline_ms": 0}}, "deadline_ms is 0"),
        ({"interface_v1": 1, "kvcached": {"deadline_ms": 2001}}, "give 1 to 2000"),
    ],
)
def test_configurations_that_cannot_work_are_refused(make: Make, extra: dict[str, Any], words: str) -> None:
    """SGLang does not start, and its log says what to change."""
    with pytest.raises(ValueError, match=words):
        make(MHATokenToKVPoolHost(), extra_config=extra)


@pytest.mark.parametrize(
    ("group", "name", "value", "words"),
    [
        ("spec", "speculative_algorithm", "EAGLE", "leave out --speculative-algorithm"),
        ("memory", "hicache_write_policy", "write_back", "leave out --hicache-write-policy"),
        ("memory", "hicache_host_memory_mode", "buffer_only", "leave out --hicache-host-memory-mode"),
        (
            *("disagg", "disaggregation_decode_enable_offload_kvcache", True),
            "leave out --disaggregation-decode-enable-offload-kvcache",
        ),
    ],
)
def test_settings_with_which_nothing_is_found_are_refused(
    make: Make, fake: FakeSglang, group: str, name: str, value: object, words: str
) -> None:
    """SGLang does not start with settings with which it would store for nothing, and its log names the option."""
    setattr(fake.bags[group], name, value)
    with pytest.raises(ValueError, match=words):
        make(MHATokenToKVPoolHost())


def test_models_that_cannot_be_served_are_refused(make: Make, fake: FakeSglang) -> None:
    """Other pools and layouts, and weights nobody can identify."""
    with pytest.raises(ValueError, match="page_head is not served"):
        make(MHATokenToKVPoolHost(layout="page_head"))
    with pytest.raises(ValueError, match="too small"):
        make(MHATokenToKVPoolHost(pages=2))
    with pytest.raises(ValueError, match="FakePool is not served"):
        make(type("FakePool", (MHATokenToKVPoolHost,), {})())
    fake.bags["model"].model_path = "org/model"
    with pytest.raises(ValueError, match="no weight files of org/model"):
        make(MHATokenToKVPoolHost())
