"""An acquire that loads: whole or not at all, as `test_acquire` has it for the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvcached.core.cache import Cache
from kvcached.core.slots.states import SlotState
from kvcached.core.transfers.loads import Loads
from kvcached.core.transfers.table import TransferTable
from tests.core.engine import Engine, Injected, healthy
from tests.core.host_tier import Workers, host_of, stored

MakeTiers = Callable[..., Cache]


class FailingStep:
    """Makes the n-th call of the cache's parts fail while it is switched on; calls within such a call don't count."""

    def __init__(self, patch: pytest.MonkeyPatch, cache: Cache) -> None:
        self.left = -1
        self.depth = 0
        self.failed = ""
        tree, pool, host = cache.trees[0], cache.pools["a"], host_of(cache)
        names = ["match", "match_host", "lock", "unlock", "touch", "touch_host", "commit", "evict", "path_slots"]
        for owner, methods in (
            (type(tree), [*names, "path_keys", "path_ranges", "resolve"]),
            (type(pool), ["take", "move", "holds"]),
            (type(host), ["holds"]),
            (TransferTable, ["next_id", "hurry", "of_pool", "start"]),
            (Loads, ["join", "start"]),
        ):
            for name in methods:
                patch.setattr(owner, name, self._wrap(name, getattr(owner, name)))

    def _wrap(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        inside = name not in {"start", "join"}  # those are steps of steps: what they call counts too

        def call(*arguments: Any, **keywords: Any) -> Any:
            if self.left >= 0 and not self.depth:
                self.left -= 1
                if self.left < 0:
                    self.failed = name
                    raise Injected(name)
            self.depth += inside
            try:
                return method(*arguments, **keywords)
            finally:
                self.depth -= inside

        return call


def acquire_with_a_load(make: MakeTiers, patch: pytest.MonkeyPatch, step: int) -> str:
    """An acquire that evicts, joins a load, starts one and lets one wait for a store. One step of it fails; which?"""
    cache = make("ab", slots=10)
    stored(cache, "abc", "b")
    workers, engine = Workers(cache), Engine(cache)
    engine.store("012345678")
    workers.answer_all()
    one = engine.acquire("a")
    Engine(cache, "b").store("abcde")
    cache.settle()
    before = cache.managed.sessions[engine.session].pool.protected
    failing = FailingStep(patch, cache)
    failing.left = step
    try:
        grant = engine.acquire("abcdefg")
    except Injected:
        failing.left = -1
        assert healthy(cache)
        session = cache.managed.sessions[engine.session]
        assert list(session.leases) == [one.lease]
        assert list(session.leases.by_request) == [session.leases[one.lease].request]
        assert session.pool.counts[SlotState.LEASED] == 0
        held = [each for each in cache.transfers.values() if each.pool is session.pool]
        assert session.pool.protected == max([before, *(each.end for each in held)])
        assert session.pool.counts[SlotState.FILLING] == sum(each.blocks for each in held)
        workers.answer_all()
        assert engine.acquire("abcdefg").hit == 5
    else:
        failing.left = -1
        assert grant.hit == 5
    workers.answer_all()
    cache.close_session(engine.session)
    assert (cache.pools["a"].protected, cache.pools["a"].counts[SlotState.FILLING]) == (0, 0)
    return failing.failed


@pytest.mark.interpreted
def test_acquire_with_a_load_that_fails_at_any_step_leaves_nothing_behind(
    new_tiers: MakeTiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step of an acquire that evicts, joins and loads fails in turn: nothing of it stays but what was ordered."""
    monkeypatch.setattr("kvcached.core.transfers.loads.LOAD_BLOCKS_MAX", 2)
    failed: list[str] = []
    while not failed or failed[-1]:
        with monkeypatch.context() as patch:
            failed.append(acquire_with_a_load(new_tiers, patch, len(failed)))

    assert len(failed) > 20
    assert {"match", "lock", "evict", "take", "join", "move", "commit", "unlock", "start", "path_ranges"} <= set(failed)
