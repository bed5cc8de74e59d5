"""Loads: what workers are told to copy, and what follows from how it went."""

from __future__ import annotations

import pytest

from kvcached_client.vllm.daemon.commands import DropLoad, Release, Seek
from kvcached_client.vllm.orders import LoadOrder
from tests.vllm_connector.rig import BLOCK, GENERATION, FakeRequest, Rig


def load(rig: Rig, request: FakeRequest, hit: int, *, local: int = 0) -> tuple[LoadOrder, list[int]]:
    """Let a request load its hit; the order, and all blocks that it has."""
    rig.found(hit)
    tokens, is_async = rig.matched(request, local * BLOCK)
    assert tokens
    assert is_async
    blocks = rig.blocks(local + tokens // BLOCK)
    rig.side.allocated(request, [blocks], tokens)
    request.num_computed_tokens = local * BLOCK + tokens
    (order,) = rig.idle().loads
    return order, blocks


def test_load_goes_out_with_the_step() -> None:
    """A load names its session, its request and for each block its key, its place in vLLM and its host slot."""
    rig = Rig()
    request = rig.arrive("r", 4 * BLOCK + 1)
    order, blocks = load(rig, request, 3)
    (span,) = order.job.spans
    assert (order.session, order.request, order.job.generation) == (1, "r", GENERATION)
    assert (span.depth, span.parent, span.keys) == (0, b"", request.keys(0, 3))
    assert (span.blocks.tolist(), span.slots.tolist()) == (blocks, [500, 501, 502])
    assert rig.idle().loads == ()


def test_load_begins_behind_local_hit() -> None:
    """Behind blocks that vLLM has by itself, a load begins at the block that it was told of, with its parent's key."""
    rig = Rig()
    request = rig.arrive("r", 5 * BLOCK + 1)
    order, blocks = load(rig, request, 4, local=1)
    (span,) = order.job.spans
    assert (span.depth, span.parent, span.keys) == (1, request.keys(0, 1), request.keys(1, 4))
    assert (span.blocks.tolist(), span.slots.tolist()) == (blocks[1:], [501, 502, 503])


def test_vllm_may_take_less() -> None:
    """Where vLLM takes fewer tokens than it was told, as many blocks are loaded."""
    rig = Rig()
    request = rig.arrive("r", 5 * BLOCK + 1)
    rig.found(4)
    rig.matched(request)
    rig.side.allocated(request, [rig.blocks(2)], 2 * BLOCK)
    (order,) = rig.idle().loads
    assert order.job.spans[0].slots.tolist() == [500, 501]


def test_second_allocation_does_nothing() -> None:
    """The call for a request whose load is over brings no second load and drops none."""
    rig = Rig()
    request = rig.arrive("r", 4 * BLOCK + 1)
    _, blocks = load(rig, request, 3)
    rig.side.loaded({"r"}, (), ())
    rig.start(request, 3 * BLOCK, BLOCK + 1, blocks=[*blocks, *rig.blocks(2)])
    assert rig.link.taken(DropLoad) == []
    assert rig.idle().loads == ()


def test_load_that_nobody_announced_is_a_fault() -> None:
    """A load that vLLM awaits without having been told of one is an error at once: the request would wait for ever."""
    rig = Rig()
    request = rig.arrive("r", 4 * BLOCK + 1)
    with pytest.raises(RuntimeError, match="nobody announced"):
        rig.side.allocated(request, [rig.blocks(3)], 3 * BLOCK)


@pytest.mark.parametrize("as_whole", [False, True])
def test_failed_load_is_not_tried_again(as_whole: bool) -> None:
    """After a load that failed vLLM is told 0 for the same request, and the load is called off for every worker."""
    rig = Rig()
    request = rig.arrive("r", 4 * BLOCK + 1)
    order, blocks = load(rig, request, 3)
    rig.side.loaded({"r"}, {"r"} if as_whole else (), () if as_whole else {blocks[1]})
    assert rig.link.taken(DropLoad) == [DropLoad(1, order.job.transfer)]
    request.num_computed_tokens = 0
    assert rig.matched(request) == (0, False)
    rig.start(request, 0, 4 * BLOCK + 1)
    rig.preempt(request)
    assert rig.matched(request) == (0, False)


def test_failure_may_be_told_before_the_end() -> None:
    """With several workers bad blocks are told when the first one is through, the end when all are."""
    rig = Rig(shards=2)
    request = rig.arrive("r", 4 * BLOCK + 1)
    _, blocks = load(rig, request, 3)
    rig.side.loaded((), (), {blocks[0]})
    rig.side.loaded({"r"}, (), ())
    assert rig.matched(request) == (0, False)


def test_other_requests_load_on() -> None:
    """Bad blocks count for the request that they were loaded for, and for no other."""
    rig = Rig()
    first, second = (rig.arrive(name, 4 * BLOCK + 1) for name in "ab")
    rig.link.commands = [command for command in rig.link.commands if getattr(command, "ticket", 0) == 1]
    _, blocks = load(rig, first, 3)
    rig.side.loaded({"a", "b", "of another connector"}, (), {blocks[0]})
    rig.preempt(second)
    assert rig.matched(second) == (None, False)


def test_good_load_is_not_called_off() -> None:
    """A load that arrived is ended by the workers alone."""
    rig = Rig()
    load(rig, rig.arrive("r", 4 * BLOCK + 1), 3)
    rig.side.loaded({"r"}, (), ())
    assert rig.link.taken(DropLoad) == []


def test_aborted_while_loading() -> None:
    """A request that ends while it loads stores nothing of what is not there yet, and gives its lease back."""
    rig = Rig()
    request = rig.arrive("r", 4 * BLOCK + 1)
    _, blocks = load(rig, request, 3)
    rig.finish(request, blocks)
    assert len(rig.link.taken(Release)) == 1
    assert rig.held == []
    rig.side.loaded({"r"}, (), {blocks[0]})
    assert not rig.side.is_busy


def test_load_of_lost_session_goes_out() -> None:
    """A load that vLLM counts on is ordered though its session was lost: workers end it, well or not."""
    rig = Rig()
    request = rig.arrive("r", 4 * BLOCK + 1)
    rig.found(3)
    tokens, _ = rig.matched(request)
    assert tokens
    rig.side.allocated(request, [rig.blocks(3)], tokens)
    rig.lose()
    orders = rig.idle()
    assert [order.session for order in orders.loads] == [1]
    assert orders.session is None


def test_blocks_behind_a_loaded_hit_are_stored_from_there() -> None:
    """What was loaded needs no store: the first offer starts behind the hit."""
    rig = Rig()
    request = rig.arrive("r", 4 * BLOCK + 1)
    _, blocks = load(rig, request, 3)
    rig.side.loaded({"r"}, (), ())
    rig.link.taken(Seek)
    rig.start(request, 3 * BLOCK, BLOCK + 1, blocks=[*blocks, *rig.blocks(2)])
    assert rig.plan().pieces == ((3, 1),)
