"""Mistakes about CUDA: events, fences, contexts, registered memory, and memory of devices."""

from __future__ import annotations

import pytest

from kvcached.recovery import device_pools
from kvcached.replica_start import Holder
from kvcached.service import state_writer
from kvcached.worker.cuda_memory import CudaMemory
from kvcached_client.blocks import checksums
from kvcached_client.blocks.copy import CopyPlan
from kvcached_client.blocks.transfers import BlockTransfers
from kvcached_client.copy_process.main import Copying
from kvcached_client.cuda import copier, device, driver, host, mapping, rows
from kvcached_client.cuda.copier import CudaCopier
from kvcached_client.cuda.device import Device, DeviceMemory
from kvcached_client.cuda.driver import Driver
from kvcached_client.cuda.engine import EventMark
from kvcached_client.cuda.gates import LayerGates
from kvcached_client.cuda.host import HostPool
from kvcached_client.cuda.marks import MarkWriter, SharedMark
from kvcached_client.cuda.streams import StreamFences
from kvcached_client.offload_shard import OffloadShard
from tests.mutants.mutant import caught_by, rewrite

_ROUND_TRIP = "tests/cuda/test_copier.py::test_loaded_blocks_are_those_that_were_stored"
_OFFLOAD = "tests/cuda/test_offload.py::test_blocks_of_one_engine_are_loaded_by_another"
_FENCES = "tests/cuda/test_streams.py::test_slots_under_a_fence_keep_their_bytes"
_SHARED = "tests/cuda/test_device.py::test_descriptor_keeps_the_memory"


@caught_by("tests/cuda/test_copier.py::test_layer_is_there_when_it_is_said_to_be")
def cuda_batch_over_before_its_event(patch: pytest.MonkeyPatch) -> None:
    """A batch counts as copied once it is queued: headers and progress entries tell of bytes that are under way."""
    rewrite(patch, copier._finished, "first.event.synchronize()", "pass")


@caught_by("tests/cuda/test_copier.py::test_layer_is_there_when_it_is_said_to_be")
def cuda_event_before_the_copy(patch: pytest.MonkeyPatch) -> None:
    """The event of a batch is recorded before the batch is queued."""
    rewrite(
        patch,
        CudaCopier._queue,
        "sent = self._send(batch, stream, to_host=to_host)\n"
        "return _UnderWay(batch, stream, before, sent, stream.record(spins=batch.is_end))",
        "over = stream.record()\n"
        "return _UnderWay(batch, stream, before, self._send(batch, stream, to_host=to_host), over)",
    )


@caught_by("tests/cuda/test_copier.py::test_end_of_a_transfer_is_waited_for_in_a_loop_once_it_has_begun")
def cuda_loop_for_all_that_is_queued(patch: pytest.MonkeyPatch) -> None:
    """Who waits for the end of a transfer waits in a loop for all that is before it: a core is busy for as long."""
    rewrite(patch, copier._finished, "first.before.synchronize()", "pass")


@caught_by("tests/cuda/test_rows.py::test_layers_at_two_distances_are_two_copies")
def cuda_piece_of_two_rows(patch: pytest.MonkeyPatch) -> None:
    """Two runs of rows that meet both copy the piece at which they do."""
    rewrite(patch, rows._even, "first += height", "first += height - 1")


@caught_by("tests/engine/test_llama_model.py::test_rows_are_written_without_a_copy_of_the_pool")
def cuda_engine_writes_over_what_is_loaded(patch: pytest.MonkeyPatch) -> None:
    """The example engine writes rows into a copy of the pool, and brings it back, as deterministic torch does."""
    from examples.llama_engine import attention  # noqa: PLC0415 - torch takes seconds

    rewrite(patch, attention.write_rows, "torch.use_deterministic_algorithms(mode=False)", "pass")


