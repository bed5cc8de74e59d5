"""Pages of weights that are not those of the files, on a real daemon, with as much of SGLang as a storage sees."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcached_client import Admin
from kvcached_client.sglang import hooks, loaded_weights
from kvcached_client.sglang.page_store import PageStore
from tests.project.daemon_process import running_daemon
from tests.sglang.conftest import CONFIG, Make
from tests.sglang.fake_sglang import (
    FakeSglang,
    MHATokenToKVPoolHost,
    PoolTransfer,
    UnifiedRadixCache,
    WeightChecker,
    WeightUpdater,
    behind,
    hashes,
    places,
    replace_weights,
    resume_memory,
)

#: As it is: the tests put another in its place.
BEGAN_NS = loaded_weights.process_began_ns
Update = Callable[[WeightUpdater], Any]
UPDATES: list[Update] = [
    lambda updater: updater.begin_weight_update(),
    lambda updater: updater.end_weight_update(run_post_load=True),
    lambda updater: updater.update_weights_from_disk("elsewhere", "auto"),
    lambda updater: updater.update_weights_from_ipc("request"),
    lambda updater: updater.update_weights_from_tensor([]),
    lambda updater: updater.load_weights_from_distributed([]),
    lambda _: WeightChecker()._reset_tensors(),
    lambda _: resume_memory("weights"),
]


def store(storage: Any, keys: list[str]) -> None:
    assert storage.batch_set_v1(keys, places(*range(len(keys))), behind()) == [True] * len(keys)


def weight_file(fake: FakeSglang) -> Path:
    return Path(fake.bags["model"].model_path) / "model.safetensors"


def namespaces(run_dir: Path) -> dict[str, int]:
    """Sessions by id of the namespace."""
    with Admin.connect(run_dir) as admin:
        return {host.namespace: host.sessions for host in admin.stats().hosts}


def test_replaced_weights_share_nothing(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """When weights in memory are replaced, SGLang finds neither its own pages of before nor anybody else's."""
    keys, pool = hashes(2), MHATokenToKVPoolHost()
    storage, other = make(pool), make(pool)
    store(storage, keys)
    for _ in range(2):
        replace_weights()
        assert storage.batch_exists(keys) == 0
        store(storage, keys)
        assert storage.batch_exists(keys) == 2
    new = hashes(2, "new")
    store(storage, new)
    assert (other.batch_exists(new), make(pool).batch_exists(new)) == (0, 0)
    assert make(pool).batch_exists(keys) == 2  # of before: the files are the same
    assert "weights were replaced in memory" in caplog.text


@pytest.mark.parametrize("update", UPDATES)
def test_every_way_to_replace_weights_counts(make: Make, update: Update) -> None:
    """It makes no difference who writes weights, and whether SGLang says that it failed, or raises."""
    keys, storage = hashes(2), make(MHATokenToKVPoolHost())
    store(storage, keys)
    with contextlib.suppress(NotImplementedError):
        update(WeightUpdater())
    assert storage.batch_exists(keys) == 0


@pytest.mark.parametrize(("tag", "is_copy_kept"), [("kv_cache", False), ("weights", True)])
def test_memory_that_comes_back_with_the_same_weights_changes_nothing(
    make: Make, fake: FakeSglang, tag: str, is_copy_kept: bool
) -> None:
    """Memory of other kinds has no weights; of weights, SGLang may keep a copy while their memory is given back."""
    fake.bags["exec"].features.enable_weights_cpu_backup = is_copy_kept
    keys, storage = hashes(2), make(MHATokenToKVPoolHost())
    store(storage, keys)
    resume_memory(tag)
    assert storage.batch_exists(keys) == 2
    assert make(MHATokenToKVPoolHost()).batch_exists(keys) == 2


