"""A daemon that is stopped, and answers nothing: how often it is waited for, whatever SGLang has on it."""

from __future__ import annotations

import logging
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcached_client.engines import one_process
from kvcached_client.offload import OffloadClient
from tests.project.daemon_process import running_daemon
from tests.sglang.conftest import CONFIG, Make
from tests.sglang.fake_sglang import MambaPoolHost, MHATokenToKVPoolHost, PoolTransfer, behind, hashes, places

KEYS = hashes(4)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a daemon was asked for something, by name of the call. Each may be waited for."""
    asked: Counter[str] = Counter()
    for name in ("connect", "acquire", "match", "prefetch", "prepare_store", "clear", "_saying_goodbye"):
        _count(monkeypatch, name, asked)
    monkeypatch.setattr(one_process, "RETRY_S", 600.0)
    return asked


def _count(patch: pytest.MonkeyPatch, name: str, asked: Counter[str]) -> None:
    call: Any = getattr(OffloadClient, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        asked[name] += 1
        return call(*args, **kwargs)

    patch.setattr(OffloadClient, name, counted)


@pytest.fixture
def storage(make: Make, tmp_path: Path, asked: Counter[str]) -> Iterator[Any]:
    """Of a model with three pools, each of which is in use; its daemon is stopped."""
    with running_daemon(CONFIG, tmp_path / "run") as daemon:
        pools = {"swa": MHATokenToKVPoolHost(), "mamba": MambaPoolHost()}
        table = {"run_dir": str(tmp_path / "run"), "side_pools": True}
        storage = make(MHATokenToKVPoolHost(), beside=pools, extra_config={"interface_v1": 1, "kvcached": table})
        assert _stored(storage) == 4 + 2 + 1
        assert storage.batch_exists(KEYS) == 4
        asked.clear()
        daemon.send_signal(signal.SIGSTOP)
        try:
            yield storage
            storage.close()
        finally:
            daemon.send_signal(signal.SIGCONT)
        assert asked["_saying_goodbye"] == 0


def _stored(storage: Any) -> int:
    """How many pages of all pools are stored."""
    window = PoolTransfer("swa", KEYS[-2:], places(0, 1), "trailing_pages")
    state = PoolTransfer("mamba", KEYS[-1:], places(3, size=1), "trailing_pages")
    beside = storage.batch_set_v2([window, state], behind())
    told = [*beside.values(), storage.batch_set_v1(KEYS, places(0, 1, 2, 3), behind())]
    return sum(map(sum, told))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The beginnings of what was warned of since this was asked last."""
    told = [each.getMessage()[:36] for each in caplog.records if each.levelno >= logging.WARNING]
    caplog.clear()
    return told


def test_lost_daemon_is_told_once(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All pools, and what looks up and what copies in each, tell of a daemon together: when it is lost, and is back."""
    monkeypatch.setattr(one_process, "RETRY_S", 0.0)
    directory, lost, back = tmp_path / "run", "kvcached: nothing is stored or loade", "kvcached: the daemon is back"
    pools = {"swa": MHATokenToKVPoolHost(), "mamba": MambaPoolHost()}
    with running_daemon(CONFIG, directory):
        storage = make(MHATokenToKVPoolHost(), directory, beside=pools)
        assert _stored(storage) == 4 + 2 + 1
        assert not warnings(caplog)
    for _ in range(2):
        assert (storage.batch_exists(KEYS), _stored(storage)) == (0, 0)
    assert warnings(caplog) == [lost]
    with running_daemon(CONFIG, directory):
        assert _stored(storage) == 4 + 2 + 1
        assert storage.batch_exists(KEYS) == 4
        assert warnings(caplog) == [back]
    assert storage.batch_exists(KEYS) == 0
    with running_daemon(CONFIG, directory):
        assert storage.batch_exists(KEYS) == 0
        assert _stored(storage) < 4 + 2 + 1  # in sessions of the daemon before
        assert _stored(storage) == 4 + 2 + 1
        assert warnings(caplog) == [lost, back]


def test_look_up_waits_for_one_answer(storage: Any, asked: Counter[str]) -> None:
    """SGLang's thread is busy for one deadline, and not for that of a goodbye as well."""
    assert storage.batch_exists(KEYS) == 0
    assert asked == {"match": 1}


def test_pools_wait_for_one_answer_together(storage: Any, asked: Counter[str]) -> None:
    """SGLang ends itself if a thread is busy for ten seconds: what one pool has waited for, no other waits for."""
    assert _stored(storage) == 0
    assert storage.batch_exists(KEYS) == 0
    storage.clear()
    assert asked == {"acquire": 1}


def test_sessions_that_were_not_asked_are_used_again(
    storage: Any, asked: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the daemon is asked again, the engine that did not wait goes on in the session that it had."""
    assert storage.batch_exists(KEYS) == 0
    monkeypatch.setattr(storage._silence, "ends_at_s", 0.0)
    assert _stored(storage) == 0
    assert asked == {"match": 1, "acquire": 1}


def test_detached_storage_waits_for_one_answer(
    storage: Any, asked: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages that nobody can find any more are dropped when the storage is detached, but for no more than a deadline."""
    monkeypatch.setattr(storage, "_is_secret", True)
    storage.close()
    assert asked == {"clear": 1}
