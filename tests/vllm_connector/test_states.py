"""Loads and stores of requests of a model with states: one group with full attention, and two groups of states."""

from __future__ import annotations

import numpy as np
import pytest

from kvcached_client.offload import PreparedLoad
from kvcached_client.types import LeaseId, TransferId
from kvcached_client.vllm.daemon.commands import Branches, DropLoad, Found, Offer, Pin, Release, Seek
from kvcached_client.vllm.orders import group_key
from kvcached_client.vllm.scheduling.chains import Chains, GroupKeys, unit_of
from tests.vllm_connector.mini_hybrid import ListedBlock
from tests.vllm_connector.rig import BLOCK, GENERATION, FakeRequest, FakeStep, HandedOff, New, Rig

UNIT = unit_of([BLOCK, BLOCK, BLOCK], BLOCK, states=(0, 2))
STATES, FULL = (0, 2), 1


class StatesRig(Rig):
    """A rig whose requests have the blocks in `tables` now; 0 is the null block."""

    def __init__(self, *, pool_blocks: int = 16_384) -> None:
        self.tables: dict[str, list[int]] = {}
        super().__init__(pool_blocks=pool_blocks, chains=Chains(BLOCK, unit=UNIT, live=self._lists))

    def _lists(self, request: str) -> list[list[ListedBlock]]:
        return [[], [ListedBlock(block) for block in self.tables[request]], []]

    def branch(self, units: int, *, loadable: bool = True) -> Found:
        """Answer the one seek that waits: the longest branch is behind so many units."""
        (seek,) = self.link.taken(Seek)
        self._lease += 1
        self._transfer += 1
        hit = units + len(STATES)
        load = PreparedLoad(TransferId(self._transfer), GENERATION, np.arange(500, 500 + hit, dtype=np.int32), 0)
        event = Found(seek.ticket, self.number, LeaseId(self._lease), hit, load if loadable else None, len(STATES))
        self.link.events.append(event)
        return event

    def begin(self, request_id: str, units: int, *, hit: int = 0) -> FakeRequest:
        """A request of so many units and a token that has a lease, and room for all its blocks; nothing is loaded."""
        request = self.arrive(request_id, units * BLOCK + 1)
        self.found(hit, loadable=False)
        assert self.matched(request) == (0, False)
        self.tables[request_id] = self.blocks(units + 1)
        self.side.allocated(request, [[], self.tables[request_id], []], 0)
        return request

    def compute(self, request: FakeRequest, units: int, states: dict[int, tuple[int, int]]) -> None:
        """A step that computes so many units of a new request, and keeps states: their blocks, by number of units."""
        handed_off = [
            (group, block, at * BLOCK)
            for at, blocks in states.items()
            for group, block in zip(STATES, blocks, strict=True)
        ]
        step = FakeStep(
            scheduled_new_reqs=[New(request.request_id, ([], [], []), request.num_computed_tokens)],
            num_scheduled_tokens={request.request_id: units * BLOCK},
            kv_connector_block_state=HandedOff({request.request_id: handed_off}),
        )
        request.num_computed_tokens += units * BLOCK
        self.side.step(step)


def load(rig: StatesRig, units: int, *, local: int = 0) -> FakeRequest:
    """A request whose load of a branch is ordered; its blocks are 101, … and the states are in 201 and 202."""
    request = rig.arrive("r", 5 * BLOCK + 1)
    rig.branch(units)
    assert rig.matched(request, local * BLOCK) == ((units - local) * BLOCK, True)
    rig.tables["r"] = [101 + unit for unit in range(units)]
    null = [0] * (units - 1)
    rig.side.allocated(request, [[*null, 201], rig.tables["r"], [*null, 202]], (units - local) * BLOCK)
    request.num_computed_tokens = units * BLOCK
    return request


def state_keys(request: FakeRequest, units: int) -> list[bytes]:
    return [group_key(request.block_hashes[units - 1], group) for group in STATES]


def test_chain_has_the_blocks_of_attention_only() -> None:
    """Blocks of states are in no chain, whose units hold the tokens of the largest block of any group."""
    unit = unit_of([2 * BLOCK, BLOCK, 4 * BLOCK], BLOCK, states=(2,))
    assert (unit.tokens, [(place.group, place.block) for place in unit.places]) == (
        4 * BLOCK,
        [(1, 0), (0, 0), (1, 1), (1, 2), (0, 1), (1, 3)],
    )
    assert [(place.group, place.index_in_group(2)) for place in unit.states] == [(2, 2)]


