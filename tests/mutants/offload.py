"""Mistakes about engines in offload mode, which copy blocks themselves."""

from __future__ import annotations

import pytest

from kvcached.core.index.tree import PrefixTree
from kvcached.core.namespaces import Namespace, Namespaces
from kvcached.core.offload import Offload
from kvcached.core.slots.states import SlotState
from kvcached.core.transfers.engine_copies import EngineCopies
from kvcached.core.transfers.store_waits import longest_hit
from kvcached.core.transfers.table import TransferTable
from kvcached.service.offload.admission import OffloadAdmission
from kvcached.service.offload.verbs import OffloadVerbs
from kvcached.service.sessions import EngineGroup
from kvcached_client.blocks import transfers
from kvcached_client.copy_process import main as copy_process
from kvcached_client.copy_process.client import CopyProcess
from kvcached_client.copy_process.shards import ProcessShard
from kvcached_client.cuda import copier, device
from kvcached_client.cuda.copier import CudaCopier
from kvcached_client.transport.session import SessionChannel
from tests.mutants.mutant import caught_by, rewrite

_DEATHS = "tests/copy_process/test_deaths.py::"


@caught_by(_DEATHS + "test_idle_copy_process_ends_with_its_engine")
def copy_process_waits_for_its_connection_only(patch: pytest.MonkeyPatch) -> None:
    """A copy process lives on while a forked child of its dead engine has the connection."""
    rewrite(
        patch, copy_process.serve, "connection.fileno(), engine, shard.fileno()", "connection.fileno(), shard.fileno()"
    )


@caught_by(_DEATHS + "test_idle_copy_process_ends_with_its_engine")
def prepared_copy_process_waits_for_its_connection_only(patch: pytest.MonkeyPatch) -> None:
    """Before it has a session, a copy process lives on while a forked child of its dead engine has the connection."""
    rewrite(patch, copy_process._messages, "(connection.fileno(), engine)", "(connection.fileno(),)")


@caught_by(_DEATHS + "test_outcome_is_told_though_the_process_has_ended_since")
def end_of_a_copy_process_is_told_with_its_last_outcome(patch: pytest.MonkeyPatch) -> None:
    """Who has taken a good outcome does not leave the session, and finds it over where nobody expects that."""
    rewrite(patch, CopyProcess.outcomes, "if not found:", "if True:")


@caught_by(_DEATHS + "test_process_that_cannot_go_on_says_why_though_it_has_ended")
def refusal_of_a_copy_process_not_read(patch: pytest.MonkeyPatch) -> None:
    """Who joins by a process that has ended does not hear why, and starts another one, and another one."""
    rewrite(patch, CopyProcess._join, "suppress(OSError)", "suppress()")


@caught_by(_DEATHS + "test_refused_order_fails_alone")
def refused_order_silences_its_session(patch: pytest.MonkeyPatch) -> None:
    """What is wrong with one order counts as a daemon that does not answer: for seconds, nothing is copied."""
    rewrite(patch, ProcessShard._ordered, "outcome.code is not None", "False")


@caught_by("tests/copy_process/test_hangs.py::test_process_that_waits_for_its_mark_is_not_late")
def process_behind_a_long_kernel_is_late(patch: pytest.MonkeyPatch) -> None:
    """A copy process that waits for the engine's own kernels is taken for one that hangs."""
    rewrite(patch, ProcessShard._outcome, "elif may_begin", "elif True")


@caught_by(_DEATHS + "test_dead_engine_s_memory_and_slots_wait_for_the_death_of_its_copy_process")
def copy_process_has_no_lock(patch: pytest.MonkeyPatch) -> None:
    """The lock of an engine's memory is gone with the engine, though its copy process may still write there."""
    inherited = "return map_sealed(begin.descriptor,"
    other = 'os.open(f"/proc/self/fd/{begin.descriptor}", os.O_RDWR)'
    rewrite(
        patch,
        copy_process.mapped,
        inherited,
        f"other = {other}\nos.close(begin.descriptor)\nreturn map_sealed(other,",
    )


