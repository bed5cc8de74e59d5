"""Clears that the daemon refuses, or has not heard of when SGLang ends, with as much of SGLang as a storage sees."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcached_client import Admin
from kvcached_client.offload import OffloadClient
from kvcached_client.sglang.page_store import PageStore
from tests.sglang.conftest import Make
from tests.sglang.fake_sglang import MHATokenToKVPoolHost, behind, hashes, places, replace_weights

KEYS = hashes(2)
REFUSED = "this session is read-only, and a clear takes blocks from others (use kvcached clear)"


@pytest.fixture
def writer(make: Make) -> Any:
    """A storage that has stored pages."""
    storage = make(MHATokenToKVPoolHost())
    assert storage.batch_set_v1(KEYS, places(0, 1), behind()) == [True, True]
    return storage


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[OffloadClient]:
    """The clients that have sent a clear."""
    sent, clear = list[OffloadClient](), OffloadClient.clear

    def counted(client: OffloadClient) -> int:
        sent.append(client)
        return clear(client)

    monkeypatch.setattr(OffloadClient, "clear", counted)
    return sent


@pytest.fixture
def only_reads(writer: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sessions that are opened now are as `read_only` in the daemon's configuration makes them."""
    connect = OffloadClient.connect

    def read_only(*args: Any, **named: Any) -> OffloadClient:
        return connect(*args, **named, read_only=True)

    with monkeypatch.context() as patch:
        patch.setattr(OffloadClient, "connect", read_only)
        yield


def test_clear_that_is_refused_is_sent_once(
    make: Make, writer: Any, only_reads: None, sent: list[OffloadClient], caplog: pytest.LogCaptureFixture
) -> None:
    """The log has the daemon's reason and what to do; this SGLang finds nothing from before, and others do."""
    reader = make(MHATokenToKVPoolHost())
    assert reader.batch_exists(KEYS) == 2
    reader.clear()
    assert [reader.batch_exists(KEYS) for _ in range(3)] == [0, 0, 0]
    assert len(sent) == 1
    assert caplog.text.count(REFUSED) == 1
    assert "nothing is cleared yet" not in caplog.text
    assert writer.batch_exists(KEYS) == 2


def test_refused_clear_counts_for_a_storage_that_is_attached_again(make: Make, only_reads: None) -> None:
    """SGLang finds nothing from before its clear until it starts again, also with another storage."""
    reader = make(MHATokenToKVPoolHost())
    reader.clear()
    reader.close()
    assert make(MHATokenToKVPoolHost(), is_attached=True).batch_exists(KEYS) == 0
    assert make(MHATokenToKVPoolHost()).batch_exists(KEYS) == 2  # another SGLang


def test_clear_of_weights_that_were_replaced_may_be_refused(make: Make, only_reads: None) -> None:
    """Where nobody shares its pages any more, an SGLang that may not clear goes on with others at new weights."""
    reader = make(MHATokenToKVPoolHost())
    for _ in range(2):
        replace_weights()
        assert reader.batch_exists(KEYS) == 0


def test_owed_clear_is_tried_again_at_the_end(
    make: Make, writer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A storage that is closed clears what it could not clear before, and warns of nothing then."""
    with monkeypatch.context() as patch:
        patch.setattr(PageStore, "clear", lambda _: False)
        writer.clear()
    writer.close()
    assert make(MHATokenToKVPoolHost()).batch_exists(KEYS) == 0
    assert "is not cleared, because" not in caplog.text


@pytest.mark.parametrize("has_new_weights", [False, True])
def test_clear_that_stays_owed_at_the_end_is_told(
    has_new_weights: bool,
    make: Make,
    writer: Any,
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The log says at the end that pages are still found which were to be cleared; no session is left."""
    with monkeypatch.context() as patch:
        patch.setattr(PageStore, "clear", lambda _: False)
        writer.clear()
        if has_new_weights:
            replace_weights()
            assert writer.batch_exists(KEYS) == 0
        for _ in range(2):
            writer.close()
    assert caplog.text.count("is not cleared, because the daemon does not answer") == 1
    with Admin.connect(run_dir) as admin:
        assert {host.sessions for host in admin.stats().hosts} == {0}
    assert make(MHATokenToKVPoolHost()).batch_exists(KEYS) == 2


def test_owed_clear_of_pages_that_nobody_shares_is_not_told(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After weights were replaced, no engine finds these pages once the storage is closed, cleared or not."""
    storage = make(MHATokenToKVPoolHost())
    replace_weights()
    assert storage.batch_exists(KEYS) == 0
    with monkeypatch.context() as patch:
        patch.setattr(PageStore, "clear", lambda _: False)
        storage.clear()
        storage.close()
    assert "is not cleared, because" not in caplog.text
