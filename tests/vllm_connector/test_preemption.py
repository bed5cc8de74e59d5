"""Requests that lose their blocks, and caches that are reset."""

from __future__ import annotations

import pytest

from kvcached_client.vllm.daemon.commands import DropLoad, Offer, Release, Seek
from kvcached_client.vllm.scheduling.scheduler import RESET_S_MAX
from tests.vllm_connector.rig import BLOCK, Rig


@pytest.mark.parametrize("how", ["named by the step", "seen when it comes up"])
def test_preempted_request_asks_afresh(how: str) -> None:
    """A preempted request gives its lease back and asks under another name, for its output, too; only once."""
    rig = Rig()
    request = rig.arrive("r", 2 * BLOCK + 1)
    (first,) = rig.link.taken(Seek)
    rig.link.commands.append(first)
    found = rig.found(0)
    rig.matched(request)
    rig.start(request, 0, 2 * BLOCK + 1)
    rig.plan(pieces=[])
    rig.idle()
    request.append(*range(BLOCK))
    rig.preempt(request)
    if how == "named by the step":
        rig.idle(preempted={"r", "a request of another connector"})
    else:
        assert rig.matched(request) == (None, False)
        rig.idle(preempted={"r"})
    assert rig.link.taken(Release) == [Release(1, found.lease)]
    (second,) = rig.link.commands
    assert isinstance(second, Seek)
    assert (second.load, second.keys, second.tokens) == (True, request.keys(0, 3), 3 * BLOCK + 1)
    assert second.name != first.name
    rig.found(2)
    assert rig.matched(request) == (2 * BLOCK, True)


def test_preempted_request_that_may_not_load_gives_its_lease_back() -> None:
    """A preempted request whose load failed asks for no hit; the lease that it had is given back all the same."""
    rig = Rig()
    request = rig.arrive("r", 2 * BLOCK + 1)
    found = rig.found(1)
    tokens, _ = rig.matched(request)
    assert tokens
    rig.side.allocated(request, [rig.blocks(1)], tokens)
    rig.idle()
    rig.side.loaded({"r"}, {"r"}, ())
    rig.preempt(request)
    rig.idle(preempted={"r"})
    assert rig.link.taken(Release) == [Release(1, found.lease)]
    assert rig.link.taken(Seek) == []


def test_resumed_blocks_replace() -> None:
    """Blocks of a resumed request are all that it has, also where nothing told of its preemption before."""
    rig = Rig()
    request = rig.arrive("r", 2 * BLOCK + 1)
    rig.found(0)
    rig.matched(request)
    rig.start(request, 0, BLOCK)
    rig.plan(pieces=[])
    rig.idle()
    other = rig.blocks(3)
    rig.run(request, BLOCK, added=other, resumed=True)
    rig.plan()
    assert rig.idle().stores[0].job.spans[0].blocks.tolist() == other[1:2]


def test_store_of_preempted_request_goes_on() -> None:
    """What a request had offered when it was preempted is stored from the blocks that are held, and only those."""
    rig = Rig()
    request = rig.arrive("r", 2 * BLOCK + 1)
    rig.found(0)
    rig.matched(request)
    blocks = rig.start(request, 0, 2 * BLOCK + 1)
    (offer,) = rig.link.taken(Offer)
    rig.preempt(request)
    rig.idle(preempted={"r"})
    assert rig.held == blocks[:2]
    assert rig.side.frees_soon
    rig.plan(offer=offer)
    orders = rig.idle()
    assert orders.stores[0].job.spans[0].blocks.tolist() == blocks[:2]
    rig.report(orders)
    assert rig.held == []


def test_depth_of_an_old_lease_is_not_the_new_ones() -> None:
    """The answer to an offer of before the preemption does not move the start of the next lease's offers."""
    rig = Rig()
    request = rig.arrive("r", 3 * BLOCK + 1)
    rig.found(0)
    rig.matched(request)
    rig.start(request, 0, 3 * BLOCK + 1)
    (old,) = rig.link.taken(Offer)
    rig.preempt(request)
    rig.idle(preempted={"r"})
    rig.found(1)
    rig.matched(request)
    rig.plan(offer=old, depth=2, pieces=[(0, 2)])
    rig.start(request, 0, 3 * BLOCK + 1)
    assert [offer.start for offer in rig.link.taken(Offer)] == [1]


def test_late_answer_to_a_preempted_request() -> None:
    """The answer to what a request asked before it was preempted is given back; the later one counts."""
    rig = Rig()
    request = rig.arrive("r", 3 * BLOCK + 1)
    (old,) = rig.link.taken(Seek)
    rig.preempt(request)
    rig.idle(preempted={"r"})
    (new,) = rig.link.taken(Seek)
    rig.link.commands = [old]
    stale = rig.found(3)
    rig.idle()
    assert stale.load is not None
    assert rig.link.commands == [DropLoad(1, stale.load.transfer), Release(1, stale.lease)]
    rig.link.commands = [new]
    rig.found(2)
    assert rig.matched(request) == (2 * BLOCK, True)


