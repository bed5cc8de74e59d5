"""Loads and stores of requests with blocks of two groups: full attention, and a window with larger blocks."""

from __future__ import annotations

import numpy as np
import pytest

from kvcached_client.vllm.daemon.commands import DropStore, Offer, Release, Seek
from kvcached_client.vllm.scheduling.chains import Chains, GroupKeys, unit_of
from tests.vllm_connector.mini_hybrid import ListedBlock
from tests.vllm_connector.rig import BLOCK, FakeRequest, Rig

UNIT = unit_of([BLOCK, 2 * BLOCK], BLOCK)
UNIT_TOKENS = 2 * BLOCK


class GroupsRig(Rig):
    """A rig whose requests have the blocks in `tables` now; 0 is the null block."""

    def __init__(self, *, pool_blocks: int = 16_384) -> None:
        self.tables: dict[str, list[list[int]]] = {}
        super().__init__(pool_blocks=pool_blocks, chains=Chains(BLOCK, unit=UNIT, live=self._lists))

    def _lists(self, request: str) -> list[list[ListedBlock]]:
        return [[ListedBlock(block) for block in table] for table in self.tables[request]]

    def begin(self, request_id: str, units: int, *, hit: int = 0) -> FakeRequest:
        """A request of so many units and a token that has a lease, and room for all its blocks; nothing is loaded."""
        request = self.arrive(request_id, units * UNIT_TOKENS + 1)
        self.found(hit, loadable=False)
        assert self.matched(request) == (0, False)
        self.tables[request_id] = [self.blocks(2 * units), self.blocks(units)]
        self.side.allocated(request, self.tables[request_id], 0)
        return request

    def chain(self, request: FakeRequest, start: int, stop: int) -> list[int]:
        """Ids of blocks of a request's chain: two of full attention in each unit, then one of the window."""
        full, windowed = self.tables[request.request_id]
        ids = [each for unit, block in enumerate(windowed) for each in (full[2 * unit], full[2 * unit + 1], block)]
        return ids[start:stop]


def test_load_goes_to_the_blocks_that_vllm_has() -> None:
    """A hit counts in whole units; what has left the window is not loaded."""
    rig = GroupsRig()
    request = rig.arrive("r", 3 * UNIT_TOKENS + 1)
    found = rig.found(8)
    assert found.load is not None
    assert rig.matched(request) == (2 * UNIT_TOKENS, True)
    rig.side.allocated(request, [[1, 2, 3, 4], [0, 9]], 2 * UNIT_TOKENS)
    (order,) = rig.idle().loads
    keys = GroupKeys(request, UNIT)
    assert [(span.depth, span.blocks.tolist()) for span in order.job.spans] == [(0, [1, 2]), (3, [3, 4, 9])]
    assert [span.slots.tolist() for span in order.job.spans] == [[500, 501], [503, 504, 505]]
    assert [span.parent for span in order.job.spans] == [b"", keys[2]]
    assert b"".join(span.keys for span in order.job.spans) == b"".join([*keys[0:2], *keys[3:6]])


def test_load_continues_what_vllm_has() -> None:
    """Behind a hit in vLLM's own cache, only further units are loaded."""
    rig = GroupsRig()
    request = rig.arrive("r", 3 * UNIT_TOKENS + 1)
    rig.found(9)
    assert rig.matched(request, UNIT_TOKENS) == (2 * UNIT_TOKENS, True)
    rig.side.allocated(request, [[1, 2, 3, 4, 5, 6], [0, 8, 9]], 2 * UNIT_TOKENS)
    (order,) = rig.idle().loads
    assert [(span.depth, span.blocks.tolist()) for span in order.job.spans] == [(3, [3, 4, 8, 5, 6, 9])]


@pytest.mark.parametrize("hit", [0, 1, 2])
def test_less_than_a_unit_is_no_hit(hit: int) -> None:
    """If not every group has blocks, nothing is loaded."""
    rig = GroupsRig()
    request = rig.arrive("r", 3 * UNIT_TOKENS + 1)
    rig.found(hit)
    assert rig.matched(request) == (0, False)