@caught_by("tests/cuda/test_doctor.py::test_machine_that_can_do_everything")
def cuda_rows_not_copied(patch: pytest.MonkeyPatch) -> None:
    """A driver does nothing where it is to copy rows: `kvcached doctor --cuda` has to say so."""
    patch.setattr(Driver, "copy_rows", lambda *_, **__: 0)


@caught_by("tests/cuda/test_rows.py::test_layers_far_apart_are_rows_with_a_shorter_pitch")
def cuda_pitch_without_limit(patch: pytest.MonkeyPatch) -> None:
    """Layers are copied as rows with whatever pitch they have; the device refuses that."""
    rewrite(patch, rows._parts, "max(1, -(-distance // pitch_max))", "1")


@caught_by("tests/cuda/test_rows.py::test_rows_that_are_queued_before_a_refusal_are_waited_for")
def cuda_refused_batch_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    """A batch that is refused in its midst fails at once, while its first copies go on."""
    rewrite(patch, CudaCopier._queue, "stream.synchronize()", "pass")


@caught_by("tests/cuda/test_rows.py::test_layers_with_strides_of_their_own_are_pieces")
def cuda_strides_taken_for_equal(patch: pytest.MonkeyPatch) -> None:
    """All blocks are copied with the distances of the first one, though layers have strides of their own."""
    rewrite(patch, rows.split, "(places[1:] != places[0]).any()", "False")


@caught_by("tests/cuda/test_copier.py::test_layers_of_a_block_are_rows_of_one_copy")
def cuda_rows_told_as_one_layer(patch: pytest.MonkeyPatch) -> None:
    """Layers that arrive together are told of as one: the engine waits for the others forever."""
    rewrite(patch, BlockTransfers.load_by_layer, "0 if bad else batch.layers", "0 if bad else min(1, batch.layers)")


@caught_by("tests/cuda/test_copier.py::test_rows_are_in_one_allocation")
def cuda_rows_leave_their_allocation(patch: pytest.MonkeyPatch) -> None:
    """Layers that torch has made one by one are rows of one copy where they lie at even distances: it is refused."""
    where = "self._allocations.starts(numbers[0, :, column] + base)"
    rewrite(patch, CudaCopier._send, where, "np.zeros(batch.per_block, np.int64)")


@caught_by("tests/cuda/test_rows.py::test_neighbouring_blocks_in_two_allocations_are_two_pieces")
def cuda_piece_leaves_its_allocation(patch: pytest.MonkeyPatch) -> None:
    """Pages back to back are one piece, though one allocation ends between them."""
    rewrite(patch, rows.merged, "begins |= apart", "pass")


@caught_by("tests/worker/test_copier.py::test_large_layers_are_several_batches")
def cuda_layer_told_with_its_first_batch(patch: pytest.MonkeyPatch) -> None:
    """A layer is said to be there when the first of its batches is."""
    rewrite(patch, CopyPlan.by_layer, "if some.stop == len(blocks)", "if not some.start")


@caught_by("tests/client/test_checksums.py::test_end_waits_for_threads_that_read")
def cuda_memory_read_after_the_end(patch: pytest.MonkeyPatch) -> None:
    """Threads still sum blocks when a transfer is over, and the host pool may be unmapped."""
    rewrite(patch, checksums.Part.wait, "wait([self._future])", "pass")


@caught_by("tests/client/test_checksums.py::test_nobody_waits_for_what_no_thread_has_begun")
def cuda_load_waits_for_the_sums_of_stores(patch: pytest.MonkeyPatch) -> None:
    """What is handed to threads is theirs, though all of them sum a store."""
    rewrite(patch, checksums.Part.sums, "or self._future.cancel()", "")


@caught_by("tests/cuda/test_streams.py::test_kernels_behind_a_load_that_is_late")
def cuda_gates_open_before_their_layers(patch: pytest.MonkeyPatch) -> None:
    """A gate lets the stream pass before its layer has arrived."""
    wait = "self._pool.wait_layer(tickets, layer, group, deadline_ms=remaining_ms)"
    rewrite(patch, LayerGates.open_by_layer, wait, "pass")