def test_old_pages_that_are_stored_before_sglang_drops_them_are_not_found(make: Make) -> None:
    """SGLang may store pages of the former weights until it drops its own, which need not be at once."""
    keys, storage = hashes(2), make(MHATokenToKVPoolHost())
    replace_weights()
    store(storage, keys)
    UnifiedRadixCache().reset()
    assert storage.batch_exists(keys) == 0
    store(storage, keys)
    UnifiedRadixCache().reset()
    assert storage.batch_exists(keys) == 2


def test_every_storage_of_a_process_forgets(make: Make) -> None:
    """SGLang may have two at a time: both are told of new weights."""
    keys, pool = hashes(2), MHATokenToKVPoolHost()
    both = make(pool), make(pool, is_attached=True)
    store(both[0], keys)
    assert [each.batch_exists(keys) for each in both] == [2, 2]
    replace_weights()
    assert [each.batch_exists(keys) for each in both] == [0, 0]


def test_storage_that_is_attached_again_shares_nothing_after_new_weights(make: Make) -> None:
    """Detaching the storage and attaching it does not bring back what the weight files stand for."""
    keys, pool = hashes(2), MHATokenToKVPoolHost()
    storage = make(pool)
    store(storage, keys)
    storage.close()
    again = make(pool, is_attached=True)
    assert again.batch_exists(keys) == 2  # the weights are the same
    again.close()
    replace_weights()
    third = make(pool, is_attached=True)
    assert third.batch_exists(keys) == 0
    new = hashes(2, "new")
    store(third, new)
    assert make(pool).batch_exists(new) == 0


def test_storage_that_is_attached_again_knows_the_files_that_were_loaded(make: Make, fake: FakeSglang) -> None:
    """Files that are replaced on disk while SGLang runs are not those in its memory."""
    keys, pool = hashes(2), MHATokenToKVPoolHost()
    make(pool).close()
    loaded = list(hooks._loaded)
    weight_file(fake).write_bytes(b"of another step")
    store(make(pool), keys)
    hooks._loaded[:] = loaded
    assert make(pool, is_attached=True).batch_exists(keys) == 0


