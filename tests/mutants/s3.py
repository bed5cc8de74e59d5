"""Mistakes of the backend `s3`."""

from __future__ import annotations

import pytest

from kvcached.storage import secret_file
from kvcached.storage.s3 import backend, opening, record
from kvcached.storage.s3.backend import S3Storage
from kvcached.storage.s3.probe import Probe
from tests.mutants.mutant import caught_by, rewrite

_CALLS = "tests/storage/s3/test_backend.py::"
_OPENING = "tests/storage/s3/test_opening.py::"
_TRIAL = "tests/storage/s3/test_trial.py::"
_USAGE = "tests/storage/s3/test_usage.py::"


@caught_by(_CALLS + "test_bodies_of_writes_are_copies")
def s3_bodies_in_the_host_pool(patch: pytest.MonkeyPatch) -> None:
    """A write that took too long stores what its slot holds later."""
    rewrite(patch, S3Storage._put, 'b"".join(block.parts)', "list(block.parts)")


@caught_by(_CALLS + "test_object_of_another_size_is_wrong")
def s3_objects_of_any_size(patch: pytest.MonkeyPatch) -> None:
    """An object of another size is read as the block."""
    rewrite(patch, S3Storage._get, 'answer.meta["size"] != block.size_bytes', "False")


@caught_by(_CALLS + "test_blocks_wait_for_room")
def s3_bodies_unbounded(patch: pytest.MonkeyPatch) -> None:
    """The bodies of all blocks of a call are in memory at the same time."""
    rewrite(patch, backend._gate, "IN_FLIGHT_BYTES_MAX // largest", "len(blocks)")


@caught_by(_CALLS + "test_clear_goes_through_many_pages")
def s3_clear_of_foreign_objects(patch: pytest.MonkeyPatch) -> None:
    """A clear deletes objects that are no blocks."""
    rewrite(patch, S3Storage._next_of, "_NAME.fullmatch(name.removeprefix(self._blocks))", "name")


@caught_by(_CALLS + "test_record_whose_answer_was_lost_is_found")
def s3_record_of_its_own_unknown(patch: pytest.MonkeyPatch) -> None:
    """A daemon takes its own record, the answer to which was lost, for that of another one."""
    rewrite(patch, record.write, "there.nonce == nonce", "False")


@caught_by(_CALLS + "test_record_of_the_same_bytes_has_another_version")
def s3_record_without_its_random_bytes(patch: pytest.MonkeyPatch) -> None:
    """Two writes of the same record have one version."""
    rewrite(patch, record.write, "secrets.token_bytes(_NONCE_BYTES)", "bytes(_NONCE_BYTES)")


@caught_by(_OPENING + "test_service_without_conditions_is_refused[if-match]")
def s3_condition_of_a_version_untried(patch: pytest.MonkeyPatch) -> None:
    """A service that replaces a record whatever its version is used."""
    rewrite(patch, Probe.honours_conditions, '(b"", _another(version))', '(b"",)')


@caught_by(_OPENING + "test_service_without_conditions_is_refused[if-none-match]")
def s3_condition_of_absence_untried(patch: pytest.MonkeyPatch) -> None:
    """A service that writes a first record over another one is used."""
    rewrite(patch, Probe.honours_conditions, '(b"", _another(version))', "(_another(version),)")


@caught_by(_TRIAL + "test_environment_does_not_count[AWS_CONDITIONAL_PUT-disabled]")
def s3_settings_of_the_environment(patch: pytest.MonkeyPatch) -> None:
    """A variable of the environment decides how blocks are written."""
    rewrite(patch, opening._leave_environment, "known not in _OF_ROLES", "False")


@caught_by(_TRIAL + "test_who_may_not_delete_leaves_nothing")
def s3_delete_untried_before_a_write(patch: pytest.MonkeyPatch) -> None:
    """Who may not delete leaves one more object each time."""
    rewrite(patch, Probe.delete_before, "await obstore.delete_async(self._store, [self._path])", "pass")


@caught_by(_USAGE + "test_block_of_another_daemon_ends_it")
def s3_empty_after_a_find(patch: pytest.MonkeyPatch) -> None:
    """A daemon that only reads says that there is nothing, though it has found a block."""
    rewrite(patch, S3Storage._noted, "any(found)", "False")


@caught_by(_OPENING + "test_credentials_file_is_private")
def s3_keys_that_others_read(patch: pytest.MonkeyPatch) -> None:
    """A credentials file that everybody may read is used."""
    rewrite(patch, secret_file.read_private, "not is_private(descriptor)", "False")
