"""Mistakes of the core about sessions, the index, and clears."""

from __future__ import annotations

import pytest

from kvcached.core.cache import Cache
from kvcached.core.clearing import Clearings
from kvcached.core.index.run import Segment
from kvcached.core.index.tree import PrefixTree
from kvcached.core.managed import Managed
from kvcached.core.managed_session import ManagedSession
from kvcached.core.removal import Removals
from kvcached.core.slots.host_slots import SlabAllocator
from kvcached_client.types import SessionId
from tests.mutants.mutant import caught_by, rewrite


@caught_by("tests/service/test_clears.py::test_new_generation_is_written_down_before_it_is_told")
def clear_told_before_it_is_written_down(patch: pytest.MonkeyPatch) -> None:
    """A clear does not have the ledger written anew."""
    rewrite(patch, Clearings._finish, "self.version += 1", "pass")


@caught_by("tests/core/test_clearing.py::test_no_session_while_copies_run")
def cleared_while_a_copy_runs(patch: pytest.MonkeyPatch) -> None:
    """A namespace is cleared while copies that began earlier still write into it."""
    rewrite(patch, Clearings.advance, "not is_copied", "True")


@caught_by("tests/core/test_clearing.py::test_backups_are_not_awaited_and_none_begins")
def slots_that_storage_reads_freed_by_a_clear(patch: pytest.MonkeyPatch) -> None:
    """A clear gives away the slots that a storage process still reads."""
    rewrite(patch, Clearings._finish, "self._storage.backups.let_go(tree, before, _CAUSE)", "pass")


@caught_by("tests/core/test_sessions.py::test_stale_epoch_is_refused")
def epoch_check_of_a_request_dropped(patch: pytest.MonkeyPatch) -> None:
    """A request that names a past epoch of its pool is served."""

    def session_at(self: Managed, session_id: SessionId, epoch: int) -> ManagedSession:
        return self.sessions.active(session_id)

    patch.setattr(Managed, "session_at", session_at)


@caught_by("tests/core/test_removals.py::test_pool_of_an_engine_that_has_not_declared_its_leases_keeps_its_blocks")
def blocks_of_a_returning_engine_removed(patch: pytest.MonkeyPatch) -> None:
    """A removal takes blocks that an engine from before a restart may be reading."""
    rewrite(patch, PrefixTree.remove, "not pool.frozen and ", "")


@caught_by("tests/core/test_removals.py::test_prefetch_under_way_keeps_what_it_is_to_bring")
def prefetch_not_in_use(patch: pytest.MonkeyPatch) -> None:
    """A removal says that nothing is left while a prefetch is about to bring the blocks back."""
    rewrite(patch, Removals._held, "held.update(_coming(prefetch, start))", "pass")


@caught_by("tests/core/test_stores.py::test_block_that_loses_its_last_copy_takes_its_descendants")
def last_copy_rule_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A block that lost its last copy leaves what was built on it behind, out of reach."""
    rewrite(patch, PrefixTree._count_dropped, "host.solid < host.length", "False")


@caught_by("tests/core/test_load_rollback.py::test_acquire_with_a_load_that_fails_at_any_step_leaves_nothing_behind")
def rollback_of_an_acquire_deleted(patch: pytest.MonkeyPatch) -> None:
    """An acquire that fails after its lease was made leaves the lease behind."""
    rewrite(patch, Managed.acquire, "session.release(lease, session.fence)", "pass")


@caught_by("tests/core/test_clearing.py::test_no_session_while_copies_run")
def session_during_a_clear(patch: pytest.MonkeyPatch) -> None:
    """An engine gets a session while its namespace is being cleared."""
    rewrite(patch, Managed.open, "pool.clearing", "False")


@caught_by("tests/core/test_stores.py::test_slab_is_held_back_for_every_namespace_without_one")
def slab_not_held_back(patch: pytest.MonkeyPatch) -> None:
    """The first namespace to fill the host pool takes the slabs of all others."""
    rewrite(patch, SlabAllocator._find, "len(self._free) > held_back", "self._free")


@caught_by("tests/core/test_tree.py::test_split_keeps_every_pin_at_its_depth")
def split_forgets_a_pin(patch: pytest.MonkeyPatch) -> None:
    """When a run is cut in two, pins of the shallow part are forgotten."""
    rewrite(patch, Segment.split, "shallow or None", "None")


@caught_by("tests/core/test_sessions.py::test_goodbye_gives_everything_back_but_what_was_written")
def unsignalled_blocks_stay_after_a_goodbye(patch: pytest.MonkeyPatch) -> None:
    """Blocks whose fence never signalled are found after their engine's goodbye."""
    signal = "session.signal(max((hold.fence for hold in session.holds), default=session.fence))"
    rewrite(patch, Cache.close_session, "self.managed.end(session)", f"{signal}\nself.managed.end(session)")