def test_blocks_are_held_from_the_step_that_fills_them() -> None:
    """While the daemon's answer to the first offer is awaited, later blocks are held, though vLLM drops them."""
    rig = GroupsRig()
    request = rig.begin("r", 4)
    chain = rig.chain(request, 0, 12)
    rig.run_new(request, [], 0, 2 * UNIT_TOKENS)
    assert rig.held == sorted(chain[:6])
    rig.run(request, 2 * UNIT_TOKENS)
    assert rig.held == sorted(chain)
    rig.tables["r"][1][:3] = [0, 0, 0]
    rig.plan()
    orders = rig.idle()
    assert [span.blocks.tolist() for span in orders.stores[0].job.spans] == [chain[:6]]
    rig.plan()
    later = rig.idle()
    assert [(span.depth, span.blocks.tolist()) for span in later.stores[0].job.spans] == [(6, chain[6:])]
    rig.report(orders)
    assert rig.held == sorted(chain[6:])
    rig.report(later)
    assert rig.held == []


def test_chain_ends_where_vllm_keeps_no_block() -> None:
    """What had left the window before it could be held is not stored, nor is anything behind it."""
    rig = GroupsRig()
    request = rig.begin("r", 4)
    first = rig.chain(request, 0, 3)
    rig.tables["r"][1][1] = 0
    rig.run_new(request, [], 0, 4 * UNIT_TOKENS)
    assert rig.held == first
    rig.plan()
    rig.report(rig.idle())
    rig.finish(request, [])
    assert (rig.held, rig.link.taken(Offer)) == ([], [])
    assert rig.link.taken(Release)


def test_blocks_behind_a_refused_store_are_not_stored_in_its_place() -> None:
    """If the host pool has no room for an offer, the blocks that were held for the next one are freed."""
    rig = GroupsRig()
    request = rig.begin("r", 4)
    offered = rig.chain(request, 0, 6)
    rig.run_new(request, [], 0, 2 * UNIT_TOKENS)
    rig.tables["r"][1][:2] = [0, 0]
    rig.run(request, UNIT_TOKENS)
    rig.plan(depth=1, pieces=[(0, 1)])
    orders = rig.idle()
    assert rig.held == sorted(offered)
    rig.run(request, UNIT_TOKENS)
    rig.report(orders)
    rig.finish(request, [])
    assert (rig.held, rig.link.taken(Offer)) == ([], [])


def test_refused_store_is_offered_again_while_vllm_has_its_blocks() -> None:
    """Blocks that are all still there are offered again from the depth that the daemon names."""
    rig = GroupsRig()
    request = rig.begin("r", 4)
    rig.run_new(request, [], 0, 2 * UNIT_TOKENS)
    rig.plan(depth=1, pieces=[(0, 1)])
    rig.report(rig.idle())
    rig.run(request, UNIT_TOKENS)
    (offer,) = rig.link.taken(Offer)
    keys = GroupKeys(request, UNIT)
    assert (offer.start, offer.keys) == (1, b"".join(keys[1:9]))


def test_failed_load_is_computed_and_stored_from_the_beginning() -> None:
    """VLLM computes the whole request, so the next lease begins at the first block that the daemon has lost."""
    rig = GroupsRig()
    request = rig.arrive("r", 3 * UNIT_TOKENS + 1)
    rig.found(9)
    assert rig.matched(request) == (3 * UNIT_TOKENS, True)
    rig.side.allocated(request, [[1, 2, 3, 4, 5, 6], [0, 8, 9]], 3 * UNIT_TOKENS)
    rig.idle()
    rig.side.loaded({"r"}, {"r"}, ())
    assert rig.link.taken(Release)
    assert rig.matched(request) == (0, False)
    rig.tables["r"] = [rig.blocks(6), rig.blocks(3)]
    rig.side.allocated(request, rig.tables["r"], 0)
    rig.run_new(request, [], 0, 3 * UNIT_TOKENS + 1)
    assert [seek.load for seek in rig.link.commands if isinstance(seek, Seek)] == [False]
    rig.found(4)
    rig.idle()
    (offer,) = rig.link.taken(Offer)
    assert (offer.start, offer.keys) == (4, b"".join(GroupKeys(request, UNIT)[4:9]))
    assert rig.held == sorted(rig.chain(request, 4, 9))