def test_states_of_different_boundaries_have_different_keys() -> None:
    """The keys of states name all tokens up to their boundary, and their group."""
    request = FakeRequest("r", range(5 * BLOCK))
    other = FakeRequest("s", [*range(2 * BLOCK), *range(50, 50 + 3 * BLOCK)])
    keys, others = GroupKeys(request, UNIT), GroupKeys(other, UNIT)
    every = [key for units in range(1, 6) for key in keys.of_states(units)]
    assert len({*every, *keys}) == len(every) + len(keys)
    assert [keys.of_states(units) == others.of_states(units) for units in range(1, 6)] == [True, True] + [False] * 3


def test_seek_names_where_a_hit_may_end() -> None:
    """A seek has the keys of the states at each boundary before the last token; a seek for stores has none."""
    rig = StatesRig()
    request = rig.arrive("r", 3 * BLOCK)
    (seek,) = rig.link.commands
    assert isinstance(seek, Seek)
    hashes = b"".join(each[:15] for each in request.block_hashes[:2])
    assert seek.branches == Branches("r~states~1", BLOCK, 1, STATES, hashes)
    assert seek.branches.behind(2, seek.keys) == b"".join([*GroupKeys(request, UNIT)[:2], *state_keys(request, 2)])


def test_state_of_the_hit_goes_to_the_block_at_its_end() -> None:
    """A load has the blocks of attention, and behind them the states, into the block from which vLLM goes on."""
    rig = StatesRig()
    request = load(rig, 3)
    (order,) = rig.idle().loads
    keys = GroupKeys(request, UNIT)
    assert [(span.depth, span.blocks.tolist()) for span in order.job.spans] == [(0, [101, 102, 103]), (3, [201, 202])]
    assert [span.slots.tolist() for span in order.job.spans] == [[500, 501, 502], [503, 504]]
    assert [span.keys for span in order.job.spans] == [b"".join(keys[:3]), b"".join(state_keys(request, 3))]
    assert [span.parent for span in order.job.spans] == [b"", keys[2]]


def test_load_behind_a_local_hit_has_the_states_at_its_own_end() -> None:
    """Behind a hit in vLLM's own cache, further blocks are loaded, and the states at the end of the longer hit."""
    rig = StatesRig()
    load(rig, 3, local=2)
    (order,) = rig.idle().loads
    assert [(span.depth, span.blocks.tolist()) for span in order.job.spans] == [(2, [103]), (3, [201, 202])]


@pytest.mark.parametrize("hit", [1, 3])
def test_blocks_without_states_are_no_hit(hit: int) -> None:
    """If the host pool has blocks without states behind them, nothing is loaded, and stores go on behind the blocks."""
    rig = StatesRig()
    request = rig.begin("r", 4, hit=hit)
    rig.compute(request, 4, {})
    (offer,) = rig.link.taken(Offer)
    assert offer.start == hit


def test_states_at_a_shorter_hit_are_not_for_a_longer_one() -> None:
    """What vLLM itself has of a prompt is not made shorter by a branch that ends before."""
    rig = StatesRig()
    request = rig.arrive("r", 5 * BLOCK + 1)
    rig.branch(2)
    assert rig.matched(request, 2 * BLOCK) == (0, False)
    rig.side.allocated(request, [[], rig.blocks(6), []], 0)
    assert rig.link.taken(DropLoad)
    assert rig.link.taken(Release)


def test_a_part_of_a_branch_is_no_load() -> None:
    """VLLM awaits tokens that no states are for: an error at once, not a request that computes with other states."""
    rig = StatesRig()
    request = rig.arrive("r", 5 * BLOCK + 1)
    rig.branch(3)
    rig.matched(request)
    with pytest.raises(RuntimeError, match="nobody announced"):
        rig.side.allocated(request, [[0, 201], [101, 102], [0, 202]], 2 * BLOCK)


