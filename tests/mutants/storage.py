"""Mistakes of the storage tier: its process, and the disk's cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from kvcached.core.generations import Generations
from kvcached.core.namespaces import Namespaces
from kvcached.core.transfers import storage
from kvcached.process.in_flight import InFlight, OpenRequest
from kvcached.recovery import generations
from kvcached.recovery.recorder import Recorder
from kvcached.service.admin.clears import Clears
from kvcached.service.offload.admission import OffloadAdmission
from kvcached.service.storage_verbs import StorageVerbs
from kvcached.shared_record import SharedRecord
from kvcached.storage import executor, frame
from kvcached.storage.canonical import Rearrangement
from kvcached.storage.client import StorageLink
from kvcached.storage.disk import directory
from kvcached.storage.disk.catalog import DiskCatalog
from kvcached.storage.disk.index import DiskIndex, Entry
from kvcached.storage.disk.slots import DiskSpace
from kvcached.storage.encryption import cipher
from kvcached.storage.executor import HostCopies
from kvcached.storage.forgets import Forgets
from kvcached.storage.messages import Done
from kvcached_client.blocks import canonical
from tests.mutants.mutant import caught_by, rewrite

_CANONICAL = "tests/storage/test_canonical.py::"


@caught_by(_CANONICAL + "test_any_number_of_shards_gets_its_heads")
def canonical_heads_of_another_shard(patch: pytest.MonkeyPatch) -> None:
    """The heads of a block in storage go to the shards in another order."""
    rewrite(patch, Rearrangement._views, "for ours in whole", "for ours in whole[::-1]")


@caught_by(_CANONICAL + "test_changed_byte_in_the_host_pool_does_not_reach_storage")
def canonical_bytes_sealed_unread(patch: pytest.MonkeyPatch) -> None:
    """Bytes that changed in the host pool get a new checksum on their way to storage."""
    rewrite(patch, executor._leaving, "sums != tuple(map(xxh3_128_digest, slot.parts))", "False")


@caught_by("tests/client/test_canonical.py::test_single_head_whose_place_is_unknown_has_none")
def canonical_place_of_a_single_head_guessed(patch: pytest.MonkeyPatch) -> None:
    """The only head of a shard is taken to be where its stride says, which means nothing."""
    rewrite(patch, canonical._order, "elements != stride", "False")


@caught_by("tests/client/test_canonical.py::test_shards_that_do_not_divide_the_heads_have_none")
def canonical_slots_taken_for_heads(patch: pytest.MonkeyPatch) -> None:
    """Slots for K and for V of each head are divided among shards as if they were heads."""
    rewrite(patch, canonical.canonical_layout, "local * (1 if heads == 1 else shards) != heads", "heads % local")


@caught_by(
    "tests/daemon/test_canonical_storage.py::test_cleared_blocks_do_not_come_back_in_the_layout_before[True-engine]"
)
def generations_of_another_layout_believed(patch: pytest.MonkeyPatch) -> None:
    """What was cleared while storage had another layout is found again when it has the one before."""
    rewrite(patch, generations.in_layout, "recorded_layout(layout) == record.layout", "True")


@caught_by("tests/daemon/test_canonical_storage.py::test_clear_of_a_forgotten_engine_holds_in_the_layout_before")
def ledger_of_another_layout_believed(patch: pytest.MonkeyPatch) -> None:
    """A namespace goes on in the generation of a daemon whose storage had another layout."""
    rewrite(patch, generations.editions_of, "is_of_this_layout or not space.canonical_root", "True")


@caught_by("tests/service/test_offload_clears.py::test_clear_of_one_tells_of_all_that_share_its_blocks_in_storage")
def memory_of_other_shardings_kept_over_a_clear(patch: pytest.MonkeyPatch) -> None:
    """Device memory that engines with another number of shards left is adopted after a clear."""
    rewrite(
        patch,
        Clears._tell_cleared,
        "known.spec.storage_root == spec.storage_root",
        "known is namespace",
    )


@caught_by(
    "tests/service/test_offload_clears.py::test_clear_of_namespaces_that_share_blocks_tells_of_forgotten_ones[canonical0]"
)
def memory_of_forgotten_namespaces_kept_over_a_clear(patch: pytest.MonkeyPatch) -> None:
    """Device memory of a namespace that is forgotten is adopted after a clear of those that share its blocks."""
    rewrite(patch, Clears._tell_cleared, "bool(spec.canonical_root) if known is None", "False if known is None")


@caught_by("tests/service/test_recorder.py::test_clear_is_not_written_down_after_storage_is_lost")
def record_written_while_storage_is_away(patch: pytest.MonkeyPatch) -> None:
    """A daemon whose storage was detached writes over the record of the one that uses the directory by then."""
    patch.setattr(Recorder, "close", lambda _: None)


@caught_by(
    "tests/daemon/test_generations.py::"
    "test_daemon_that_waited_for_storage_finds_nothing_from_before_a_clear_of_the_one_before"
)
def record_not_read_again(patch: pytest.MonkeyPatch) -> None:
    """A daemon that waited for storage finds what the one before has cleared meanwhile."""
    rewrite(patch, StorageLink._on_opened, "self.before_ready(partial(", "(lambda go_on: go_on())(partial(")


@caught_by(
    "tests/service/test_lost_record.py::test_daemon_that_waited_for_storage_serves_nothing_without_its_record[removed]"
)
def lost_record_taken_for_one_without_clears(patch: pytest.MonkeyPatch) -> None:
    """A daemon that waited for storage, whose record is lost, goes on in the generation that another one cleared."""
    patch.setattr(Clears, "lose_record", lambda _: None)


@caught_by("tests/storage/test_forgets.py::test_prefix_that_is_due_is_requested_once_however_often_storage_opens")
def prefix_requested_again_at_each_opening(patch: pytest.MonkeyPatch) -> None:
    """Each opening of storage adds a request for each generation that it has still to forget."""
    rewrite(patch, Forgets.add, "if prefix in self.due", "if False")


@caught_by("tests/service/test_followed_clears.py::test_clear_of_both_daemons_begins_a_generation_of_neither")
def clear_of_both_daemons_taken_for_the_other_ones(patch: pytest.MonkeyPatch) -> None:
    """What another daemon stored before a clear that could not be recorded here is found after it."""
    rewrite(patch, Clears._followed, "self._recorder.has_recorded(root, ours)", "True")


@caught_by("tests/service/test_shared_record.py::test_daemon_that_starts_before_its_storage_clears_nobody")
def generation_from_before_the_record_holds(patch: pytest.MonkeyPatch) -> None:
    """A daemon that starts before its network clears the namespace on all machines."""
    rewrite(patch, Clears._followed, "root in generations.provisional", "False")


@caught_by("tests/service/test_shared_record.py::test_daemons_agree_and_nothing_cleared_comes_back")
def larger_number_hides_a_clear(patch: pytest.MonkeyPatch) -> None:
    """What a daemon has in memory outlives a clear of another one, because it has a larger number of its own."""
    rewrite(
        patch,
        Clears._followed,
        "recorded.generation == ours.generation",
        "recorded.generation <= ours.generation",
    )


@caught_by("tests/service/test_shared_record.py::test_daemons_agree_and_nothing_cleared_comes_back")
def overtaken_record_is_not_followed(patch: pytest.MonkeyPatch) -> None:
    """A daemon that another one has overtaken writes its own record over that one's clear."""
    rewrite(patch, SharedRecord._follow, "self._service.clears.follow(record.by_root(), is_shared=True)", "pass")


