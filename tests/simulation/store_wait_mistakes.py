"""Deliberate mistakes about waits for stores of other sessions."""

from __future__ import annotations

from typing import Any

import pytest

from kvcached.core.slots.states import TransferState
from kvcached.core.transfers import prefetch
from kvcached.core.transfers.engine_copies import EngineCopies
from kvcached.core.transfers.prefetch import Prefetches
from kvcached.core.transfers.storage import StorageTier
from kvcached.core.transfers.storage_state import Prefetch
from tests.mutants.mutant import rewrite
from tests.simulation.mistake import Mistake


def _failed_store_ends_no_wait(patch: pytest.MonkeyPatch) -> None:
    """Only a store that has brought its blocks ends the wait for it."""
    end, go_behind = EngineCopies.end, Prefetches._go_behind_store
    failed = set()

    def end_and_note(self: EngineCopies, session: Any, copy: Any, *state: Any) -> None:
        end(self, session, copy, *state)
        if copy.state is TransferState.FAILED:
            failed.add((id(self._table), copy.id))

    def go_behind_good(self: Prefetches, prefetch: Prefetch, *, may_ask: bool) -> None:
        if (id(self._table), prefetch.store) not in failed:
            go_behind(self, prefetch, may_ask=may_ask)

    patch.setattr(EngineCopies, "end", end_and_note)
    patch.setattr(Prefetches, "_go_behind_store", go_behind_good)


def _hoped_for_is_told(patch: pytest.MonkeyPatch) -> None:
    """The end of a wait tells of all blocks that were being stored, whatever became of them."""
    wait_for, reach = Prefetch.wait_for, Prefetch.reach
    hoped: dict[int, int] = {}

    def wait_and_hope(self: Prefetch, store: Any, filling: int, until_ms: int) -> None:
        wait_for(self, store, filling, until_ms)
        hoped[id(self)] = self.inserted + filling

    def reach_hoped(self: Prefetch, depth: int) -> None:
        reach(self, max(depth, hoped.get(id(self), 0)))

    patch.setattr(Prefetch, "wait_for", wait_and_hope)
    patch.setattr(Prefetch, "reach", reach_hoped)


def _clear_ends_no_wait(patch: pytest.MonkeyPatch) -> None:
    """Whoever waits for a store goes on with that after a clear."""
    rewrite(patch, Prefetches.look_again, "not self._is_current(prefetch)", "False")


def _wait_ends_with_storage(patch: pytest.MonkeyPatch) -> None:
    """Nobody looks again at who waits for a store, unless storage works."""
    patch.setattr(StorageTier, "is_active", property(lambda self: self.state == "ready"))


def _any_store_is_waited_for(patch: pytest.MonkeyPatch) -> None:
    """A prefetch waits for some store under way in its namespace, not for that of its next block."""

    def any_store(hit: Any, tree: Any, keys: Any, stores: Any, own: Any) -> Any:
        del keys
        others = (store.id for store in stores if store.tree is tree and store.kind == "store" and store.id not in own)
        return next(others, 0) if hit.filling else 0

    patch.setattr(prefetch, "store_behind", any_store)


STORE_WAIT_MISTAKES = [
    Mistake("failed store ends no wait", _failed_store_ends_no_wait, (16, 49)),
    Mistake("hoped for blocks are told", _hoped_for_is_told, (0, 3)),
    Mistake("clear ends no wait", _clear_ends_no_wait, (51, 127)),
    Mistake("wait ends with storage only", _wait_ends_with_storage, (35, 40)),
    Mistake("any store is waited for", _any_store_is_waited_for, (3, 24)),
]