@caught_by(_DEATHS + "test_killed_copy_process_fails_its_order_and_leaves_no_wrong_byte")
def orders_of_a_dead_copy_process_forgotten(patch: pytest.MonkeyPatch) -> None:
    """The orders that a copy process had when it died have no outcome."""
    rewrite(
        patch,
        CopyProcess.outcomes,
        "found += [Outcome(number, error=self._ending()) for number in sorted(self._open)]",
        "pass",
    )


@caught_by("tests/client/test_block_transfers.py::test_store_whose_bytes_may_be_wrong_writes_no_header")
def store_is_not_confirmed(patch: pytest.MonkeyPatch) -> None:
    """A store gets its headers though its engine died before the copy was over, when its memory may be another's."""
    rewrite(patch, transfers.BlockTransfers.store_all, "self._confirm is not None", "False")


@caught_by("tests/client/test_block_transfers.py::test_blocks_of_the_trusted_epoch_are_not_compared")
def inherited_block_is_not_compared(patch: pytest.MonkeyPatch) -> None:
    """What an earlier daemon has stored is trusted, and what a live process has just written is compared."""
    rewrite(patch, transfers._doubted, "epoch != trusted_epoch", "epoch == trusted_epoch")


@caught_by("tests/client/test_offload.py::test_load_of_an_acquire_that_was_granted_too_late_is_called_off")
def late_load_is_kept(patch: pytest.MonkeyPatch) -> None:
    """A lease that was granted too late is released, and the load that came with it stays for the session's life."""
    rewrite(patch, SessionChannel.give_back_late, "call_off=load", "call_off=0")


@caught_by("tests/core/test_offload.py::test_acquire_announces_no_load_of_no_blocks")
def load_of_no_blocks_announced(patch: pytest.MonkeyPatch) -> None:
    """An acquire announces a load though there is nothing to load."""
    rewrite(patch, Offload.acquire, "load_from < depth", "load_from <= depth")


@caught_by("tests/service/test_offload.py::test_acquire_may_announce_its_load")
def load_is_not_called_off(patch: pytest.MonkeyPatch) -> None:
    """A release calls no load off."""
    rewrite(patch, OffloadVerbs.release, "if request.call_off:", "if False:")


@caught_by("tests/service/test_offload.py::test_offers_of_several_leases_are_served_one_by_one")
def further_copies_of_a_report_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A report of several copies ends the first only."""
    rewrite(patch, OffloadVerbs._transfer_done, "for more in request.more", "for more in ()")


@caught_by("tests/service/test_offload_endings.py::test_report_of_several_loads_behind_a_goodbye_ends_all_of_them")
def late_report_ends_at_the_first_refusal(patch: pytest.MonkeyPatch) -> None:
    """A report of several copies that comes too late ends the first only."""
    rewrite(patch, OffloadVerbs._transfer_done, "refused.append(refusal)", "raise")


@caught_by("tests/core/test_offload.py::test_store_that_is_called_off_is_not_found")
def offload_called_off_store_believed(patch: pytest.MonkeyPatch) -> None:
    """A store that is called off without a reason counts as written."""
    rewrite(patch, EngineCopies.settled, "error = error or _CALLED_OFF", "pass")


@caught_by("tests/core/test_offload_spaces.py::test_clear_ends_all_hits")
def offload_clear_keeps_the_tree(patch: pytest.MonkeyPatch) -> None:
    """Clearing a namespace changes its generation only."""

    def clear(self: Namespaces, namespace: Namespace) -> int:
        namespace.generation = self._generations.renew(namespace.spec.root)
        self.version += 1
        return namespace.host.counts[SlotState.CACHED]

    patch.setattr(Namespaces, "clear", clear)


@caught_by("tests/core/test_offload.py::test_corrupt_blocks_are_not_matched_again")
def offload_corrupt_block_not_dropped(patch: pytest.MonkeyPatch) -> None:
    """A block that a shard found damaged is hit again."""
    patch.setattr(TransferTable, "drop_corrupt", lambda *_: None)


@caught_by("tests/core/test_offload.py::test_corrupt_block_stays_while_somebody_reads_it")
def offload_corrupt_slot_freed_while_read(patch: pytest.MonkeyPatch) -> None:
    """A damaged block's slot is free while another load reads it."""
    rewrite(patch, TransferTable.drop_corrupt, " and slot not in read", "")