@caught_by("tests/service/test_shared_record.py::test_what_another_daemon_has_to_forget_stays_in_the_record")
def what_others_have_to_forget_leaves_the_record(patch: pytest.MonkeyPatch) -> None:
    """Blocks that a daemon has cleared and not yet deleted stay in the service for ever when it dies."""
    rewrite(patch, SharedRecord._forgets, "each not in self._ours", "False")


@caught_by("tests/service/test_shared_record.py::test_clear_while_the_service_is_away_is_recorded_when_it_is_back")
def failed_write_is_not_repeated(patch: pytest.MonkeyPatch) -> None:
    """A clear that could not be recorded is never recorded, though the service is back."""
    rewrite(patch, SharedRecord._seen, "self._recorder.again()", "pass")


@caught_by("tests/core/test_generations.py::test_number_of_another_daemon_is_left_behind")
def two_daemons_count_on_from_one_number(patch: pytest.MonkeyPatch) -> None:
    """Two daemons that take turns at a storage give one number to what each has after its own clear."""
    jump = "((before >> RANDOM_BITS) + 1 << RANDOM_BITS) + self._chance"
    rewrite(patch, Generations.fresh, jump, "before + 1")


@caught_by("tests/core/test_generations.py::test_namespaces_in_use_are_never_forgotten")
def editions_in_use_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A replica's generation is lost when engines have declared many namespaces, and its stored blocks with it."""
    rewrite(patch, Generations._put, "{root, *self._in_use()}", "{root}")


@caught_by("tests/recovery/test_generation_file.py::test_write_without_a_thread_fails_and_the_next_one_is_done")
def thread_that_cannot_start_ends_the_record(patch: pytest.MonkeyPatch) -> None:
    """A write whose thread cannot be started never ends, and no later one begins."""
    rewrite(patch, generations._in_thread, "RuntimeError as error:", "OSError as error:")


