"""How the daemon ends: in order at the first signal, at once at the second.

In order: no new work, until nothing is held and under way or the deadline has come; then every request that was
received is answered, and everything is stopped. Workers get what is left of the deadline, or a moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from typing import Final, NoReturn

from kvcached.recovery.state_file import LedgerFile
from kvcached.service.admin.verbs import Left
from kvcached.service.health import HealthRequests
from kvcached.service.replica import Replica
from kvcached.service.service import Service
from kvcached.worker.client import WorkerPool

#: What workers get to end in order when engines have used up the deadline. They take some milliseconds.
WORKERS_STOP_S_MIN: Final = 1.0
#: What workers on CUDA devices get to show that these work. They take some milliseconds; a device that hangs takes all.
DEVICES_ANSWER_S: Final = 1.0

_log: Final = logging.getLogger(__name__)


class Stop:
    """The end of one daemon.

    Args:
        deadline_ms: how long engines may go on after the first signal.

    Attributes:
        asked: set by the first signal.
        at_once: called before the process ends at the second one. They must not wait.
    """

    def __init__(self, deadline_ms: int) -> None:
        self.asked = asyncio.Event()
        self.at_once: list[Callable[[], None]] = []
        self._deadline_ms = deadline_ms
        self._loop = asyncio.get_running_loop()
        self._ends_s: float | None = None

    def on_signal(self) -> None:
        """Somebody wants the daemon to end."""
        if self.asked.is_set():
            self._end_at_once()
        self.asked.set()

    async def wind_down(self, service: Service) -> None:
        """Wait until engines hold nothing any more, or the deadline has come."""
        self._ends_s = self._loop.time() + self._deadline_ms / 1000
        ended: asyncio.Future[Left] = self._loop.create_future()
        service.stop(self._deadline_ms, ended.set_result)
        left = await ended
        if any(left):
            _log.warning(
                "%d leases, %d copies and %d requests are left at the deadline and end now",
                left.leases,
                left.copies,
                left.requests,
            )

    async def end_workers(self, workers: WorkerPool) -> None:
        """End a replica's workers, by force where they take longer than what is left of the deadline."""
        left_s = self._deadline_ms / 1000 if self._ends_s is None else self._ends_s - self._loop.time()
        await workers.close(max(left_s, WORKERS_STOP_S_MIN))

    async def note(self, file: LedgerFile, epoch: int, replicas: Sequence[Replica], health: HealthRequests) -> None:
        """Say to the next daemon that this one stops in order, with all its CUDA devices, if it has any.

        A replica may move then, and memory that nobody has kept is no surprise.

        Idle workers do not notice that their device is lost: so all are asked now. A pool that sleeps is not: it sleeps
        on after the next start, and wakes on its own devices only.

        Args:
            file: the ledger of this daemon.
            epoch: of this daemon.
            replicas: all, their workers not ended yet.
            health: checks them.
        """
        on_devices = [each for each in replicas if each.cuda_ordinals]
        if self._ends_s is None or any(each.is_degraded for each in on_devices):
            return
        if on_devices and (doubts := await health.doubts(on_devices, DEVICES_ANSWER_S)):
            words = "the next daemon moves no replica to another CUDA device, because one may be lost: %s"
            _log.warning(words, "; ".join(doubts))
            return
        try:
            file.note_stop(epoch)
        except OSError as error:
            _log.warning("the next daemon is not told that this one has stopped in order: %s", error)

    def _end_at_once(self) -> NoReturn:
        for each in self.at_once:
            with contextlib.suppress(Exception):
                each()
        os._exit(1)
