"""One shard process of an engine in offload mode: it copies blocks between its tensors and the daemon's host pool.

The scheduler asks the daemon what to copy where (`OffloadClient`) and sends each shard a `BlockJob`. Each shard reports
to the daemon when it is done; until every shard has reported, nobody else gets the slots. A store waits for the reply:
until then nobody finds the blocks. A load does not: the headers, read before and after the copy, prove what came.

Kernels on a CUDA device write and read blocks some time after they were launched. So a copy is ordered after a mark:
the thread that launches kernels marks its stream, and the device begins the copy when it has reached the mark. The host
pool is registered with the device in the background, for as long as it is mapped.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Final, NamedTuple, Self

import msgspec
import numpy as np

from kvcached_client.blocks.header import NAMESPACE_BYTES
from kvcached_client.blocks.host_layout import HostGeometry
from kvcached_client.blocks.jobs import BlockJob, JobSpan
from kvcached_client.blocks.mapping import map_sealed, prefer_huge_pages, unusable
from kvcached_client.blocks.pages import EnginePages
from kvcached_client.blocks.transfers import BlockTransfers
from kvcached_client.errors import (
    DaemonUnreachable,
    DeadlineExceeded,
    ErrorCode,
    KvcachedError,
    Stale,
    bad_value,
    request_error,
    stores_called_off,
)
from kvcached_client.failpoints import failpoint
from kvcached_client.protocol.attach import JoinedHost
from kvcached_client.protocol.engine import Settled, TransferDone
from kvcached_client.protocol.grants import check_number
from kvcached_client.protocol.offload import ERROR_LENGTH_MAX, LEASES_PER_MESSAGE_MAX, CopyKind
from kvcached_client.transport.attach import SessionGrant, join_host
from kvcached_client.transport.channel import Channel
from kvcached_client.transport.run_dir import rpc_endpoint
from kvcached_client.transport.steps import BatchedCall, PostedCalls, Steps
from kvcached_client.types import TransferId, Verify

if TYPE_CHECKING:
    from kvcached_client.cuda.engine import EngineCopies, Mark

__all__ = ["STORES_PER_REPORT_MAX", "BlockJob", "JobSpan", "OffloadShard"]

#: Copies that a shard remembers to have reported. Who makes one again does so at once, or soon.
_REPORTED_KEPT: Final = 4096
#: The first, and those that are named beside it.
STORES_PER_REPORT_MAX: Final = LEASES_PER_MESSAGE_MAX + 1


def check_stores(jobs: Sequence[BlockJob]) -> None:
    """Raise BadRequest where there are none, or too many to be reported together."""
    if not 1 <= len(jobs) <= STORES_PER_REPORT_MAX:
        raise bad_value(f"{len(jobs)} stores in one call", f"give 1 to {STORES_PER_REPORT_MAX}")


class _Memory(NamedTuple):
    """What a shard copies with, as long as the host pool is mapped."""

    pages: EnginePages
    transfers: BlockTransfers
    device: EngineCopies | None

    def after(self, mark: Mark | None) -> AbstractContextManager[None]:
        """Copies in here are ordered after a mark."""
        if self.device is None:
            if mark is None:
                return nullcontext()
            raise bad_value("a mark for tensors on the CPU", "leave it out: they are written when `store` is called")
        if mark is None or isinstance(mark, int):
            what = "no mark" if mark is None else "the mark of a copy process"
            raise bad_value(f"{what} for tensors on a CUDA device", "give `after=shard.mark(stream)`")
        return self.device.after(mark)


class OffloadShard:
    """The mapped host pool, and a connection for reports. Made by `join`; used by one thread of one process.

    A forked child does not inherit the mapping. A thread that calls it keeps its current CUDA device.

    Attributes:
        shard: index of this shard.
        epoch: epoch of the host pool when it was mapped.
    """

    def __init__(self, grant: SessionGrant, joined: JoinedHost, memory: _Memory, channel: Channel) -> None:
        self.shard: int = joined.shard
        self.epoch: int = joined.epoch
        self._session = grant
        self._verify = joined.verify
        self._is_read_only = joined.read_only
        self._memory: _Memory | None = memory
        self._channel = channel
        self._reports = PostedCalls()  #: of loads; their replies are taken with later reports
        self._over: Stale | None = None  #: what a report was answered with, once the session is over
        self._copying = threading.RLock()  #: held from the begin of a copy until it is reported
        #: Transfers that were reported, well or with an error: their slots may be others' now. The oldest first.
        self._reported: dict[TransferId, None] = {}

    def __repr__(self) -> str:
        state = "closed" if self._memory is None else "open"
        return f"OffloadShard(session={self._session.id}, shard={self.shard}, {state})"

    @classmethod
    def join(
        cls,
        grant: SessionGrant,
        shard: int,
        pages: EnginePages,
        *,
        deadline_ms: int = 1000,
        confirm: Callable[[], None] | None = None,
    ) -> Self:
        """Join a session as one of its shards, and map the host pool.

        Args:
            grant: session grant from the scheduler.
            shard: index of this shard.
            pages: the shard's tensors, with the layout that the scheduler declared.
            deadline_ms: limit for joining, and later for each report to the daemon.
            confirm: called when the bytes of a store are copied, and no block counts as stored yet; raises where they
                may be wrong.

        Raises:
            DaemonUnreachable: nothing listens in the session's run directory.
            DaemonSilent: no reply came in time.
            Refused: the socket belongs to another user, or the tensors have another layout than the declared one.
            Stale: the session is over.
            RequestError: the daemon refused.
            DaemonFailure: the memory is not sealed, too small, or cannot be mapped.
            DeviceError: the tensors are on a CUDA device that this process cannot use.
        """
        joined = join_host(grant, check_number("shard", shard), deadline_ms=deadline_ms)
        memory: _Memory | None = None
        try:
            memory = _map(joined.joined, joined.memory, pages, confirm)
            # Takes the connection over.
            channel = Channel(rpc_endpoint(grant.run_dir), deadline_ms=deadline_ms, attached=joined.connection)
        except BaseException:
            _release(memory)
            joined.connection.leave()
            raise
        finally:
            os.close(joined.memory)
        return cls(grant, joined.joined, memory, channel)

    def mark(self, stream: int) -> Mark:
        """A mark behind all work that a CUDA stream has now, for `store` and `load`. Any thread may call it.

        Args:
            stream: the stream's handle, as ``torch.cuda.current_stream().cuda_stream``.

        Raises:
            BadRequest: the tensors are on the CPU.
            DeviceError: the device has failed.
            DaemonUnreachable: the shard is closed.
        """
        pages = self._open().pages
        if not pages.is_on_cuda:
            raise bad_value("a mark for tensors on the CPU", "leave it out: they have no streams")
        return pages.device.mark(stream)

    def store(self, job: BlockJob, *, after: Mark | None = None) -> None:
        """Copy blocks into the host pool, and report to the daemon that they are there.

        If it raises, the failure is reported where the daemon can be reached, and nobody finds the blocks; only after
        `DeadlineExceeded` or `DaemonUnreachable` it is unknown whether they are found.

        Args:
            job: blocks to copy.
            after: for tensors on a CUDA device, a mark behind the kernels that write the blocks.

        Raises:
            BadRequest: the job contradicts itself, names blocks that do not exist, or was made or has failed before;
                nothing was copied.
            Refused: the host pool is mapped read-only, and nothing was copied; or the store was called off before its
                report (`already_released`), so that it may have damaged blocks of other stores in its slots.
            Stale: the session is over.
            TransportError: the daemon did not reply, even when the report was repeated. What is found is whole.
            DeviceError: the device failed. Most failures are for good: then every later copy fails, too.
        """
        self.store_all((job,), after=after)

    def store_all(self, jobs: Sequence[BlockJob], *, after: Mark | None = None) -> None:
        """As `store` of each job, with one call that copies and one report.

        If it raises, what `store` says holds for the blocks of all jobs; but where stores were called off, the others
        are stored. Another number of jobs than `jobs` allows is refused before anything is copied or reported.

        Args:
            jobs: at least one, and at most `STORES_PER_REPORT_MAX`.
            after: as in `store`, behind the kernels of all jobs.

        Raises:
            BadRequest, Refused, Stale, TransportError, DeviceError: as `store`.
        """
        check_stores(jobs)
        with self._copying:
            memory = self._open()
            self._check_writable()
            self._begin("store", jobs)
            try:
                with memory.after(after):
                    memory.transfers.store_all(jobs, epoch=self.epoch)
            except BaseException as error:
                self._report_failure("store", jobs, error)
                raise
            failpoint("offload.store.written")
            if ended := self._settle(self._done("store", jobs)).ended:
                raise stores_called_off(ended)

    def load(self, job: BlockJob, *, after: Mark | None = None) -> list[int]:
        """Copy blocks out of the host pool, and report to the daemon that the slots are no longer read.

        When it returns, the blocks are there, for every kernel that is launched from then on. It does not wait for the
        reply to the report: that the daemon refuses it, or hangs, is logged by a later call.

        Args:
            job: blocks to copy.
            after: for tensors on a CUDA device, a mark behind the kernels that still read or write the blocks.

        Returns:
            The blocks that differ from what was stored, counted from 0 in the order of the job; empty if all are good.
            The engine computes these blocks, and everything after them in their chain.

        Raises:
            BadRequest, DeviceError: as `store`.
            Stale: the session is over, as the reply to an earlier report said.
            TransportError: the daemon is gone. No block counts as loaded then, nor after any other of these errors.
        """
        with self._copying:
            return self._load(job, after)

    def fileno(self) -> int:
        """The descriptor of the connection to the daemon; it becomes readable when the session is over.

        Raises:
            DaemonUnreachable: the shard is closed.
        """
        return self._channel.attach_fileno()

    def close(self) -> None:
        """Unmap the host pool and leave the session, when all loads are reported, or after a deadline.

        The session goes on, and so do the copies of other shards; what this one was to copy fails. Another thread may
        call it while one copies: it waits until that copy has been reported. No copy follows.
        """
        with self._copying:
            memory, self._memory = self._memory, None
            _release(memory)
            del memory
            if not self._channel.is_forked:
                self._reports.wait()  # or the daemon might hear of the end before it hears of the loads
            self._channel.close(linger_ms=self._channel.deadline_ms, leaves=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> _Memory:
        if self._channel.is_forked:  # something else may be where the host pool was: it must not be written
            raise RuntimeError("this shard belongs to the process that has joined; a forked child joins by itself")
        if self._memory is None:
            raise DaemonUnreachable("this shard has left its session; join again")
        return self._memory

    def _check_writable(self) -> None:
        if self._is_read_only:
            raise request_error(
                ErrorCode.FORBIDDEN,
                "this engine maps the host pool read-only, and stores nothing",
                "connect without read_only, and see read_only in [[access.engine]] of the daemon's configuration",
            )

    def _load(self, job: BlockJob, after: Mark | None) -> list[int]:
        memory = self._open()
        if self._over is not None:
            raise self._over.with_traceback(None)  # which would grow with each load, and keep its frames
        self._begin("load", (job,))
        try:
            with memory.after(after):
                bad = memory.transfers.load(
                    job, verify=self._verify is not Verify.NEVER, trusted_epoch=self._verify.trusted_epoch(self.epoch)
                )
        except BaseException as error:
            self._report_failure("load", (job,), error)
            raise
        depths = [depth for span in job.spans for depth in range(span.depth, span.depth + len(span.blocks))]
        failpoint("offload.load.copied")
        indices = np.array([depths[index] - job.start for index in bad], "<i4")
        report = self._telling_of_load(self._done("load", (job,)), (indices.tobytes(),) if bad else ())
        self._reports.add(BatchedCall(report))
        self._reports.collect(self._channel.has_come)
        return bad

    def _begin(self, kind: CopyKind, jobs: Sequence[BlockJob]) -> None:
        """Refuse a copy that was reported; from now on these are."""
        for job in jobs:
            if job.transfer in self._reported:
                raise bad_value(
                    f"{kind} {job.transfer} was made before, or has failed, so that its slots are others' now",
                    f"carry out each job once; prepare another {kind}",
                )
        for job in jobs:
            self._reported[job.transfer] = None
        while len(self._reported) > _REPORTED_KEPT:
            del self._reported[next(iter(self._reported))]

    def _done(self, kind: CopyKind, jobs: Sequence[BlockJob], *, error: str = "") -> TransferDone:
        return TransferDone(
            id=self._channel.next_id(),
            session=self._session.id,
            token=self._session.token,
            kind=kind,
            transfer=jobs[0].transfer,
            shard=self.shard,
            error=error,
            more=tuple(job.transfer for job in jobs[1:]),
        )

    def _settle(self, request: TransferDone) -> Settled:
        """Send a report; if no reply came, repeat it with the same id: the daemon counts it once."""
        try:
            return self._channel.ask(request, Settled)[0]
        except DeadlineExceeded:
            return self._channel.ask(request, Settled)[0]

    def _telling_of_load(self, request: TransferDone, frames: Sequence[bytes]) -> Steps[None]:
        """Send a report, and take its reply later. A daemon that hangs reads the report when it goes on."""
        self._channel.send(request, frames)
        yield request
        try:
            self._channel.receive(request, Settled)
        except Stale as error:
            self._over = error.with_traceback(None)
            raise

    def _report_failure(self, kind: CopyKind, jobs: Sequence[BlockJob], error: BaseException) -> None:
        """Report that copies failed. If that fails as well, add a note to the error, which the caller gets."""
        try:
            self._settle(self._done(kind, jobs, error=_words(error)))
        except KvcachedError as untold:
            error.add_note(f"the failure could not be reported to the daemon: {untold}")


def _map(joined: JoinedHost, descriptor: int, pages: EnginePages, confirm: Callable[[], None] | None) -> _Memory:
    if (pages.block_bytes, pages.fingerprint) != (joined.block_bytes, joined.fingerprint):
        raise request_error(
            ErrorCode.WRONG_LAYOUT,
            f"blocks of {pages.block_bytes} bytes, layout {pages.fingerprint.hex()}; the session was opened for "
            f"{joined.block_bytes}, {joined.fingerprint.hex()}",
            "declare the layout of the shards' own tensors, which must be alike",
        )
    host = _geometry(joined)
    if not host.slots_per_slab or joined.shard >= host.shards:
        raise unusable(f"{host.slots_per_slab} slots in a slab, shard {joined.shard} of {host.shards}")
    protection = mmap.PROT_READ if joined.read_only else mmap.PROT_READ | mmap.PROT_WRITE
    buffer = map_sealed(descriptor, host.size_bytes, protection)
    address = ctypes.addressof(buffer)
    prefer_huge_pages(address, host.size_bytes)
    device = None
    if pages.is_on_cuda:
        device = pages.device.open_host(address, host, joined.shard, read_only=joined.read_only, memory=buffer)
    transfers = BlockTransfers(
        pages,
        host,
        joined.shard,
        buffer,
        namespace=joined.namespace[:NAMESPACE_BYTES],
        fingerprint=joined.fingerprint,
        copier=None if device is None else device.copier,
        confirm=confirm,
    )
    return _Memory(pages, transfers, device)


def _release(memory: _Memory | None) -> None:
    if memory is not None and memory.device is not None:
        memory.device.close()


def _geometry(joined: JoinedHost) -> HostGeometry:
    sizes = {name: getattr(joined, name) for name in HostGeometry.__struct_fields__}
    try:
        return msgspec.convert(sizes, HostGeometry)
    except msgspec.ValidationError as error:
        raise unusable(f"{sizes}: {error}") from None


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:ERROR_LENGTH_MAX]
