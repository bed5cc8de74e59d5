"""One shard of an engine whose threads wait for copies: a process of its own makes them, where that can be.

To plan copies takes the interpreter, which threads that launch kernels need: beside a thread that copied 16 MiB in each
step, steps of many small kernels took 1.7 times as long (decision 0070). A process takes nothing of it.
"""

from __future__ import annotations

import logging
import select
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias, Union

from kvcached_client.blocks.jobs import BlockJob
from kvcached_client.blocks.pages import EnginePages
from kvcached_client.copy_process.client import CopyProcess
from kvcached_client.copy_process.engine_memory import EngineMemory
from kvcached_client.copy_process.messages import Outcome
from kvcached_client.errors import (
    DaemonUnreachable,
    DeadlineExceeded,
    DeviceError,
    ErrorCode,
    RequestError,
    request_error,
)
from kvcached_client.offload_shard import OffloadShard
from kvcached_client.transport.attach import SessionGrant

if TYPE_CHECKING:
    from kvcached_client.cuda.engine import EngineDevice, Mark
    from kvcached_client.cuda.marks import MarkWriter

#: Behind which copies begin: of a thread that copies, and of a copy process; None for tensors on the CPU.
AnyMark: TypeAlias = Union["Mark", int, None]

#: How long loads of a new session may wait for a process, at most.
START_MS_MAX: Final = 10_000
#: As many processes may be killed while they join. What kills more of them may kill all, as a lack of memory does.
KILLS_MAX: Final = 2


class ProcessShard:
    """As `OffloadShard`, whose copies a process of its own makes. Used by one thread, which sleeps meanwhile."""

    def __init__(self, copies: CopyProcess) -> None:
        self._copies = copies

    def fileno(self) -> int:
        """A descriptor that becomes readable when the session is over or the daemon is gone.

        Raises:
            Stale: that is known already.
        """
        try:
            return self._copies.fileno()
        except DaemonUnreachable as error:
            raise _ended(str(error)) from None

    def store_all(self, jobs: Sequence[BlockJob], *, after: int | None) -> None:
        """See `OffloadShard.store_all`.

        Raises:
            Stale: the process is gone, and with it the session.
            RequestError: it, or the daemon, has refused the stores.
            DaemonUnreachable: it has not carried them out, for another reason.
        """
        self._ordered(lambda: self._copies.store(jobs, after=after))

    def load(self, job: BlockJob, *, after: int | None) -> list[int]:
        """See `OffloadShard.load`. Raises as `store_all`."""
        return list(self._ordered(lambda: self._copies.load(job, after=after)).bad)

    def close(self) -> None:
        """Leave the session: the process ends, which cuts a copy short."""
        self._copies.close()

    def _ordered(self, order: Callable[[], int]) -> Outcome:
        """The outcome of an order that went well; the only one under way."""
        try:
            number, outcomes = order(), list[Outcome]()
            poller = select.poll()
            poller.register(self._copies.fileno(), select.POLLIN)
            while not outcomes:
                poller.poll()
                outcomes = [each for each in self._copies.outcomes() if each.number == number]
        except DaemonUnreachable as error:
            raise _ended(str(error)) from None
        (outcome,) = outcomes
        if not outcome.error:
            return outcome
        if self._copies.is_over:
            raise _ended(outcome.error)
        if outcome.code is not None:
            raise request_error(outcome.code, outcome.error, outcome.fix)
        raise DaemonUnreachable(outcome.error)


def _ended(why: str) -> RequestError:
    return request_error(ErrorCode.SESSION_EXPIRED, why, "nothing: the scheduler connects again")


