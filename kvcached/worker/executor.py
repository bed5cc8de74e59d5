"""What a worker does: it reads requests, carries them out one at a time, and reports each as done.

Requests that somebody waits for go first, mostly. `BlockTransfers` copies the bytes, as in an
engine's own processes.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from array import array
from bisect import insort
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, starmap
from typing import Final

import msgspec

from kvcached.core.messages import Span
from kvcached.core.slots.ranges import Ranges, pairs
from kvcached.memory.progress import ProgressPage
from kvcached.memory.sealed import SharedMemory
from kvcached.process.seqpacket import send, wait_packet
from kvcached.worker.messages import (
    CORRUPT_BLOCKS_MAX,
    DESCRIPTORS_MAX,
    ERROR_SIZE_CHARS_MAX,
    MESSAGE_SIZE_BYTES_MAX,
    REQUESTS_IN_FLIGHT_MAX,
    Done,
    Hurry,
    Load,
    Probe,
    Ready,
    Request,
    Shutdown,
    Store,
    WorkerConfig,
    decode_request,
    encode,
)
from kvcached.worker.pool_memory import open_memory
from kvcached.worker.probe import DevicePool, probe
from kvcached_client.blocks.transfers import BlockJob, BlockTransfers, JobSpan
from kvcached_client.errors import DeviceError
from kvcached_client.failpoints import failpoint
from kvcached_client.types import KEY_SIZE_BYTES, TransferId

Task = Store | Load | Probe

#: So many requests that somebody waits for go before a store that nobody waits for; then it has its turn, for it holds
#: slots on the device and in the host pool until it is over.
PASSES_MAX: Final = 16

_log: Final = logging.getLogger(__name__)


class Serving:
    """Reads the daemon's requests and hands them to an executor, which reports them.

    Args:
        shard: what the requests are about.
        connection: to the daemon, blocking.
    """

    def __init__(self, shard: Shard, connection: socket.socket) -> None:
        self._shard = shard
        self._connection = connection
        self._sequence = 0
        self._executor = Executor(shard.carry_out, self._report, self._hang_up)

    def run(self) -> str:
        """Serve until nothing more is to be done; returns why."""
        self._executor.start()
        try:
            send(self._connection, encode(Ready()))
            while (packet := wait_packet(self._connection, MESSAGE_SIZE_BYTES_MAX, 0)) is not None:
                self._follow(decode_request(packet.data))
        except msgspec.DecodeError as error:
            return f"a request cannot be decoded: {error}"
        except OSError as error:
            return f"the connection broke: {error}"
        return "the daemon has ordered it, or is gone"

    def _hang_up(self) -> None:
        """The executor carries out nothing more: `run` need not wait for requests."""
        self._connection.shutdown(socket.SHUT_RDWR)

    def _follow(self, request: Request) -> None:
        if request.sequence != self._sequence + 1:
            self._refuse(request, f"sequence {request.sequence} after {self._sequence}")
            return
        self._sequence = request.sequence
        if isinstance(request.work, Hurry):  # carried out when it is read, not in its turn
            self._executor.hurry(request.work.transfer)
            self._report(Done(sequence=request.sequence))
            return
        try:
            self._executor.submit(request)
        except NotTaken as reason:
            self._refuse(request, str(reason))

    def _refuse(self, request: Request, reason: str) -> None:
        _log.error("request %d refused: %s", request.sequence, reason)
        if isinstance(request.work, Load):
            self._shard.progress.fail(request.work.progress, request.work.transfer)
        self._report(Done(sequence=request.sequence, error=reason))

    def _report(self, done: Done) -> None:
        self._connection.sendall(encode(done))


class NotTaken(Exception):
    """The executor does not take a request; it will not be carried out."""


def failed(request: Request, error: BaseException) -> Done:
    """The report of a request that an error ended."""
    return Done(sequence=request.sequence, error=f"{type(error).__name__}: {error}"[:ERROR_SIZE_CHARS_MAX])


class Executor:
    """Runs requests off the caller's thread and reports each as done exactly once, failed ones included.

    Loads, probes and urgent stores come before other stores; inside each class the order is that of the sequence
    numbers. A store that becomes urgent takes its place by its own number. `Shutdown` comes last. The thread ends after
    a `Shutdown`, when a report cannot be sent, or when the device has failed: then only another process can use it.

    Args:
        carry_out: called in the executor's thread; returns the corrupt blocks of a load.
        report: called in the executor's thread. An error that it raises ends the executor.
        ended: called in the executor's thread, once, when no further request will be carried out.
    """

    def __init__(
        self,
        carry_out: Callable[[Task], tuple[int, ...]],
        report: Callable[[Done], None],
        ended: Callable[[], None],
    ) -> None:
        self._carry_out = carry_out
        self._report = report
        self._ended = ended
        self._changed = threading.Condition()
        # Guarded by the condition. Of the first two at most REQUESTS_IN_FLIGHT_MAX, each ordered by sequence number.
        self._waited_for: list[Request] = []
        self._others: list[Request] = []
        self._last: list[Request] = []
        self._passed = 0  # requests that went before a store that waits
        self._ending = False
        self._device_failed = False  #: used by the thread only
        # A worker that ends does not wait for a copy that nobody will read.
        self._thread = threading.Thread(target=self._run, name="executor", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Queue a `Task` or a `Shutdown`. Never waits.

        Raises:
            NotTaken: `REQUESTS_IN_FLIGHT_MAX` wait already, or a `Shutdown` came before.
        """
        with self._changed:
            if self._ending:
                raise NotTaken("a shutdown was ordered before")
            if isinstance(request.work, Shutdown):
                self._ending = True
                self._last.append(request)
            elif len(self._waited_for) + len(self._others) >= REQUESTS_IN_FLIGHT_MAX:
                raise NotTaken("too many requests wait")
            elif isinstance(request.work, Store) and not request.work.urgent:
                self._others.append(request)
            else:
                self._waited_for.append(request)
            self._changed.notify()

    def hurry(self, transfer: int) -> None:
        """Somebody waits for a store now. Does nothing where it runs, is over, or is not known."""
        with self._changed:
            for index, request in enumerate(self._others):
                if isinstance(request.work, Store) and request.work.transfer == transfer:
                    insort(self._waited_for, self._others.pop(index), key=lambda other: other.sequence)
                    return

    def _run(self) -> None:
        try:
            while True:
                request = self._next()
                done = self._outcome(request)
                failpoint("worker.ack")
                self._report(done)
                if isinstance(request.work, Shutdown) or self._device_failed:
                    return
        except OSError as error:
            _log.error("cannot report: %s", error)
        finally:
            self._ended()

    def _next(self) -> Request:
        with self._changed:
            while not (queue := self._waited_for or self._others or self._last):
                self._changed.wait()
            if queue is self._waited_for and self._others and self._passed == PASSES_MAX:
                queue = self._others
            self._passed = self._passed + 1 if queue is self._waited_for and self._others else 0
            return queue.pop(0)

    def _outcome(self, request: Request) -> Done:
        corrupt: tuple[int, ...] = ()
        try:
            if isinstance(request.work, Store | Load | Probe):
                corrupt = self._carry_out(request.work)
        except Exception as error:  # noqa: BLE001  whatever went wrong, the daemon waits for an answer
            _log.exception("request %d failed", request.sequence)
            self._device_failed = isinstance(error, DeviceError)
            return failed(request, error)
        return Done(sequence=request.sequence, corrupt=corrupt)


