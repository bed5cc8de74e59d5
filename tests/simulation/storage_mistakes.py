"""Deliberate mistakes about storage, write policies and pins."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvcached import books
from kvcached.core import stores
from kvcached.core.backup import Backups
from kvcached.core.events import StorageLost
from kvcached.core.pinned import Pins
from kvcached.core.storage_state import PrefetchEnd
from kvcached.core.tree import HOST
from kvcached.storage.link import StorageLink
from kvcached.storage_verbs import StorageVerbs
from kvcached_client.types import WritePolicy
from tests.simulation.mistake import Mistake


def _lost_before_dead(patch: pytest.MonkeyPatch) -> None:
    """Copies of storage that is too slow end at once, though its process lives and goes on with them."""
    suspend = StorageLink._suspend

    def suspend_and_lose(self: StorageLink, why: str) -> None:
        suspend(self, why)
        self._tell(StorageLost())

    patch.setattr(StorageLink, "_suspend", suspend_and_lose)


def _backups_not_pinned(patch: pytest.MonkeyPatch) -> None:
    """What storage reads may be evicted."""
    start, end = Backups._start, Backups.end

    def start_unpinned(self: Backups, candidate: Any) -> bool:
        before = set(self.copies)
        is_started = start(self, candidate)
        for number in self.copies.keys() - before:
            copy = self.copies[number]
            if copy.run is not None:
                copy.tree.unpin_host(copy.run, copy.end)
        return is_started

    def end_unpinned(self: Backups, copy: Any, *about: int) -> None:
        copy.tree.pin(copy.tree.resolve(copy.run, copy.end), copy.end, HOST)
        end(self, copy, *about)

    patch.setattr(Backups, "_start", start_unpinned)
    patch.setattr(Backups, "end", end_unpinned)


def _generations_share_blocks(patch: pytest.MonkeyPatch) -> None:
    """What storage has of a namespace before it is cleared stays, and is found under the same name after that."""
    kind_of = StorageVerbs.kind_of

    def kind_of_any(self: StorageVerbs, namespace: bytes, generation: int) -> Any:
        kind = kind_of(self, namespace, generation)
        return None if kind is None else msgspec.structs.replace(kind, generation=0)

    patch.setattr(StorageVerbs, "kind_of", kind_of_any)
    patch.setattr(StorageVerbs, "_forget", lambda *_: None)


def _answer_lost_with_storage(patch: pytest.MonkeyPatch) -> None:
    """Whoever waits for a prefetch is not told that storage has gone."""
    over = StorageVerbs._over

    def over_unless_lost(self: StorageVerbs, number: int) -> None:
        prefetch = self._prefetches.get(number)
        if prefetch is not None and prefetch.end is PrefetchEnd.UNAVAILABLE:
            for waiter in self._waiters.pop(number, []):
                if waiter.timer is not None:
                    waiter.timer.cancel()
        over(self, number)

    patch.setattr(StorageVerbs, "_over", over_unless_lost)


def _policy_not_written(patch: pytest.MonkeyPatch) -> None:
    """The ledger always names the policies that are configured."""
    replica = books._replica

    def configured(*about: Any) -> Any:
        record = replica(*about)
        return msgspec.structs.replace(record, write_policy=record.configured_policy)

    patch.setattr(books, "_replica", configured)


def _tails_copied_under_never(patch: pytest.MonkeyPatch) -> None:
    """What is about to leave a device is copied under every policy."""
    patch.setattr(stores, "_STORE_TAILS", frozenset(WritePolicy))


def _pin_outlives_its_time(patch: pytest.MonkeyPatch) -> None:
    """Pins end when somebody ends them."""
    patch.setattr(Pins, "tick", lambda *_: None)


def _pin_ends_early(patch: pytest.MonkeyPatch) -> None:
    """A pin's time is counted from the last tick before it."""
    pin = Pins.pin

    def pin_shorter(self: Pins, tree: Any, pool: Any, keys: bytes, until_ms: int) -> Any:
        return pin(self, tree, pool, keys, until_ms - 200)

    patch.setattr(Pins, "pin", pin_shorter)


STORAGE_MISTAKES = [
    Mistake("storage is lost before it is dead", _lost_before_dead, (7, 12)),
    Mistake("backups not pinned", _backups_not_pinned, (2, 0)),
    Mistake("generations share blocks", _generations_share_blocks, (48, 42)),
    Mistake("answer lost with storage", _answer_lost_with_storage, (4, 8)),
    Mistake("policy not written down", _policy_not_written, (0, 2)),
    Mistake("tails copied under never", _tails_copied_under_never, (10, 20)),
    Mistake("pin outlives its time", _pin_outlives_its_time, (4, 3)),
    Mistake("pin ends early", _pin_ends_early, (14, 8)),
]
