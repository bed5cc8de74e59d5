"""The copier of blocks between a device and the host pool: batches become calls of the driver, a few of them at a time.

Each direction has a stream of its own. Pieces whose bytes follow each other on both sides are one copy; the driver
itself would not merge them. Pieces at even distances are the rows of one copy.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from kvcached_client.blocks.checksums import Checksums, Runs, ended, spare_threads
from kvcached_client.blocks.copy import Batch, passing
from kvcached_client.cuda.allocations import Allocations
from kvcached_client.cuda.device import Device
from kvcached_client.cuda.driver import Event, Stream
from kvcached_client.cuda.rows import Numbers, Pieces, addressed, merged, split

if TYPE_CHECKING:
    from kvcached_client.cuda.engine import Mark

#: Batches that are queued before the first of them is waited for: the device always has the next one.
AHEAD_MAX: Final = 2
#: Layers of small pages are loaded some at a time, as rows: the more rows a copy has, the faster it is.
_SMALL_PAGE_BYTES: Final = 32 << 10
_SMALL_LAYERS_AT_ONCE: Final = 16
#: Likewise of few blocks: a device copies so many bytes while the next batch is planned.
_LAYERS_BYTES_MIN: Final = 2 << 20


class _UnderWay(NamedTuple):
    """A batch that is queued. The driver may read the arrays until the event is over.

    Attributes:
        before: the work before an end of a transfer. Who waits for the end sleeps until then.
    """

    batch: Batch
    stream: Stream
    before: Event | None
    arrays: Pieces
    event: Event

    def close(self) -> None:
        """Destroy the events."""
        if self.before is not None:
            self.before.close()
        self.event.close()


class CudaCopier:
    """A `Copier` between memory of a device and the host pool. Used by one thread for each direction.

    Args:
        device: whose context is current to these threads.
        host: addresses of the host pool.
    """

    def __init__(self, device: Device, host: range) -> None:
        self._host = host
        self._pitch_max = device.attribute("MAX_PITCH")
        self._allocations = Allocations(device.driver)
        self._checksums = Checksums(threads=spare_threads(device.driver.devices()))
        self._known: tuple[array[int], Numbers] = array("q"), np.zeros((3, 0), np.int64)
        self._to_host = device.make_stream()
        try:
            self._to_device = device.make_stream()
        except BaseException:
            self._to_host.close()
            raise

    def layers_at_once(self, page_bytes: int, blocks: int) -> int:
        """See `Copier.layers_at_once`."""
        fewest = _SMALL_LAYERS_AT_ONCE if page_bytes < _SMALL_PAGE_BYTES else 1
        return max(fewest, _LAYERS_BYTES_MIN // max(1, page_bytes * blocks))

    def allocations(self, addresses: Sequence[int]) -> Sequence[int]:
        """See `Copier.allocations`."""
        found: list[int] = self._allocations.starts(np.array(addresses, np.int64)).tolist()
        return found

    def wait(self, mark: Mark) -> None:
        """Copies from now on begin when the work before the mark is over. The caller does not wait."""
        mark.hold(self._to_host)
        mark.hold(self._to_device)

    def copy(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """See `Copier.copy`."""
        queued: deque[_UnderWay] = deque()
        try:
            for batch in passing(batches):
                queued.append(self._queue(batch))
                if len(queued) > AHEAD_MAX or queued[0].event.is_over():
                    yield _finished(queued)
            while queued:
                yield _finished(queued)
        finally:
            _abandon(queued)

    def copy_summed(self, batches: Iterable[Batch], per_sum: int) -> Iterator[bytes]:
        """See `Copier.copy_summed`. The bytes are summed on the host, after the copy, while further batches are copied.

        Where the host is the source somebody may write the slot between the copy and the sum. Its header tells of that.
        """
        with ended([]) as under_way:
            for batch in self.copy(batches):
                before = len(under_way)
                under_way.extend(self._checksums.begin(self._blocks_of(batch, per_sum)))
                if before:
                    yield b"".join(part.sums() for part in under_way[:before])
                    del under_way[:before]
            if under_way:
                yield b"".join(part.sums() for part in under_way)

    def sums(self, blocks: Iterable[Runs]) -> Generator[bytes]:
        """See `Copier.sums`."""
        return self._checksums.each(blocks)

    def move(self, batch: Batch) -> None:
        """Copy pieces between any memory of the device and of this process; return when they are where they belong."""
        queued = deque([self._queue(batch)])
        try:
            _finished(queued)
        finally:
            _abandon(queued)

    def close(self) -> None:
        """Wait for the copies that are queued, and destroy the streams. Does nothing the second time.

        Raises:
            CudaFailure: the device has failed.
        """
        self._checksums.close()
        try:
            self._to_host.finish()
        finally:
            self._to_device.finish()

    def _queue(self, batch: Batch) -> _UnderWay:
        to_host = self._is_to_host(batch)
        stream = self._to_host if to_host else self._to_device
        before = stream.record() if batch.is_end else None
        try:
            sent = self._send(batch, stream, to_host=to_host)
            return _UnderWay(batch, stream, before, sent, stream.record(spins=batch.is_end))
        except BaseException:
            try:
                stream.synchronize()  # some of the batch may be queued, and nobody would wait for it
            finally:
                if before is not None:
                    before.close()
            raise

    def _send(self, batch: Batch, stream: Stream, *, to_host: bool) -> Pieces:
        """Queue a batch; returns the arrays that the driver may read until they are copied."""
        if batch.per_block > 1 and (to_host or self._is_from_host(batch)):
            numbers = np.frombuffer(batch.pieces, np.int64).reshape(-1, batch.per_block, 3)
            base, column = (batch.source, 1) if to_host else (batch.destination, 0)
            allocations = self._allocations.starts(numbers[0, :, column] + base)
            rows, pieces = split(numbers, batch.destination, batch.source, self._pitch_max, allocations)
            if rows is not None:
                stream.copy_rows(rows, to_host=to_host)
        else:
            pieces = self._pieces(batch)
        if len(pieces[0]):
            stream.copy(*pieces)
        return pieces

    def _pieces(self, batch: Batch) -> Pieces:
        """As few pieces as possible. They are computed once for layers that share them."""
        known = self._known
        if known[0] is not batch.pieces:
            known = (batch.pieces, merged(np.frombuffer(batch.pieces, np.int64).reshape(-1, 3)))
            self._known = known
        return addressed(known[1], batch.destination, batch.source)

    def _blocks_of(self, batch: Batch, per_sum: int) -> list[Runs]:
        """The bytes of each block of a batch, on the host. In the host pool, they are one run."""
        to_host = self._is_to_host(batch)
        base, column = (batch.destination, 0) if to_host else (batch.source, 1)
        pieces = np.frombuffer(batch.pieces, np.int64).reshape(-1, per_sum, 3)
        starts, sizes = pieces[:, :, column] + base, pieces[:, :, 2]
        if (starts[:, :-1] + sizes[:, :-1] == starts[:, 1:]).all():
            return [[run] for run in zip(starts[:, 0].tolist(), sizes.sum(1).tolist(), strict=True)]
        return [list(zip(*block, strict=True)) for block in zip(starts.tolist(), sizes.tolist(), strict=True)]

    def _is_to_host(self, batch: Batch) -> bool:
        return bool(batch.pieces) and batch.destination + batch.pieces[0] in self._host

    def _is_from_host(self, batch: Batch) -> bool:
        return bool(batch.pieces) and batch.source + batch.pieces[1] in self._host


def _abandon(queued: deque[_UnderWay]) -> None:
    """Nobody takes these any more, but their memory is in use until they are over."""
    for stream in {each.stream for each in queued}:
        stream.synchronize()
    for each in queued:
        each.close()


def _finished(queued: deque[_UnderWay]) -> Batch:
    """The first batch, once it is over."""
    first = queued[0]
    if first.before is not None:
        first.before.synchronize()
    first.event.synchronize()
    queued.popleft().close()
    return first.batch
