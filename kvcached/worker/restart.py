"""A replica's workers for as long as the daemon runs: lost groups are replaced by new ones, on the same memory.

After a loss: every worker of the group is killed, and the kernel confirms their deaths; then, after a pause, the next
group is started. Pauses double with each try, and begin anew once a group has lived for a while. After many short lives
in a row the replica is degraded: pauses are the longest from the next on, until one has lived for a while.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from kvcached.worker.lifecycle import BackOff, Breaker, Lifecycle, WorkersState
from kvcached.worker.supervisor import STOP_DEADLINE_S, ReplicaPool, WorkerGroup
from kvcached_client.types import ShardIndex

#: A loss is no news any more.
_ENDS: Final = (WorkersState.STOPPING, WorkersState.STOPPED)

_log: Final = logging.getLogger(__name__)


class ReplicaGroups:
    """One `WorkerGroup` after another. Made, used and stopped in one event loop's thread.

    Args:
        pool: what the workers map.
        run_dir: where their logs and locks are; must exist.
        on_lost: called once per loss, with the first shard that was lost and why.
        on_restored: called when every shard has a worker again. Every command of the lost workers is
            settled, and whoever waited for one has been told.
        back_off: pauses between tries.

    Attributes:
        restarts: lost groups that were replaced, since the daemon's start.
        current: the group that runs. Between two it is one that refuses what it is asked.
    """

    def __init__(
        self,
        pool: ReplicaPool,
        run_dir: str,
        on_lost: Callable[[ShardIndex, str], None],
        on_restored: Callable[[], None],
        back_off: BackOff | None = None,
    ) -> None:
        self._pool = pool
        self._run_dir = run_dir
        self._on_lost = on_lost
        self._on_restored = on_restored
        self._back_off = back_off or BackOff()
        self._breaker = Breaker(healthy_after_s=self._back_off.healthy_after_s)
        self._lifecycle = Lifecycle(pool.replica)
        self._loop = asyncio.get_running_loop()
        self._started_s = 0.0
        self._lost_s = 0.0
        self._work: asyncio.Task[None] | None = None  #: burying or starting
        self._pause: asyncio.TimerHandle | None = None
        self._announcement: asyncio.Handle | None = None
        self._trust: asyncio.TimerHandle | None = None  #: when a group on probation has proved itself
        self.restarts = 0
        self.current = self._new_group()

    @property
    def state(self) -> WorkersState:
        """What the workers do."""
        return self._lifecycle.state

    @property
    def is_degraded(self) -> bool:
        """Whether the last lives were short, as many as make it no chance any more; the present one included."""
        return self._breaker.is_open

    async def start(self) -> None:
        """Start the first group. On an error none is left, and nothing is tried again.

        Raises:
            BadRequest, DaemonFailure: as `WorkerGroup.start`.
        """
        self._lifecycle.go(WorkersState.STARTING)
        await self.current.start()
        self._runs()

    async def stop(self, deadline_s: float = STOP_DEADLINE_S) -> None:
        """End the workers as `WorkerGroup.stop` does, and start none again. Does nothing the second time."""
        if self.state in _ENDS:
            return
        self._lifecycle.go(WorkersState.STOPPING)
        for timer in (self._pause, self._trust):
            if timer is not None:
                timer.cancel()
        if self._work is not None:
            self._work.cancel()
            await asyncio.wait([self._work])
        await self.current.stop(deadline_s)
        self._lifecycle.go(WorkersState.STOPPED)

    def kill(self) -> None:
        """End the workers by SIGKILL, now: for a daemon that has no time to stop them in order."""
        self.current.kill()

    def _new_group(self) -> WorkerGroup:
        return WorkerGroup(self._pool, self._run_dir, self._on_group_lost)

    def _runs(self) -> None:
        self._started_s = self._loop.time()
        if not self._breaker.is_open:
            self._lifecycle.go(WorkersState.RUNNING)
            return
        self._lifecycle.go(WorkersState.PROBATION)
        self._trust = self._loop.call_later(self._back_off.healthy_after_s, self._on_trusted)

    def _on_trusted(self) -> None:
        self._breaker.close()
        self._lifecycle.go(WorkersState.RUNNING)
        _log.info("replica %s: not degraded any more", self._pool.replica)

    def _on_group_lost(self, shard: ShardIndex, reason: str) -> None:
        if self.state in _ENDS:
            return
        for handle in (self._announcement, self._trust):
            if handle is not None:
                handle.cancel()  # lost again before anybody was told, or before it was trusted
        self._lifecycle.go(WorkersState.LOST)
        self._lost_s = self._loop.time()
        lived_s = self._lost_s - self._started_s
        self._back_off.lived(lived_s)
        self._breaker.ended(lived_s)
        self._work = self._loop.create_task(self._bury())
        self._on_lost(shard, reason)

    async def _bury(self) -> None:
        await self.current.bury()
        pause_s = self._plan()
        _log.info("replica %s: all workers are dead; they are started again in %g s", self._pool.replica, pause_s)

    def _plan(self) -> float:
        """Plan the next start; returns when it will be."""
        pause_s = self._back_off.pause_s()
        if self._breaker.is_open:
            pause_s = self._back_off.longest_s
            self._lifecycle.go(WorkersState.DEGRADED)
            _log.error("replica %s is degraded: its workers have died again and again", self._pool.replica)
        else:
            self._lifecycle.go(WorkersState.WAITING)
        self._pause = self._loop.call_later(pause_s, self._start_next)
        return pause_s

    def _start_next(self) -> None:
        self._lifecycle.go(WorkersState.STARTING)
        self._work = self._loop.create_task(self._restore())

    async def _restore(self) -> None:
        self.current = self._new_group()
        try:
            await self.current.start()
        except Exception as error:  # noqa: BLE001  whatever it is, the next try may succeed
            self._breaker.ended(0)
            pause_s = self._plan()
            _log.error("replica %s: no workers, the next try is in %g s: %s", self._pool.replica, pause_s, error)
            return
        self.restarts += 1
        self._runs()
        down_s = self._started_s - self._lost_s
        _log.info("replica %s: workers run again, %.1f s after the loss", self._pool.replica, down_s)
        self._announcement = self._loop.call_soon(self._on_restored)