def test_stores_go_on_behind_the_hit() -> None:
    """With the load, the lease of the branch is exchanged for one of the chain, behind whose end blocks are stored."""
    rig = StatesRig()
    request = load(rig, 3)
    assert rig.link.taken(Release)
    (seek,) = (each for each in rig.link.commands if isinstance(each, Seek))
    assert (seek.load, seek.branches) == (False, None)
    rig.found(3)
    rig.idle()
    rig.side.loaded({"r"}, (), ())
    rig.tables["r"] += [104, 105]
    rig.compute(request, 2, {5: (301, 302)})
    (offer,) = rig.link.taken(Offer)
    assert (offer.start, offer.keys) == (3, b"".join(GroupKeys(request, UNIT)[3:5]))
    assert rig.held == [104, 105, 301, 302]


def test_late_branch_is_given_back() -> None:
    """A branch that is found after its request was computed is given back: stores need a lease on the chain."""
    rig = StatesRig()
    request = rig.arrive("r", 5 * BLOCK + 1)
    rig.now += 2
    assert rig.matched(request) == (0, False)
    rig.tables["r"] = rig.blocks(6)
    rig.side.allocated(request, [[], rig.tables["r"], []], 0)
    rig.compute(request, 5, {})
    found = rig.branch(3)
    rig.idle()
    assert [each.lease for each in rig.link.taken(Release)] == [found.lease]
    assert rig.link.taken(DropLoad)
    rig.found(3)
    rig.idle()
    (offer,) = rig.link.taken(Offer)
    assert offer.start == 3


def test_states_are_stored_behind_their_blocks() -> None:
    """States are held from the step that completes them, and offered when the blocks before them are stored."""
    rig = StatesRig()
    request = rig.begin("r", 4)
    rig.compute(request, 4, {4: (301, 302)})
    blocks = rig.tables["r"][:4]
    assert rig.held == sorted([*blocks, 301, 302])
    rig.plan()
    orders = rig.idle()
    assert not rig.link.taken(Seek)
    rig.report(orders)
    assert rig.held == [301, 302]
    assert rig.side.is_busy
    rig.idle()
    rig.found(4)
    rig.idle()
    (offer,) = rig.link.taken(Offer)
    assert (offer.start, offer.keys) == (4, b"".join(state_keys(request, 4)))
    rig.plan(offer=offer)
    (order,) = (orders := rig.idle()).stores
    (span,) = order.job.spans
    assert (span.depth, span.blocks.tolist(), span.parent) == (4, [301, 302], GroupKeys(request, UNIT)[3])
    rig.report(orders)
    assert rig.held == []


def test_states_of_a_finished_request_are_stored() -> None:
    """A request that has ended leaves its states: vLLM goes on until they are stored, and no longer."""
    rig = StatesRig()
    request = rig.begin("r", 2)
    rig.compute(request, 2, {1: (301, 302), 2: (303, 304)})
    rig.finish(request, [])
    rig.plan()
    rig.report(rig.idle())
    for units in (1, 2):
        rig.idle()
        seek = next(each for each in rig.link.commands if isinstance(each, Seek))
        rig.link.commands.remove(seek)
        rig.link.events.append(Found(seek.ticket, rig.number, LeaseId(90 + units), units, None))
        rig.idle()
        rig.plan()
        rig.report(rig.idle())
    rig.idle()
    assert (rig.held, rig.side.is_busy) == ([], False)


@pytest.mark.parametrize("hit", [2, 6])
def test_states_that_cannot_or_need_not_be_stored_are_freed(hit: int) -> None:
    """States whose prefix the daemon has lost meanwhile, and states that it has already, are freed without an offer."""
    rig = StatesRig()
    request = rig.begin("r", 4, hit=4)
    rig.compute(request, 4, {4: (301, 302)})
    rig.idle()
    rig.found(hit)
    rig.idle()
    assert (rig.held, rig.link.taken(Offer)) == ([], [])
    assert rig.link.taken(Release)