@caught_by("tests/core/test_offload_spaces.py::test_clear_of_one_clears_all_of_its_storage_root")
def clear_of_one_sharding_only(patch: pytest.MonkeyPatch) -> None:
    """A clear leaves the blocks of engines with other numbers of shards, who then store them as of after it."""
    rewrite(patch, Namespaces._begin_all, "self.of_storage(storage_root)", "self.of_storage(storage_root)[-1:]")


@caught_by("tests/access/test_admission.py::test_blocks_of_others_in_storage_are_not_used_under_an_own_label")
def labels_of_storage_not_asked_for(patch: pytest.MonkeyPatch) -> None:
    """An engine reads another model's blocks in storage by declaring them with another number of shards."""
    rewrite(
        patch,
        OffloadAdmission._known_labels,
        "self._cache.offload.namespaces.of_storage(spec.storage_root)",
        "[each for each in self._cache.offload.namespaces.by_root.values() if each.spec.root == spec.root]",
    )


@caught_by("tests/daemon/test_storage.py::test_cleared_blocks_do_not_come_back")
def cleared_blocks_stay_in_storage(patch: pytest.MonkeyPatch) -> None:
    """What was cleared is found again in storage."""
    rewrite(patch, StorageVerbs.carry_out, "self.storage.link.forget(found.stored().prefix(), note_forgotten)", "pass")


@caught_by("tests/storage/test_disk_slots.py::test_writer_into_a_file_that_is_gone_has_no_room")
def disk_block_in_a_file_that_is_gone(patch: pytest.MonkeyPatch) -> None:
    """A block is told as stored on the disk although its file was given back meanwhile."""
    rewrite(patch, DiskCatalog._record, "file.is_retired", "False")


@caught_by("tests/storage/test_disk_directory.py::test_two_backends_never_share_a_directory")
def disk_directory_shared(patch: pytest.MonkeyPatch) -> None:
    """Two daemons use one directory."""
    rewrite(patch, directory._lock, "fcntl.LOCK_EX", "fcntl.LOCK_SH")


@caught_by("tests/storage/test_disk_space.py::test_least_recently_used_blocks_make_room")
def disk_evicts_what_was_stored_first(patch: pytest.MonkeyPatch) -> None:
    """A block on the disk goes by its age, however often it is used."""
    rewrite(patch, DiskIndex.oldest, "ORDER BY used", "ORDER BY stored")


@caught_by("tests/storage/test_disk_space.py::test_floor_frees_space_first_and_then_refuses")
def disk_free_space_floor_forgotten(patch: pytest.MonkeyPatch) -> None:
    """The disk's cache keeps its files while the file system fills up."""
    rewrite(patch, DiskSpace.excess_bytes, "max(0, lacking, ", "max(0, ")


@caught_by("tests/storage/test_disk_slots.py::test_reader_never_gets_the_next_block_of_its_slot")
def disk_entry_not_compared_after_reading(patch: pytest.MonkeyPatch) -> None:
    """A slot of the disk that is given away while it is read hands out the next block's bytes."""
    rewrite(patch, DiskCatalog.settle, "after.get(entry.key) == entry", "True")


@caught_by("tests/storage/test_disk_slots.py::test_slot_of_a_block_that_could_not_be_removed_is_not_free")
def disk_slot_free_before_its_entry_is_gone(patch: pytest.MonkeyPatch) -> None:
    """The slot of a block on the disk is free although the removal of its entry was taken back."""
    remove = DiskIndex.remove

    def release(self: DiskCatalog, entries: Iterable[Entry]) -> int:
        entries = list(entries)
        for each in entries:
            self._space.files[each.file].release(each.slot)
        with self._index.changes():
            return len(remove(self._index, entries))

    patch.setattr(DiskCatalog, "_forget", release)


@caught_by("tests/storage/test_disk_crash.py::test_index_that_is_damaged_while_open_is_replaced")
def disk_index_damaged_for_ever(patch: pytest.MonkeyPatch) -> None:
    """A damaged index of the disk stays in use."""
    patch.setattr(DiskCatalog, "replace_index", lambda *_: None)


@caught_by("tests/storage/test_disk_crash.py::test_slots_that_the_index_does_not_know_are_free")
def disk_slots_lost_with_their_entries(patch: pytest.MonkeyPatch) -> None:
    """Slots whose entries were lost in a crash take no block any more."""
    patch.setattr(DiskCatalog, "_note_slots", lambda *_: None)


@caught_by("tests/storage/test_encrypted.py::test_parts_cannot_change_places")
def encrypted_part_of_any_place(patch: pytest.MonkeyPatch) -> None:
    """A part of an encrypted value can stand in another's place."""
    rewrite(patch, cipher._context, 'number.to_bytes(2, "little") + ', "")


