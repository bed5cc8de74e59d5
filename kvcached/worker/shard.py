"""A shard of a replica as its worker has it: the memory, and what carries out copies in it.

`BlockTransfers` copies the bytes, as in an engine's own processes.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, starmap

from kvcached.core.messages import Span
from kvcached.core.slots.ranges import Ranges, pairs
from kvcached.memory.progress import ProgressPage
from kvcached.memory.sealed import SharedMemory
from kvcached.worker.messages import (
    CORRUPT_BLOCKS_MAX,
    DESCRIPTORS_MAX,
    HostRegistered,
    Load,
    Probe,
    Store,
    WorkerConfig,
)
from kvcached.worker.pool_memory import open_memory
from kvcached.worker.probe import DevicePool, probe
from kvcached_client.blocks.jobs import BlockJob, JobSpan
from kvcached_client.blocks.transfers import BlockTransfers
from kvcached_client.failpoints import failpoint
from kvcached_client.types import KEY_SIZE_BYTES, TransferId


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

    def begin(self, tell: Callable[[HostRegistered], None]) -> None:
        """See `PoolMemory.begin`."""
        self._memory.begin(tell)

    def carry_out(self, task: Store | Load | Probe) -> tuple[int, ...]:
        """Carry out one request. Called from a thread for stores and a thread for all else.

        Returns:
            The corrupt blocks of a load.

        Raises:
            ValueError, BadRequest: it names what this worker does not have.
            CorruptCopy: a probe read back other bytes than it wrote.
            DeviceError: the device refused it; nothing of it is under way any more. See `device_works`.
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

    def device_works(self) -> bool:
        """See `PoolMemory.works`."""
        return self._memory.works()

    def _host_transfers(self) -> WorkerTransfers:
        if self._transfers is None:
            raise ValueError("this worker has no host pool")
        return self._transfers


def _mapped(descriptor: int, size_bytes: int) -> SharedMemory:
    memory = SharedMemory(descriptor, size_bytes)
    os.close(descriptor)
    return memory


class WorkerTransfers:
    """Carries out stores and loads. Used by one thread for each of the two.

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
                trusted_epoch=work.trusted_epoch,
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