@caught_by(_SHARED)
def cuda_granule_not_rounded(patch: pytest.MonkeyPatch) -> None:
    """Memory of a device is asked for in bytes, not in granules."""
    patch.setattr(Device, "whole_granules", lambda _, size_bytes: size_bytes)


@caught_by(_FENCES)
def cuda_fence_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    """A fence has signalled once it is given, whatever the stream still does."""
    rewrite(patch, StreamFences._collect, "self._queued[0].event.is_over()", "True")


@caught_by(_FENCES)
def cuda_fence_in_another_stream(patch: pytest.MonkeyPatch) -> None:
    """A fence is an event in the default stream, for which the engine's streams do not wait."""
    rewrite(patch, StreamFences.next, "CUstream(stream)", "CUstream(0)")


@caught_by(_OFFLOAD)
def cuda_mark_in_another_stream(patch: pytest.MonkeyPatch) -> None:
    """A mark is an event in the default stream: copies begin before the forward pass ends."""
    rewrite(patch, EventMark.__init__, "CUstream(stream)", "CUstream(0)")


@caught_by(_SHARED)
def cuda_map_without_access(patch: pytest.MonkeyPatch) -> None:
    """Memory is mapped, and nobody may read or write it."""
    rewrite(
        patch,
        DeviceMemory.__init__,
        "device.allow_access(reserved, size_bytes)",
        "pass",
    )


@caught_by("tests/cuda/test_copier.py::test_copies_stay_within_what_is_registered_at_once")
def cuda_parts_of_half_slabs(patch: pytest.MonkeyPatch) -> None:
    """What is registered at once ends within a slab, so that a copy has bytes of two registered ranges."""
    rewrite(patch, host.shard_ranges, "max(1, call_bytes // host.slab_bytes) * host.slab_bytes", "call_bytes")


@caught_by(_ROUND_TRIP)
def cuda_part_registered_twice(patch: pytest.MonkeyPatch) -> None:
    """The first part of the host pool is registered again in place of each other one."""
    rewrite(patch, HostPool._register_all, "self._address + each.start", "self._address")


@caught_by(_OFFLOAD)
def cuda_pool_stays_registered(patch: pytest.MonkeyPatch) -> None:
    """An engine that leaves keeps the host pool registered, which is unmapped then."""
    rewrite(patch, HostPool.close, "self._registered.pop().close()", "self._registered.pop()")


@caught_by(_OFFLOAD)
def cuda_sources_read_in_any_order(patch: pytest.MonkeyPatch) -> None:
    """The driver may read the source of a copy at any time, and not only behind what is queued before it."""
    patch.setattr(driver, "_IN_STREAM_ORDER", 3)


@caught_by(_ROUND_TRIP)
def cuda_thread_without_context(patch: pytest.MonkeyPatch) -> None:
    """The thread that registers the host pool has no context."""
    call = "self._register_all(on_progress)"
    rewrite(patch, HostPool._register, f"with self._device.current():\n    {call}", call)


@caught_by("tests/cuda/test_graphs.py::test_sdk_does_not_break_a_capture")
def cuda_capture_is_broken(patch: pytest.MonkeyPatch) -> None:
    """Calls of the SDK break a graph that another thread captures."""
    mode = "modes.CU_STREAM_CAPTURE_MODE"
    call = 'driver.call("cuThreadExchangeStreamCaptureMode", {})'
    rewrite(patch, device.own_context, call.format(f"{mode}_RELAXED"), call.format(f"{mode}_GLOBAL"))


@caught_by("tests/cuda/test_pool.py::test_evicted_blocks_come_back_from_the_host_pool")
def cuda_worker_without_context(patch: pytest.MonkeyPatch) -> None:
    """The thread of a worker that copies has no context."""
    patch.setattr(CudaMemory, "use", lambda _: None)