def test_storage_that_is_attached_late_shares_nothing(
    make: Make, fake: FakeSglang, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody knows whether weights were replaced while SGLang ran without the storage, and the log says so."""
    keys, pool = hashes(2), MHATokenToKVPoolHost()
    store(make(pool), keys)
    fake.bags["memory"].hicache_storage_backend = None
    late = make(pool)
    assert late.batch_exists(keys) == 0
    store(late, keys)
    assert late.batch_exists(keys) == 2
    assert "attached to a running SGLang" in caplog.text


def test_files_that_changed_since_the_start_are_not_trusted(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They may have been loaded before they changed: SGLang shares nothing until its next start."""
    keys, pool = hashes(2), MHATokenToKVPoolHost()
    with monkeypatch.context() as patch:
        patch.setattr(loaded_weights, "process_began_ns", lambda: 0)
        storage = make(pool)
        store(storage, keys)
        assert (storage.batch_exists(keys), make(pool).batch_exists(keys)) == (2, 0)
    assert make(pool).batch_exists(keys) == 0
    assert "weight files have changed since SGLang was started" in caplog.text


def test_start_of_the_process_is_on_the_clock_of_files(tmp_path: Path) -> None:
    """What is written now has changed after this process began, by its age."""
    file = tmp_path / "file"
    file.write_bytes(b"")
    age_s = (file.stat().st_ctime_ns - BEGAN_NS()) / 1e9
    assert 0 < age_s < 3600


def test_updates_in_a_row_cost_one_namespace(make: Make, tmp_path: Path) -> None:
    """However many updates there are, the daemon has the namespace of the files and one more."""
    directory, keys = tmp_path / "run", hashes(2)
    with running_daemon(CONFIG, directory):
        storage = make(MHATokenToKVPoolHost(), directory)
        store(storage, keys)
        for _ in range(3):
            for _ in range(8):
                replace_weights()
            assert storage.batch_exists(keys) == 0
            store(storage, keys)
        assert len(namespaces(directory)) == 2


def cached(run_dir: Path) -> int:
    """Pages in all namespaces."""
    with Admin.connect(run_dir) as admin:
        return sum(host.states["cached"] for host in admin.stats().hosts)


def test_pages_that_nobody_can_find_are_dropped(make: Make, tmp_path: Path) -> None:
    """A storage that is detached after new weights leaves no pages of any pool in the daemon; others leave theirs."""
    directory, keys = tmp_path / "run", hashes(2)
    with running_daemon(CONFIG, directory):
        for is_replaced, left in ((True, 0), (False, 4)):
            storage = make(MHATokenToKVPoolHost(), directory, beside={"swa": MHATokenToKVPoolHost()})
            if is_replaced:
                replace_weights()
            store(storage, keys)
            window = PoolTransfer("swa", keys, places(0, 1), "trailing_pages")
            assert storage.batch_set_v2([window], behind()) == {"swa": [True, True]}
            assert cached(directory) == 4
            storage.close()
            assert cached(directory) == left


def test_pages_of_a_call_under_way_are_dropped_with_it(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a call stores of replaced weights while the storage is detached is dropped when the call ends."""
    directory, keys = tmp_path / "run", hashes(2)
    store_now = PageStore.store

    def late(pages: PageStore, *args: Any) -> int:
        storage.close()
        return store_now(pages, *args)

    with running_daemon(CONFIG, directory):
        storage = make(MHATokenToKVPoolHost(), directory)
        replace_weights()
        monkeypatch.setattr(PageStore, "store", late)
        store(storage, keys)
        assert cached(directory) == 0


def test_call_under_way_keeps_its_pages_to_itself(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that a call stores of weights that are replaced meanwhile are not found, though it ends later."""
    keys, storage = hashes(2), make(MHATokenToKVPoolHost())
    replace_weights()
    store(storage, hashes(1, "first"))  # the namespace is one that could be cleared

    store_now = PageStore.store

    def late(pages: PageStore, *args: Any) -> int:
        monkeypatch.setattr(PageStore, "store", store_now)
        replace_weights()
        assert storage.batch_exists(keys) == 0
        return store_now(pages, *args)

    monkeypatch.setattr(PageStore, "store", late)
    store(storage, keys)
    assert storage.batch_exists(keys) == 0


def test_daemon_that_confirms_no_clear_gets_another_namespace(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the daemon's word that old pages are gone, others than these are looked for."""
    keys, storage = hashes(2), make(MHATokenToKVPoolHost())
    replace_weights()
    store(storage, keys)
    monkeypatch.setattr(PageStore, "clear", lambda _: False)
    replace_weights()
    assert storage.batch_exists(keys) == 0


def test_new_weights_do_not_make_a_clear_forgotten(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clear that the daemon has not heard of is made up for on the pages that it was of, not on those after them."""
    keys, storage = hashes(2), make(MHATokenToKVPoolHost())
    store(storage, keys)
    with monkeypatch.context() as patch:
        patch.setattr(PageStore, "clear", lambda _: False)
        storage.clear()
        replace_weights()
        assert storage.batch_exists(keys) == 0
        assert make(MHATokenToKVPoolHost()).batch_exists(keys) == 2
        store(storage, keys)  # in a namespace of its own
    assert storage.batch_exists(keys) == 2
    assert make(MHATokenToKVPoolHost()).batch_exists(keys) == 0
    assert not storage._owed_clears._owed


def test_closed_storage_stays_closed(make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """After it is detached, new weights and late calls connect it to no daemon."""
    directory, keys = tmp_path / "run", hashes(1)
    with running_daemon(CONFIG, directory):
        storage = make(MHATokenToKVPoolHost(), directory)
        storage.close()
        caplog.set_level(logging.DEBUG)
        replace_weights()
        assert storage.batch_exists(keys) == 0
        assert storage.batch_set_v1(keys, places(0), behind()) == [False]
        assert list(namespaces(directory).values()) == [0]