class Shard:
    """A device pool, its progress page, and its part of the host pool, all mapped until the process ends.

    Args:
        config: what to map.
        descriptors: what came with the configuration. Those that are not needed once mapped are closed here.

    Attributes:
        progress: how far loads are.

    Raises:
        ValueError: memory is missing, or not what the configuration says.
        OSError: the kernel refused one of the steps.
        DeviceError: the device is not there, or refused one.
    """

    def __init__(self, config: WorkerConfig, descriptors: Sequence[int]) -> None:
        if len(descriptors) != DESCRIPTORS_MAX - (config.host is None):
            raise ValueError(f"{len(descriptors)} descriptors, and {'a' if config.host else 'no'} host pool")
        pool, *page = descriptors[: DESCRIPTORS_MAX - 1]
        host = None if config.host is None else _mapped(descriptors[-1], config.host.size_bytes)
        self._memory = open_memory(config, pool, host)
        os.close(pool)
        self.progress = ProgressPage.of(page)
        self._pool = DevicePool(config.geometry, self._memory)
        self._transfers: WorkerTransfers | None = None
        if host is not None and config.host is not None:
            transfers = BlockTransfers(
                config.geometry.at(self._memory.address),
                config.host,
                config.shard,
                host.view,
                namespace=config.namespace,
                fingerprint=config.fingerprint,
                copier=self._memory.copier,
            )
            self._transfers = WorkerTransfers(transfers, self.progress)

    def carry_out(self, task: Store | Load | Probe) -> tuple[int, ...]:
        """Carry out one request. Called from one thread.

        Returns:
            The corrupt blocks of a load.

        Raises:
            ValueError, BadRequest: it names what this worker does not have.
            CorruptCopy: a probe read back other bytes than it wrote.
            DeviceError: the device does nothing more for this process.
        """
        self._memory.use()
        match task:
            case Probe():
                probe(self._pool, task)
            case Store():
                self._host_transfers().store(task)
            case Load():
                if self._transfers is None:
                    self.progress.fail(task.progress, task.transfer)
                return self._host_transfers().load(task)
        return ()

    def _host_transfers(self) -> WorkerTransfers:
        if self._transfers is None:
            raise ValueError("this worker has no host pool")
        return self._transfers


