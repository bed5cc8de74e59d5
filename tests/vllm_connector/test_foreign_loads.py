"""Loads that another connector makes in the step that uses them, as vLLM's `MultiConnector` joins it with kvcached."""

from __future__ import annotations

import pytest

from kvcached_client.vllm.daemon.commands import Offer
from tests.vllm_connector.rig import BLOCK, FakeRequest, Rig, generate
from tests.vllm_connector.test_groups import UNIT_TOKENS, GroupsRig


def starting(
    rig: Rig, name: str, *, local: int, foreign: int, more: int, blocks: list[int] | None = None
) -> tuple[FakeRequest, list[int]]:
    """A request, and its blocks, of which vLLM has some, another connector loads some, and the step computes some."""
    request = rig.arrive(name, (local + foreign + more) * BLOCK + 1)
    rig.found(0)
    assert rig.matched(request, local * BLOCK) == (0, False)
    return request, rig.start(request, (local + foreign) * BLOCK, more * BLOCK + 1, blocks=blocks)


def name_blocks(rig: Rig, blocks: list[int]) -> None:
    """VLLM finds these blocks by hashes."""
    for block in blocks:
        rig.pool.blocks[block].block_hash = b"%d" % block


def offered(rig: Rig) -> list[tuple[int, int]]:
    """Where each offer starts and ends. The daemon plans stores of all of them."""
    offers = rig.link.taken(Offer)
    for offer in offers:
        rig.plan(offer=offer)
    return [(offer.start, offer.start + len(offer.keys) // 16) for offer in offers]


def test_foreign_load_is_offered_once_its_step_is_over() -> None:
    """Nothing of a request is offered that came behind vLLM's own blocks, until the step's output has come."""
    rig = Rig()
    request, _ = starting(rig, "r", local=0, foreign=2, more=1)
    assert offered(rig) == []
    rig.side.step_over()
    generate(rig, request, 1)
    assert offered(rig) == [(0, 4)]


def test_blocks_before_a_foreign_load_are_offered_at_once() -> None:
    """What vLLM had itself is right."""
    rig = Rig()
    starting(rig, "r", local=1, foreign=2, more=1)
    assert offered(rig) == [(0, 1)]


def test_end_of_the_step_before_says_nothing() -> None:
    """With asynchronous scheduling, the output of an earlier step comes first."""
    rig = Rig()
    rig.idle()
    request, _ = starting(rig, "r", local=0, foreign=2, more=1)
    rig.side.step_over()
    generate(rig, request, 1)
    assert offered(rig) == []
    rig.side.step_over()
    generate(rig, request, 1)
    assert offered(rig) == [(0, 5)]


def test_request_that_ends_meanwhile_offers_what_is_right() -> None:
    """A request that is aborted before the output has come offers nothing of another connector's load."""
    rig = Rig()
    request, blocks = starting(rig, "r", local=1, foreign=2, more=1)
    rig.plan()
    rig.finish(request, blocks)
    rig.idle()
    assert offered(rig) == []


def test_request_that_ends_after_its_load_is_stored() -> None:
    """One that has offered nothing yet when the output says that all is right offers all at its end."""
    rig = Rig()
    request, blocks = starting(rig, "r", local=0, foreign=2, more=1)
    rig.side.step_over()
    rig.finish(request, blocks)
    assert offered(rig) == [(0, 3)]


def test_bad_blocks_and_those_behind_are_never_offered() -> None:
    """Once its output names a block as bad, nothing of the request is offered but what vLLM had before its load."""
    rig = Rig()
    request, blocks = starting(rig, "r", local=1, foreign=2, more=1)
    assert offered(rig) == [(0, 1)]
    rig.side.loaded((), (), {blocks[2]})
    rig.side.step_over()
    request.num_computed_tokens = 2 * BLOCK
    rig.run(request, 2 * BLOCK + 1)
    generate(rig, request, 4)
    rig.finish(request, blocks)
    assert offered(rig) == []


@pytest.mark.parametrize("is_before", [True, False])
def test_requests_that_find_bad_blocks_do_not_offer_them(is_before: bool) -> None:
    """VLLM lets others find a foreign load at once, and while bad blocks are computed again: all of them are wrong."""
    rig = Rig()
    _, blocks = starting(rig, "r", local=1, foreign=2, more=1)
    name_blocks(rig, blocks[:4])
    assert offered(rig) == [(0, 1)]
    if is_before:
        other, _ = starting(rig, "other", local=4, foreign=0, more=1, blocks=blocks[:4] + rig.blocks(2))
        assert offered(rig) == [(0, 1)]
    rig.side.loaded((), (), {blocks[1]})
    rig.side.step_over()
    rig.side.step_over()
    if not is_before:
        other, _ = starting(rig, "other", local=4, foreign=0, more=1, blocks=blocks[:4] + rig.blocks(2))
        assert offered(rig) == [(0, 1)]
    generate(rig, other, 4)
    assert offered(rig) == []


def test_bad_blocks_that_became_others_are_offered() -> None:
    """A block that vLLM has taken for something else is no longer bad."""
    rig = Rig()
    request, blocks = starting(rig, "r", local=0, foreign=2, more=1)
    name_blocks(rig, blocks[:3])
    rig.side.loaded((), (), {blocks[0]})
    rig.side.step_over()
    rig.finish(request, blocks)
    rig.pool.blocks[blocks[0]].block_hash = b"other"
    starting(rig, "other", local=1, foreign=0, more=1, blocks=[blocks[0], *rig.blocks(2)])
    assert offered(rig) == [(0, 2)]


def test_bad_blocks_of_own_loads_are_computed_and_offered() -> None:
    """A load of kvcached's own that fails is computed again before anything builds on it: it distrusts nobody."""
    rig = Rig()
    request = rig.arrive("r", 3 * BLOCK + 1)
    rig.found(2)
    assert rig.matched(request) == (2 * BLOCK, True)
    blocks = rig.blocks(4)
    rig.side.allocated(request, [blocks], 2 * BLOCK)
    rig.idle()
    rig.side.loaded({"r"}, (), {blocks[1]})
    rig.side.step_over()
    rig.run_new(request, blocks, BLOCK, 2 * BLOCK + 1)
    assert offered(rig) == [(2, 3)]


def test_foreign_load_with_several_groups_waits_for_its_step() -> None:
    """With several groups, blocks behind another connector's load are not offered before its step is over, either."""
    rig = GroupsRig()
    request = rig.begin("r", 2)
    rig.matched(request)
    rig.run_new(request, rig.blocks(1), UNIT_TOKENS, UNIT_TOKENS + 1)
    assert offered(rig) == []
