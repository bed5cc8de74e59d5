"""The picture of the index for the status page: what it shows, its bounds, and an index that changes meanwhile."""

from __future__ import annotations

import random

import pytest

from kvcached.core.cache import Cache
from kvcached.core.eviction.lru import LeastRecentlyUsed
from kvcached.core.index.run import Run
from kvcached.core.index.tree import PrefixTree
from kvcached.core.insight import picture
from kvcached.core.insight.picture import BOUNDS, Bounds, TreePicture, draw
from tests.service.office import FakePeer, Office, key_chain


@pytest.fixture
def office() -> Office:
    office = Office("a")
    office.enter(FakePeer(1))
    return office


def store(office: Office, *parts: tuple[int, int]) -> None:
    """A chain of parts, each of so many blocks and a seed."""
    office.store(b"".join(key_chain(blocks, seed) for blocks, seed in parts))


def drawn(cache: Cache, bounds: Bounds = BOUNDS) -> list[TreePicture]:
    for found in draw(cache, bounds):
        if found is not None:
            return found
    raise AssertionError("no picture")


def test_small_runs_that_were_used_last_are_shown(office: Office) -> None:
    """A picture has the largest runs and those that were used last; of the others it counts runs and blocks."""
    store(office, (2, 0), (5, 1))
    store(office, (2, 0), (3, 2))
    store(office, (2, 0), (1, 3))

    (tree,) = drawn(office.cache, Bounds(largest=2, latest=2))
    assert [(run.above, run.blocks, run.below) for run in tree.shown] == [(-1, 2, 9), (0, 5, 0), (0, 1, 0)]
    assert tree.shown[0].children == 3
    assert [run.idle == 0 for run in tree.shown] == [True, False, True]
    assert (tree.looked, tree.blocks) == (4, 11)


def test_use_below_is_use(office: Office) -> None:
    """A run is as hot as the hottest run below it: a prompt's first blocks are used with its last."""
    store(office, (2, 0), (2, 1))
    store(office, (2, 0), (3, 2))
    store(office, (1, 9))
    store(office, (2, 0), (2, 1))

    (tree,) = drawn(office.cache)
    idle = {(run.start, run.blocks): run.idle for run in tree.shown}
    assert idle[0, 2] == idle[2, 2] == 0
    assert idle[2, 3] > 0


def test_runs_that_are_looked_at_are_bounded(office: Office) -> None:
    """Of a large index some runs are looked at, the newest continuations first; the picture says how many."""
    for seed in range(6):
        store(office, (1, seed))

    (tree,) = drawn(office.cache, Bounds(looked=4))
    assert (tree.tree.run_count, tree.chains, tree.looked, len(tree.shown)) == (6, 6, 4, 4)
    newest = {key_chain(1, seed) for seed in range(2, 6)}
    assert {run.key for run in tree.shown} == newest


def test_small_trees_are_looked_at_whole_beside_a_large_one() -> None:
    """A tree gets what smaller ones leave, so that a large one hides none of them."""
    trees = [PrefixTree([], [LeastRecentlyUsed()]) for _ in range(3)]
    for tree, runs in zip(trees, (1000, 2, 6), strict=True):
        tree.run_count = runs

    shares = picture._shares(trees, 10)
    assert [shares[tree] for tree in trees] == [4, 2, 4]


def test_index_may_change_between_steps() -> None:
    """While runs are split, grow and leave, the picture still shows only runs that are there, each below its parent."""
    assert sum(shown_while_it_changes(random.Random(seed)) for seed in range(60)) > 60


def shown_while_it_changes(choose: random.Random) -> int:
    """How many runs a picture of a small index has that changes between its steps."""
    office = Office("a")
    office.enter(FakePeer(1))
    stems = [(choose.randrange(1, 4), stem) for stem in range(3)]

    def change() -> None:
        parts = [choose.choice(stems)] + [(choose.randrange(1, 3), choose.randrange(10, 14)) for _ in range(2)]
        store(office, *parts)

    for _ in range(6):
        change()
    for found in draw(office.cache, Bounds(per_step=1)):
        if found is not None:
            (tree,) = found
            check(tree)
            return len(tree.shown)
        if choose.random() < 0.4:
            change()
    raise AssertionError("no picture")


def check(tree: TreePicture) -> None:
    """Every run of the picture is in the tree, where the picture says, and sums agree."""
    runs: list[Run] = []
    for run in tree.shown:
        above = tree.tree.root if run.above < 0 else runs[run.above]
        found = (above.children or {})[run.key]
        assert (found.start, found.length, len(found.children or ())) == (run.start, run.blocks, run.children)
        assert run.start == above.end
        assert run.held
        runs.append(found)
    for place, run in enumerate(tree.shown):
        children = [child for child in tree.shown if child.above == place]
        assert run.below >= sum(child.blocks + child.below for child in children)
        assert all(child.idle >= run.idle for child in children)


def test_empty_index_has_an_empty_picture(office: Office) -> None:
    """Nothing is cached: a tree without runs."""
    (tree,) = drawn(office.cache)

    assert (tree.looked, tree.blocks, tree.chains, tree.shown) == (0, 0, 0, [])
