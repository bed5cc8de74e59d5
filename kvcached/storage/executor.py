"""Carries out one request in the storage process: frames and checksums between a backend and the host pool.

Blocks go from the host pool to the backend and back without an intermediate copy. A block is written to storage with
the checksums of its store in the host pool. A fetched block gets its header in the host pool only if its bytes match
these checksums, so the same checksums cover a block from the engine's store to the last load.

In a canonical layout, a block is rearranged in memory of this process. It then has other checksums there: they are
taken of bytes that came from bytes whose checksums were compared, in both directions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple, TypeVar

import numpy as np
from xxhash import xxh3_128_digest

from kvcached.core.messages import Span
from kvcached.core.slots.ranges import Ranges, pairs
from kvcached.storage import frame
from kvcached.storage.backend import STORED_KEY_BYTES, Block, Outcome, Result, Storage, StorageGone
from kvcached.storage.canonical import Rearrangement
from kvcached.storage.frame import FRAME_BYTES, StoredBlock, StoredKind
from kvcached.storage.messages import (
    Backup,
    BlockFormat,
    Delete,
    Done,
    Fetch,
    Forget,
    Ping,
    Query,
    ReadRecord,
    Request,
    WriteRecord,
)
from kvcached.storage.shared_records import SharedRecords
from kvcached.storage.tiers.full_pauses import FullPauses
from kvcached_client.blocks import header as host_header
from kvcached_client.blocks.header import BlockName, HeaderKind
from kvcached_client.blocks.host_layout import HEADER_BYTES
from kvcached_client.types import KEY_SIZE_BYTES

T = TypeVar("T")


#: Blocks that one thread rearranges are at most so many bytes at a time, or one block.
STAGED_BYTES_MAX: Final = 32 << 20


class _Slot(NamedTuple):
    """A block's name, and its place in the host pool on each shard."""

    name: BlockName
    headers: list[memoryview]
    parts: list[memoryview]


class _Staged(NamedTuple):
    """A block on its way: its frame, and its bytes as storage has them, which are in the host pool or beside it."""

    slot: _Slot
    frame: memoryview
    parts: Sequence[memoryview]

    def block(self, kind: StoredKind) -> Block:
        """What the backend gets."""
        return Block(kind.prefix() + self.slot.name.key, (self.frame, *self.parts))