@caught_by(_ROUND_TRIP)
def cuda_wrong_abi(patch: pytest.MonkeyPatch) -> None:
    """The batched copy of CUDA 13 is called with the arguments of CUDA 12.8."""
    patch.setattr(driver, "_BATCH_VERSION", 13_000)


_LOST = "tests/cuda/test_lost_device.py::{}"


@caught_by(_LOST.format("test_other_devices_serve_and_are_not_mistaken"))
def cuda_lost_device_by_number(patch: pytest.MonkeyPatch) -> None:
    """A replica that has served gets memory of whichever device has its number now."""
    rewrite(patch, device_pools._on_cuda, "uuids = devices or", "uuids =")


@caught_by(_LOST.format("test_replica_does_not_move_to_a_neighbours_device"))
def cuda_lost_device_is_a_move(patch: pytest.MonkeyPatch) -> None:
    """After a stop in order, the numbers of other devices do not tell that one was lost before them."""
    rewrite(patch, device_pools._moved, "numbers.get(each, number) != number", "False")


@caught_by(_LOST.format("test_daemon_starts_without_its_device"))
def cuda_lost_device_ends_the_start(patch: pytest.MonkeyPatch) -> None:
    """Kept memory whose device is lost makes the start fail, and the service manager drops it in the end."""
    rewrite(patch, Holder.open, "self._memory.has_served", "False")


@caught_by(_LOST.format("test_memory_that_nobody_kept_is_made_when_the_device_is_back"))
def cuda_lost_pool_sleeps_on(patch: pytest.MonkeyPatch) -> None:
    """The state file says of a pool that waits for its device that it sleeps, so the next daemon does not wait."""
    rewrite(patch, state_writer._replica, " and not replica.waits_for_device", "")


_CLOSING = "tests/cuda/test_closing.py::{}"


@caught_by(_CLOSING.format("test_pool_is_given_up_after_the_kernels_on_it"))
def cuda_pool_given_up_under_kernels(patch: pytest.MonkeyPatch) -> None:
    """The daemon is told that a pool is not used any more while kernels are queued that write into it."""
    rewrite(patch, mapping._when_idle, 'device.driver.call("cuCtxSynchronize")', "pass")


@caught_by(_CLOSING.format("test_forgotten_pool_is_unmapped_after_the_kernels_on_it"))
def cuda_pool_unmapped_under_kernels(patch: pytest.MonkeyPatch) -> None:
    """A pool is unmapped while kernels are queued that write into it."""
    rewrite(patch, mapping.unmap_when_idle, 'device.driver.call("cuCtxSynchronize")', "pass")


@caught_by(_CLOSING.format("test_gates_are_unregistered_after_the_streams_have_passed"))
def cuda_gates_unregistered_under_waits(patch: pytest.MonkeyPatch) -> None:
    """Gates are unregistered while a stream has yet to wait for one."""
    rewrite(patch, LayerGates.close, 'self._owner.device.driver.call("cuCtxSynchronize")', "pass")


@caught_by(_CLOSING.format("test_copier_is_closed_after_the_copies_that_are_queued"))
def cuda_unregistered_before_streams_are_drained(patch: pytest.MonkeyPatch) -> None:
    """A copier that is closed does not wait for its copies, and the host pool is unregistered under them."""
    rewrite(patch, driver.Stream.finish, "self.synchronize()", "pass")


@caught_by(_CLOSING.format("test_shard_is_closed_after_the_copy_of_another_thread"))
def cuda_shard_closed_under_a_copy(patch: pytest.MonkeyPatch) -> None:
    """A shard is closed while another thread copies and reports."""
    rewrite(patch, OffloadShard.close, "with self._copying:", "if True:")


@caught_by("tests/cuda/test_streams.py::test_stopped_worker_holds_no_stream_behind_the_deadline")
def cuda_gates_without_deadline(patch: pytest.MonkeyPatch) -> None:
    """The host waits for a layer much longer than the step's deadline, and the stream with it."""
    rewrite(patch, LayerGates.open_by_layer, "max(0, (deadline_ns - time.monotonic_ns()) // 1_000_000)", "10_000")