@caught_by("tests/service/test_offload.py::test_requests_of_another_epoch_are_stale")
def offload_epoch_check_dropped(patch: pytest.MonkeyPatch) -> None:
    """A request of an engine in offload mode that names a host pool of the past is served."""
    patch.setattr(OffloadVerbs, "_check_epoch", lambda *_: None)


@caught_by("tests/core/test_offload.py::test_report_of_the_other_kind_ends_nothing")
def offload_kind_not_compared(patch: pytest.MonkeyPatch) -> None:
    """A shard that reports a store under a load's number ends the load."""
    rewrite(patch, Offload.transfer_done, "copy.kind is not kind", "False")


@caught_by("tests/core/test_offload.py::test_store_that_is_called_off_is_not_found")
def offload_every_shard_taken_for_the_first(patch: pytest.MonkeyPatch) -> None:
    """A scheduler that calls a copy off speaks for shard 0 only."""
    rewrite(patch, EngineCopies.settled, "copy.waiting.clear()", "shard = 0")


@caught_by("tests/core/test_offload_policies.py::test_offers_of_one_request_are_one_sighting")
def offload_first_sighting_is_stored(patch: pytest.MonkeyPatch) -> None:
    """Under the selective policy an offer that is passed over is not remembered as such: its rest is copied later."""
    rewrite(patch, EngineCopies.may_store, "lease.passed or ", "")


@caught_by("tests/service/test_offload_endings.py::test_goodbye_with_copies_under_way_waits_for_the_shards_only")
def offload_goodbye_frees_what_shards_write(patch: pytest.MonkeyPatch) -> None:
    """A scheduler's goodbye counts for its shard processes, too."""

    def part(self: OffloadAdmission, group: EngineGroup) -> None:
        self._replace(group, group.members)

    patch.setattr(OffloadAdmission, "part", part)


@caught_by("tests/core/test_offload.py::test_store_is_found_only_when_every_shard_has_written_it")
def offload_hit_on_blocks_being_written(patch: pytest.MonkeyPatch) -> None:
    """Blocks that shards still write are hit."""
    rewrite(patch, longest_hit, "pool.counts[SlotState.FILLING]", "False")


@caught_by("tests/core/test_offload.py::test_hole_above_a_whole_run_is_asked_for")
def offload_hole_above_a_whole_run(patch: pytest.MonkeyPatch) -> None:
    """A store asks for lost copies up to the first run that is there as a whole."""
    up = "run, depth = run.parent, run.start"
    rewrite(patch, PrefixTree.missing_in_host, up, f"else:\n    break\n{up}")


@caught_by("tests/core/test_offload_spaces.py::test_idle_namespaces_with_a_slab_each_make_room")
def offload_idle_namespace_keeps_a_slab(patch: pytest.MonkeyPatch) -> None:
    """Namespaces that nobody uses hold slabs back from those in use."""
    rewrite(patch, Namespaces._give_room, "host.empty == host.slabs and not host.floor", "False")


@caught_by("tests/service/test_offload_endings.py::test_engine_with_the_same_name_for_itself_ends_nobody_elses_session")
def offload_instance_ends_strangers(patch: pytest.MonkeyPatch) -> None:
    """A shard that joins ends sessions of other engines that call themselves the same."""
    rewrite(patch, OffloadAdmission.join, "if left:", "if True:")


@caught_by("tests/core/test_offload.py::test_slots_of_a_load_are_read_undisturbed_after_the_release")
def offload_load_not_pinned(patch: pytest.MonkeyPatch) -> None:
    """What an engine's own load reads may be evicted once the lease is released."""
    lock, unlock = "tree.lock(", "copy.tree.unlock_host("
    rewrite(patch, EngineCopies.start, lock, f"if kind is TransferKind.STORE: {lock}")
    rewrite(patch, EngineCopies.end, unlock, f"if copy.kind is TransferKind.STORE: {unlock}")


@caught_by("tests/core/test_offload.py::test_load_of_what_proved_corrupt_meanwhile_is_refused")
def offload_load_of_slots_being_written(patch: pytest.MonkeyPatch) -> None:
    """A load is given slots whose blocks were dropped, or are being written again."""
    cached = "all(host.holds(first, count, SlotState.CACHED) for first, count in pairs(slots))"
    rewrite(patch, Offload._start_load, cached, "True")


