"""Chains of pages, on a daemon that is made up: how long it is waited for, and what it is told of failures."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvcached_client.engines import one_process
from kvcached_client.engines.one_process import FETCH_MS, OneProcessSession
from kvcached_client.offload import OffloadClient
from kvcached_client.sglang import page_store
from kvcached_client.sglang.page_store import ENDS_MAX, GRACE_S, PAGES_TOGETHER, PageStore, Patience, chain_of
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

    def begin_match(self, keys: bytes, tokens: int, *, full: bool) -> SimpleNamespace:
        found = self.match(keys, tokens, full=full)
        return SimpleNamespace(result=lambda: found)

    def prefetch(self, keys: bytes, _: int, *, full: bool, deadline_ms: int, token_ids: bytes | None) -> Any:
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


class BusyDaemon:
    """A daemon without storage that has some pages, and answers all that was asked together after some time."""

    def __init__(self, has: set[bytes], answers_after_s: float) -> None:
        self.now_s, self.has, self.answers_after_s = 0.0, has, answers_after_s
        self.unanswered, self.together = 0, list[int]()
        client: Any = self
        self.session = OneProcessSession(client, client, storage_at_s=math.inf)

    def monotonic(self) -> float:
        return self.now_s

    @contextlib.contextmanager
    def guarded(self) -> Iterator[OneProcessSession]:
        yield self.session

    def match(self, keys: bytes, tokens: int, *, full: bool) -> int:
        return int(self.begin_match(keys, tokens, full=full).result())

    def begin_match(self, keys: bytes, _: int, *, full: bool) -> SimpleNamespace:
        assert full
        self.unanswered += 1
        return SimpleNamespace(result=lambda: self._answer(keys))

    def _answer(self, keys: bytes) -> int:
        if self.unanswered:
            self.together.append(self.unanswered)
            self.unanswered = 0
            self.now_s += self.answers_after_s
        return int(keys in self.has)


def ends_of(patch: pytest.MonkeyPatch, stored: list[int], window: int, answers_after_s: float) -> tuple[Any, list[int]]:
    """Ends of a prompt of 32000 pages of which these are stored, and the daemon that was asked."""
    chain = chain_of((), hashes(32000))
    daemon: Any = BusyDaemon({chain.part(page, page + 1) for page in stored}, answers_after_s)
    for module in (page_store, one_process):
        patch.setattr(module, "time", daemon)
    return daemon, PageStore(daemon, daemon, 1).ends(chain.keys, window, Patience(), every=True)


def test_scan_for_ends_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a long prompt the last ends are looked at, with many questions under way, and no page is asked for twice."""
    daemon, ends = ends_of(monkeypatch, [0, 1, 31000, 31001, 31998, 31999], 2, 0.001)
    assert ends == [31002, 32000]
    assert sum(daemon.together) <= ENDS_MAX + 2 * PAGES_TOGETHER
    assert len(daemon.together) <= ENDS_MAX // PAGES_TOGETHER + 3


def test_scan_for_ends_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a daemon that is slow, the ends that were found in time are used: SGLang waits for its threads 10 s."""
    daemon, ends = ends_of(monkeypatch, [31100, 31999], 1, 0.9)
    assert ends == [32000]
    assert FETCH_MS / 1000 <= daemon.now_s <= FETCH_MS / 1000 + GRACE_S + 0.9


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
