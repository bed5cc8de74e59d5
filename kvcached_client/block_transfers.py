"""Jobs of one shard in attached mode: what is checked before and said beside the copies.

A header is zero from before the first byte of a job's blocks is written until all of them are there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvcached_client.block_job import BlockJob, JobSpan
from kvcached_client.engine_pages import EnginePages
from kvcached_client.errors import ErrorCode, RequestError, request_error
from kvcached_client.failpoints import failpoint
from kvcached_client.header_table import BlockNames, HeaderTable, Rows, pack, stored_checksums
from kvcached_client.host_geometry import HostGeometry
from kvcached_client.host_header import KEY_BYTES, HeaderKind
from kvcached_client.mapping import Buffer
from kvcached_client.page_copier import PageCopier
from kvcached_client.slabs import HEADER_BYTES

_DEPTH_MAX: Final = 1 << 32


class _Blocks(NamedTuple):
    """The blocks of a job that was found sound, one row for each."""

    names: BlockNames
    blocks: npt.NDArray[np.int64]
    headers: npt.NDArray[np.int64]  #: where they are in the host pool, in bytes
    places: npt.NDArray[np.int64]  #: the same for the blocks


class BlockTransfers:
    """Carries out stores and loads. Used by one thread.

    Args:
        pages: of the engine, whose blocks are as large as the host pool's.
        host: where a host slot's bytes are.
        shard: which one this process is: what part of each slab it has, or what share of each store.
        memory: the host pool, writable.
        namespace, fingerprint: whose blocks these are, as headers say it; 16 bytes each.
        epoch: of the daemon, for the headers.
    """

    def __init__(
        self,
        pages: EnginePages,
        host: HostGeometry,
        shard: int,
        memory: Buffer,
        *,
        namespace: bytes,
        fingerprint: bytes,
        epoch: int,
    ) -> None:
        self._engine_blocks = pages.blocks
        self._host = host
        self._shard = shard
        self._copier = PageCopier(pages, memory)
        self._table = HeaderTable(memoryview(memory).cast("B"))
        self._namespace = namespace
        self._fingerprint = fingerprint
        self._epoch = epoch

    def store(self, job: BlockJob) -> None:
        """Copy this shard's blocks into the host pool. After any other error than these, none of their slots holds one.

        Raises:
            BadRequest: the job contradicts itself, or names what does not exist; nothing was touched.
        """
        work = self._mine(self._check(job))
        self._table.invalidate(work.headers)
        failpoint("attached.store.cleared")
        checksums = self._copier.to_host(work.blocks, work.places)
        failpoint("attached.store.copied")
        headers = pack(self._kind(job), work.names, checksums, self._epoch, job.transfer)
        self._table.write(work.headers, headers)

    def load(self, job: BlockJob, *, verify: bool) -> list[int]:
        """Copy blocks out of the host pool.

        Headers are read before and after the copy. A daemon that takes the pool over from one that was killed does not
        know of loads that it granted, and may give their slots to others: then the headers have changed.

        Args:
            job: what to copy.
            verify: compare bytes with checksums, too, and not only what headers say of the blocks.

        Returns:
            The blocks that are not good, counted from 0 in the order of the job: what the engine has of them is not to
            be used. All others were copied.

        Raises:
            BadRequest: as `store`.
        """
        work = self._check(job)
        before = self._table.read(work.headers)
        good, stored = stored_checksums(before, self._kind(job), work.names)
        chosen = np.flatnonzero(good)
        blocks, places = work.blocks[chosen], work.places[chosen]
        if verify:
            found = _rows(self._copier.to_engine_summed(blocks, places))
            good[chosen] = (found == stored[chosen]).all(axis=1)
        else:
            self._copier.to_engine(blocks, places)
        good &= (self._table.read(work.headers) == before).all(axis=1)
        bad: list[int] = np.flatnonzero(~good).tolist()
        return bad

    def _mine(self, work: _Blocks) -> _Blocks:
        mine, names = self._host.share(len(work.blocks), self._shard), work.names
        names = BlockNames(names.keys[mine], names.parents[mine], names.depths[mine])
        return _Blocks(names, work.blocks[mine], work.headers[mine], work.places[mine])

    def _kind(self, job: BlockJob) -> HeaderKind:
        return HeaderKind(self._namespace, self._fingerprint, job.generation)

    def _check(self, job: BlockJob) -> _Blocks:
        if not job.spans:
            raise _bad("no blocks", "leave the job out")
        for span in job.spans:
            _check_span(span)
        blocks = _indices("engine block", (span.blocks for span in job.spans), self._engine_blocks)
        slots = _indices("host slot", (span.slots for span in job.spans), self._host.slots)
        slabs, index = np.divmod(slots, self._host.slots_per_slab)
        slab_starts = slabs * self._host.slab_bytes
        return _Blocks(
            _names(job.spans),
            blocks,
            slab_starts + self._host.header_offset(0, self._shard) + index * HEADER_BYTES,
            slab_starts + self._host.block_offset(0, self._shard) + index * self._host.block_bytes,
        )


def _check_span(span: JobSpan) -> None:
    keys, rest = divmod(len(span.keys), KEY_BYTES)
    if rest or not keys or not keys == len(span.blocks) == len(span.slots):
        raise _bad(
            f"{len(span.keys)} bytes of keys, {len(span.blocks)} blocks and {len(span.slots)} slots",
            f"give {KEY_BYTES} bytes, a block and a slot for each",
        )
    if not 0 <= span.depth <= _DEPTH_MAX - keys:
        raise _bad(f"depth {span.depth}", f"give the number of blocks before the first one, below {_DEPTH_MAX}")
    if len(span.parent) != (KEY_BYTES if span.depth else 0):
        raise _bad(
            f"a parent of {len(span.parent)} bytes at depth {span.depth}",
            f"give the key before the first one, {KEY_BYTES} bytes; none at depth 0",
        )


def _indices(kind: str, parts: Iterable[npt.NDArray[np.integer]], limit: int) -> npt.NDArray[np.int64]:
    found = np.concatenate([np.asarray(part, np.int64) for part in parts])
    ordered = np.sort(found)
    if not 0 <= ordered[0] <= ordered[-1] < limit:
        raise _bad(f"{kind}s from {ordered[0]} to {ordered[-1]} of {limit}", "name those that exist")
    if (ordered[1:] == ordered[:-1]).any():
        raise _bad(f"a {kind} is named twice", "name each once")
    return found


def _names(spans: Iterable[JobSpan]) -> BlockNames:
    keys, parents = b"", b""
    depths: list[int] = []
    for span in spans:
        keys += span.keys
        parents += (span.parent or bytes(KEY_BYTES)) + span.keys[:-KEY_BYTES]
        depths += range(span.depth, span.depth + len(span.keys) // KEY_BYTES)
    return BlockNames(_rows(keys), _rows(parents), np.array(depths, np.int64))


def _rows(keys: bytes) -> Rows:
    return np.frombuffer(keys, np.uint8).reshape(-1, KEY_BYTES)


def _bad(message: str, fix: str) -> RequestError:
    return request_error(ErrorCode.BAD_VALUE, f"job: {message}", fix)
