"""Mistakes about copies between tiers: stores, loads, and blocks from storage."""

from __future__ import annotations

import pytest

from kvcached.core.managed import Managed
from kvcached.core.pins import Pins
from kvcached.core.transfers import prefetch
from kvcached.core.transfers.fetch_budget import FetchBudget
from kvcached.core.transfers.loads import Loads
from kvcached.core.transfers.prefetch import Prefetches
from kvcached.core.transfers.stores import Stores
from kvcached.core.transfers.table import TransferTable
from kvcached.core.transfers.worker_copies import WorkerCopies
from tests.mutants.mutant import caught_by, rewrite


@caught_by("tests/core/test_storage.py::test_bytes_that_are_not_fetched_are_free_for_others[no_room]")
def bytes_that_are_not_fetched_count(patch: pytest.MonkeyPatch) -> None:
    """A prefetch that finds no room has spent the bytes of all others."""
    rewrite(patch, FetchBudget.give_back, "self._left_bytes + size_bytes", "self._left_bytes")


@caught_by("tests/core/test_load_failures.py::test_corrupt_copy_that_another_load_reads_leaves_with_that_load")
def corrupt_slot_freed_while_a_copy_reads_it(patch: pytest.MonkeyPatch) -> None:
    """A host slot with bad bytes is free though another load still reads it."""
    patch.setattr(TransferTable, "pass_on", lambda *_: set())


@caught_by("tests/core/test_load_failures.py::test_hit_is_cut_where_a_load_failed")
def cut_hit_not_told(patch: pytest.MonkeyPatch) -> None:
    """A lease keeps the length of its hit though a load of it failed."""
    patch.setattr(Managed, "_replace_missing", lambda *_: None)


@caught_by("tests/core/test_stores.py::test_demotion_takes_no_tail_that_is_not_stored")
def demotion_of_the_last_copy(patch: pytest.MonkeyPatch) -> None:
    """Demotion drops tails that the host pool does not have."""
    rewrite(patch, Stores._drop_stored, "tree.stored_tail(segment)", "segment.evictable_tail")


@caught_by("tests/core/test_stores.py::test_failed_store_leaves_a_hole_that_a_match_ends_at")
def failed_store_believed(patch: pytest.MonkeyPatch) -> None:
    """Blocks of a store that failed stay in the host index."""
    rewrite(patch, WorkerCopies._end, "not transfer.failure and ", "")


@caught_by("tests/core/test_storage.py::test_prefix_that_has_gone_takes_the_fetched_along")
def fetched_blocks_behind_a_gap(patch: pytest.MonkeyPatch) -> None:
    """A block from storage enters the index though one before it has not come."""
    rewrite(patch, prefetch._insert, "depth < start", "False")


@caught_by("tests/core/test_storage.py::test_cleared_namespace_gets_nothing_of_before")
def fetched_blocks_of_a_cleared_namespace(patch: pytest.MonkeyPatch) -> None:
    """Blocks that were on their way from storage when their namespace was cleared are found in the new generation."""
    patch.setattr(Prefetches, "_is_current", lambda *_: True)


@caught_by("tests/core/test_loads.py::test_load_hurries_the_store_that_it_depends_on")
def load_before_its_store(patch: pytest.MonkeyPatch) -> None:
    """A load starts though the store of what it reads is still under way."""
    rewrite(patch, Loads._order, "if load.after:", "if False:")


@caught_by("tests/core/test_pauses.py::test_hit_of_a_paused_replica_is_what_its_device_has")
def load_started_while_paused(patch: pytest.MonkeyPatch) -> None:
    """Loads are started while copies are paused."""
    rewrite(patch, Loads.start, "not pool.copies", "False")


@caught_by("tests/core/test_stores.py::test_device_slots_of_a_store_are_not_granted_before_it_ends")
def pin_of_a_transfer_not_counted(patch: pytest.MonkeyPatch) -> None:
    """A transfer does not pin the host slots that it reads or writes."""
    rewrite(patch, TransferTable.lock, "tree.lock(tree.resolve(transfer.run, end), end, HOST)", "pass")


@caught_by("tests/core/test_pins.py::test_pin_over_blocks_of_unsignalled_work_is_cut_with_them")
def pin_outlives_its_blocks(patch: pytest.MonkeyPatch) -> None:
    """A pin holds on to blocks that leave the pool."""
    patch.setattr(Pins, "cut_off", lambda *_: None)


@caught_by("tests/core/test_load_rollback.py::test_acquire_with_a_load_that_fails_at_any_step_leaves_nothing_behind")
def rollback_of_a_load_deleted(patch: pytest.MonkeyPatch) -> None:
    """An acquire whose load fails half-way keeps the slots that the load was to fill."""
    freed = 'undo.callback(pool.move, device, SlotState.FILLING, SlotState.FREE, f"rollback of {cause}")'
    rewrite(patch, Loads._start_one, freed, "pass")


@caught_by("tests/core/test_load_failures.py::test_loads_behind_one_that_failed_are_worth_nothing")
def slot_freed_while_a_copy_writes_it(patch: pytest.MonkeyPatch) -> None:
    """Slots of a load are free as soon as the load before it failed, though a worker still writes them."""
    orphaned = 'load.orphan("what it continues is gone")'
    freed = 'pool.move(load.device, SlotState.FILLING, SlotState.FREE, "a mistake")'
    rewrite(patch, Loads.cut_off, orphaned, f"{orphaned}\n{freed}")


@caught_by("tests/core/test_load_failures.py::test_store_never_reaches_behind_a_load_under_way")
def store_behind_a_load_under_way(patch: pytest.MonkeyPatch) -> None:
    """A store pins blocks that go if the load before them fails."""
    rewrite(patch, Stores._settled_end, "depth = load.start", "pass")


@caught_by("tests/core/test_write_policies.py::test_slots_are_granted_after_the_acknowledgement")
def write_back_waits_for_nobody(patch: pytest.MonkeyPatch) -> None:
    """Under write-back slots are granted before what was in them is copied."""
    patch.setattr(Stores, "write_back", lambda *_: False)
