"""Mistakes about states of vLLM's layers, and where a hit of a model that has them ends."""

from __future__ import annotations

import pytest

from kvcached_client.vllm.daemon import branches
from kvcached_client.vllm.daemon.commands import Branches
from kvcached_client.vllm.daemon.thread import DaemonThread
from kvcached_client.vllm.scheduling import loads, states
from kvcached_client.vllm.scheduling.chains import Chains, GroupKeys
from kvcached_client.vllm.scheduling.leases import Leases
from kvcached_client.vllm.scheduling.scheduler import SchedulerSide
from kvcached_client.vllm.scheduling.states import WaitingStates
from kvcached_client.vllm.scheduling.store_queue import StoreQueue
from tests.mutants.mutant import caught_by, rewrite

_SCHEDULER = "tests/vllm_connector/test_states.py::"
_DAEMON = "tests/vllm_connector/test_branches.py::"


@caught_by(_DAEMON + "test_states_of_another_boundary_are_no_branch")
def vllm_state_of_an_earlier_boundary_taken_for_the_hits(patch: pytest.MonkeyPatch) -> None:
    """Behind a hit, the states of the first boundary count: a request goes on with a state of fewer tokens."""
    rewrite(patch, Branches.behind, "(units - 1) * GROUP_HASH_BYTES : units * GROUP_HASH_BYTES", ":GROUP_HASH_BYTES")


@caught_by(_SCHEDULER + "test_states_of_different_boundaries_have_different_keys")
def vllm_states_of_all_boundaries_share_a_key(patch: pytest.MonkeyPatch) -> None:
    """States are known by the first tokens of their prompt."""
    rewrite(patch, GroupKeys.of_states, "units * self._unit.hashes - 1", "self._unit.hashes - 1")


@caught_by(_SCHEDULER + "test_state_of_the_hit_goes_to_the_block_at_its_end")
def vllm_states_loaded_into_another_block(patch: pytest.MonkeyPatch) -> None:
    """States are written into the block before that from which vLLM goes on."""
    rewrite(patch, Chains.state_blocks, "units - 1", "units - 2")


@caught_by(_SCHEDULER + "test_a_part_of_a_branch_is_no_load")
def vllm_states_loaded_behind_a_part_of_their_blocks(patch: pytest.MonkeyPatch) -> None:
    """A request gets states of more tokens than it has blocks of."""
    rewrite(patch, loads.order_load, "tracked.states and stop != tracked.loadable", "False")


@caught_by(_DAEMON + "test_blocks_without_states_are_not_loaded")
def vllm_blocks_loaded_without_states(patch: pytest.MonkeyPatch) -> None:
    """A hit counts for which there are blocks of attention and no states."""
    rewrite(patch, DaemonThread._end_acquire, " and seek.branches is None", "")


@caught_by(_DAEMON + "test_branch_that_is_gone_is_given_back")
def vllm_part_of_a_branch_acquired(patch: pytest.MonkeyPatch) -> None:
    """A branch counts whose states were evicted between the question and the lease."""
    rewrite(patch, branches.acquire_branch, " or found.hit * KEY_SIZE_BYTES != len(keys)", "")


@caught_by(_SCHEDULER + "test_states_are_stored_behind_their_blocks")
def vllm_states_not_held(patch: pytest.MonkeyPatch) -> None:
    """States that wait for their store are not held: vLLM gives their blocks to other requests."""
    rewrite(patch, StoreQueue.keep_state, "self._stores.hold(block_ids)", "pass")


@caught_by(_SCHEDULER + "test_states_are_stored_behind_their_blocks")
def vllm_states_offered_before_their_blocks_are_stored(patch: pytest.MonkeyPatch) -> None:
    """States are offered while the blocks before them are being copied: the daemon does not take them."""
    rewrite(patch, WaitingStates.take_ready, " and not is_storing(tracked)", "")


@caught_by(_SCHEDULER + "test_states_of_one_boundary_are_stored_together")
def vllm_states_of_a_boundary_inside_a_block(patch: pytest.MonkeyPatch) -> None:
    """A state of fewer tokens than the block ends with is stored as the state at the end of the block before."""
    rewrite(patch, states.completed_states, "not rest and ", "")


@caught_by(_SCHEDULER + "test_stores_go_on_behind_the_hit")
def vllm_blocks_stored_behind_states(patch: pytest.MonkeyPatch) -> None:
    """After a load, the blocks of the chain are offered on the lease of the branch, as if states were before them."""
    rewrite(patch, SchedulerSide.allocated, "if tracked.states:", "if False:")


@caught_by(_SCHEDULER + "test_late_branch_is_given_back")
def vllm_late_branch_kept(patch: pytest.MonkeyPatch) -> None:
    """A branch that comes too late for its request is used for stores."""
    rewrite(patch, Leases.found, "if tracked.states:", "if False:")


@caught_by(_SCHEDULER + "test_preempted_request_keeps_no_states")
def vllm_states_outlive_a_preemption(patch: pytest.MonkeyPatch) -> None:
    """States of a request that has lost its blocks wait for blocks that nobody stores."""
    rewrite(patch, SchedulerSide._start_over, "forget_kept", "drop_kept")


@caught_by(_SCHEDULER + "test_vllm_waits_for_no_states_of_a_request_that_waits_for_vllm")
def vllm_waits_for_its_own_request(patch: pytest.MonkeyPatch) -> None:
    """VLLM preempts nobody because states wait for blocks of a request that waits for room: nothing goes on."""
    rewrite(patch, WaitingStates.frees_soon, "return any(", "return bool(self) or any(")


@caught_by(_SCHEDULER + "test_lost_session_leaves_no_states")
def vllm_states_outlive_their_session(patch: pytest.MonkeyPatch) -> None:
    """States wait for a store of blocks that are not held any more."""
    rewrite(patch, StoreQueue.lose, "forget_kept", "drop_kept")
