"""Mistakes about memory of the daemon on CUDA devices that outlives its engine."""

from __future__ import annotations

import pytest

from kvcached.memory.engine_pool import EnginePool
from kvcached.recovery.engine_pools import EnginePools
from kvcached.recovery.engine_writers import EngineWriters
from kvcached_client.cuda.engine_pool import EnginePoolMemory
from kvcached_client.vllm.computed_steps import ComputedSteps
from kvcached_client.vllm.device_memory import RankMemory
from kvcached_client.vllm.device_table import DeviceTable
from tests.mutants.mutant import caught_by, rewrite

_PROCESSES = "tests/cuda/test_warm.py"
_POOLS = "tests/recovery/test_engine_pools_on_devices.py"


@caught_by(f"{_PROCESSES}::test_blocks_are_named_when_the_stream_has_done_their_step")
def device_block_named_when_its_step_is_launched(patch: pytest.MonkeyPatch) -> None:
    """A block is named while its kernels wait in the stream."""
    rewrite(patch, ComputedSteps.launched, "if self._fences is None:", "if True:")


@caught_by(f"{_PROCESSES}::test_warming_up_writes_no_block")
def device_block_adopted_that_warming_up_wrote(patch: pytest.MonkeyPatch) -> None:
    """The pool's memory is where vLLM warms up, and its blocks are found all the same."""
    rewrite(patch, EnginePoolMemory.__init__, "place.map_scratch()", "place.map_memory()")


@caught_by(f"{_PROCESSES}::test_warming_up_writes_no_block")
def new_device_memory_is_not_zeroed(patch: pytest.MonkeyPatch) -> None:
    """VLLM gets new memory with whatever is in it, and reads it for padding."""
    rewrite(patch, EnginePoolMemory.open, "if is_new:", "if not is_new and False:")


@caught_by(f"{_PROCESSES}::test_forked_child_keeps_the_memory_of_a_dead_engine")
def device_memory_is_not_locked(patch: pytest.MonkeyPatch) -> None:
    """A rank writes memory of a device without its lock."""
    rewrite(patch, RankMemory._take_on_device, "if not _lock(found.table, self._question.rank):", "if found is None:")


@caught_by(f"{_PROCESSES}::test_memory_goes_to_the_engine_on_its_device")
def device_memory_of_any_device(patch: pytest.MonkeyPatch) -> None:
    """An engine gets what another one of its name has left on another device, which is made anew for it."""
    rewrite(patch, EnginePools._left, " and _device_of(pool, request) == request.device", "")


@caught_by(f"{_PROCESSES}::test_failed_device_names_nothing_any_more")
def device_that_failed_is_waited_for(patch: pytest.MonkeyPatch) -> None:
    """The scheduler waits without end for steps of a device that has failed."""
    rewrite(patch, DeviceTable.computed, "self._blocks.stop()", "pass")


@caught_by(f"{_POOLS}::test_memory_waits_for_the_death_of_its_process")
def device_memory_of_a_process_without_its_lock(patch: pytest.MonkeyPatch) -> None:
    """Whoever has no lock any more counts as dead, though the device may still run its kernels."""
    rewrite(patch, EnginePools._is_used, "return pool.is_locked or self._writers.has(pool)", "return pool.is_locked")


@caught_by(f"{_POOLS}::test_start_that_has_the_claim_of_a_living_one_is_refused")
def device_memory_of_two_processes(patch: pytest.MonkeyPatch) -> None:
    """A second engine with the same claim gets the memory of the first one."""
    rewrite(patch, EngineWriters.admit, "if not known.is_dead() and not _is_same(known, process):", "if not known:")


@caught_by(f"{_POOLS}::test_memory_of_a_process_that_cannot_be_seen_is_dropped")
def writer_of_another_pid_namespace_is_dead(patch: pytest.MonkeyPatch) -> None:
    """The next daemon takes a process of another pid namespace for the one that has its id here, or for dead."""
    rewrite(patch, EngineWriters.find, "if writer.namespace != pid_namespace():", "if not rank + 1:")


@caught_by(f"{_POOLS}::test_new_memory_of_a_rank_drops_all_rows")
def new_device_memory_keeps_rows(patch: pytest.MonkeyPatch) -> None:
    """A rank's memory is made anew, and the table names the blocks that were in the old one."""
    rewrite(patch, EnginePool.drop, "self.table.forget()", "pass")
