"""Mistakes of workers, and of those who start them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcached import daemon
from kvcached.core.cache import Cache
from kvcached.worker.client import WorkerPool
from kvcached.worker.executor import Executor
from tests.mutants.mutant import caught_by, rewrite


@caught_by("tests/worker/test_executor.py::test_each_request_is_reported_exactly_once")
def acknowledgement_of_a_failed_command_skipped(patch: pytest.MonkeyPatch) -> None:
    """A worker says nothing about a request that failed."""
    rewrite(patch, Executor._run, "self._report(done)", "if not done.error:\n    self._report(done)")


@caught_by("tests/worker/test_executor.py::test_neither_direction_waits_for_the_other")
def load_behind_a_store(patch: pytest.MonkeyPatch) -> None:
    """A worker loads nothing while a store is under way."""
    rewrite(patch, Executor.submit, "if isinstance(request.work, Store) else self._loads", "if True else self._loads")


@caught_by("tests/worker/test_executor.py::test_shutdown_comes_after_all_before_it")
def shutdown_before_the_other_lane_is_empty(patch: pytest.MonkeyPatch) -> None:
    """A worker that is told to end says so while copies of its other direction are under way."""
    rewrite(patch, Executor._leave, "None if self._running or self._is_over", "None if self._is_over")


@caught_by("tests/worker/test_restart.py::test_crash_loop_degrades_a_replica_until_its_workers_live")
def breaker_never_opens(patch: pytest.MonkeyPatch) -> None:
    """Workers that die again and again are started again without a pause."""
    rewrite(patch, WorkerPool._plan, "self._back_off.longest_s", "0")


@caught_by("tests/daemon/test_rejoin.py::test_stopped_worker_of_the_daemon_before_is_dead_before_the_next_serves")
def last_workers_not_awaited(patch: pytest.MonkeyPatch) -> None:
    """A daemon hands out slots that a worker of the one before may still write."""
    patch.setattr(daemon, "_end_earlier_workers", _ended)


@caught_by("tests/daemon/test_host_tier.py::test_worker_killed_under_a_load_ends_every_wait")
def load_of_a_dead_worker_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Nobody tells who waits for a layer that the worker which was to load it has died."""
    patch.setattr(WorkerPool, "_fail_load", lambda *_: None)


@caught_by("tests/core/test_loads.py::test_slots_of_a_copy_wait_until_its_worker_is_dead")
def copies_end_before_their_workers(patch: pytest.MonkeyPatch) -> None:
    """The first word of a death ends all copies of a pool, while other workers of it may still write."""
    ends = "for each in self.worker_copies.table.of_pool(pool):\n    self.worker_copies._end(each)"
    rewrite(patch, Cache._on_worker_died, "pool.lose_workers()", f"pool.lose_workers()\n{ends}")


async def _ended(_: Path) -> None:
    """Nobody is waited for."""