class Shards:
    """Joins sessions as a shard of an engine, and marks the streams that its tensors are written by.

    `mark` and `abort` may be called by another thread than the rest.

    Args:
        pages: the shard's tensors.
        shard: its index.
        current_stream: the handle of the calling thread's current stream on a CUDA device, by the device's ordinal.
        deadline_ms: limit for joining, and for each report to the daemon.
        in_process: let a process copy. Where its device or its memory cannot be shared with one, threads copy, and the
            log says why.
        log: the engine's.
        memory: what the tensors are in, as in `CopyProcess.start`.

    Raises:
        BadRequest: the tensors are on several devices.
        DeviceError: this process cannot use their device.
    """

    def __init__(
        self,
        pages: EnginePages,
        shard: int,
        current_stream: Callable[[int], int],
        *,
        deadline_ms: int,
        in_process: bool,
        log: logging.Logger,
        memory: EngineMemory | None = None,
    ) -> None:
        self._pages = pages
        self._shard = shard
        self._current_stream = current_stream
        self._device = pages.device if pages.is_on_cuda else None
        self._deadline_ms = deadline_ms
        self._log = log
        self._memory = memory
        self._marks: MarkWriter | None = None  #: for copy processes
        self._prepared: CopyProcess | None = None
        self._under_way: CopyProcess | None = None  #: that joins, or has joined
        self._kills = 0  #: of processes that joined
        if in_process and self._device is not None:
            self._begin(self._device)

    def prepare(self) -> None:
        """Start the process for the next session: that takes a second, for which its loads would wait."""
        if self._marks is None or self._prepared is not None:
            return
        try:
            self._prepared = self._started(self._marks)
        except (DeviceError, OSError) as error:
            self._log.warning("kvcached: no copy process can be started now: %s", error)  # `join` tries again

    def join(self, grant: SessionGrant) -> OffloadShard | ProcessShard:
        """Join a session. That one has ended which was joined before.

        Raises:
            KvcachedError: as `OffloadShard.join`, or `CopyProcess.start`.
        """
        if self._marks is None:
            return OffloadShard.join(grant, self._shard, self._pages, deadline_ms=self._deadline_ms)
        prepared, self._prepared = self._prepared, None
        self._under_way = None  # what comes of the next one says nothing about the last one
        if prepared is not None and prepared.was_killed:
            prepared.close()
            prepared = None
        try:
            self._under_way = prepared or self._started(self._marks)
            self._under_way.join(grant, start_ms=START_MS_MAX)
        except (DeviceError, DeadlineExceeded, OSError) as error:
            if self._under_way is not None and self._under_way.was_killed and self._kills < KILLS_MAX:
                self._kills += 1
                raise DaemonUnreachable(str(error)) from error
            self._log.warning("kvcached: no process can copy for this worker any more, a thread will: %s", error)
            self.close()
            raise DeviceError(str(error)) from error
        return ProcessShard(self._under_way)

    def mark(self) -> AnyMark:
        """A mark behind all that this thread has launched on its current stream; None for tensors on the CPU.

        Raises:
            BadRequest: a thousand marks are ahead of the device, or a thread copies from now on.
            DeviceError: the driver refused.
        """
        if self._device is None:
            return None
        stream, marks = self._current_stream(self._device.ordinal), self._marks
        return self._device.mark(stream) if marks is None else marks.mark(stream)

    def abort(self) -> None:
        """Let the copies of a process fail at once: they may be behind marks that their stream never comes to."""
        if (copies := self._under_way) is not None:
            copies.abort()

    def close(self) -> None:
        """Give the marks up. Orders that have such a mark fail."""
        marks, self._marks = self._marks, None
        if self._prepared is not None:
            self._prepared.abort()
            self._prepared.close()
        if marks is not None:
            marks.close(waits=False)

    def _begin(self, device: EngineDevice) -> None:
        from kvcached_client.cuda.marks import MarkWriter  # noqa: PLC0415 - only tensors on a device need the driver

        marks: MarkWriter | None = None
        try:
            marks = MarkWriter(device)
            self._prepared = self._started(marks)
        except (DeviceError, RequestError, OSError) as error:
            self._log.info("kvcached: a thread of this worker copies, no other process can: %s", error)
            if marks is not None:
                marks.close()
        else:
            self._marks = marks

    def _started(self, marks: MarkWriter) -> CopyProcess:
        return CopyProcess.prepare(self._shard, self._pages, self._memory, deadline_ms=self._deadline_ms, marks=marks)
