"""Stores and loads of one shard: copies of blocks between its pages and its part of the host pool, proven by headers.

Shards of engines in offload mode and workers of the daemon use the same code. Only the header proves which block a host
slot holds: it is cleared before the first byte of the slot is written, and written when the block is complete. A load
copies only blocks whose headers match.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from itertools import chain, islice
from typing import Final, NamedTuple

from kvcached_client.blocks import header as host_header
from kvcached_client.blocks.copy import Batch, Copier, CopyPlan, MemoryCopier
from kvcached_client.blocks.header import CHECKSUM_BYTES, BlockNames, HeaderKind
from kvcached_client.blocks.host_layout import HEADER_BYTES, HostGeometry
from kvcached_client.blocks.jobs import BlockJob, Indices, JobSpan
from kvcached_client.blocks.mapping import Buffer
from kvcached_client.blocks.pages import BlockPages
from kvcached_client.errors import RequestError, bad_value
from kvcached_client.failpoints import failpoint
from kvcached_client.types import KEY_SIZE_BYTES

_DEPTH_MAX: Final = 1 << 32


class _Blocks(NamedTuple):
    """The blocks of a job that was checked, in columns: an entry for every block."""

    names: BlockNames
    blocks: list[int]  #: indices on the shard
    headers: list[int]  #: offsets of the headers from the start of the host pool
    places: list[int]  #: offsets of the blocks' bytes, likewise


class BlockTransfers:
    """Carries out stores and loads. Used by one thread for stores, and one for loads.

    Args:
        pages: pages of the shard; its blocks are as large as the host pool's.
        host: layout of the host pool.
        shard: index of the shard, which determines its part of each slab, or its share of each store.
        memory: the bytes of the host pool, writable. They must stay mapped while this object is used.
        namespace, fingerprint: those in the blocks' headers; 16 bytes each.
        copier: copies the bytes.
        confirm: called when the bytes of a store are copied, and no header is written; raises where they may be wrong.

    Raises:
        ValueError: the shard's blocks have another size than the host pool's, or the shard has no part of the pool.
    """

    def __init__(
        self,
        pages: BlockPages,
        host: HostGeometry,
        shard: int,
        memory: Buffer | memoryview,
        *,
        namespace: bytes,
        fingerprint: bytes,
        copier: Copier | None = None,
        confirm: Callable[[], None] | None = None,
    ) -> None:
        if (found := sum(layer.page_bytes for layer in pages.layers)) != host.block_bytes:
            raise ValueError(f"the shard's blocks have {found} bytes, those of the host pool {host.block_bytes}")
        if not shard < host.shards:
            raise ValueError(f"shard {shard}: the host pool has parts for {host.shards}")
        self._pages = pages  # keeps the memory of an engine's tensors alive
        self._host = host
        self._shard = shard
        self._memory = memoryview(memory).cast("B")
        self._address = ctypes.addressof(ctypes.c_ubyte.from_buffer(self._memory))
        self._plan = CopyPlan(pages.layers, self._address)
        self._copier: Copier = copier or MemoryCopier()
        self._confirm = confirm
        self._namespace = namespace
        self._fingerprint = fingerprint

    def store(self, job: BlockJob, *, epoch: int) -> None:
        """Copy this shard's blocks into the host pool.

        After any other error than `BadRequest`, the slots hold no blocks.

        Args:
            job: blocks to copy.
            epoch: epoch of the daemon that ordered the store, for the headers.

        Raises:
            BadRequest: the job contradicts itself, or names blocks or slots that do not exist; nothing was written.
        """
        self.store_all((job,), epoch=epoch)

    def store_all(self, jobs: Sequence[BlockJob], *, epoch: int) -> None:
        """As `store` of each job, with one call that copies all blocks: a call costs as much as some blocks.

        After any other error than `BadRequest`, the slots of all jobs hold no blocks.

        Raises:
            BadRequest: as `store`, of any job.
        """
        works, memory = [self._mine(self._check(job)) for job in jobs], self._memory
        headers = [place for work in works for place in work.headers]
        for place in headers:
            host_header.invalidate(memory[place : place + HEADER_BYTES])
        failpoint("blocks.store.cleared")
        blocks, places = (
            [block for work in works for block in work.blocks],
            [at for work in works for at in work.places],
        )
        batches = self._plan.by_block(blocks, places, to_host=True)
        sums = b"".join(self._copier.copy_summed(batches, self._plan.pieces_per_block))
        failpoint("blocks.store.copied")
        if self._confirm is not None:
            self._confirm()
        packed = b"".join(self._packed(jobs, works, sums, epoch))
        for place, header in zip(headers, _split(packed, HEADER_BYTES), strict=True):
            failpoint("blocks.store.header")
            host_header.write(memory[place : place + HEADER_BYTES], header)

    def load(self, job: BlockJob, *, verify: bool, trusted_epoch: int | None = None) -> list[int]:
        """Copy blocks out of host slots that another process may be writing at the same time.

        Headers are read before and after the copy. A daemon that takes over the pool of a killed daemon does not know
        which loads that daemon granted, and may grant their slots again: then the headers have changed.

        Args:
            job: blocks to copy.
            verify: also compare the bytes that arrive with the checksums in the headers.
            trusted_epoch: not those of blocks that were stored in this epoch.

        Returns:
            The bad blocks, counted from 0 in the order of the job; their bytes on the shard must not be used. All
            other blocks were copied.

        Raises:
            BadRequest: as `store`.
        """
        work = self._check(job)
        before = self._read(work.headers)
        stored = host_header.stored_checksums(before, self._kind(job), work.names)
        bad = {index for index, checksum in enumerate(stored) if checksum is None}
        doubted = _doubted(before, verify=verify, trusted_epoch=trusted_epoch)
        summed = [index for index in doubted if stored[index] is not None]
        sums = b"".join(self._copier.copy_summed(self._to_shard(work, summed), self._plan.pieces_per_block))
        found = zip(summed, _split(sums, CHECKSUM_BYTES), strict=True)
        for _ in self._copier.copy(self._to_shard(work, sorted(set(range(len(stored))) - bad - set(summed)))):
            pass
        bad.update(index for index, checksum in found if checksum != stored[index])
        bad.update(_changed(before, self._read(work.headers)))
        return sorted(bad)

    def load_by_layer(
        self,
        job: BlockJob,
        *,
        verify: bool,
        trusted_epoch: int | None = None,
        bad_max: int,
        layer_done: Callable[[], None],
    ) -> tuple[int, ...]:
        """Copy blocks layer by layer, up to the first bad block, out of host slots that no process writes meanwhile.

        Args:
            job: blocks to copy.
            verify: also compare the blocks' bytes with the checksums in the headers, before the copy.
            trusted_epoch: as in `load`.
            bad_max: upper bound of the bad blocks that are returned.
            layer_done: called when a layer of all blocks has arrived; not called if a block is bad.

        Returns:
            The bad blocks, counted from 0 in the order of the job; empty if all blocks were copied.

        Raises:
            BadRequest: as `store`.
        """
        work = self._check(job)
        headers = self._read(work.headers)
        doubted = set(_doubted(headers, verify=verify, trusted_epoch=trusted_epoch))
        stored = host_header.stored_checksums(headers, self._kind(job), work.names)
        bad = tuple(islice(self._bad_blocks(work, stored, doubted), bad_max))
        stop = bad[0] if bad else len(work.blocks)
        groups = self._plan.layer_groups(self._copier, stop)
        batches = self._plan.by_layer(work.blocks[:stop], work.places[:stop], groups)
        for batch in self._copier.copy(batches):
            for _ in range(0 if bad else batch.layers):
                layer_done()
        return bad

    def _packed(self, jobs: Sequence[BlockJob], works: Sequence[_Blocks], sums: bytes, epoch: int) -> Iterator[bytes]:
        """The headers of each job's blocks, whose checksums are `sums`."""
        at = 0
        for job, work in zip(jobs, works, strict=True):
            end = at + len(work.blocks) * CHECKSUM_BYTES
            yield host_header.pack_all(self._kind(job), work.names, sums[at:end], epoch, job.transfer)
            at = end

    def _bad_blocks(self, work: _Blocks, stored: Sequence[bytes | None], doubted: set[int]) -> Iterator[int]:
        base, size = self._address, self._host.block_bytes
        summed = (work.places[index] for index in range(len(stored)) if index in doubted and stored[index] is not None)
        with closing(self._copier.sums([(base + place, size)] for place in summed)) as sums:
            for index, checksum in enumerate(stored):
                if checksum is None or (index in doubted and checksum != next(sums)):
                    yield index

    def _to_shard(self, work: _Blocks, indices: Sequence[int]) -> Iterator[Batch]:
        """Batches of some blocks of a load."""
        blocks, places = work.blocks, work.places
        return self._plan.by_block([blocks[i] for i in indices], [places[i] for i in indices], to_host=False)

    def _read(self, headers: Sequence[int]) -> bytes:
        return b"".join([self._memory[place : place + HEADER_BYTES] for place in headers])

    def _mine(self, work: _Blocks) -> _Blocks:
        mine, names = self._host.share(len(work.blocks), self._shard), work.names
        of_keys = slice(*(None if end is None else end * KEY_SIZE_BYTES for end in (mine.start, mine.stop)))
        names = BlockNames(names.keys[of_keys], names.parents[of_keys], names.depths[mine])
        return _Blocks(names, work.blocks[mine], work.headers[mine], work.places[mine])

    def _kind(self, job: BlockJob) -> HeaderKind:
        return HeaderKind(self._namespace, self._fingerprint, job.generation)

    def _check(self, job: BlockJob) -> _Blocks:
        if not job.spans:
            raise _bad("no blocks", "leave the job out")
        for span in job.spans:
            _check_span(span)
        blocks = _indices("blocks of the shard", (span.blocks for span in job.spans), self._pages.blocks)
        slots = _indices("host slots", (span.slots for span in job.spans), self._host.slots)
        headers, places = self._host.places(slots, self._shard)
        return _Blocks(_names(job.spans), blocks, headers, places)


