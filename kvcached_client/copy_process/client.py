"""The engine's side of a copy process: it starts the process, orders copies, and hears of their ends. Nothing waits.

The process maps the host pool and the engine's device memory, joins the session as the shard, copies and reports to the
daemon. The engine's own process maps no host memory, and has no thread for copies. On a CUDA device it has one page
registered, into which its streams write marks.

The process is one of the session's: when it is dead, the session is over, and the engine connects again. It ends as
soon as the engine's process is dead, the session is over, or the daemon is gone. A copy is cut short then.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Self

from kvcached_client.blocks.jobs import BlockJob, PackedJob
from kvcached_client.blocks.pages import EnginePages
from kvcached_client.copy_process.engine_memory import EngineMemory, shared
from kvcached_client.copy_process.messages import (
    DEVICE_FAILED,
    Begin,
    Join,
    Load,
    NotReady,
    Order,
    Outcome,
    Ready,
    Store,
    decode_answer,
)
from kvcached_client.copy_process.start import Started, kill, started, unjoined
from kvcached_client.errors import DaemonUnreachable, DeadlineExceeded, bad_value
from kvcached_client.offload_shard import check_stores
from kvcached_client.transport.attach import SessionGrant

if TYPE_CHECKING:
    from kvcached_client.cuda.marks import MarkWriter

__all__ = ["CopyProcess", "EngineMemory", "Outcome"]

#: The interpreter and its modules have to be read, on a machine that may be busy.
START_MS_MAX: Final = 30_000
#: A process that does not take an order, or does not end, for so long, is killed.
_SEND_S_MAX: Final = 5.0
_END_S_MAX: Final = 5.0


class CopyProcess:
    """One shard of a session, whose copies a process of its own makes. Used by one thread of one process.

    A forked child cannot use it: that raises RuntimeError. To close it there ends nothing.

    Made by `start`, or by `prepare` before there is a session.

    Attributes:
        shard: index of this shard.
        epoch: epoch of the host pool.
    """

    def __init__(
        self,
        shard: int,
        started: Started,
        marks: MarkWriter | None,
        *,
        closes_marks: bool,
    ) -> None:
        """Use `start` or `prepare`."""
        self.shard = shard
        self.epoch = 0
        self._started = started
        self._process, self._stream, _ = started
        self._process_id = os.getpid()
        self._marks = marks  #: of tensors on a CUDA device
        self._closes_marks = closes_marks
        self._numbers = 0
        self._open: set[int] = set()
        self._is_over = False
        self._last_words = ""  #: of an interpreter that could not start

    def __repr__(self) -> str:
        state = "over" if self._is_over else f"{len(self._open)} orders under way"
        return f"CopyProcess(shard={self.shard}, pid={self.pid}, {state})"

    @classmethod
    def start(
        cls,
        grant: SessionGrant,
        shard: int,
        pages: EnginePages,
        memory: EngineMemory | None = None,
        *,
        deadline_ms: int = 1000,
        start_ms: int = START_MS_MAX,
    ) -> Self:
        """Start a process that joins a session as one of its shards, and wait until it has joined.

        Args:
            grant: session grant from the scheduler.
            shard: index of this shard.
            pages: the shard's tensors, with the layout that the scheduler declared.
            memory: what the tensors of `pages` are in. None: on a CUDA device, in allocations of ``cudaMalloc``, which
                is how torch allocates; they are shared by CUDA IPC handles.
            deadline_ms: limit of the process for joining, and for each report to the daemon.
            start_ms: limit for all of it.

        Raises:
            BadRequest: the tensors are not all in the memory; or they are on the CPU, and there is none, or it lacks
                the seals against shrinking, growing and further seals.
            DaemonUnreachable: there is no daemon.
            DeadlineExceeded: the process has not joined in time; it was killed.
            RequestError: as `OffloadShard.join`.
            DeviceError: one of the two processes cannot use the device, its memory or the marks of the other one; or
                a signal has ended the process before it had joined.
            OSError: the process cannot be started, as where its interpreter does not have this package.
        """
        deadline = time.monotonic() + start_ms / 1000
        made = cls.prepare(shard, pages, memory, deadline_ms=deadline_ms)
        made.join(grant, start_ms=max(1, int((deadline - time.monotonic()) * 1000)))
        return made

    @classmethod
    def prepare(
        cls,
        shard: int,
        pages: EnginePages,
        memory: EngineMemory | None = None,
        *,
        deadline_ms: int = 1000,
        marks: MarkWriter | None = None,
    ) -> Self:
        """Start a process that maps a shard's tensors, and waits for the session that it is to join.

        Args:
            shard: as in `start`.
            pages: likewise.
            memory: likewise.
            deadline_ms: likewise.
            marks: of the tensors' CUDA device; the caller closes them. None = they are this object's own.

        Raises:
            BadRequest, DeviceError, OSError: as `start`.
        """
        own = _marks_of(pages) if pages.is_on_cuda and marks is None else None
        made: Self | None = None
        try:
            told = shared(pages, memory, marks or own)
            begin = Begin(
                shard, told.descriptor, told.size_bytes, told.device, told.layers, pages.blocks, pages.fingerprint,
                deadline_ms,
            )  # fmt: skip
            made = cls(shard, started(told.descriptors), marks or own, closes_marks=own is not None)
            with suppress(OSError):  # it has ended: `join` says so
                made._stream.send(begin, _SEND_S_MAX)
        except BaseException:
            if made is not None:
                made.abort()
                made.close()
            elif own is not None:
                own.close()
            raise
        return made

    def join(self, grant: SessionGrant, *, start_ms: int = START_MS_MAX) -> None:
        """Have the process join a session, once, and wait until it has. After an error it is dead, and this is closed.

        Raises:
            DaemonUnreachable, DeadlineExceeded, RequestError, DeviceError, OSError: as `start`.
        """
        self._check_process()
        try:
            self._join(Join(grant.to_bytes()), start_ms)
        except BaseException:
            self.abort()
            self.close()
            raise

    def mark(self, stream: int) -> int:
        """A mark behind all work that a CUDA stream has now, for `store` and `load`. Any thread may call it.

        Args:
            stream: the stream's handle, as ``torch.cuda.current_stream().cuda_stream``; 0 is the default stream. It
                captures no graph.

        Raises:
            BadRequest: the tensors are on the CPU; this is closed; or a thousand marks are ahead of the device.
            DeviceError: the device has failed. Close the copy process then: it waits for marks that never come.
        """
        self._check_process()
        if self._marks is None:
            raise bad_value("a mark for tensors on the CPU", "leave it out: they have no streams")
        return self._marks.mark(stream)

    def has_reached(self, mark: int | None) -> bool:
        """Whether the device has come to a mark of `mark`, so that copies behind it may begin; None on the CPU."""
        return mark is None or self._marks is None or self._marks.is_reached(mark)

    def store(self, jobs: Sequence[BlockJob], *, after: int | None = None) -> int:
        """Order stores, as `OffloadShard.store_all`. Never waits for the copy.

        An exception out of a signal handler kills the process: it may have the order, whose number nobody knows.

        Args:
            jobs: as in `OffloadShard.store_all`.
            after: for tensors on a CUDA device, a mark of this copy process behind the kernels that write the blocks.
                On the CPU they are written when this is called: an engine orders stores after the forward pass.

        Returns:
            The order's number, which comes back with its outcome.

        Raises:
            BadRequest: there is no mark, and the tensors are on a CUDA device, or the other way round; the mark is none
                that `mark` has returned; or there are no jobs, or too many. Nothing was ordered.
            DaemonUnreachable: the process is gone. If it ends after the call, an outcome says so.
        """
        check_stores(jobs)
        return self._order(Store(self._numbers + 1, tuple(map(PackedJob.of, jobs)), self._checked(after)))

    def load(self, job: BlockJob, *, after: int | None = None) -> int:
        """Order a load, as `OffloadShard.load`; loads go before stores. Else as `store`.

        Args:
            job: blocks to copy.
            after: for tensors on a CUDA device, a mark behind the kernels that still read or write what the blocks held
                before.
        """
        return self._order(Load(self._numbers + 1, PackedJob.of(job), self._checked(after)))

    def outcomes(self) -> list[Outcome]:
        """The orders that have ended since the last call. Never waits for a copy.

        If the process has ended, and nothing else is to be told, it is dead when this returns, so that nothing writes
        the engine's memory any more, and every order without an outcome has failed: `error` says why. The session is
        over then.
        """
        self._check_process()
        found: list[Outcome] = []
        try:
            while not self._is_over:
                answers = map(decode_answer.decode, self._stream.receive(0))
                found += [answer for answer in answers if isinstance(answer, Outcome)]
        except BlockingIOError:
            pass
        except EOFError:
            if not found:  # what it has done comes first, and the end of the session with the next call
                self._end()
        self._open.difference_update(outcome.number for outcome in found)
        if self._is_over:
            found += [Outcome(number, error=self._ending()) for number in sorted(self._open)]
            self._open.clear()
        return found

    def fileno(self) -> int:
        """A descriptor that is readable when there are outcomes, or the process has ended.

        Raises:
            DaemonUnreachable: the process is gone.
        """
        self._check()
        return self._stream.fileno()

    @property
    def is_over(self) -> bool:
        """Whether the process is known to be gone. Then the session is over."""
        return self._is_over

    @property
    def was_killed(self) -> bool:
        """Whether a signal has ended the process, which says nothing about its device."""
        status = self._process.poll()
        return status is not None and status < 0

    @property
    def device_has_failed(self) -> bool:
        """Whether the process has ended because the device did nothing more for it."""
        return self._process.poll() == DEVICE_FAILED

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def abort(self) -> None:
        """Kill the process, with all its copies. Any thread may call this; `close` is to follow."""
        self._process.kill()

    def close(self) -> None:
        """End the process, which cuts copies short, and wait for its death. May be called again.

        On a CUDA device it also waits for the work before the last mark, unless the marks are the caller's. In a forked
        child it closes the child's descriptor of the connection only.
        """
        if self._is_forked:
            self._stream.close()
            return
        self._end()
        if self._marks is not None and self._closes_marks:
            self._marks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _join(self, join: Join, start_ms: int) -> None:
        deadline = time.monotonic() + start_ms / 1000
        try:
            with suppress(OSError):  # it has ended, and may have said why
                self._stream.send(join, _SEND_S_MAX)
            while True:
                for data in self._stream.receive(max(deadline - time.monotonic(), 0.001)):
                    answer = decode_answer.decode(data)
                    if isinstance(answer, Ready):
                        self.epoch = answer.epoch
                        return
                    if isinstance(answer, NotReady):
                        self._end()  # by itself: it must not look as if it was killed
                        raise answer.refusal()
        except TimeoutError:
            raise DeadlineExceeded(
                f"the copy process has not joined the session within {start_ms} ms (allow more by `start_ms`, or end "
                "what keeps the machine busy; `kvcached doctor --cuda` says whether the device works)"
            ) from None
        except (EOFError, OSError):
            self._end()
            raise unjoined(self._process, self._ending(), self._last_words) from None

    def _order(self, order: Order) -> int:
        self._check()
        self._numbers = order.number  # before it is sent: whatever interrupts that, no other order has its number
        try:
            self._stream.send(order, _SEND_S_MAX)
            self._open.add(order.number)
        except OSError:
            # It has read a part of the order at most, and carries out none; what it has reported can still be read.
            self._process.kill()
            raise DaemonUnreachable("the copy process takes no orders") from None
        except BaseException:
            self._process.kill()  # it may have all of the order
            raise
        return order.number

    @property
    def _is_forked(self) -> bool:
        return os.getpid() != self._process_id

    def _check_process(self) -> None:
        if self._is_forked:
            raise RuntimeError(
                f"this copy process belongs to process {self._process_id}; a forked child starts its own"
            )

    def _check(self) -> None:
        self._check_process()
        if self._is_over:
            raise DaemonUnreachable(self._ending())

    def _checked(self, after: int | None) -> int:
        """The mark of an order; 0 on the CPU."""
        if (after is None) != (self._marks is None):
            if after is None:
                raise bad_value("no mark for tensors on a CUDA device", "give `after=copies.mark(stream)`")
            raise bad_value("a mark for tensors on the CPU", "leave it out: they are written when this is called")
        if after is None or self._marks is None:
            return 0
        if not self._marks.has_made(after):
            raise bad_value("no mark of this copy process", "give `after=copies.mark(stream)`, of the same `copies`")
        return after

    def _end(self) -> None:
        """Have it dead: it ends by itself when its connection is shut down; if not, it is killed."""
        if self._is_over:
            return
        self._stream.shut_down()
        try:
            self._process.wait(_END_S_MAX)
        except subprocess.TimeoutExpired:
            kill(self._process)
        self._is_over = True  # not before: an exception out of a signal handler may have ended the wait
        self._stream.close()
        self._last_words = self._started.take_last_words()

    def _ending(self) -> str:
        status = self._process.returncode
        reason = ", as its device has failed" if status == DEVICE_FAILED else ""
        return f"the copy process has ended with status {status}{reason}"


def _marks_of(pages: EnginePages) -> MarkWriter:
    from kvcached_client.cuda.marks import MarkWriter  # noqa: PLC0415 - only tensors on a device need the driver

    return MarkWriter(pages.device)
