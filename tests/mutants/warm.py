"""Mistakes about device memory that outlives its engine."""

from __future__ import annotations

from typing import Any

import pytest

from kvcached.memory.engine_pool import EnginePool
from kvcached.recovery.engine_pools import EnginePools
from kvcached_client.vllm import device_table
from kvcached_client.vllm.device_memory import RankMemory
from kvcached_client.vllm.device_table import DeviceTable
from kvcached_client.vllm.scheduling import device_blocks
from kvcached_client.vllm.scheduling.device_blocks import DeviceBlocks
from tests.mutants.mutant import caught_by, rewrite

_MODEL = "tests/vllm_connector/test_device_blocks.py"
_KILLED = f"{_MODEL}::test_engine_is_killed_at_any_instant"
_GROUPS = "tests/vllm_connector/test_device_groups.py"
_TABLE = "tests/vllm_connector/test_device_table.py"
_POOLS = "tests/recovery/test_engine_pools.py"


@caught_by(_KILLED)
def device_block_keeps_its_name(patch: pytest.MonkeyPatch) -> None:
    """A block that is handed out keeps its row: the next engine finds what is being overwritten."""
    rewrite(patch, DeviceBlocks._handed_out, "self._table.clear(block.block_id)", "pass")


@caught_by(_KILLED)
def device_block_named_a_step_early(patch: pytest.MonkeyPatch) -> None:
    """A block is named when the step before that which fills it is computed."""
    rewrite(patch, DeviceBlocks.computed, ".number <= number", ".number <= number + 1")


@caught_by(f"{_MODEL}::test_block_that_is_handed_out_is_not_named")
def device_block_named_though_given_away(patch: pytest.MonkeyPatch) -> None:
    """A block that is handed out while its step is under way is named when that is over."""
    rewrite(patch, DeviceBlocks._handed_out, "self._filled.pop(block.block_id, None)", "pass")
    rewrite(
        patch,
        DeviceBlocks.computed,
        "if first.row.epoch == epoch and self._block(first.row.block).block_hash == first.row.name:",
        "if first.row.epoch == epoch:",
    )


@caught_by(_KILLED)
def device_block_of_a_stale_epoch(patch: pytest.MonkeyPatch) -> None:
    """What builds on blocks from before a clear is named as if it were new."""
    rewrite(patch, DeviceBlocks._epoch_behind, "if self._table.all_of(epoch, named) else _NO_EPOCH", "")


@caught_by(f"{_MODEL}::test_nothing_of_before_a_clear_is_named")
def device_block_of_the_epoch_of_its_end(patch: pytest.MonkeyPatch) -> None:
    """A block is of the epoch in which its step ends, though its request began before."""
    rewrite(
        patch,
        DeviceBlocks.computed,
        "if first.row.epoch == epoch and self._block(first.row.block).block_hash == first.row.name:",
        "if first := first._replace(row=first.row._replace(epoch=epoch)):",
    )


@caught_by(f"{_MODEL}::test_adopted_blocks_are_reused_in_the_order_of_their_use")
def device_blocks_adopted_in_the_order_of_their_numbers(patch: pytest.MonkeyPatch) -> None:
    """Adopted blocks are reused by number: one miss takes the heads of several prompts."""
    rewrite(
        patch,
        device_blocks.in_order_of_use,
        "key=lambda row: (stamps[row.block], -row.depth)",
        "key=lambda row: row.block",
    )


@caught_by(f"{_MODEL}::test_head_of_a_chain_is_used_as_late_as_its_end")
def device_block_used_before_its_children(patch: pytest.MonkeyPatch) -> None:
    """The first blocks of a request that was under way go before its last ones."""
    rewrite(
        patch,
        device_blocks.in_order_of_use,
        "stamps[row.parent] = max(stamps[row.parent], stamps[row.block])",
        "pass",
    )


@caught_by(f"{_TABLE}::test_blocks_of_other_weights_are_dropped")
def device_blocks_of_other_weights(patch: pytest.MonkeyPatch) -> None:
    """Blocks are adopted whatever they were computed with."""
    rewrite(patch, DeviceTable._is_same, "return identity == earlier", "return True")


@caught_by(f"{_TABLE}::test_nothing_is_adopted_if_a_rank_has_other_memory")
def device_blocks_of_one_rank(patch: pytest.MonkeyPatch) -> None:
    """Blocks are adopted though one of two ranks has new memory."""
    rewrite(patch, device_table.open_table, "set(pool_ids) != {mapped.pool_id}", "mapped.pool_id not in pool_ids")


@caught_by(f"{_TABLE}::test_blocks_are_named_when_all_ranks_have_computed_them")
def device_block_named_by_one_rank(patch: pytest.MonkeyPatch) -> None:
    """A block is named when one of two ranks has computed it."""
    rewrite(patch, DeviceTable.computed, "elif len(self._computed) == self._ranks:", "else:")


@caught_by(f"{_TABLE}::test_rank_without_a_scheduler_drops_all_names")
def device_memory_written_behind_its_table(patch: pytest.MonkeyPatch) -> None:
    """A worker whose scheduler keeps no table writes blocks that the table still names."""
    rewrite(patch, RankMemory.begin_step, "self._mapped.table.new_epoch()", "pass")