def _check_span(span: JobSpan) -> None:
    keys, rest = divmod(len(span.keys), KEY_SIZE_BYTES)
    if rest or not keys or not keys == len(span.blocks) == len(span.slots):
        raise _bad(
            f"{len(span.keys)} bytes of keys, {len(span.blocks)} blocks and {len(span.slots)} slots",
            f"give {KEY_SIZE_BYTES} bytes, a block and a slot for each",
        )
    if not 0 <= span.depth <= _DEPTH_MAX - keys:
        raise _bad(f"depth {span.depth}", f"give the number of blocks before the first one, below {_DEPTH_MAX}")
    if len(span.parent) != (KEY_SIZE_BYTES if span.depth else 0):
        raise _bad(
            f"a parent of {len(span.parent)} bytes at depth {span.depth}",
            f"give the key before the first one, {KEY_SIZE_BYTES} bytes; none at depth 0",
        )


def _indices(kind: str, parts: Iterable[Indices], limit: int) -> list[int]:
    found = [index for part in parts for index in part.tolist()]
    if not 0 <= min(found) <= max(found) < limit:
        raise _bad(f"{kind} from {min(found)} to {max(found)} of {limit}", "name those that exist")
    if len(set(found)) < len(found):
        raise _bad(f"{kind}: one is named twice", "name each once")
    return found


def _names(spans: Sequence[JobSpan]) -> BlockNames:
    parents = [(span.parent or bytes(KEY_SIZE_BYTES)) + span.keys[:-KEY_SIZE_BYTES] for span in spans]
    depths = (range(span.depth, span.depth + len(span.blocks)) for span in spans)
    return BlockNames(b"".join(span.keys for span in spans), b"".join(parents), array("Q", chain(*depths)))


def _doubted(headers: bytes, *, verify: bool, trusted_epoch: int | None) -> Sequence[int]:
    """Indices of the blocks whose bytes are to be compared with their checksums."""
    if not verify:
        return ()
    epochs = host_header.epochs(headers)
    return [index for index, epoch in enumerate(epochs) if epoch != trusted_epoch]


def _changed(before: bytes, after: bytes) -> Iterator[int]:
    """Indices of the headers that differ."""
    if before == after:
        return
    for index, (one, other) in enumerate(zip(_split(before, HEADER_BYTES), _split(after, HEADER_BYTES), strict=True)):
        if one != other:
            yield index


def _split(data: bytes, size: int) -> Sequence[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


def _bad(message: str, fix: str) -> RequestError:
    return bad_value(f"job: {message}", fix)