def _mapped(descriptor: int, size_bytes: int) -> SharedMemory:
    memory = SharedMemory(descriptor, size_bytes)
    os.close(descriptor)
    return memory


class WorkerTransfers:
    """Carries out stores and loads. Used by one thread.

    Args:
        transfers: of the device pool.
        progress: where loads tell how far they are.
    """

    def __init__(self, transfers: BlockTransfers, progress: ProgressPage) -> None:
        self._transfers = transfers
        self._progress = progress

    def store(self, work: Store) -> None:
        """Copy this shard's blocks into the host pool. After any other error than these, none of their slots holds one.

        Raises:
            ValueError: keys and slots do not pair; nothing was touched.
            BadRequest: a slot does not exist or is named twice; nothing was touched.
        """
        failpoint("worker.store.begin")
        self._transfers.store(_job(work), epoch=work.epoch)
        failpoint("worker.store.written")

    def load(self, work: Load) -> tuple[int, ...]:
        """Copy blocks out of the host pool, up to the first that is not the one that was stored there.

        Its progress entry tells of layers only where all blocks are good: a layer of some blocks is no layer.

        Returns:
            The blocks that are not good, counted from 0, at most `CORRUPT_BLOCKS_MAX`; empty where all were copied.

        Raises:
            ValueError, BadRequest: as `store`.
        """
        self._progress.begin(work.progress, work.transfer)
        try:
            failpoint("worker.load.begin")
            bad = self._transfers.load_by_layer(
                _job(work),
                verify=work.verify,
                bad_max=CORRUPT_BLOCKS_MAX,
                layer_done=partial(self._progress.advance, work.progress),
            )
            failpoint("worker.load.copied")
        except BaseException:
            self._progress.fail(work.progress, work.transfer)
            raise
        if bad:
            self._progress.fail(work.progress, work.transfer)
        else:
            self._progress.succeed(work.progress)
        return bad


def _job(work: Store | Load) -> BlockJob:
    return BlockJob(TransferId(work.transfer), work.generation, tuple(map(_span, work.spans)))


def _span(span: Span) -> JobSpan:
    blocks = len(span.keys) // KEY_SIZE_BYTES
    return JobSpan(span.depth, span.parent, span.keys, _slots(span.device, blocks), _slots(span.host, blocks))


def _slots(ranges: Ranges[int], blocks: int) -> array[int]:
    """The slots of ranges, of which nothing is made before their number is known."""
    found = list(pairs(ranges))
    for first, count in found:
        if count <= 0:
            raise ValueError(f"slot range ({first}, {count}) is empty")
    if (slots := sum(count for _, count in found)) != blocks:
        raise ValueError(f"{slots} slots for {blocks} keys")
    return array("q", chain.from_iterable(starmap(lambda first, count: range(first, first + count), found)))
