"""Mistakes about memory of the daemon on CUDA devices that outlives its engine."""

from __future__ import annotations

import pytest

from kvcached.memory.engine_pool import EnginePool
from kvcached.recovery.engine_pools import EnginePools
from kvcached.recovery.engine_writers import EngineWriters
from kvcached_client.copy_process.client import CopyProcess
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
    rewrite(patch, EngineWriters.admit, "is_taken = ", "is_taken = pool is None and ")


@caught_by(f"{_POOLS}::test_memory_waits_for_the_death_of_the_process_that_copies")
def device_memory_of_a_process_that_copies(patch: pytest.MonkeyPatch) -> None:
    """An engine with the claim of a dead one gets its memory, into which the dead one's copies still go."""
    rewrite(patch, EngineWriters.admit, "or self._lives(pool, _place_of_copies(pool, rank))", "")


@caught_by(f"{_POOLS}::test_next_daemon_waits_for_the_death_of_the_process_that_copies")
def process_that_copies_forgotten_by_the_next_daemon(patch: pytest.MonkeyPatch) -> None:
    """The next daemon waits for the death of the engine's process alone."""
    rewrite(patch, EngineWriters.find, "min(2 * pool.head.ranks, RANKS_MAX)", "pool.head.ranks")


@caught_by(f"{_POOLS}::test_nobody_copies_for_an_engine_that_has_not_the_memory")
def copies_for_a_dead_engine(patch: pytest.MonkeyPatch) -> None:
    """A process gets the memory of an engine that is dead, as if it copied for it."""
    rewrite(patch, EngineWriters.admit_copies, "elif not self._lives(pool, rank):", "elif rank < 0:")


@caught_by("tests/cuda/test_copies_in_daemon_memory.py::test_memory_waits_for_the_process_that_copied")
def process_that_copies_is_no_writer(patch: pytest.MonkeyPatch) -> None:
    """The daemon gives memory to a process that copies, and does not note it."""
    rewrite(patch, EngineWriters.admit_copies, "self._put(pool, place, process)", "process.close()")


@caught_by(
    "tests/cuda/test_copies_in_daemon_memory.py::test_thread_copies_where_the_daemon_gives_the_memory_to_no_process"
)
def refused_process_is_taken_for_a_killed_one(patch: pytest.MonkeyPatch) -> None:
    """A process that has said why it cannot copy is killed before it ends, and others are tried in vain."""
    rewrite(patch, CopyProcess._join, "self._end()  # by itself: it must not look as if it was killed", "pass")


@caught_by(f"{_POOLS}::test_memory_of_a_process_that_cannot_be_seen_is_dropped")
def writer_of_another_pid_namespace_is_dead(patch: pytest.MonkeyPatch) -> None:
    """The next daemon takes a process of another pid namespace for the one that has its id here, or for dead."""
    rewrite(patch, EngineWriters.find, "if writer.namespace != pid_namespace():", "if not place + 1:")


@caught_by(f"{_POOLS}::test_new_memory_of_a_rank_drops_all_rows")
def new_device_memory_keeps_rows(patch: pytest.MonkeyPatch) -> None:
    """A rank's memory is made anew, and the table names the blocks that were in the old one."""
    rewrite(patch, EnginePool.drop, "self.table.forget()", "pass")
