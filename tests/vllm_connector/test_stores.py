"""Stores: what is offered when, and which of vLLM's blocks are held for how long."""

from __future__ import annotations

import pytest

from kvcached_client.vllm.daemon.commands import DropStore, Offer, Release
from kvcached_client.vllm.scheduling.scheduler import GENERATED_BLOCKS_PER_OFFER
from tests.vllm_connector.rig import BLOCK, GENERATION, FakeRequest, Rig, generate, running


def test_full_blocks_are_offered_and_held() -> None:
    """The step that fills blocks offers them, and holds them from then on."""
    rig = Rig()
    request, blocks = running(rig, "r", 2 * BLOCK + 1)
    (offer,) = rig.link.taken(Offer)
    assert (offer.start, offer.keys) == (0, request.keys(0, 2))
    assert rig.held == blocks[:2]


def test_store_goes_out_with_a_later_step() -> None:
    """Workers are told to store after the step that computed the blocks, with the daemon's slots; then they go."""
    rig = Rig()
    request, blocks = running(rig, "r", 2 * BLOCK + 1)
    assert rig.idle().stores == ()
    plan = rig.plan()
    orders = rig.idle()
    (order,) = orders.stores
    (span,) = order.job.spans
    assert (order.session, order.job.transfer, order.job.generation) == (1, plan.transfer, GENERATION)
    assert (span.depth, span.parent, span.keys) == (0, b"", request.keys(0, 2))
    assert (span.blocks.tolist(), span.slots.tolist()) == (blocks[:2], [900, 901])
    assert rig.idle().stores == ()
    assert rig.held == blocks[:2]
    rig.report(orders)
    assert rig.held == []


def test_held_until_every_worker_has_reported() -> None:
    """Blocks are let go when the last worker is through, in an order that lets vLLM evict a prefix from its end."""
    rig = Rig(shards=3)
    _, blocks = running(rig, "r", 2 * BLOCK + 1)
    rig.plan()
    orders = rig.idle()
    rig.report(orders, workers=2)
    assert rig.held == blocks[:2]
    rig.report(orders)
    assert (rig.held, rig.pool.freed) == ([], [blocks[1], blocks[0]])


def test_what_is_stored_already_is_let_go() -> None:
    """Where the daemon has all copies, nothing is copied, and the blocks go at once."""
    rig = Rig()
    running(rig, "r", 2 * BLOCK + 1)
    rig.plan(pieces=[])
    assert rig.idle().stores == ()
    assert rig.held == []


def test_daemon_may_want_less() -> None:
    """Only what the daemon lacks is copied, in as many spans as there are pieces."""
    rig = Rig()
    request, blocks = running(rig, "r", 5 * BLOCK + 1)
    rig.plan(pieces=[(1, 1), (3, 2)])
    (order,) = rig.idle().stores
    first, second = order.job.spans
    assert (first.depth, first.parent, first.keys) == (1, request.keys(0, 1), request.keys(1, 2))
    assert (second.depth, second.parent, second.keys) == (3, request.keys(2, 3), request.keys(3, 5))
    assert (first.blocks.tolist(), second.blocks.tolist()) == (blocks[1:2], blocks[3:5])
    assert (first.slots.tolist(), second.slots.tolist()) == ([900], [901, 902])


def test_earlier_blocks_that_were_lost_are_stored_again() -> None:
    """Blocks before those offered, whose copies were lost, are copied and held where the request still has them."""
    rig = Rig()
    request, blocks = running(rig, "r", 3 * BLOCK + 1, hit=2)
    assert rig.link.commands[-1] == Offer(2, 1, rig.link.commands[-1].lease, 2, request.keys(2, 3))  # type: ignore[union-attr]
    rig.plan(pieces=[(0, 1), (2, 1)])
    orders = rig.idle()
    first, second = orders.stores[0].job.spans
    assert (first.blocks.tolist(), second.blocks.tolist()) == (blocks[:1], blocks[2:3])
    assert rig.held == [blocks[0], blocks[2]]
    rig.report(orders)
    assert rig.held == []


def test_piece_may_reach_over_the_start_of_an_offer() -> None:
    """One piece may hold blocks before and behind the start of the offer."""
    rig = Rig()
    _, blocks = running(rig, "r", 3 * BLOCK + 1, hit=1)
    rig.plan(pieces=[(0, 3)])
    (order,) = rig.idle().stores
    assert order.job.spans[0].blocks.tolist() == blocks[:3]
    assert rig.held == blocks[:3]


def test_earlier_blocks_that_are_gone_cancel_the_store() -> None:
    """Where the request has ended, earlier blocks are not there any more: the store is called off."""
    rig = Rig()
    request, blocks = running(rig, "r", 3 * BLOCK + 1, hit=2)
    rig.finish(request, blocks)
    plan = rig.plan(pieces=[(0, 1), (2, 1)])
    assert rig.idle().stores == ()
    assert [drop.transfer for drop in rig.link.taken(DropStore)] == [plan.transfer]
    assert (rig.held, rig.side.take_skipped()) == ([], 2)


