"""Mistakes about vLLM's groups of layers."""

from __future__ import annotations

import pytest

from kvcached_client.vllm import orders
from kvcached_client.vllm.scheduling import chains
from kvcached_client.vllm.scheduling.chains import Chains, GroupKeys
from kvcached_client.vllm.scheduling.scheduler import SchedulerSide
from kvcached_client.vllm.scheduling.store_queue import StoreQueue
from tests.mutants.mutant import caught_by, rewrite

_TESTS = "tests/vllm_connector/test_chains.py"


@caught_by(f"{_TESTS}::test_prompts_that_part_inside_a_block_have_other_keys_for_it")
def vllm_block_known_by_its_first_hash(patch: pytest.MonkeyPatch) -> None:
    """The key of a block is the hash of the first tokens in it: prompts that part behind them share it."""
    rewrite(patch, chains.unit_of, "(block + 1) * size // hash_tokens - 1", "block * size // hash_tokens")


@caught_by(f"{_TESTS}::test_equal_keys_mean_equal_chains_before")
def vllm_blocks_of_a_unit_in_the_order_of_groups(patch: pytest.MonkeyPatch) -> None:
    """A small block comes after a larger one with later tokens: the daemon finds it in the chain of another prompt."""
    rewrite(patch, chains.unit_of, "(place.last_hash, place.group)", "place.group")


@caught_by(f"{_TESTS}::test_keys_of_groups_differ")
def vllm_groups_share_keys(patch: pytest.MonkeyPatch) -> None:
    """A layer with a window gets the block of a layer with full attention."""
    rewrite(patch, orders.group_key, "bytes([group])", "bytes(1)")


@caught_by(f"{_TESTS}::test_keys_follow_a_request_that_gets_other_tokens")
def vllm_keys_outlive_their_tokens(patch: pytest.MonkeyPatch) -> None:
    """A request that gets other tokens keeps its keys."""
    rewrite(patch, GroupKeys._follow, "hashes[known - 1] != self._last_hash", "False")


@caught_by(f"{_TESTS}::test_live_blocks_end_where_vllm_keeps_none")
def vllm_null_block_stored(patch: pytest.MonkeyPatch) -> None:
    """The block that stands for those outside of the window is stored as one of them."""
    rewrite(patch, Chains.live_run, " or of_group[index].is_null", "")


@caught_by(f"{_TESTS}::test_loads_leave_out_what_has_left_the_window")
def vllm_null_block_loaded(patch: pytest.MonkeyPatch) -> None:
    """A load writes into the block that stands for those outside of the window."""
    rewrite(patch, Chains.runs, "if block_id != NULL_BLOCK:", "if True:")


@caught_by("tests/vllm_connector/test_groups.py::test_blocks_are_held_from_the_step_that_fills_them")
def vllm_blocks_of_a_window_not_held(patch: pytest.MonkeyPatch) -> None:
    """Blocks that wait for their offer are not held: vLLM gives them to other requests before they are stored."""
    rewrite(patch, StoreQueue.keep, "self._stores.hold(kept)", "pass")


@caught_by("tests/vllm_connector/test_groups.py::test_failed_load_is_computed_and_stored_from_the_beginning")
def vllm_failed_load_goes_on_with_its_lease(patch: pytest.MonkeyPatch) -> None:
    """After a failed load, blocks are stored behind the hit only: what the daemon has lost stays lost."""
    rewrite(patch, SchedulerSide._recompute, "self._leases.release(tracked)", "pass")


@caught_by("tests/vllm_connector/test_groups.py::test_lost_blocks_are_not_replaced_by_others")
def vllm_blocks_of_a_group_taken_for_a_chain(patch: pytest.MonkeyPatch) -> None:
    """What the daemon has lost of a chain is stored again from the blocks of the first group alone."""
    rewrite(patch, Chains.own_blocks, "[] if self.is_grouped else ", "")


@caught_by("tests/vllm_connector/test_groups.py::test_less_than_a_unit_is_no_hit")
def vllm_hit_of_a_part_of_a_unit(patch: pytest.MonkeyPatch) -> None:
    """A hit counts where one group has blocks and another has not."""
    rewrite(
        patch,
        SchedulerSide.matched_tokens,
        "found -= found % chains.unit_blocks",
        "found += -found % chains.unit_blocks",
    )


@caught_by("tests/vllm_connector/test_groups.py::test_blocks_behind_a_refused_store_are_not_stored_in_its_place")
def vllm_kept_blocks_outlive_a_refused_store(patch: pytest.MonkeyPatch) -> None:
    """Blocks behind a store that the daemon refused stay held."""
    rewrite(patch, StoreQueue._put_aside, "self.drop_kept(tracked)", "pass")


@caught_by("tests/vllm_connector/test_groups.py::test_blocks_that_wait_for_more_are_offered_when_nothing_is_computed")
def vllm_kept_blocks_wait_for_tokens_that_do_not_come(patch: pytest.MonkeyPatch) -> None:
    """A paused vLLM cannot reset its cache."""
    patch.setattr(StoreQueue, "offer_kept", lambda queue, requests: None)


@caught_by("tests/vllm_connector/test_groups.py::test_preempted_request_holds_nothing_that_waits")
def vllm_kept_blocks_outlive_a_preemption(patch: pytest.MonkeyPatch) -> None:
    """A request that lost its blocks to others offers them as its own."""
    rewrite(patch, SchedulerSide._start_over, "self._store_queue.forget_kept(tracked)", "pass")