_REFUSED = "tests/cuda/test_refusals.py::test_refused_call_leaves_nothing"


@caught_by(_REFUSED)
def cuda_context_kept_by_a_device_that_failed(patch: pytest.MonkeyPatch) -> None:
    """A device that could not be opened to the end keeps its context."""
    rewrite(patch, Device.__init__, "self.close()", "pass")


@caught_by(_REFUSED)
def cuda_context_kept_by_a_pool_that_failed(patch: pytest.MonkeyPatch) -> None:
    """A pool that cannot be mapped keeps the context of its device."""
    rewrite(patch, mapping.CudaBuffer.__init__, "owner.close()", "pass")


@caught_by(_REFUSED)
def cuda_gates_that_failed_stay_registered(patch: pytest.MonkeyPatch) -> None:
    """Gates that could not be made to the end stay registered, and their memory goes."""
    rewrite(patch, LayerGates._register, "registered.close()", "pass")


@caught_by(_REFUSED)
def cuda_memory_stays_registered(patch: pytest.MonkeyPatch) -> None:
    """Host memory of which the driver gives no address stays registered."""
    rewrite(patch, device.RegisteredMemory.__init__, "self.close()", "pass")


@caught_by(_REFUSED)
def cuda_stream_of_a_copier_that_failed(patch: pytest.MonkeyPatch) -> None:
    """A copier without its second stream keeps the first one."""
    rewrite(patch, CudaCopier.__init__, "self._to_host.close()", "pass")


_COPY_PROCESS = "tests/cuda/test_copy_process.py::{}"


@caught_by(_COPY_PROCESS.format("test_copy_begins_when_its_mark_is_reached"))
def cuda_copy_process_does_not_wait_for_marks(patch: pytest.MonkeyPatch) -> None:
    """A copy process copies before the engine's kernels have written the blocks."""
    patch.setattr(SharedMark, "hold", lambda *_: None)


@caught_by(_COPY_PROCESS.format("test_copy_begins_when_its_mark_is_reached"))
def cuda_shared_mark_in_another_stream(patch: pytest.MonkeyPatch) -> None:
    """A mark for a copy process is written by the default stream, which is not behind the engine's kernels."""
    rewrite(patch, MarkWriter.mark, "CUstream(stream)", "CUstream(0)")


@caught_by(_COPY_PROCESS.format("test_mistakes_about_marks_are_refused"))
def cuda_word_of_a_mark_used_again_too_early(patch: pytest.MonkeyPatch) -> None:
    """A mark gets the word of another one to which the device has not come."""
    patch.setattr(MarkWriter, "_is_reached", lambda *_: True)


@caught_by(_COPY_PROCESS.format("test_page_of_marks_is_given_up_after_the_last_mark"))
def cuda_marks_unregistered_under_writes(patch: pytest.MonkeyPatch) -> None:
    """The page of marks is unregistered while a stream is still to write into it."""
    rewrite(patch, MarkWriter.close, 'self._owner.device.driver.call("cuCtxSynchronize")', "pass")


@caught_by(_COPY_PROCESS.format("test_device_that_fails_the_copies_does_not_fail_the_engine"))
def cuda_copy_process_goes_on_without_its_device(patch: pytest.MonkeyPatch) -> None:
    """A copy process whose device has failed stays, and fails every later order."""
    rewrite(patch, Copying._carry_out, "not self._device_works()", "False")


@caught_by("tests/cuda/test_vllm_worker.py::test_copy_that_the_device_refuses_costs_its_order_only")
def cuda_refused_copy_ends_the_copy_process(patch: pytest.MonkeyPatch) -> None:
    """What a device refuses once ends the session of all ranks, though the device works."""
    rewrite(patch, Copying._carry_out, "not self._device_works()", "True")
