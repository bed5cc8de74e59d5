"""A replica's workers for as long as the daemon runs: lost groups are replaced by new ones, with new memory.

After a loss: every worker of the group is killed, and the kernel confirms their deaths; then, after a pause, the next
group is started. Pauses double with each try, and begin anew once a group has lived for a while.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from kvcached.worker.supervisor import STOP_DEADLINE_S, ReplicaPool, WorkerGroup
from kvcached_client.types import ShardIndex

#: The first pause: a worker that died by chance is soon replaced.
FIRST_PAUSE_S: Final = 0.5
#: The longest: a start that fails costs a process per shard, and a log line.
LONGEST_PAUSE_S: Final = 30.0
#: A group that lived this long was healthy: the next loss has a cause of its own.
HEALTHY_AFTER_S: Final = 60.0

_log: Final = logging.getLogger(__name__)


class BackOff:
    """How long to wait before the next try."""

    def __init__(
        self,
        *,
        first_s: float = FIRST_PAUSE_S,
        longest_s: float = LONGEST_PAUSE_S,
        healthy_after_s: float = HEALTHY_AFTER_S,
    ) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._healthy_after_s = healthy_after_s
        self._next_s = first_s

    def pause_s(self) -> float:
        """The next pause. The one after it is twice as long, up to the longest."""
        pause_s = self._next_s
        self._next_s = min(2 * pause_s, self._longest_s)
        return pause_s

    def lived(self, seconds: float) -> None:
        """What was started lived for so long: long enough, and pauses begin anew."""
        if seconds >= self._healthy_after_s:
            self._next_s = self._first_s


class ReplicaGroups:
    """One `WorkerGroup` after another. Made, used and stopped in one event loop's thread.

    Args:
        pool: what the workers hold.
        run_dir: where their sockets and logs are; must exist.
        on_lost: called once per loss, with the first shard that was lost and why.
        on_restored: called when every shard has a worker and memory again. Every command of the lost workers is
            settled, and whoever waited for one has been told.
        back_off: pauses between tries.

    Attributes:
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
        self._loop = asyncio.get_running_loop()
        self._started_s = 0.0
        self._lost_s = 0.0
        self._stopping = False
        self._work: asyncio.Task[None] | None = None  #: burying or starting
        self._pause: asyncio.TimerHandle | None = None
        self._announcement: asyncio.Handle | None = None
        self.current = self._new_group()

    async def start(self) -> None:
        """Start the first group. On an error none is left, and nothing is tried again.

        Raises:
            BadRequest, DaemonFailure: as `WorkerGroup.start`.
        """
        await self.current.start()
        self._started_s = self._loop.time()

    async def stop(self, deadline_s: float = STOP_DEADLINE_S) -> None:
        """End the workers as `WorkerGroup.stop` does, and start none again. Does nothing the second time."""
        self._stopping = True
        if self._pause is not None:
            self._pause.cancel()
        if self._work is not None:
            self._work.cancel()
            await asyncio.wait([self._work])
        await self.current.stop(deadline_s)

    def _new_group(self) -> WorkerGroup:
        return WorkerGroup(self._pool, self._run_dir, self._on_group_lost)

    def _on_group_lost(self, shard: ShardIndex, reason: str) -> None:
        if self._stopping:
            return
        if self._announcement is not None:
            self._announcement.cancel()  # lost again before anybody was told
        self._lost_s = self._loop.time()
        self._back_off.lived(self._lost_s - self._started_s)
        self._work = self._loop.create_task(self._bury())
        self._on_lost(shard, reason)

    async def _bury(self) -> None:
        try:
            await self.current.bury()
        except OSError:
            _log.exception("replica %s: not everything that its workers held was given back", self._pool.replica)
        pause_s = self._plan()
        _log.info("replica %s: all workers are dead; they are started again in %g s", self._pool.replica, pause_s)

    def _plan(self) -> float:
        """Plan the next start; returns when it will be."""
        pause_s = self._back_off.pause_s()
        self._pause = self._loop.call_later(pause_s, self._start_next)
        return pause_s

    def _start_next(self) -> None:
        self._work = self._loop.create_task(self._restore())

    async def _restore(self) -> None:
        self.current = self._new_group()
        try:
            await self.current.start()
        except Exception as error:  # noqa: BLE001  whatever it is, the next try may succeed
            pause_s = self._plan()
            _log.error("replica %s: no workers, the next try is in %g s: %s", self._pool.replica, pause_s, error)
            return
        self._started_s = self._loop.time()
        down_s = self._started_s - self._lost_s
        _log.info("replica %s: workers run again, %.1f s after the loss", self._pool.replica, down_s)
        self._announcement = self._loop.call_soon(self._on_restored)