@pytest.mark.parametrize(
    "handed_off",
    [
        [(0, 301, 4 * BLOCK)],
        [(0, 301, 3 * BLOCK), (2, 302, 4 * BLOCK)],
        [(0, 301, 4 * BLOCK - 1), (2, 302, 4 * BLOCK - 1)],
    ],
)
def test_states_of_one_boundary_are_stored_together(handed_off: list[tuple[int, int, int]]) -> None:
    """A boundary at which only one group has a state, or inside of a block, is none."""
    rig = StatesRig()
    rig.begin("r", 4)
    step = FakeStep(
        scheduled_new_reqs=[New("r", ([], [], []), 0)],
        num_scheduled_tokens={"r": 4 * BLOCK},
        kv_connector_block_state=HandedOff({"r": handed_off}),
    )
    rig.side.step(step)
    assert rig.held == rig.tables["r"][:4]


def test_loaded_states_are_not_stored_again() -> None:
    """VLLM names also the states that it has got by a load."""
    rig = StatesRig()
    request = load(rig, 3)
    rig.found(3)
    rig.side.loaded({"r"}, (), ())
    rig.compute(request, 0, {3: (201, 202)})
    assert rig.held == []


def test_states_without_room_are_not_stored() -> None:
    """States are held within the share of vLLM's blocks that stores may hold, and only behind blocks that are held."""
    rig = StatesRig(pool_blocks=20)
    request = rig.begin("r", 4)
    rig.compute(request, 4, {4: (301, 302)})
    assert rig.held == sorted(rig.tables["r"][:4])
    assert rig.side.take_skipped() == len(STATES)


def test_vllm_waits_for_no_states_of_a_request_that_waits_for_vllm() -> None:
    """While states wait for further blocks of their request, vLLM may preempt; it waits where they will be stored."""
    rig = StatesRig()
    request = rig.begin("r", 4)
    rig.compute(request, 4, {})
    rig.plan()
    rig.report(rig.idle())
    request.append(*range(BLOCK))
    rig.compute(request, 1, {5: (301, 302)})
    assert rig.held == [rig.tables["r"][4], 301, 302]
    assert not rig.side.frees_soon
    rig.finish(request, [])
    assert rig.side.frees_soon


def test_lost_session_leaves_no_states() -> None:
    """States of a session that is over are freed with the blocks before them."""
    rig = StatesRig()
    request = rig.begin("r", 4)
    rig.compute(request, 4, {4: (301, 302)})
    rig.lose()
    rig.unplan()
    rig.idle()
    assert (rig.held, rig.side.is_busy) == ([], False)


def test_preempted_request_keeps_no_states() -> None:
    """A request that loses its blocks before they are stored leaves no states behind them."""
    rig = StatesRig()
    request = rig.begin("r", 4)
    rig.compute(request, 4, {4: (301, 302)})
    rig.preempt(request)
    rig.idle(preempted={"r"})
    assert rig.held == sorted(rig.tables["r"][:4])


def test_failed_load_of_states_is_computed_and_stored() -> None:
    """Where states could not be loaded, vLLM computes the request, and what it computes is stored in their place."""
    rig = StatesRig()
    request = load(rig, 3)
    rig.found(3)
    rig.idle()
    rig.side.loaded({"r"}, {"r"}, ())
    assert rig.matched(request) == (0, False)
    request.num_computed_tokens = 0
    rig.tables["r"] = rig.blocks(6)
    rig.side.allocated(request, [[], rig.tables["r"], []], 0)
    rig.compute(request, 5, {3: (301, 302)})
    assert rig.held == sorted([*rig.tables["r"][:5], 301, 302])


def test_pin_keeps_the_states_of_the_prompt() -> None:
    """A pin of a prompt is one of its branch, and waits until the states are stored."""
    rig = StatesRig()
    request = FakeRequest("r", range(2 * BLOCK + 1))
    request.kv_transfer_params = {"kvcached": {"pin_ttl_s": 60}}
    rig.side.on_new_request(request)
    rig.found(2, loadable=False)
    assert rig.matched(request) == (0, False)
    rig.tables["r"] = rig.blocks(3)
    rig.side.allocated(request, [[], rig.tables["r"], []], 0)
    rig.compute(request, 2, {2: (301, 302)})
    rig.finish(request, [])
    rig.idle()
    assert not rig.link.taken(Pin)
    rig.found(2)
    rig.idle()
    rig.plan()
    orders = rig.idle()
    assert not rig.link.taken(Pin)
    rig.report(orders)
    (pin,) = rig.link.taken(Pin)
    assert pin.keys == b"".join([*GroupKeys(request, UNIT)[:2], *state_keys(request, 2)])
