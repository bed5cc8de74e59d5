"""Stores that cannot be: limits, lack of room, refusals, and sessions that are lost."""

from __future__ import annotations

from kvcached_client.vllm.daemon.commands import DropStore, Offer, Release, Seek, Unplanned
from kvcached_client.vllm.scheduling.scheduler import GENERATED_BLOCKS_PER_OFFER
from kvcached_client.vllm.scheduling.store_queue import OFFER_BLOCKS_MAX, STORES_MAX
from tests.vllm_connector.rig import BLOCK, Rig, generate, running


def test_number_of_stores_is_bounded() -> None:
    """Beyond the limit blocks are not held; they are offered when there is room again."""
    rig = Rig()
    last: list[int] = []
    for number in range(STORES_MAX + 1):
        _, last = running(rig, f"r{number}", 2 * BLOCK)
    offers = rig.link.taken(Offer)
    assert len(offers) == STORES_MAX
    assert not set(last) & set(rig.held)
    rig.idle()
    assert rig.link.taken(Offer) == []
    rig.plan(offer=offers[0])
    rig.report(rig.idle())
    rig.idle()
    assert len(rig.link.taken(Offer)) == 1
    assert set(last) <= set(rig.held)


def test_finish_beyond_the_bound_is_skipped_and_counted() -> None:
    """Blocks of a request that ends while too many stores are under way are not stored, but counted."""
    rig = Rig()
    for number in range(STORES_MAX):
        running(rig, f"r{number}", 2 * BLOCK)
    request, blocks = running(rig, "last", 2 * BLOCK)
    rig.finish(request, blocks)
    assert (rig.side.take_skipped(), rig.side.take_skipped()) == (2, 0)
    assert not set(blocks) & set(rig.held)
    assert len(rig.link.taken(Release)) == 1


def test_long_prompt_is_offered_in_parts() -> None:
    """A prompt of more blocks than one offer may have is offered in several, each after the other's answer."""
    rig = Rig()
    request, blocks = running(rig, "r", (OFFER_BLOCKS_MAX + 2) * BLOCK + 1)
    assert rig.held == blocks[:OFFER_BLOCKS_MAX]
    rig.plan()
    rig.finish(request, blocks)
    rig.idle()
    assert rig.plan().pieces == ((OFFER_BLOCKS_MAX, 2),)
    assert rig.held == blocks[: OFFER_BLOCKS_MAX + 2]


def test_without_room_nothing_is_offered_until_more_is_due() -> None:
    """Where the host pool has no room the rest is not offered again and again, but with the next offer."""
    rig = Rig()
    request, blocks = running(rig, "r", (OFFER_BLOCKS_MAX + 2) * BLOCK)
    rig.plan(depth=3, pieces=[(0, 3)])
    rig.report(rig.idle())
    assert (rig.held, rig.link.taken(Offer), rig.side.take_skipped()) == ([], [], OFFER_BLOCKS_MAX - 3)
    more = generate(rig, request, GENERATED_BLOCKS_PER_OFFER)
    assert [(offer.start, offer.keys[:16]) for offer in rig.link.taken(Offer)] == [(3, request.keys(3, 4))]
    assert rig.held == [*blocks[3:], *more][:OFFER_BLOCKS_MAX]


def test_finished_request_without_room_is_let_go() -> None:
    """What a finished request could not store for lack of room is not held."""
    rig = Rig()
    request, blocks = running(rig, "r", 4 * BLOCK)
    rig.finish(request, blocks)
    rig.plan(depth=1, pieces=[(0, 1)])
    rig.report(rig.idle())
    assert (rig.held, rig.side.is_busy, len(rig.link.taken(Release))) == ([], False, 1)


def test_refused_offer_lets_blocks_go() -> None:
    """Blocks whose offer was refused are let go and counted, and offered again with the next ones."""
    rig = Rig()
    request, _ = running(rig, "r", 2 * BLOCK)
    rig.unplan()
    rig.idle()
    assert (rig.held, rig.side.take_skipped(), rig.link.taken(Offer)) == ([], 2, [])
    generate(rig, request, GENERATED_BLOCKS_PER_OFFER)
    assert [offer.start for offer in rig.link.taken(Offer)] == [0]


def test_refused_part_of_a_long_prompt_is_not_offered_on_and_on() -> None:
    """Where one part of a long prompt was refused, nothing is offered before more is due."""
    rig = Rig()
    request, _ = running(rig, "r", (OFFER_BLOCKS_MAX + 2) * BLOCK)
    rig.unplan()
    rig.idle()
    assert rig.link.taken(Offer) == []
    generate(rig, request, GENERATED_BLOCKS_PER_OFFER)
    assert [offer.start for offer in rig.link.taken(Offer)] == [0]


def test_slow_daemon_postpones_offers() -> None:
    """While the link takes no questions, offers wait, and blocks are not held."""
    rig = Rig()
    request = rig.arrive("r", 2 * BLOCK + 1)
    rig.found(0)
    rig.matched(request)
    rig.link.is_taking = False
    blocks = rig.start(request, 0, 2 * BLOCK + 1)
    assert rig.held == []
    rig.link.is_taking = True
    rig.idle()
    assert rig.held == blocks[:2]


def test_failed_store_is_called_off_after_the_last_worker() -> None:
    """A store that failed on a worker is called off for all when all are through: before that one may be writing."""
    rig = Rig(shards=2)
    running(rig, "r", 2 * BLOCK)
    plan = rig.plan()
    orders = rig.idle()
    rig.report(orders, failed=True)
    assert rig.link.taken(DropStore) == []
    rig.report(orders)
    assert [drop.transfer for drop in rig.link.taken(DropStore)] == [plan.transfer]
    assert rig.held == []


