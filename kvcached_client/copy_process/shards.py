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
from kvcached_client.copy_process.engine_memory import shared
from kvcached_client.copy_process.messages import Outcome
from kvcached_client.errors import DaemonUnreachable, DeviceError, RequestError
from kvcached_client.offload_shard import OffloadShard
from kvcached_client.transport.attach import SessionGrant

if TYPE_CHECKING:
    from kvcached_client.cuda.engine import Mark
    from kvcached_client.cuda.marks import MarkWriter

#: Behind which copies begin: of a thread that copies, and of a copy process; None for tensors on the CPU.
AnyMark: TypeAlias = Union["Mark", int, None]

_log: Final = logging.getLogger(__name__)


class ProcessShard:
    """As `OffloadShard`, whose copies a process of its own makes. Used by one thread, which sleeps meanwhile."""

    def __init__(self, copies: CopyProcess) -> None:
        self._copies = copies

    def fileno(self) -> int:
        """A descriptor that becomes readable when the session is over or the daemon is gone."""
        return self._copies.fileno()

    def store_all(self, jobs: Sequence[BlockJob], *, after: int | None) -> None:
        """See `OffloadShard.store_all`.

        Raises:
            DaemonUnreachable: the process is gone, or has not carried out the stores, for any reason.
        """
        self._outcome(self._copies.store(jobs, after=after))

    def load(self, job: BlockJob, *, after: int | None) -> list[int]:
        """See `OffloadShard.load`. Raises as `store_all`."""
        return list(self._outcome(self._copies.load(job, after=after)).bad)

    def close(self) -> None:
        """Leave the session: the process ends, which cuts a copy short."""
        self._copies.close()

    def _outcome(self, number: int) -> Outcome:
        poller = select.poll()
        poller.register(self._copies.fileno(), select.POLLIN)
        while True:
            poller.poll()
            for outcome in self._copies.outcomes():
                if outcome.number == number:
                    if outcome.error:
                        raise DaemonUnreachable(outcome.error)
                    return outcome


class Shards:
    """Joins sessions as a shard of an engine, and marks the streams that its tensors are written by.

    Args:
        pages: the shard's tensors.
        shard: its index.
        current_stream: the handle of the calling thread's current stream on a CUDA device, by the device's ordinal.
        deadline_ms: limit for joining, and for each report to the daemon.
        in_process: let a process copy. Where its device or its memory cannot be shared with one, threads copy, and the
            log says why.

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
    ) -> None:
        self._pages = pages
        self._shard = shard
        self._current_stream = current_stream
        self._device = pages.device if pages.is_on_cuda else None
        self._deadline_ms = deadline_ms
        self._marks = _shared_marks(pages) if in_process and pages.is_on_cuda else None

    def join(self, grant: SessionGrant) -> OffloadShard | ProcessShard:
        """Join a session.

        Raises:
            KvcachedError: as `OffloadShard.join`, or `CopyProcess.start`.
        """
        if self._marks is None:
            return OffloadShard.join(grant, self._shard, self._pages, deadline_ms=self._deadline_ms)
        try:
            copies = CopyProcess.start(
                grant, self._shard, self._pages, deadline_ms=self._deadline_ms, marks=self._marks
            )
        except (DeviceError, OSError) as error:
            _log.warning("no process can copy for this engine, a thread will: %s", error)
            self.close()
            raise
        return ProcessShard(copies)

    def mark(self) -> AnyMark:
        """A mark behind all that this thread has launched on its current stream; None for tensors on the CPU.

        Raises:
            BadRequest: a thousand marks are ahead of the device.
            DeviceError: the driver refused.
        """
        if self._device is None:
            return None
        stream, marks = self._current_stream(self._device.ordinal), self._marks
        return self._device.mark(stream) if marks is None else marks.mark(stream)

    def close(self) -> None:
        """Give the marks up; waits for the work before them. Orders that have such a mark fail."""
        marks, self._marks = self._marks, None
        if marks is not None:
            marks.close()


def _shared_marks(pages: EnginePages) -> MarkWriter | None:
    """Marks for a process that copies; None where it could not reach what it needs."""
    from kvcached_client.cuda.marks import MarkWriter  # noqa: PLC0415 - only tensors on a device need the driver

    marks: MarkWriter | None = None
    try:
        marks = MarkWriter(pages.device)
        shared(pages, None, marks)
    except (DeviceError, RequestError) as error:
        _log.info("a thread of this process copies, as no other process can reach its tensors: %s", error)
        if marks is not None:
            marks.close()
        return None
    return marks