@caught_by(f"{_POOLS}::test_pool_of_a_living_engine_is_nobody_elses")
def device_memory_of_a_living_engine(patch: pytest.MonkeyPatch) -> None:
    """A second engine gets the memory that a living one writes."""
    rewrite(patch, EnginePools._left, " and not self._is_used(pool)", "")


@caught_by(f"{_POOLS}::test_pool_with_memory_of_another_is_dropped")
def device_memory_of_another_pool(patch: pytest.MonkeyPatch) -> None:
    """The next daemon takes any memory of the right size for that of a rank."""
    adopt: Any = EnginePool.adopt
    rewrite(
        patch,
        adopt.__func__,
        "memory_fault(descriptor, head.rank_bytes) or MemoryIdentity.of(descriptor) != memory",
        "memory_fault(descriptor, head.rank_bytes)",
    )


@caught_by(f"{_POOLS}::test_clear_drops_the_rows_of_its_namespace")
def device_memory_outlives_a_clear(patch: pytest.MonkeyPatch) -> None:
    """A clear leaves the names of blocks of engines that live."""
    rewrite(patch, EnginePools.cleared, "pool.table.new_epoch()", "pass")


@caught_by(f"{_GROUPS}::test_nothing_is_named_that_builds_on_a_group_of_before_a_clear")
def epoch_of_the_first_group_alone(patch: pytest.MonkeyPatch) -> None:
    """A request builds on blocks of a window from before a clear, and what it computes counts as new."""
    rewrite(patch, DeviceBlocks._epoch_behind, "zip(tables, counts, strict=True)", "[(tables[0], counts[0])]")


@caught_by(f"{_GROUPS}::test_hit_inside_a_block_is_of_no_epoch_once_there_was_a_clear")
def hit_inside_a_block_is_of_the_epoch_before_it(patch: pytest.MonkeyPatch) -> None:
    """A request that builds on a part of a block from before a clear counts as new."""
    rewrite(patch, DeviceBlocks._is_known, "epoch != self._first_epoch", "not epoch")


@caught_by(f"{_MODEL}::test_nothing_is_named_that_builds_on_a_block_of_before_a_clear_in_front_of_a_new_one")
def epoch_of_the_last_block_alone(patch: pytest.MonkeyPatch) -> None:
    """A request builds on a block from before a clear in front of a new one, and what it computes counts as new."""
    rewrite(patch, DeviceBlocks._epoch_behind, "all_of(epoch, named)", "all_of(epoch, named[-1:])")


@caught_by(f"{_MODEL}::test_request_that_was_taken_back_is_not_named")
def request_that_was_taken_back_is_named(patch: pytest.MonkeyPatch) -> None:
    """A state of a token that its request has no more is named as one without it."""
    rewrite(patch, DeviceBlocks._is_known, " and new.request not in self._requests", "")


@caught_by(f"{_GROUPS}::test_blocks_that_never_get_a_hash_are_looked_at_until_their_step_is_over")
def blocks_without_a_hash_are_looked_at_at_each_step(patch: pytest.MonkeyPatch) -> None:
    """A request that decodes in a window costs the scheduler's thread a look at all its blocks at each step."""
    rewrite(patch, DeviceBlocks._look, "self._over >= request.full_step", "self._over < 0")


@caught_by(f"{_GROUPS}::test_part_of_a_block_is_not_named")
def part_of_a_block_is_named(patch: pytest.MonkeyPatch) -> None:
    """A block that vLLM finds by fewer tokens than it has room for is named as if it was full."""
    rewrite(patch, DeviceBlocks._note, " and block.block_hash_num_tokens == (depth + 1) * size", "")


@caught_by(f"{_GROUPS}::test_blocks_without_a_hash_are_passed_over")
def chain_ends_at_a_block_that_left_the_window(patch: pytest.MonkeyPatch) -> None:
    """Blocks behind those that nobody needs any more are not found after a restart."""
    rewrite(patch, DeviceBlocks._note, "request.noted[group] += request.noted[group] == depth", "break")


@caught_by(f"{_GROUPS}::test_blocks_without_a_hash_are_passed_over")
def block_of_a_window_is_adopted_in_another_group(patch: pytest.MonkeyPatch) -> None:
    """All blocks are taken for as long as those of the first group, and tell vLLM of too few tokens."""
    rewrite(patch, DeviceBlocks._group_of, "len(self._block_sizes) > 1", "not self._block_sizes")


@caught_by(f"{_MODEL}::test_block_whose_hash_comes_with_the_output_is_named")
def hash_of_an_output_is_seen_with_the_next_step(patch: pytest.MonkeyPatch) -> None:
    """A request that loses its blocks meanwhile leaves one without a name, and nothing is named that builds on it."""
    rewrite(patch, DeviceBlocks.step_over, "self._look(request_id, request)", "pass")


@caught_by(f"{_MODEL}::test_loaded_blocks_of_before_a_clear_are_not_named")
def loaded_blocks_of_before_a_clear_are_named(patch: pytest.MonkeyPatch) -> None:
    """A load that was found before a clear, and ordered after it, is named as if it had been computed since."""
    rewrite(patch, DeviceBlocks.allocated, "self._arrived.get(request_id) != epoch", "False")