class HostCopies:
    """Carries out requests. Used by several threads.

    Args:
        memory: the host pool.
        backend: the storage backend.
        timeout_s: how long one call of the backend may take.
        records: carries out what is about the record of generations; None where nothing is.
        pauses: of writes while the backend has no room; None for a backend that has its own.
    """

    def __init__(
        self,
        memory: memoryview,
        backend: Storage,
        timeout_s: float,
        records: SharedRecords | None = None,
        pauses: FullPauses | None = None,
    ) -> None:
        self._memory = memory
        self._backend = backend
        self._timeout_s = timeout_s
        self._records = records
        self._pauses = pauses

    def carry_out(self, request: Request, progress: Callable[[], None] = lambda: None) -> Done:
        """Carry out a request. An error of the backend is in the report.

        Args:
            request: what to do.
            progress: called between two calls of the backend, and in those that may take long.

        Raises:
            StorageGone: the backend has to be opened anew.
        """
        try:
            done = self._carry_out(request, progress)
        except StorageGone:
            raise
        except Exception as error:  # noqa: BLE001 - a backend may raise anything, and the daemon has to hear of it
            done = Done(sequence=request.sequence, failed=True, error=f"{type(error).__name__}: {error}")
        return done

    def _carry_out(self, request: Request, progress: Callable[[], None]) -> Done:
        match request:
            case Fetch():
                return self._fetch(request, progress)
            case Backup():
                return self._back_up(request, progress)
            case ReadRecord() | WriteRecord():
                if self._records is None:
                    raise NotImplementedError("a record without memory for it")
                return self._records.carry_out(request)
            case Query():
                count = self._find(request, progress)
            case Delete():
                return self._delete(request, progress)
            case Forget():
                count = self._backend.clear(request.prefix, timeout_s=self._timeout_s, progress=progress)
                self._note_room()
            case Ping():
                self._backend.exists([bytes(STORED_KEY_BYTES)], timeout_s=self._timeout_s)
                count = 0
        return Done(sequence=request.sequence, count=count)

    def _find(self, request: Query, progress: Callable[[], None]) -> int:
        prefix, found = request.format.stored().prefix(), 0
        keys = [prefix + key for key in _split(request.keys)]
        for some in _batches(keys, self._backend.capabilities.batch_blocks, progress):
            there = self._backend.exists(some, timeout_s=self._timeout_s)
            if not all(there):
                return found + there.index(False)
            found += len(some)
        return found

    def _delete(self, request: Delete, progress: Callable[[], None]) -> Done:
        if not self._backend.capabilities.deletes:
            return Done(sequence=request.sequence, count=-1)
        keys = [request.prefix + key for key in _split(request.keys)]
        batches = _batches(keys, self._backend.capabilities.batch_blocks, progress)
        count = sum(self._backend.delete(some, timeout_s=self._timeout_s) for some in batches)
        if count:
            self._note_room()
        return Done(sequence=request.sequence, count=count, error=self._backend.unsettled(keys))

    # --- from storage -----------------------------------------------------------------------------------------------

    def _fetch(self, request: Fetch, progress: Callable[[], None]) -> Done:
        kind, stored = request.format, request.format.stored()
        headers = HeaderKind(kind.header_namespace, kind.fingerprint, kind.header_generation)
        good = wrong = 0
        for some in _batches(list(self._slots(kind, request.span)), self._at_once(kind), progress):
            for slot in some:
                for header in slot.headers:
                    header[:] = bytes(HEADER_BYTES)  # also over a claim: no other process writes here
            staged = _staged(kind, some)
            results = self._backend.get([each.block(stored) for each in staged], timeout_s=self._timeout_s)
            for each, result in zip(staged, results, strict=True):
                slot, failure = each.slot, result.outcome is Outcome.FAILED
                sums = _arrived(kind, stored, each) if result.outcome is Outcome.DONE else None
                if sums is None:
                    if result.outcome in {Outcome.DONE, Outcome.WRONG}:
                        wrong += 1
                        self._drop_wrong(stored, slot)
                    return _done(request.sequence, good, result if failure else None, wrong=wrong)
                for header, checksum in zip(slot.headers, sums, strict=True):
                    packed = host_header.pack(headers, slot.name, checksum, request.epoch, request.transfer)
                    host_header.write(header, packed)
                good += 1
        return Done(sequence=request.sequence, count=good)

    def _drop_wrong(self, kind: StoredKind, slot: _Slot) -> None:
        """Delete a wrong block. Where that fails, as on a full disk, the blocks before it are still good."""
        with contextlib.suppress(Exception):  # of any backend; the block is found wrong again
            self._backend.discard([kind.prefix() + slot.name.key], timeout_s=self._timeout_s)

    # --- to storage -------------------------------------------------------------------------------------------------

    def _back_up(self, request: Backup, progress: Callable[[], None]) -> Done:
        stored = request.format.stored()
        slots = [slot for span in request.spans for slot in self._slots(request.format, span)]
        done = written = 0
        for some in _batches(slots, self._at_once(request.format), progress):
            refusal = None if self._pauses is None else self._pauses.refusal(stored.prefix())
            if refusal is not None:
                return _done(request.sequence, done, refusal, written=written)
            keys = [stored.prefix() + slot.name.key for slot in some]
            lacks = self._backend.missing(keys, timeout_s=self._timeout_s)
            progress()
            missing = [slot for slot, is_missing in zip(some, lacks, strict=True) if is_missing]
            put, failure = self._put(request.format, stored, missing)
            written += put
            if failure is not None:
                first, result = failure
                done += next(at for at, slot in enumerate(some) if slot is first)
                return _done(request.sequence, done, result, written=written)
            done += len(some)
        return Done(sequence=request.sequence, count=done, written=written)

    def _put(
        self, kind: BlockFormat, stored: StoredKind, slots: Sequence[_Slot]
    ) -> tuple[int, tuple[_Slot, Result] | None]:
        """Write blocks; returns how many were written, and the first that could not be, with why."""
        if not slots:
            self._note(stored, [])
            return 0, None
        headers = HeaderKind(kind.header_namespace, kind.fingerprint, kind.header_generation)
        whole: list[_Staged] = []
        for each in _staged(kind, slots):
            sums = _leaving(kind, headers, each)
            if sums is None:  # the slot does not hold that block: a bit has changed; a load finds that, too
                continue
            name = each.slot.name
            each.frame[:] = frame.pack(stored, StoredBlock(name.key, name.parent, name.depth, sums))
            whole.append(each)
        blocks = [each.block(stored) for each in whole]
        results = self._backend.put(blocks, timeout_s=self._timeout_s) if blocks else []
        self._note(stored, results)
        failed = [
            (each.slot, result)
            for each, result in zip(whole, results, strict=True)
            if result.outcome is not Outcome.DONE
        ]
        return len(whole) - len(failed), failed[0] if failed else None

    def _note(self, stored: StoredKind, results: Sequence[Result]) -> None:
        if self._pauses is not None:
            self._pauses.note(stored.prefix(), results)

    def _note_room(self) -> None:
        if self._pauses is not None:
            self._pauses.forget()

    def _at_once(self, kind: BlockFormat) -> int:
        """How many blocks one call of the backend is about."""
        most = self._backend.capabilities.batch_blocks
        if kind.canonical is None:
            return most
        return max(min(most, STAGED_BYTES_MAX // (kind.geometry.parts * kind.geometry.block_bytes)), 1)

    def _slots(self, kind: BlockFormat, span: Span) -> Iterator[_Slot]:
        geometry, parent = kind.geometry, span.parent
        shards = range(geometry.parts)
        for index, (key, slot) in enumerate(zip(_split(span.keys), _each(span.host), strict=True)):
            headers = [geometry.header_offset(slot, shard) for shard in shards]
            parts = [geometry.block_offset(slot, shard) for shard in shards]
            yield _Slot(
                BlockName(key, parent, span.depth + index),
                [self._memory[at : at + HEADER_BYTES] for at in headers],
                [self._memory[at : at + geometry.block_bytes] for at in parts],
            )
            parent = key


def _is_next(block: StoredBlock, name: BlockName) -> bool:
    """Whether a block's depth and parent are those of the chain; the right key alone is not enough."""
    return (block.parent, block.depth) == (name.parent, name.depth)


def _done(sequence: int, count: int, failure: Result | None, *, written: int = 0, wrong: int = 0) -> Done:
    failed = failure is not None and failure.outcome is Outcome.FAILED
    error = "" if failure is None else f"{failure.outcome}: {failure.detail}"
    return Done(sequence=sequence, count=count, written=written, wrong=wrong, failed=failed, error=error)


def _staged(kind: BlockFormat, slots: Sequence[_Slot]) -> list[_Staged]:
    """Frames for blocks, and memory for those that are rearranged."""
    frames = _pages(len(slots), FRAME_BYTES)
    if kind.canonical is None:
        return [_Staged(slot, page, slot.parts) for slot, page in zip(slots, frames, strict=True)]
    values = _pages(len(slots), kind.geometry.parts * kind.geometry.block_bytes)
    return [_Staged(slot, page, (value,)) for slot, page, value in zip(slots, frames, values, strict=True)]


def _pages(count: int, size_bytes: int) -> list[memoryview]:
    """So many pieces of memory, each of which begins at a page."""
    stride = -(-size_bytes // FRAME_BYTES) * FRAME_BYTES
    raw = np.zeros(count * stride + FRAME_BYTES, np.uint8)
    start = -raw.ctypes.data % FRAME_BYTES
    return [raw.data[at : at + size_bytes] for at in range(start, start + count * stride, stride)]


def _leaving(kind: BlockFormat, headers: HeaderKind, staged: _Staged) -> tuple[bytes, ...] | None:
    """Checksums of a block that goes to storage, as storage has it; None if its slot holds another, or wrong bytes."""
    slot = staged.slot
    told = [host_header.stored_checksum(header, headers, slot.name) for header in slot.headers]
    sums = tuple(each for each in told if each is not None)
    if len(sums) < len(told):
        return None
    if kind.canonical is None:
        return sums
    rearrangement, (value,) = Rearrangement.of(kind.canonical, kind.geometry), staged.parts
    rearrangement.to_canonical(slot.parts, value)
    # After the copy: what was wrong when it was copied, or became wrong meanwhile, still is.
    if sums != tuple(map(xxh3_128_digest, slot.parts)):
        return None
    return rearrangement.checksums(value)


def _arrived(kind: BlockFormat, stored: StoredKind, staged: _Staged) -> tuple[bytes, ...] | None:
    """Checksums of a block that has come to the host pool; None if it is another one, or its bytes are wrong."""
    name = staged.slot.name
    block = frame.unpack(bytes(staged.frame), stored, name.key)
    if block is None or not _is_next(block, name):
        return None
    if kind.canonical is None:
        return block.checksums if frame.is_sound(block, staged.parts) else None
    rearrangement, (value,) = Rearrangement.of(kind.canonical, kind.geometry), staged.parts
    if not frame.is_sound(block, rearrangement.split(value)):
        return None
    # The checksum is of memory that no other process writes: a write into the slot does not get one.
    ours = _pages(len(staged.slot.parts), kind.geometry.block_bytes)
    rearrangement.to_host(value, ours)
    for part, mine in zip(staged.slot.parts, ours, strict=True):
        part[:] = mine
    return tuple(map(xxh3_128_digest, ours))


def _split(keys: bytes) -> list[bytes]:
    return [keys[at : at + KEY_SIZE_BYTES] for at in range(0, len(keys), KEY_SIZE_BYTES)]


def _each(slots: Ranges[int]) -> Iterator[int]:
    return (slot for first, count in pairs(slots) for slot in range(first, first + count))


def _batches(things: Sequence[T], size: int, progress: Callable[[], None]) -> Iterator[Sequence[T]]:
    """Things in batches; there is progress between two of them."""
    for at in range(0, len(things), size):
        if at:
            progress()
        yield things[at : at + size]