def test_lost_session_lets_go_of_what_workers_do_not_know() -> None:
    """With the session planned stores are dropped; those that workers copy end by their reports."""
    rig = Rig()
    running(rig, "copying", 2 * BLOCK)
    rig.plan()
    orders = rig.idle()
    copying = rig.held
    running(rig, "planned", 2 * BLOCK)
    running(rig, "offered", 2 * BLOCK)
    planned, offered = rig.link.taken(Offer)
    rig.plan(offer=planned)
    rig.lose()
    rig.link.events.append(Unplanned(offered.ticket))
    assert rig.idle().stores == ()
    assert rig.held == copying
    rig.report(orders, failed=True)
    assert (rig.held, rig.side.is_busy) == ([], False)


def test_running_request_stores_into_the_next_session() -> None:
    """A request that goes on after its session was lost gets a lease of the next one, and offers what that lacks."""
    rig = Rig()
    request, _ = running(rig, "r", 2 * BLOCK)
    rig.plan(pieces=[])
    rig.idle()
    rig.lose()
    rig.connect()
    generate(rig, request, GENERATED_BLOCKS_PER_OFFER)
    (seek,) = rig.link.commands
    assert isinstance(seek, Seek)
    assert (seek.load, seek.keys) == (False, request.keys(0, 2 + GENERATED_BLOCKS_PER_OFFER))
    rig.found(1)
    rig.idle()
    assert rig.plan().pieces == ((1, 1 + GENERATED_BLOCKS_PER_OFFER),)
    assert rig.idle().stores[0].session == 2


def test_finished_requests_of_lost_session_are_let_go() -> None:
    """A finished request that waits for its session's answer is over with the session."""
    rig = Rig()
    request, blocks = running(rig, "r", 2 * BLOCK)
    rig.finish(request, blocks)
    rig.unplan()
    rig.lose()
    rig.idle()
    assert (rig.held, rig.side.is_busy) == ([], False)


def test_frees_soon() -> None:
    """VLLM need not preempt where blocks come free with a store; blocks that a request still has do not count."""
    rig = Rig()
    request, blocks = running(rig, "r", 2 * BLOCK)
    assert not rig.side.frees_soon
    rig.finish(request, blocks)
    assert rig.side.frees_soon
    rig.plan()
    orders = rig.idle()
    assert rig.side.frees_soon
    rig.report(orders)
    assert not rig.side.frees_soon


def test_offers_hold_no_more_than_their_share() -> None:
    """Offers hold a quarter of vLLM's blocks at most; the rest of a prompt is offered as stores end."""
    rig = Rig(pool_blocks=40)
    _, blocks = running(rig, "r", 24 * BLOCK)
    assert rig.held == blocks[:10]
    rig.plan()
    orders = rig.idle()
    assert rig.held == blocks[:10]
    rig.report(orders)
    rig.idle()
    assert rig.held == blocks[10:20]


def test_finished_requests_hold_no_more_than_their_share() -> None:
    """What a finished request would hold beyond the share is not stored, but counted; its beginning is."""
    rig = Rig(pool_blocks=40)
    rig.link.is_taking = True
    first, first_blocks = running(rig, "first", 6 * BLOCK)
    second, second_blocks = running(rig, "second", 9 * BLOCK)
    assert len(rig.held) == 10
    rig.finish(first, first_blocks)
    rig.finish(second, second_blocks)
    assert rig.held == [*first_blocks, *second_blocks[:4]]
    assert rig.side.take_skipped() == 5
    for offer in rig.link.taken(Offer):
        rig.plan(offer=offer)
    rig.report(rig.idle())
    assert (rig.held, rig.side.is_busy, len(rig.link.taken(Release))) == ([], False, 2)


def test_earlier_blocks_count_towards_the_share() -> None:
    """Lost blocks before an offer that the daemon asks for again are not stored if offers would hold too many."""
    rig = Rig(pool_blocks=40)
    running(rig, "r", 14 * BLOCK + 1, hit=11)
    plan = rig.plan(pieces=[(0, 8), (11, 3)])
    assert rig.idle().stores == ()
    assert [drop.transfer for drop in rig.link.taken(DropStore)] == [plan.transfer]
    assert (rig.held, rig.side.take_skipped()) == ([], 11)

    running(rig, "s", 14 * BLOCK + 1, hit=11)
    rig.plan(pieces=[(0, 7), (11, 3)])
    assert len(rig.idle().stores) == 1
    assert len(rig.held) == 10


def test_offers_that_hold_much_do_not_wait() -> None:
    """Where half of the blocks that may be held are held, offers wait for no others, so that blocks come free."""
    rig = Rig(pool_blocks=40)
    running(rig, "r", 4 * BLOCK)
    assert rig.link.hurries == 0
    running(rig, "s", 1 * BLOCK + BLOCK)
    assert (len(rig.held), rig.link.hurries) == (6, 1)


def test_blocks_that_wait_for_an_offer_count_as_held() -> None:
    """The last blocks of a request whose offer is out are held, too: where that is much, the offer is sent."""
    rig = Rig(pool_blocks=40)
    request, blocks = running(rig, "r", 2 * BLOCK)
    blocks += generate(rig, request, 3)
    assert (len(rig.held), rig.link.hurries) == (2, 0)
    rig.finish(request, blocks)
    assert (len(rig.held), rig.link.hurries) == (5, 1)