def test_lost_blocks_are_not_replaced_by_others() -> None:
    """If the daemon asks for blocks before the offer, it gets none: vLLM may not have them any more."""
    rig = GroupsRig()
    request = rig.begin("r", 2, hit=3)
    rig.run_new(request, rig.tables["r"][0], 0, 2 * UNIT_TOKENS)
    rig.plan(pieces=[(1, 1), (3, 3)])
    assert not rig.idle().stores
    assert rig.link.taken(DropStore)
    assert rig.held == []


def test_held_blocks_stay_within_their_share() -> None:
    """No more than a quarter of vLLM's blocks is held, and the chain ends there."""
    rig = GroupsRig(pool_blocks=32)
    request = rig.begin("r", 4)
    rig.run_new(request, [], 0, 4 * UNIT_TOKENS)
    assert rig.held == sorted(rig.chain(request, 0, 6))


def generated(rig: GroupsRig) -> FakeRequest:
    """A request with a unit of its prompt stored, and a unit of generated tokens held, which waits for more."""
    request = rig.begin("r", 1)
    for table, more in zip(rig.tables["r"], (2, 1), strict=True):
        table.extend(rig.blocks(more))
    rig.run_new(request, [], 0, UNIT_TOKENS + 1)
    rig.plan()
    rig.report(rig.idle())
    request.append(*range(UNIT_TOKENS))
    rig.run(request, UNIT_TOKENS)
    assert (rig.held, rig.link.taken(Offer)) == (sorted(rig.chain(request, 3, 6)), [])
    return request


def test_blocks_that_wait_for_more_are_offered_when_nothing_is_computed() -> None:
    """A paused vLLM steps until it may reset its cache: no block is held for more blocks that will not come."""
    rig = GroupsRig()
    request = generated(rig)
    assert rig.side.is_busy
    rig.idle()
    rig.plan()
    orders = rig.idle()
    assert [(span.depth, span.blocks.tolist()) for span in orders.stores[0].job.spans] == [
        (3, rig.chain(request, 3, 6))
    ]
    rig.report(orders)
    assert (rig.held, rig.side.is_busy) == ([], False)


@pytest.mark.parametrize("why", ["the request is preempted", "the daemon is behind"])
def test_blocks_that_cannot_be_offered_are_freed_when_nothing_is_computed(why: str) -> None:
    """Where vLLM has preempted the request meanwhile, or the daemon takes nothing, what waited is not stored."""
    rig = GroupsRig()
    request = generated(rig)
    if why == "the daemon is behind":
        rig.link.is_taking = False
    else:
        rig.preempt(request)
    rig.idle()
    assert (rig.held, rig.side.is_busy, rig.link.taken(Offer)) == ([], False, [])


def test_preempted_request_holds_nothing_that_waits() -> None:
    """A request that loses its blocks begins anew; what was offered is stored all the same."""
    rig = GroupsRig()
    request = rig.begin("r", 4)
    rig.run_new(request, [], 0, 2 * UNIT_TOKENS)
    rig.run(request, UNIT_TOKENS)
    rig.preempt(request)
    rig.idle(preempted={"r"})
    assert rig.held == sorted(rig.chain(request, 0, 6))


def test_nothing_waits_without_a_session() -> None:
    """When the session is lost, and while there is none, no block is held for an offer."""
    rig = GroupsRig()
    request = rig.begin("r", 4)
    rig.run_new(request, [], 0, UNIT_TOKENS)
    rig.run(request, UNIT_TOKENS)
    rig.lose()
    rig.unplan()
    rig.idle()
    assert rig.held == []
    rig.link.is_taking = False
    rig.run(request, UNIT_TOKENS)
    assert rig.held == []
    rig.finish(request, [])
    assert rig.held == []


def test_no_events_tell_of_groups() -> None:
    """Blocks of several groups are not announced, because events know one block for each hash."""
    rig = GroupsRig()
    request = rig.begin("r", 2, hit=6)
    rig.run_new(request, [], 0, 2 * UNIT_TOKENS)
    assert rig.side.announcements.take() == []
    assert np.array(rig.held).size == 0
