"""Stores and loads of one shard: blocks between its device pool and its part of the host pool, proven by headers.

A block in the host pool is what its header says, and nothing else is believed: a header is gone before its slot is
overwritten and comes back when the block is complete, and a load begins by looking at all headers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import xxhash

from kvcached.worker.copier import Copier, SlotRun, check_runs, cut_runs, merge_runs, plan_copies
from kvcached.worker.geometry import PoolGeometry
from kvcached.worker.messages import CORRUPT_BLOCKS_MAX, BlockSpan, Load, Store, unpack_slot_ranges
from kvcached.worker.progress import ProgressPage
from kvcached_client import host_header
from kvcached_client.failpoints import failpoint
from kvcached_client.host_geometry import HostGeometry
from kvcached_client.host_header import KEY_BYTES, BlockName, HeaderKind
from kvcached_client.slabs import HEADER_BYTES


class _Block(NamedTuple):
    """One block of a transfer, as it is in the host pool."""

    name: BlockName
    header: memoryview
    content: memoryview


class HostTransfers:
    """Carries out stores and loads. Used by one thread.

    Args:
        pool: where a device slot's bytes are.
        host: where a host slot's bytes are.
        shard: which one this worker is: what part of each slab it has, or what share of each store.
        copier: copies between the two.
        memory: the host pool.
        progress: where loads tell how far they are.
        namespace, fingerprint: whose blocks these are, as headers say it; 16 bytes each.

    Raises:
        ValueError: a block of the device pool is none of the host pool, or the shard has no part of it.
    """

    def __init__(
        self,
        pool: PoolGeometry,
        host: HostGeometry,
        shard: int,
        copier: Copier,
        memory: memoryview,
        progress: ProgressPage,
        *,
        namespace: bytes,
        fingerprint: bytes,
    ) -> None:
        if pool.slot_bytes != host.block_bytes:
            raise ValueError(f"device blocks have {pool.slot_bytes} bytes, host blocks {host.block_bytes}")
        if not shard < host.shards:
            raise ValueError(f"shard {shard}: the host pool has parts for {host.shards}")
        self._pool = pool
        self._host = host
        self._shard = shard
        self._copier = copier
        self._memory = memory
        self._progress = progress
        self._namespace = namespace
        self._fingerprint = fingerprint

    def store(self, work: Store) -> None:
        """Copy this shard's blocks into the host pool. After any other error than these, none of their slots holds one.

        Raises:
            ValueError: keys and slots do not pair, a slot does not exist or is named twice; nothing was touched.
        """
        runs = self._runs(work.spans)
        blocks = list(self._blocks(work.spans))
        mine = self._host.share(len(blocks), self._shard)
        runs, blocks = cut_runs(runs, mine), blocks[mine]
        kind = self._kind(work.generation)
        failpoint("worker.store.begin")
        for block in blocks:
            host_header.invalidate(block.header)
        failpoint("worker.store.cleared")
        for strip in plan_copies(self._pool, self._host, self._shard, runs, to_host=True):
            failpoint("worker.store.copying")
            self._copier.to_host(strip)
        failpoint("worker.store.copied")
        headers = [
            host_header.pack(kind, block.name, xxhash.xxh3_128_digest(block.content), work.epoch, work.transfer)
            for block in blocks
        ]
        for block, header in zip(blocks, headers, strict=True):
            failpoint("worker.store.header")
            host_header.write(block.header, header)
        failpoint("worker.store.written")

    def load(self, work: Load) -> tuple[int, ...]:
        """Copy blocks out of the host pool, up to the first that is not the one that was stored there.

        Its progress entry tells of layers only where all blocks are good: a layer of some blocks is no layer.

        Returns:
            The blocks that are not good, counted from 0, at most `CORRUPT_BLOCKS_MAX`; empty where all were copied.

        Raises:
            ValueError: keys and slots do not pair, a slot does not exist or is named twice; nothing was touched.
        """
        self._progress.begin(work.progress, work.transfer)
        try:
            failpoint("worker.load.begin")
            bad = self._copy_good_blocks(work)
            failpoint("worker.load.copied")
        except BaseException:
            self._progress.fail(work.progress, work.transfer)
            raise
        if bad:
            self._progress.fail(work.progress, work.transfer)
        else:
            self._progress.succeed(work.progress)
        return bad

    def _copy_good_blocks(self, work: Load) -> tuple[int, ...]:
        runs = self._runs(work.spans)
        bad = tuple(islice(self._bad_blocks(work), CORRUPT_BLOCKS_MAX))
        if bad:
            runs = cut_runs(runs, slice(bad[0]))
        for strip in plan_copies(self._pool, self._host, self._shard, runs, to_host=False):
            failpoint("worker.load.copying")
            self._copier.to_device(strip)
            if not bad:
                self._progress.advance(work.progress)
        return bad

    def _bad_blocks(self, work: Load) -> Iterator[int]:
        kind = self._kind(work.generation)
        for index, block in enumerate(self._blocks(work.spans)):
            checksum = host_header.stored_checksum(block.header, kind, block.name)
            if checksum is None or (work.verify and checksum != xxhash.xxh3_128_digest(block.content)):
                yield index

    def _runs(self, spans: Sequence[BlockSpan]) -> list[SlotRun]:
        runs: list[SlotRun] = []
        for span in spans:
            merged = merge_runs(unpack_slot_ranges(span.device), unpack_slot_ranges(span.host))
            keys, rest = divmod(len(span.keys), KEY_BYTES)
            slots = sum(run.slots for run in merged)
            if rest or keys != slots:
                raise ValueError(f"{len(span.keys)} bytes of keys do not pair with {slots} slots")
            if len(span.parent) not in (0, KEY_BYTES):
                raise ValueError(f"parent of {len(span.parent)} bytes")
            runs += merged
        check_runs(runs, self._pool.slots, self._host.slots)
        return runs

    def _blocks(self, spans: Sequence[BlockSpan]) -> Iterator[_Block]:
        host, shard, memory = self._host, self._shard, self._memory
        for span in spans:
            slots = (slot for first, count in unpack_slot_ranges(span.host) for slot in range(first, first + count))
            parent = span.parent
            for index, slot in enumerate(slots):
                key = span.keys[index * KEY_BYTES : (index + 1) * KEY_BYTES]
                header, content = host.header_offset(slot, shard), host.block_offset(slot, shard)
                yield _Block(
                    BlockName(key, parent, span.depth + index),
                    memory[header : header + HEADER_BYTES],
                    memory[content : content + host.block_bytes],
                )
                parent = key

    def _kind(self, generation: int) -> HeaderKind:
        return HeaderKind(self._namespace, self._fingerprint, generation)
