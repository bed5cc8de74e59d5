"""Mistakes about the keeper, other pid namespaces, and what the log tells."""

from __future__ import annotations

import pytest

from kvcached import log
from kvcached.process import earlier
from kvcached.process.peer import UnseenProcess
from kvcached.recovery import keeper_link, takeover
from kvcached.recovery.keeper import _Keeper
from kvcached.recovery.supervise import _Supervisor
from kvcached.service import stories
from tests.mutants.mutant import caught_by, rewrite


@caught_by("tests/recovery/test_keeper.py::test_other_users_get_nothing")
def keeper_gives_to_every_user(patch: pytest.MonkeyPatch) -> None:
    """Another user who reaches the keeper's socket gets the memory of all pools."""
    rewrite(patch, _Keeper._admit, "uid != os.geteuid()", "uid < 0")


@caught_by("tests/recovery/test_keeper.py::test_one_supervisor_at_a_time")
def keeper_serves_two_supervisors(patch: pytest.MonkeyPatch) -> None:
    """A second supervisor takes the keeper, and what the first one's daemon stores from then on is lost."""
    rewrite(patch, _Keeper._admit, "elif self._supervisor is not None:", "elif uid < 0:")


@caught_by("tests/recovery/test_keeper.py::test_keeper_of_another_user_is_not_believed")
def keeper_of_any_user_believed(patch: pytest.MonkeyPatch) -> None:
    """A daemon serves blocks from memory that another user has prepared."""
    rewrite(patch, keeper_link._check_owner, "owner != os.geteuid()", "owner < 0")


@caught_by("tests/recovery/test_keeper.py::test_memory_outlives_the_supervisor[9]")
def keeper_not_told(patch: pytest.MonkeyPatch) -> None:
    """What the daemon stores and removes after the supervisor's start does not reach the keeper."""
    rewrite(patch, keeper_link.KeeperLink.pass_on, "any(", "not any(")


@caught_by("tests/recovery/test_keeper.py::test_memory_outlives_the_supervisor[9]")
def keeper_not_asked(patch: pytest.MonkeyPatch) -> None:
    """A supervisor starts its daemon without what the keeper has."""
    rewrite(patch, _Supervisor.run, "await self._keeper.open()", "self._keeper._try_later()")


@caught_by("tests/daemon/test_keeper.py::test_engine_that_is_not_seen_is_not_taken_for_dead")
def processes_of_other_namespaces_sought_here(patch: pytest.MonkeyPatch) -> None:
    """Slots are granted that an engine writes which this container cannot see."""
    rewrite(patch, takeover._sees_processes_of, "ledger.pid_namespace in {0, pid_namespace()}", "ledger")


@caught_by("tests/daemon/test_keeper.py::test_replica_is_busy_while_an_engine_that_is_not_seen_may_write")
def unseen_engine_taken_for_any_process(patch: pytest.MonkeyPatch) -> None:
    """An engine gets the slots that another one writes, which this container cannot see."""
    rewrite(patch, UnseenProcess.is_same_process, "other is self", "True")


@caught_by("tests/recovery/test_earlier.py::test_holder_that_cannot_be_seen_is_not_taken_for_dead")
def unseen_worker_taken_for_dead(patch: pytest.MonkeyPatch) -> None:
    """A daemon starts on memory that a worker of the daemon before still writes."""
    patch.setattr(earlier, "_check_released", lambda lock, name, pid: None)


@caught_by("tests/service/test_stories.py::test_story_has_neither_keys_nor_tokens")
def token_in_the_log(patch: pytest.MonkeyPatch) -> None:
    """A reader of the log may act as an engine."""
    rewrite(
        patch, stories._shown, "for name in _SHOWN if hasattr(message, name)", "for name in message.__struct_fields__"
    )


@caught_by("tests/service/test_stories.py::test_requests_are_not_told_at_other_levels")
def stories_prepared_at_every_level(patch: pytest.MonkeyPatch) -> None:
    """Each request pays for a line that nobody reads."""
    rewrite(patch, stories.RequestStories.begin, "not _log.isEnabledFor(logging.DEBUG) or ", "")


@caught_by("tests/project/test_log.py::test_log_lines_in_the_journal_have_priorities")
def priority_of_the_first_line_only(patch: pytest.MonkeyPatch) -> None:
    """A traceback has the journal's default priority, and is missing among the errors."""
    rewrite(patch, log._JournalFormatter.format, '.split("\\n")', ".splitlines()[:1]")
