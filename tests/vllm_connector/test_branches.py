"""Seeks whose hit has to end where there are states: which branch they get, and what they do without one."""

from __future__ import annotations

from typing import Any

import pytest

from kvcached_client.errors import KvcachedError
from kvcached_client.offload import Hold
from kvcached_client.types import LeaseId
from kvcached_client.vllm.daemon.branches import BRANCHES_MAX, BRANCHES_TOGETHER, acquire_branch
from kvcached_client.vllm.daemon.commands import Branches, Fetching, Found, Lost, Seek
from tests.vllm_connector.link_rig import (
    EXPIRED,
    LOAD,
    REFUSED,
    UNAVAILABLE,
    Rig,
    ScriptedClient,
    connected,
    fetching_rig,
    rig,
)

__all__ = ["fetching_rig", "rig"]

SIZE, UNITS, GROUPS = 4, 100, (1, 2)
STATES = len(GROUPS)
CHAIN = b"".join(b"block" + bytes([unit]) * 11 for unit in range(UNITS))
HASHES = [b"hash" + bytes([unit]) * 11 for unit in range(UNITS)]
BRANCHES = Branches("r~states", SIZE, 1, GROUPS, b"".join(HASHES))
CHAIN_HOLD = Hold(LeaseId(5), 3)


class BranchClient(ScriptedClient):
    """A session in which only branches are loaded."""

    def begin_acquire(
        self, request: str, keys: bytes, tokens: int, *, full: bool, priority: int, tenant: str, load_from: int | None
    ) -> Any:
        assert load_from == (0 if request == BRANCHES.name else None)
        assert full == (request == BRANCHES.name)
        return self._begin("acquire", request, keys, tokens)

    def called(self, name: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == name]


def branch(units: int, *, states: int = 0) -> bytes:
    """The keys of a branch; with the states of another boundary, if one is named."""
    last = HASHES[(states or units) - 1]
    return CHAIN[: units * 16] + b"".join(last + bytes([group]) for group in GROUPS)


def branch_hold(units: int) -> Hold:
    return Hold(LeaseId(6), units + STATES, load=LOAD)


def seek(units: int = UNITS) -> Seek:
    return Seek(1, "r", CHAIN[: units * 16], units * SIZE + 1, True, branches=BRANCHES)


def test_longest_branch_is_acquired() -> None:
    """Of the branches within the hit, the longest that is stored is acquired and loaded; the chain is given back."""
    client = BranchClient(1, acquire=branch_hold(20))
    client.stored = {branch(20), branch(7), branch(40)}
    assert acquire_branch(seek(), BRANCHES, Hold(LeaseId(5), 31), client) == branch_hold(20)
    assert client.called("acquire") == [(BRANCHES.name, branch(20), (20 + STATES) * SIZE)]
    assert client.called("release") == [(LeaseId(5),)]


def test_states_of_another_boundary_are_no_branch() -> None:
    """A branch is the blocks up to a boundary with the states of this boundary, not with those of an earlier one."""
    client = BranchClient(1)
    client.stored = {branch(3, states=1)}
    assert acquire_branch(seek(), BRANCHES, CHAIN_HOLD, client) is None
    assert client.called("match") == [(branch(units),) for units in (3, 2, 1)]


def test_branches_are_asked_for_some_at_a_time() -> None:
    """What is behind the first answers is not asked for; and no more branches than the limit."""
    client = BranchClient(1, acquire=branch_hold(UNITS))
    client.stored = {branch(UNITS)}
    assert acquire_branch(seek(), BRANCHES, Hold(LeaseId(5), UNITS), client)
    assert len(client.called("match")) == BRANCHES_TOGETHER
    client = BranchClient(1)
    client.stored = {branch(1)}
    assert acquire_branch(seek(), BRANCHES, Hold(LeaseId(5), UNITS), client) is None
    assert len(client.called("match")) == BRANCHES_MAX


@pytest.mark.parametrize("found", [Hold(LeaseId(6), 3, load=LOAD), Hold(LeaseId(6), 3 + STATES)])
def test_branch_that_is_gone_is_given_back(found: Hold) -> None:
    """A branch that was evicted before it was acquired, or cannot be loaded, is none; the lease on the chain stays."""
    client = BranchClient(1, acquire=found)
    client.stored = {branch(3)}
    assert acquire_branch(seek(), BRANCHES, CHAIN_HOLD, client) is None
    assert client.called("release") == [(LeaseId(6),)]
    assert client.called("cancel_load") == ([(LOAD.transfer,)] if found.load else [])


def test_seek_is_told_of_its_branch(rig: Rig) -> None:
    """The event of a seek has the branch's lease and load, and says how many of its blocks are states."""
    client = BranchClient(1, acquire=[CHAIN_HOLD, branch_hold(3)])
    client.stored = {branch(3)}
    connected(rig, client)
    assert rig.link.submit(seek())
    assert rig.wait(1) == [Found(1, 1, LeaseId(6), 3 + STATES, LOAD, STATES)]


def test_blocks_without_states_are_not_loaded(rig: Rig) -> None:
    """The event of a seek without a branch has the lease on the chain, and no load."""
    client = BranchClient(1, acquire=CHAIN_HOLD)
    connected(rig, client)
    assert rig.link.submit(seek())
    assert rig.wait(1) == [Found(1, 1, LeaseId(5), 3, None)]
    assert not client.called("prepare_load")


@pytest.mark.parametrize("why", [REFUSED, EXPIRED])
def test_branch_that_is_refused_is_none(rig: Rig, why: KvcachedError) -> None:
    """If the daemon refuses a branch, the chain's lease is used; if the session is lost, the next one gets the seek."""
    client = BranchClient(1, acquire=[CHAIN_HOLD, why])
    client.stored = {branch(3)}
    connected(rig, client, BranchClient(2))
    assert rig.link.submit(seek())
    if why is REFUSED:
        assert rig.wait(1) == [Found(1, 1, LeaseId(5), 3, None)]
    else:
        lost, _, found = rig.wait(3)
        assert (lost, found) == (Lost(1), Found(1, 2, LeaseId(5), 0, None))


def test_storage_is_asked_for_the_whole_prompt_then_for_the_states_of_the_hit(fetching_rig: Rig) -> None:
    """Storage brings the prompt with the states at its end, or those at the end of the hit; it is asked once each."""
    client = BranchClient(1, acquire=CHAIN_HOLD)
    connected(fetching_rig, client)
    assert fetching_rig.link.submit(seek(9))
    for number in range(2):
        (event,) = fetching_rig.wait(1)
        assert isinstance(event, Fetching)
        client.pending[number].end()
    assert fetching_rig.wait(1) == [Found(1, 1, LeaseId(5), 3, None)]
    asked = [call[:2] for call in client.called("begin_prefetch")]
    assert asked == [(branch(9), (9 + STATES) * SIZE + 1), (branch(3), (3 + STATES) * SIZE + 1)]
    assert client.called("release") == [(LeaseId(5),)]


def test_without_storage_states_are_asked_for_in_memory_only(fetching_rig: Rig) -> None:
    """A daemon without storage is not asked a second time."""
    client = BranchClient(1, acquire=CHAIN_HOLD)
    connected(fetching_rig, client)
    assert fetching_rig.link.submit(seek(9))
    fetching_rig.wait(1)
    client.pending[0].end(UNAVAILABLE)
    assert fetching_rig.wait(1) == [Found(1, 1, LeaseId(5), 3, None)]
    assert len(client.called("begin_prefetch")) == 1
