"""The stores and loads of a worker: `BlockTransfers`, ordered by messages, with loads that tell how far they are."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import partial
from itertools import chain, starmap

from kvcached.memory.progress import ProgressPage
from kvcached.worker.messages import CORRUPT_BLOCKS_MAX, BlockSpan, Load, Store, unpack_slot_ranges
from kvcached_client.blocks.job import BlockJob, JobSpan
from kvcached_client.blocks.transfers import BlockTransfers
from kvcached_client.failpoints import failpoint
from kvcached_client.types import KEY_SIZE_BYTES, TransferId


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


def _span(span: BlockSpan) -> JobSpan:
    blocks = len(span.keys) // KEY_SIZE_BYTES
    device, host = (_slots(unpack_slot_ranges(packed), blocks) for packed in (span.device, span.host))
    return JobSpan(span.depth, span.parent, span.keys, device, host)


def _slots(ranges: Sequence[tuple[int, int]], blocks: int) -> array[int]:
    """The slots of ranges, of which nothing is made before their number is known."""
    for first, count in ranges:
        if count <= 0:
            raise ValueError(f"slot range ({first}, {count}) is empty")
    if (slots := sum(count for _, count in ranges)) != blocks:
        raise ValueError(f"{slots} slots for {blocks} keys")
    return array("q", chain.from_iterable(starmap(lambda first, count: range(first, first + count), ranges)))