def recompute(rig: Rig, request: FakeRequest, bad: int) -> list[int]:
    """Load a hit of 3 blocks of which one is bad, and compute what vLLM then lacks; the request's blocks."""
    rig.found(3)
    rig.matched(request)
    blocks = rig.blocks(-(-request.num_tokens // BLOCK))
    rig.side.allocated(request, [blocks], 3 * BLOCK)
    rig.idle()
    rig.side.loaded({"r"}, (), {blocks[bad]})
    rig.run_new(request, blocks, bad * BLOCK, request.num_tokens - bad * BLOCK)
    return blocks


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_recomputed_blocks_are_held_with_the_next_offer(bad: int) -> None:
    """What was computed for a bad load is held with the next offer: the daemon gets it though the request ends."""
    rig = Rig()
    request = rig.arrive("r", 4 * BLOCK + 1)
    blocks = recompute(rig, request, bad)
    assert rig.held == blocks[bad:4]
    rig.finish(request, blocks)
    rig.plan(pieces=[(bad, 4 - bad)])
    orders = rig.idle()
    assert orders.stores[0].job.spans[0].blocks.tolist() == blocks[bad:4]
    rig.report(orders)
    assert (rig.held, rig.side.take_skipped(), rig.side.is_busy) == ([], 0, False)


def test_recomputed_blocks_are_offered_where_nothing_follows() -> None:
    """A bad load of all full blocks of a request is followed by an offer of none: the daemon asks for what it lacks."""
    rig = Rig()
    request = rig.arrive("r", 3 * BLOCK + 1)
    blocks = recompute(rig, request, 1)
    (offer,) = rig.link.taken(Offer)
    assert (offer.start, offer.keys) == (3, b"")
    rig.plan(pieces=[(1, 2)], offer=offer)
    assert rig.idle().stores[0].job.spans[0].blocks.tolist() == blocks[1:3]
    assert rig.link.taken(Offer) == []


def test_decode_offers_some_blocks_at_a_time() -> None:
    """Generated blocks are offered together, in the step that fills the last of so many; other steps ask nothing."""
    rig = Rig()
    request, _ = running(rig, "r", BLOCK + 1)
    rig.plan()
    offers = []
    for token in range(1, GENERATED_BLOCKS_PER_OFFER * BLOCK):
        request.append(token)
        rig.run(request, 1, added=rig.blocks(1) if token % BLOCK == 0 else None)
        offers += [(token, len(offer.keys) // 16) for offer in rig.link.taken(Offer)]
    assert offers == [(GENERATED_BLOCKS_PER_OFFER * BLOCK - 1, GENERATED_BLOCKS_PER_OFFER)]


def test_prompt_is_offered_to_its_last_full_block() -> None:
    """Blocks of a prompt do not wait for others, however few a chunk of it fills."""
    rig = Rig()
    request = rig.arrive("r", 3 * BLOCK)
    rig.found(0)
    rig.matched(request)
    rig.start(request, 0, 2 * BLOCK)
    rig.plan()
    rig.run(request, BLOCK, added=rig.blocks(1))
    assert [offer.start for offer in rig.link.taken(Offer)] == [2]


def test_end_offers_generated_blocks_that_waited() -> None:
    """The last full blocks of a request are offered when it ends, however few they are."""
    rig = Rig()
    request, blocks = running(rig, "r", 2 * BLOCK)
    rig.plan()
    more = generate(rig, request, 1)
    assert rig.link.taken(Offer) == []
    rig.finish(request, blocks + more)
    assert [(offer.start, offer.keys) for offer in rig.link.taken(Offer)] == [(2, request.keys(2, 3))]


def test_new_blocks_are_appended_and_resumed_ones_replace() -> None:
    """Blocks that a step adds follow the ones before; those of a request that came back are all it has."""
    rig = Rig()
    request, blocks = running(rig, "r", 2 * BLOCK)
    rig.plan()
    more = rig.blocks(1)
    for token in range(BLOCK):
        request.append(token)
        rig.run(request, 1, added=more if token == 0 else None)
    more += generate(rig, request, GENERATED_BLOCKS_PER_OFFER - 1)
    rig.plan()
    assert rig.idle().stores[0].job.spans[0].blocks.tolist() == more
    rig.preempt(request)
    rig.idle(preempted={"r"})
    rig.found(0)
    rig.matched(request)
    other = rig.blocks(3)
    rig.side.allocated(request, [other], 0)
    rig.run(request, 3 * BLOCK, added=other, resumed=True)
    rig.plan()
    assert rig.idle().stores[0].job.spans[0].blocks.tolist() == other
    assert blocks[0] not in other


def test_chunked_prefill_offers_chunk_by_chunk() -> None:
    """Each chunk of a prompt is offered when it is scheduled, one offer after the other's answer."""
    rig = Rig()
    request = rig.arrive("r", 6 * BLOCK)
    rig.found(0)
    rig.matched(request)
    blocks = rig.start(request, 0, 2 * BLOCK + 2)
    more = rig.blocks(2)
    rig.run(request, 2 * BLOCK, added=more)  # the first answer is still out
    assert rig.plan().pieces == ((0, 2),)
    rig.idle()
    plan = rig.plan()
    assert plan.pieces == ((2, 2),)
    assert rig.idle().stores[0].job.spans[0].blocks.tolist() == [blocks[2], more[0]]


def test_speculative_tokens_are_not_stored() -> None:
    """Blocks that hold speculative tokens are not offered before their tokens are certain."""
    rig = Rig()
    request, _ = running(rig, "r", BLOCK + 2)
    rig.plan()
    generate(rig, request, GENERATED_BLOCKS_PER_OFFER - 1)
    rig.run(request, 1 + 4, added=rig.blocks(1))  # one token and four guesses, which would fill a block
    assert rig.link.taken(Offer) == []
    request.append(1, 2)
    request.num_computed_tokens = len(request.tokens) - 1  # two guesses were wrong
    rig.run(request, 1)
    assert [offer.start for offer in rig.link.taken(Offer)] == [1]


def test_blocks_without_hashes_are_not_offered() -> None:
    """What vLLM has no hash for yet is not offered."""
    rig = Rig()
    request = rig.arrive("r", 3 * BLOCK)
    rig.found(0)
    rig.matched(request)
    request.block_hashes = request.block_hashes[:1]
    rig.start(request, 0, 3 * BLOCK)
    assert [len(offer.keys) for offer in rig.link.taken(Offer)] == [16]


def test_finish_offers_the_rest() -> None:
    """Full blocks that were not offered when a request ends are offered then, and its lease is given back after."""
    rig = Rig()
    request, blocks = running(rig, "r", 2 * BLOCK + 1)
    rig.finish(request, blocks)  # while the first answer is out
    request.append(*range(BLOCK))
    assert rig.side.is_busy
    rig.plan()
    orders = rig.idle()
    assert len(rig.link.taken(Release)) == 1
    assert rig.side.is_busy
    rig.report(orders)
    assert (rig.held, rig.side.is_busy) == ([], False)


def test_block_whose_last_token_came_with_the_end_is_stored() -> None:
    """A block whose last token became certain only as its request ended is offered then, and held beyond the end."""
    rig = Rig()
    request, blocks = running(rig, "r", 3 * BLOCK - 1)
    rig.plan(pieces=[])
    rig.run(request, 1)  # scheduled before the token is known that it computes
    request.append(7)
    assert (rig.link.taken(Offer), rig.held) == ([], [])
    rig.finish(request, blocks)
    assert rig.held == blocks[2:3]
    assert rig.plan().pieces == ((2, 1),)
    rig.report(rig.idle())
    assert (rig.held, rig.side.is_busy, len(rig.link.taken(Release))) == ([], False, 1)


def test_finish_while_lease_is_sought_holds_its_blocks() -> None:
    """A request that ends before its lease is known is stored all the same, without what is stored already."""
    rig = Rig()
    request = rig.arrive("r", 3 * BLOCK + 1)
    rig.now += 5
    rig.matched(request)
    blocks = rig.start(request, 0, 3 * BLOCK + 1)
    rig.finish(request, blocks)
    assert rig.held == blocks[:3]
    rig.found(1)
    rig.idle()
    assert rig.held == blocks[1:3]
    assert rig.plan().pieces == ((1, 2),)
    rig.report(rig.idle())
    assert (rig.held, rig.side.is_busy, len(rig.link.taken(Release))) == ([], False, 1)


def test_request_that_came_without_session_gets_a_lease_later() -> None:
    """Blocks of a request that arrived without a session are stored once there is one and more is due."""
    rig = Rig(is_connected=False)
    rig.link.is_taking = False
    request = rig.arrive("r", 2 * BLOCK + 1)
    rig.matched(request)
    rig.start(request, 0, 2 * BLOCK + 1)
    rig.connect()
    rig.idle()
    generate(rig, request, GENERATED_BLOCKS_PER_OFFER)
    rig.found(0)
    rig.idle()
    assert rig.plan().pieces == ((0, 2 + GENERATED_BLOCKS_PER_OFFER),)


def test_idle_engine_lets_no_offer_wait() -> None:
    """Offers wait for others while requests run; once nothing is computed, what waits is sent."""
    rig = Rig()
    request, _ = running(rig, "r", 2 * BLOCK + 1)
    rig.run(request, 1)
    assert rig.link.hurries == 0
    rig.idle()
    assert rig.link.hurries == 1


def test_what_another_connector_loads_is_stored_by_nobody_before_it_has_come() -> None:
    """A request that ends before its first step has blocks that vLLM counts as computed, and nobody has written."""
    rig = Rig()
    request = rig.arrive("r", 4 * BLOCK + 1)
    rig.found(1)
    rig.matched(request)
    blocks = rig.blocks(5)
    rig.side.allocated(request, [blocks], 0)  # as `MultiConnector` tells it where another connector has more
    request.num_computed_tokens = 4 * BLOCK
    rig.idle()
    rig.finish(request, blocks[:4])

    assert (rig.link.taken(Offer), len(rig.link.taken(Release)), rig.held) == ([], 1, [])
