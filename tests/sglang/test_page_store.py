"""Chains of pages, on a daemon that is made up: how long it is waited for, and what it is told of failures."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvcached_client.engines import one_process
from kvcached_client.engines.one_process import FETCH_MS, OneProcessSession
from kvcached_client.offload import OffloadClient
from kvcached_client.sglang import page_store
from kvcached_client.sglang.page_store import PageStore, Patience, chain_of
from tests.sglang.conftest import Make
from tests.sglang.fake_sglang import MHATokenToKVPoolHost, behind, hashes, places


class SlowStorage:
    """A daemon whose storage takes two seconds for each question, if it gets them, and brings nothing."""

    def __init__(self) -> None:
        self.now_s, self.matches = 0.0, 0
        client: Any = self
        self.session = OneProcessSession(client, client)

    def monotonic(self) -> float:
        return self.now_s

    @contextlib.contextmanager
    def guarded(self) -> Iterator[OneProcessSession]:
        yield self.session

    def match(self, keys: bytes, _: int, *, full: bool) -> int:
        assert full
        self.matches += 1
        return 0

    def prefetch(self, keys: bytes, _: int, *, full: bool, deadline_ms: int) -> SimpleNamespace:
        assert full
        self.now_s += min(deadline_ms / 1000, 2.0)
        return SimpleNamespace(reason="waiting")


def test_one_call_waits_for_storage_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many pages a window has, a look-up waits for the storage no longer than one page may take."""
    daemon: Any = SlowStorage()
    for module in (page_store, one_process):
        monkeypatch.setattr(module, "time", daemon)
    pages, keys, patience = PageStore(daemon, daemon, 1), chain_of((), hashes(16)), Patience()
    assert pages.found(keys, patience) == 0
    assert pages.ends(keys.keys, 12, patience, every=True) == []
    assert daemon.now_s <= FETCH_MS / 1000
    assert daemon.matches >= 16  # what is in the host pool is found


def test_copies_with_too_few_places_are_called_off(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon does not wait for copies that nobody makes, and the pages can be stored and loaded right after."""
    keys, storage = hashes(2), make(MHATokenToKVPoolHost())
    told: list[str] = []
    for name in ("cancel_load", "cancel_store"):
        _listen(monkeypatch, name, told)
    assert storage.batch_set_v1(keys, places(0), behind()) == [False, False]
    assert storage.batch_set_v1(keys, places(0, 1), behind()) == [True, True]
    assert storage.batch_get_v1(keys, places(0), behind()) == [False, False]
    assert storage.batch_get_v1(keys, places(0, 1), behind()) == [True, True]
    assert told == ["cancel_store", "cancel_load"]


def _listen(patch: pytest.MonkeyPatch, name: str, told: list[str]) -> None:
    function = getattr(OffloadClient, name)

    def called(*args: Any) -> None:
        told.append(name)
        function(*args)

    patch.setattr(OffloadClient, name, called)