def test_preempted_and_aborted_before_anybody_noticed() -> None:
    """A request that ends after a preemption which no hook has seen yet stores none of the blocks that it lost."""
    rig = Rig()
    request = rig.arrive("r", 2 * BLOCK + 1)
    rig.found(0)
    rig.matched(request)
    rig.start(request, 0, 2 * BLOCK + 1)
    rig.unplan()
    rig.idle()
    rig.preempt(request)
    rig.finish(request, [])
    assert (rig.held, rig.side.is_busy, len(rig.link.taken(Release))) == ([], False, 1)


def test_same_id_again_while_the_old_one_is_storing() -> None:
    """A request with the id of one that has ended, but still stores, has a lease under another name."""
    rig = Rig()
    request = rig.arrive("r", 2 * BLOCK + 1)
    (first,) = rig.link.taken(Seek)
    rig.link.commands.append(first)
    rig.found(0)
    rig.matched(request)
    blocks = rig.start(request, 0, 2 * BLOCK + 1)
    rig.finish(request, blocks)
    again = rig.arrive("r", 2 * BLOCK + 1)
    (second,) = rig.link.taken(Seek)
    assert second.name != first.name
    rig.plan()
    rig.idle()
    assert rig.matched(again) == (None, False)


def test_session_of_input_chunks_keeps_its_blocks() -> None:
    """A request that is told to workers as new a second time, with all its blocks, stores on where it was."""
    rig = Rig()
    request = rig.arrive("r", 2 * BLOCK)
    rig.found(0)
    rig.matched(request)
    blocks = rig.start(request, 0, 2 * BLOCK)
    rig.plan()
    rig.idle()
    request.ask_more(*range(BLOCK))
    rig.run_new(request, [*blocks, *rig.blocks(1)], 2 * BLOCK, BLOCK)
    assert [offer.start for offer in rig.link.taken(Offer)] == [2]


# --- reset ----------------------------------------------------------------------------------------------------------


def test_reset_clears_within_a_bounded_time() -> None:
    """A reset is the daemon's clear, waited for within limits; vLLM is told False where it did not happen."""
    rig = Rig()
    assert rig.side.reset()
    rig.link.clear_works = False
    assert not rig.side.reset()
    assert rig.link.clears == [RESET_S_MAX] * 2


def test_reset_voids_hits_that_wait() -> None:
    """A hit of before the reset is not loaded after it: its load is called off, and the request asks again."""
    rig = Rig()
    request = rig.arrive("r", 3 * BLOCK + 1)
    found = rig.found(3)
    rig.side.reset()
    assert found.load is not None
    assert rig.link.taken(DropLoad) == [DropLoad(1, found.load.transfer)]
    assert rig.matched(request) == (None, False)
    assert rig.link.taken(Release) == [Release(1, found.lease)]
    rig.found(0)
    assert rig.matched(request) == (0, False)


def test_reset_voids_answers_on_their_way() -> None:
    """An answer that may have been given before the clear is not used."""
    rig = Rig()
    request = rig.arrive("r", 3 * BLOCK + 1)
    (old,) = rig.link.taken(Seek)
    rig.side.reset()
    rig.link.commands = [old]
    rig.found(3)
    assert rig.matched(request) == (None, False)
    assert len(rig.link.taken(Release)) == 1


def test_lease_that_comes_with_a_preemption_stores_nothing() -> None:
    """In a step that preempts a request, vLLM has given its blocks to others: what comes then offers none of them."""
    rig = Rig()
    request = rig.arrive("r", 2 * BLOCK + 1)
    rig.pass_time(10)
    rig.matched(request)
    rig.start(request, 0, 2 * BLOCK + 1)
    rig.preempt(request)
    rig.found(0)
    rig.idle(preempted={"r"})
    assert rig.link.taken(Offer) == []
    assert rig.held == []


def test_plan_that_comes_with_a_preemption_stores_no_earlier_blocks() -> None:
    """Earlier blocks of a request, which the daemon asks for, are not stored in a step that preempts the request."""
    rig = Rig()
    request = rig.arrive("r", 3 * BLOCK + 1)
    rig.found(1)
    rig.matched(request, BLOCK)
    rig.start(request, BLOCK, 2 * BLOCK + 1)
    rig.preempt(request)
    rig.plan(pieces=[(0, 3)])
    assert rig.idle(preempted={"r"}).stores == ()
    assert rig.held == []