@caught_by("tests/service/test_offload_endings.py::test_slots_of_a_replaced_session_wait_for_each_of_its_shards")
def offload_session_replaced_too_early(patch: pytest.MonkeyPatch) -> None:
    """An engine that says hello anew frees what its shards may still write."""
    rewrite(patch, OffloadAdmission._replace, "if not old.living()", "if True")


@caught_by("tests/core/test_offload.py::test_a_shard_counts_once")
def offload_shard_counted_twice(patch: pytest.MonkeyPatch) -> None:
    """A shard that acknowledges twice stands for another one."""
    rewrite(patch, EngineCopies.settled, "copy.waiting.discard(ShardIndex(shard))", "copy.waiting.pop()")


@caught_by("tests/service/test_offload_endings.py::test_shard_that_joins_as_another_one_is_not_through")
def offload_shard_speaks_for_another(patch: pytest.MonkeyPatch) -> None:
    """A process that joins as one shard says that all its work in the earlier session is over."""
    rewrite(patch, OffloadAdmission.join, "old.shard_of.get(each) == shard and ", "")


@caught_by("tests/service/test_offload_endings.py::test_slots_wait_for_the_last_process")
def offload_slots_reused_after_a_lost_member(patch: pytest.MonkeyPatch) -> None:
    """One dead process of an engine in offload mode counts as all of them."""
    patch.setattr(Offload, "lose_member", Offload.end)


@caught_by("tests/cuda/test_offload.py::test_blocks_of_one_engine_are_loaded_by_another")
def offload_store_before_the_forward_pass_ends(patch: pytest.MonkeyPatch) -> None:
    """A store on a device does not wait for the mark behind the kernels that write the blocks."""
    rewrite(patch, CudaCopier.wait, "mark.hold(self._to_host)", "pass")


@caught_by("tests/cuda/test_offload.py::test_blocks_of_one_engine_are_loaded_by_another")
def offload_load_over_blocks_that_are_read(patch: pytest.MonkeyPatch) -> None:
    """A load on a device does not wait for the mark behind the kernels that read what its blocks held before."""
    rewrite(patch, CudaCopier.wait, "mark.hold(self._to_device)", "pass")


@caught_by("tests/cuda/test_offload.py::test_copies_of_a_store_that_breaks_off_end_before_the_pool_is_left")
def offload_pool_left_while_the_device_copies(patch: pytest.MonkeyPatch) -> None:
    """A store that breaks off does not wait for what it has queued: the host pool is unregistered under a copy."""
    patch.setattr(copier, "_abandon", lambda _: None)


@caught_by("tests/cuda/test_offload.py::test_blocks_of_one_engine_are_loaded_by_another")
def offload_changes_the_device_of_a_thread(patch: pytest.MonkeyPatch) -> None:
    """A thread of the engine has another CUDA device after a copy."""
    rewrite(patch, device.own_context, 'driver.call("cuCtxSetCurrent", before)', "pass")


@caught_by("tests/core/test_offload_spaces.py::test_namespace_does_not_make_room_for_itself")
def namespace_forgotten_for_its_own_slab(patch: pytest.MonkeyPatch) -> None:
    """A fetch whose engine has left forgets its own namespace to make room, and its slab is nobody's."""
    rewrite(patch, Namespaces.make_room, "each.host is not taker", "True")


@caught_by("tests/core/test_offload_policies.py::test_offer_of_no_blocks_stores_no_more_than_others")
def reader_stores_what_it_found_bad(patch: pytest.MonkeyPatch) -> None:
    """A session that is read-only gets slots for lost copies by an offer of no blocks."""
    rewrite(patch, Offload.prepare_store, "(keys or not may_store)", "keys")


@caught_by("tests/core/test_offload.py::test_second_word_of_a_shard_changes_nothing")
def second_word_of_a_shard_counts(patch: pytest.MonkeyPatch) -> None:
    """A retry of a report makes a store fail that its shard has written."""
    rewrite(patch, Offload.transfer_done, "shard != EVERY_SHARD and shard not in copy.waiting", "False")
