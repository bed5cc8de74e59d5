"""What is still hit after whose death, under each write policy: the table of docs/policies.md, cell by cell.

Three prompts of four blocks: one whose device slots others needed, one that was computed once, one that was hit again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest

from kvcached.core.cache import Cache
from kvcached.core.index.host_tree import HOST
from kvcached.core.index.run import KEY_SIZE
from kvcached.core.index.tree import PrefixTree
from kvcached.core.insight.invariants import check
from kvcached.core.messages import MembersDied, PoolRestored, WorkerDied
from kvcached.core.refusals import Refusal
from kvcached.core.restart.rejoin import Rejoin
from kvcached.core.restart.restore import RestoredCache, StoredBlocks
from kvcached.core.slots.ranges import pairs
from kvcached_client.types import NO_FENCE, WritePolicy
from tests.core.device_headers import DeviceHeaders, expected
from tests.core.engine import BLOCK_SIZE, Engine, keys_of
from tests.core.host_tier import Workers, host_hit, host_of, make_tiers

SQUEEZED, ONCE, TWICE = "uvwx", "abcd", "efgh"
Hits = tuple[int, int, int]


def lived_through(policy: WritePolicy) -> Cache:
    """A cache of 16 device slots in which all that happened to the three prompts, and whose copies have ended."""
    cache = make_tiers()
    cache.set_write_policy(cache.trees[0], policy)
    workers, engine = Workers(cache), Engine(cache)
    for text in (SQUEEZED, ONCE, TWICE):
        engine.store(text)
        workers.answer_all()
    engine.release(engine.acquire(TWICE))
    workers.answer_all()
    with suppress(Refusal):  # under write-back it has to wait
        engine.release(engine.acquire("", reserve=8))
    workers.answer_all()
    return cache


def hits(cache: Cache) -> Hits:
    """How much of each prompt a new engine would hit, on the device or in the host pool."""
    engine = Engine(cache)
    return sum(host_hit(engine, SQUEEZED)), sum(host_hit(engine, ONCE)), sum(host_hit(engine, TWICE))


def after_engine(cache: Cache) -> Hits:
    cache.handle(MembersDied(next(iter(cache.managed.sessions))))
    return hits(cache)


def after_worker(cache: Cache) -> Hits:
    cache.handle(WorkerDied("a"))
    cache.handle(PoolRestored("a"))
    return hits(cache)


def after_daemon(cache: Cache) -> Hits:
    """The pool was kept: it is the engine's until it has said what it holds, which is nothing."""
    headers = DeviceHeaders(cache)
    headers.pools["a"] = expected(cache, "a")
    cache.header_changes.clear()
    successor, revival = revived(cache)
    revival.device_pool("a", headers.found("a"))
    session = revival.pool_session("a")
    returned = Rejoin(successor)
    returned.resume(session, 0, NO_FENCE)
    returned.over(session, successor.pools["a"].epoch)
    found = [
        sum(
            successor.managed.match(
                session, successor.pools["a"].epoch, keys_of(text), len(text) * BLOCK_SIZE, full=True
            )
        )
        for text in (SQUEEZED, ONCE, TWICE)
    ]
    assert check(successor) == []
    return found[0], found[1], found[2]


def after_daemon_and_workers(cache: Cache) -> Hits:
    successor, _ = revived(cache)
    assert check(successor) == []
    return hits(successor)


def revived(cache: Cache) -> tuple[Cache, RestoredCache]:
    """The next daemon's cache, which has found what lies in the host pool."""
    successor = make_tiers()
    revival = RestoredCache(successor)
    revival.replica("a", sorted(host_of(cache).slabs), headers_of(cache.trees[0]))
    return successor, revival


def headers_of(tree: PrefixTree) -> StoredBlocks:
    """What the headers of a tree's host copies say."""
    rows: list[tuple[bytes, bytes, int, int]] = []
    for run in tree.runs():
        segment = run.segments[HOST]
        slots = (
            [slot for first, count in pairs(segment.ranges) for slot in range(first, first + count)] if segment else []
        )
        keys = tree.path_keys(run, 0, run.end)
        for depth, slot in enumerate(slots, run.start):
            parent = keys[(depth - 1) * KEY_SIZE : depth * KEY_SIZE] if depth else bytes(KEY_SIZE)
            rows.append((keys[depth * KEY_SIZE : (depth + 1) * KEY_SIZE], parent, depth, slot))
    return StoredBlocks(
        np.frombuffer(b"".join(row[0] for row in rows), np.uint8).reshape(-1, KEY_SIZE),
        np.frombuffer(b"".join(row[1] for row in rows), np.uint8).reshape(-1, KEY_SIZE),
        np.array([row[2] for row in rows], np.int64),
        np.array([row[3] for row in rows], np.int64),
        np.arange(len(rows)),
    )


DEATHS: dict[str, Callable[[Cache], Hits]] = {
    "engine": after_engine,
    "worker": after_worker,
    "daemon": after_daemon,
    "daemon, and the device pool was not kept": after_daemon_and_workers,
}
#: Blocks that are hit of the squeezed prompt, of the one seen once and of the one seen twice.
SURVIVAL: dict[WritePolicy, dict[str, Hits]] = {
    WritePolicy.WRITE_THROUGH: {
        "engine": (4, 4, 4),
        "worker": (4, 4, 4),
        "daemon": (4, 4, 4),
        "daemon, and the device pool was not kept": (4, 4, 4),
    },
    WritePolicy.WRITE_THROUGH_SELECTIVE: {
        "engine": (0, 4, 4),
        "worker": (0, 4, 4),
        "daemon": (0, 4, 4),
        "daemon, and the device pool was not kept": (0, 0, 4),
    },
    WritePolicy.WRITE_BACK: {
        "engine": (4, 4, 4),
        "worker": (4, 4, 4),
        "daemon": (4, 4, 4),
        "daemon, and the device pool was not kept": (4, 0, 0),
    },
    WritePolicy.NEVER: {
        "engine": (0, 4, 4),
        "worker": (0, 4, 4),
        "daemon": (0, 4, 4),
        "daemon, and the device pool was not kept": (0, 0, 0),
    },
}


@pytest.mark.parametrize("death", DEATHS)
@pytest.mark.parametrize("policy", WritePolicy)
def test_survival_is_as_documented(policy: WritePolicy, death: str) -> None:
    """After each death exactly those blocks are hit that the policy had copied, or that no memory was lost of."""
    cache = lived_through(policy)
    assert check(cache) == []

    assert DEATHS[death](cache) == SURVIVAL[policy][death]
    assert check(cache) == []
