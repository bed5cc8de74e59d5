"""Mistakes of a local disk in front of a service."""

from __future__ import annotations

import pytest

from kvcached.storage.executor import HostCopies
from kvcached.storage.tiers.backend import TieredStorage, _Limit
from kvcached.storage.tiers.refills import Refills
from kvcached.storage.tiers.side import Side
from tests.mutants.mutant import caught_by, rewrite

_BACKEND = "tests/storage/tiers/test_backend.py::"
_SIDE = "tests/storage/tiers/test_side.py::"


@caught_by(_BACKEND + "test_what_is_missing_the_service_says")
def disk_says_what_the_service_lacks(patch: pytest.MonkeyPatch) -> None:
    """Blocks that this machine has on its disk are never written for the others again."""
    rewrite(patch, TieredStorage.missing, "lacks is None", "True")


@caught_by(_BACKEND + "test_what_is_cleared_while_it_is_read_does_not_come_back[]")
def cleared_block_is_written_to_the_disk(patch: pytest.MonkeyPatch) -> None:
    """A block that was read before a clear is on the disk after it."""
    rewrite(patch, Refills._drop, "self._epoch += 1", "pass")


@caught_by(_BACKEND + "test_blocks_that_wait_for_the_disk_are_bounded")
def blocks_that_wait_for_the_disk_are_not_bounded(patch: pytest.MonkeyPatch) -> None:
    """A disk that is slower than the service fills the memory of the machine."""
    rewrite(patch, Refills.add, "self._size_bytes + size_bytes > REFILL_BYTES_MAX", "False")


@caught_by(_BACKEND + "test_clear_that_one_of_both_fails_at_is_an_error")
def clear_of_a_broken_disk_spares_the_service(patch: pytest.MonkeyPatch) -> None:
    """Blocks stay in the service because the disk of the machine that clears has died."""
    rewrite(patch, TieredStorage.clear, "there = self._clear(self._far, prefix, timeout_s, progress)", "there = 0")


@caught_by(_BACKEND + "test_both_have_one_limit_together")
def service_has_a_limit_of_its_own(patch: pytest.MonkeyPatch) -> None:
    """A call takes twice as long as it may, and the daemon suspends storage."""
    rewrite(patch, _Limit.carry_out, "ask(far, left_s)", "ask(far, left_s + 1)")


@caught_by(_SIDE + "test_one_call_tries_and_the_others_do_not_wait")
def all_threads_try_a_service_that_hangs(patch: pytest.MonkeyPatch) -> None:
    """Every thread of storage waits for the service, and none reads the disk."""
    rewrite(patch, Side.call, "self._is_tried or self._clock_s()", "self._clock_s()")


@caught_by(_SIDE + "test_calls_that_fail_together_are_one_failure")
def calls_that_fail_together_are_many(patch: pytest.MonkeyPatch) -> None:
    """One broken connection leaves the service out for half a minute."""
    rewrite(patch, Side._over, "was_out and not is_trial", "False")


@caught_by("tests/storage/tiers/test_copies.py::test_block_that_only_the_disk_has_is_written_to_the_service")
def backup_asks_what_is_anywhere(patch: pytest.MonkeyPatch) -> None:
    """A service that has lost everything gets no block that is still on the disk of a machine."""
    rewrite(
        patch,
        HostCopies._back_up,
        "self._backend.missing(keys, timeout_s=self._timeout_s)",
        "[not each for each in self._backend.exists(keys, timeout_s=self._timeout_s)]",
    )


@caught_by(_BACKEND + "test_block_that_is_wrong_on_the_disk_stays_in_the_service")
def wrong_block_of_a_disk_is_deleted_for_all(patch: pytest.MonkeyPatch) -> None:
    """A disk that flips bits empties the service, read by read."""
    rewrite(patch, TieredStorage.discard, "if key in self._came", "")


@caught_by(_BACKEND + "test_disk_is_cleared_when_the_service_has_lost_everything")
def disk_outlives_the_record(patch: pytest.MonkeyPatch) -> None:
    """What another machine has cleared is found on the disk when the service was restarted empty."""
    rewrite(patch, TieredStorage.read_record, "not self._is_cleared", "False")


@caught_by(_BACKEND + "test_what_is_read_during_a_clear_is_cleared")
def disk_is_cleared_before_the_service(patch: pytest.MonkeyPatch) -> None:
    """What is read while the service is cleared stays on the disk, and is found."""
    rewrite(
        patch,
        TieredStorage.clear,
        "there = self._clear(self._far, prefix, timeout_s, progress)",
        "here = self.refills.without(lambda: self._clear(self._disk, prefix, timeout_s, progress)); "
        "there = self._clear(self._far, prefix, timeout_s, progress); "
        "self._disk = self._far",
    )
