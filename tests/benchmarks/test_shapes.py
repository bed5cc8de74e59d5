"""The shapes of the index benchmarks, at small sizes, and the floors that they are compared with."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import pytest

from benchmarks.bare_tree import BareTree, walk
from benchmarks.one_engine import OneEngine
from benchmarks.shapes import ADVERSARIAL, CHAT, LONG_PROMPT_BLOCKS, TRACE, Shape
from kvcached.core.index.run import KEY_SIZE, Run
from kvcached.core.insight.invariants import check


def _path(engine: OneEngine, keys: bytes) -> Iterator[Run]:
    run, _ = engine.tree.match(keys, len(keys) // KEY_SIZE, engine.pool.index)
    while run.parent is not None:
        yield run
        run = run.parent


@pytest.mark.parametrize(
    ("shape", "prompts", "least", "most"),
    [(TRACE, 200, 600, 1000), (CHAT, 1500, 15, 17), (ADVERSARIAL, 2000, 2.4, 2.6)],
)
def test_shape_has_its_blocks_per_run(shape: Shape, prompts: int, least: float, most: float) -> None:
    """The first prompts of a shape already give a tree with about the promised blocks per run."""
    engine = OneEngine(200_000)
    for keys in islice(shape.prompts(0), prompts):
        engine.request(keys)
    assert least < engine.cached_blocks / engine.tree.run_count < most
    assert not list(check(engine.cache))


@pytest.mark.parametrize("shape", [TRACE, CHAT, ADVERSARIAL])
def test_long_prompt_is_cut_into_runs_of_its_shape(shape: Shape) -> None:
    """The prompt of 128k tokens lies in the tree in runs whose mean length is the shape's."""
    engine = OneEngine(40_000)
    prompts = list(shape.long_prompt())
    for keys in prompts:
        engine.request(keys)
    runs = list(_path(engine, prompts[0]))
    assert engine.match(prompts[0]) == walk(engine.tree.root, prompts[0]) == LONG_PROMPT_BLOCKS
    assert len(runs) == len(prompts)
    assert LONG_PROMPT_BLOCKS / len(runs) == pytest.approx(shape.run_blocks, rel=0.15)


def test_branches_of_one_block_cut_the_long_prompt_alike() -> None:
    """Shorter branches make a smaller tree with the same runs on the path of the long prompt."""
    runs = []
    for branch_blocks in (None, 1):
        engine = OneEngine(40_000)
        prompts = list(CHAT.long_prompt(branch_blocks=branch_blocks))
        for keys in prompts:
            engine.request(keys)
        runs.append([(run.start, run.length) for run in _path(engine, prompts[0])])
    assert runs[0] == runs[1]


def test_passes_repeat_a_shape_on_other_keys() -> None:
    """Two passes have prompts of the same lengths and no key in common; a pass repeated is the same."""
    first, again, second = (list(islice(CHAT.prompts(number), 50)) for number in (0, 0, 1))
    assert first == again
    assert [len(keys) for keys in first] == [len(keys) for keys in second]
    assert not {keys[:KEY_SIZE] for keys in first} & {keys[:KEY_SIZE] for keys in second}


def test_bare_tree_hits_what_the_core_hits() -> None:
    """The floor of a request does the same job: over a full cache it finds as many blocks, within one per cent."""
    engine, bare = OneEngine(8_000), BareTree(8_000)
    for number in range(2):
        for keys in islice(CHAT.prompts(number), 1500):
            engine.request(keys)
            bare.request(keys)
    assert engine.cache.counters["evicted_blocks"] > 8_000
    assert bare.free == 0
    assert bare.hit_blocks == pytest.approx(engine.hit_blocks, rel=0.01)