@caught_by("tests/storage/test_encrypted.py::test_values_cannot_change_places")
def encrypted_value_of_any_name(patch: pytest.MonkeyPatch) -> None:
    """An encrypted value can stand under another name."""
    rewrite(patch, cipher._context, "return name + ", "return ")


@caught_by("tests/storage/test_copies.py::test_slots_have_no_header_while_they_are_read_into")
def header_stays_while_storage_writes(patch: pytest.MonkeyPatch) -> None:
    """A host slot is believed to hold its old block while storage reads a new one into it."""
    rewrite(patch, HostCopies._fetch, "header[:] = bytes(HEADER_BYTES)", "pass")


@caught_by("tests/storage/test_link.py::test_forgetting_a_namespace_survives_the_process")
def storage_forgets_to_forget(patch: pytest.MonkeyPatch) -> None:
    """A namespace that was cleared stays in storage if its process dies meanwhile."""

    def forgot(self: Forgets, prefix: bytes, tell: Callable[[Done], None], done: Done) -> None:
        self.due.pop(prefix, None)
        tell(done)

    patch.setattr(Forgets, "_forgot", forgot)


@caught_by("tests/storage/test_link.py::test_orders_that_wait_for_their_turn_are_not_late")
def storage_order_late_before_its_turn(patch: pytest.MonkeyPatch) -> None:
    """Orders that wait for their turn count as late: many prefetches have storage suspended and killed."""

    def under_way(self: InFlight[Any, Any]) -> Iterator[tuple[int, OpenRequest[Any, Any]]]:
        return iter(self._open.items())

    patch.setattr(InFlight, "_under_way", under_way)


@caught_by("tests/storage/test_link.py::test_suspended_storage_is_asked_until_it_answers")
def storage_that_was_late_is_given_up(patch: pytest.MonkeyPatch) -> None:
    """Storage that was suspended for being late, and then fails, is never asked again."""
    rewrite(patch, StorageLink._judge, " or self.state is LinkState.SUSPENDED", "")


@caught_by("tests/storage/test_copies.py::test_other_block_under_the_key_is_not_used")
def stored_block_of_another_chain(patch: pytest.MonkeyPatch) -> None:
    """A block from storage is used wherever its key is asked for, whatever stands before it."""
    patch.setattr(executor, "_is_next", lambda *_: True)


@caught_by("tests/storage/test_copies.py::test_changed_byte_ends_the_hit")
def stored_bytes_believed_unread(patch: pytest.MonkeyPatch) -> None:
    """Bytes from storage are used without a look at their checksums."""
    patch.setattr(frame, "is_sound", lambda *_: True)


@caught_by("tests/storage/test_link.py::test_order_that_gets_on_is_not_late")
def storage_progress_not_heard(patch: pytest.MonkeyPatch) -> None:
    """A healthy but slow backend is suspended because all calls of an order together take long."""
    patch.setattr(InFlight, "progressed", lambda *_: None)


@caught_by("tests/core/test_storage.py::test_emptied_storage_is_filled_again")
def storage_emptied_unnoticed(patch: pytest.MonkeyPatch) -> None:
    """Blocks that storage had on the device before are taken for written on the new one."""
    patch.setattr(storage, "unmark_all", lambda _: None)


@caught_by("tests/service/test_shared_record.py::test_restart_with_a_ledger_clears_nobody")
def restart_behind_a_clear_clears_the_fleet(patch: pytest.MonkeyPatch) -> None:
    """Each daemon that was down while another one cleared clears the namespace for all machines when it is back."""
    rewrite(patch, Clears._followed, "root in generations.inherited", "False")


@caught_by("tests/service/test_shared_record.py::test_device_memory_of_a_forgotten_namespace_is_told_of_a_clear")
def device_memory_is_not_told_of_a_clear_elsewhere(patch: pytest.MonkeyPatch) -> None:
    """An engine adopts blocks in device memory from before another machine's clear."""
    rewrite(patch, Clears._tell_root_cleared, "root == storage_root", "False")


@caught_by("tests/storage/test_link.py::test_record_that_can_be_read_proves_nothing_of_blocks")
def record_that_is_read_resumes_storage(patch: pytest.MonkeyPatch) -> None:
    """A service that answers for the record only is resumed every few seconds, and requests pay for each failure."""
    rewrite(patch, StorageLink._judge, "isinstance(request, RecordRequest)", "False")


@caught_by("tests/storage/test_forgets.py::test_prefixes_are_forgotten_one_after_the_other")
def all_prefixes_are_forgotten_at_once(patch: pytest.MonkeyPatch) -> None:
    """A few clears take every thread of the storage process for minutes."""
    rewrite(patch, Forgets.send_due, "or self._is_under_way", "")
