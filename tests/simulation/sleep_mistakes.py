"""Deliberate mistakes about device pools that sleep."""

from __future__ import annotations

import pytest

from kvcached.core import managed
from kvcached.core.sleep import Sleeps
from kvcached.service import state_writer
from tests.mutants.mutant import rewrite
from tests.simulation.mistake import Mistake


def _session_on_a_pool_that_is_not_awake(patch: pytest.MonkeyPatch) -> None:
    """An engine gets a session while its pool falls asleep, sleeps or wakes."""
    patch.setattr(managed, "check_awake", lambda _: None)


def _copies_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    """Workers are ended, and memory is given back, while a copy is under way."""
    rewrite(patch, Sleeps.advance, " or self._worker_copies.table.of_pool(pool)", "")


def _sleep_not_written_down(patch: pytest.MonkeyPatch) -> None:
    """The state file says of a sleeping pool that it is awake."""
    patch.setattr(state_writer, "NO_MEMORY", frozenset())


def _wake_not_written_down(patch: pytest.MonkeyPatch) -> None:
    """The state file is not written when a pool is awake again."""
    rewrite(patch, Sleeps.awake, "self.version += 1", "pass")


SLEEP_MISTAKES = [
    Mistake("session on a pool that is not awake", _session_on_a_pool_that_is_not_awake, (0, 1), sleeps=True),
    Mistake("copies not waited for by a sleep", _copies_not_waited_for, (21, 28), sleeps=True),
    Mistake("sleep not written down", _sleep_not_written_down, (0, 1), sleeps=True),
    Mistake("wake not written down", _wake_not_written_down, (2, 3), sleeps=True),
]
