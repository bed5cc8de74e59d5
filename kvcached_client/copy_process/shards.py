"""One shard of an engine whose threads wait for copies: a process of its own makes them, where that can be.

To plan copies takes the interpreter, which threads that launch kernels need: beside a thread that copied 16 MiB in each
step, steps of many small kernels took 1.7 times as long (decision 0070). A process takes nothing of it.
"""

from __future__ import annotations

import logging
import select
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NoReturn, TypeAlias, Union

from kvcached_client.blocks.jobs import BlockJob
from kvcached_client.blocks.pages import EnginePages
from kvcached_client.copy_process.client import CopyProcess
from kvcached_client.copy_process.engine_memory import EngineMemory
from kvcached_client.copy_process.messages import Outcome
from kvcached_client.copy_process.pauses import Pauses
from kvcached_client.errors import (
    DaemonUnreachable,
    DeadlineExceeded,
    DeviceError,
    ErrorCode,
    KvcachedError,
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
#: A process that has not carried out an order for so long hangs, as the daemon's workers do then, and is killed. The
#: time is counted from when the device has come to the order's mark; to report to the daemon has its own deadlines.
PROGRESS_DEADLINE_S: Final = 30.0
#: As many processes in a row may be killed while they join. What kills more may kill all, as a lack of memory does.
KILLS_MAX: Final = 2


class ProcessShard:
    """As `OffloadShard`, whose copies a process of its own makes. Used by one thread, which sleeps meanwhile.

    Args:
        copies: that has joined.
        deadline_ms: for each report of the process to the daemon.

    Attributes:
        has_copied: an order was carried out.
    """

    def __init__(self, copies: CopyProcess, *, deadline_ms: int) -> None:
        self.has_copied = False
        self._copies = copies
        # A store's report that has no reply is repeated once; a load's waits for one deadline at most.
        self._deadline_ms = PROGRESS_DEADLINE_S * 1000 + 2 * deadline_ms
        self._is_hung = False

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
            Stale: the process is gone, and with it the session. One that hangs is killed.
            RequestError: it, or the daemon, has refused the stores.
            DeviceError: the device has refused them, and carries out others.
            DaemonUnreachable: the process has not carried them out, for another reason.
        """
        self._ordered(lambda: self._copies.store(jobs, after=after), after)

    def load(self, job: BlockJob, *, after: int | None) -> list[int]:
        """See `OffloadShard.load`. Raises as `store_all`."""
        return list(self._ordered(lambda: self._copies.load(job, after=after), after).bad)

    @property
    def has_failed(self) -> bool:
        """Whether the process has ended because the device did nothing more for it, or was killed because it hung."""
        return self._is_hung or self._copies.device_has_failed

    def close(self) -> None:
        """Leave the session: the process ends, which cuts a copy short."""
        self._copies.close()

    def _ordered(self, order: Callable[[], int], after: int | None) -> Outcome:
        """The outcome of an order that went well; the only one under way."""
        try:
            outcome = self._outcome(order(), after)
        except DaemonUnreachable as error:
            raise _ended(str(error)) from None
        if not outcome.error:
            self.has_copied = True
            return outcome
        if self._copies.is_over:
            raise _ended(outcome.error)
        if outcome.code is not None:
            raise request_error(outcome.code, outcome.error, outcome.fix)
        raise DeviceError(outcome.error) if outcome.is_of_device else DaemonUnreachable(outcome.error)

    def _outcome(self, number: int, after: int | None) -> Outcome:
        """Wait for the outcome of an order; a process that waits for its mark is not late."""
        poller = select.poll()
        poller.register(self._copies.fileno(), select.POLLIN)
        may_begin = self._copies.has_reached(after)
        while True:
            if poller.poll(self._deadline_ms):
                for outcome in self._copies.outcomes():
                    if outcome.number == number:
                        return outcome
            elif may_begin:
                self._kill_hung()
            else:
                may_begin = self._copies.has_reached(after)

    def _kill_hung(self) -> NoReturn:
        self._is_hung = True
        self._copies.abort()
        self._copies.close()
        seconds = self._deadline_ms / 1000
        raise _ended(f"the copy process was killed, because it had not carried out an order within {seconds:g} s")


def _ended(why: str) -> RequestError:
    return request_error(ErrorCode.SESSION_EXPIRED, why, "nothing: the scheduler connects again")


class CopiesPaused(DaemonUnreachable):
    """No session is joined now.

    Attributes:
        seconds: how long.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__("copy processes of this worker have come to nothing, and no further one joins a session yet")
        self.seconds = seconds


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
        self._joined: ProcessShard | None = None  #: the last one, until it is known what has become of it
        self._kills = 0  #: of processes that joined, in a row
        self._pauses = Pauses(log)
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
            CopiesPaused: processes have come to nothing again and again.
        """
        if self._marks is None:
            return OffloadShard.join(grant, self._shard, self._pages, deadline_ms=self._deadline_ms)
        self._judge_last()
        if (left_s := self._pauses.left_s()) > 0:
            raise CopiesPaused(left_s)
        prepared, self._prepared = self._prepared, None
        self._under_way = None  # what comes of the next one says nothing about the last one
        if prepared is not None and prepared.was_killed:
            prepared.close()
            prepared = None
        try:
            self._under_way = prepared or self._started(self._marks)
            self._under_way.join(grant, start_ms=START_MS_MAX)
        except DeadlineExceeded as error:  # the machine is busy, or the process is stopped: it may be better later
            self._pauses.add(str(error))
            self.prepare()
            raise
        except (DeviceError, OSError) as error:
            if self._under_way is not None and self._under_way.was_killed and self._kills < KILLS_MAX:
                self._kills += 1
                raise DaemonUnreachable(str(error)) from error
            self._log.warning("kvcached: no process can copy for this worker any more, a thread will: %s", error)
            self.close()
            if isinstance(error, KvcachedError):
                raise
            raise DaemonUnreachable(str(error)) from error
        self._kills = 0
        self._joined = ProcessShard(self._under_way, deadline_ms=self._deadline_ms)
        return self._joined

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

    def _judge_last(self) -> None:
        last, self._joined = self._joined, None
        if last is not None and last.has_copied:
            self._pauses.end()
        elif last is not None and last.has_failed:
            self._pauses.add("the last one has failed at its first copy")

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
