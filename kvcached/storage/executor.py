"""Carries out one request in the storage process: frames and checksums between a backend and the host pool.

Blocks go from the host pool to the backend and back without an intermediate copy. A block is written to storage with
the checksums of its store in the host pool. A fetched block gets its header in the host pool only if its bytes match
these checksums, so the same checksums cover a block from the engine's store to the last load.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from kvcached.core.messages import Span
from kvcached.core.slots.ranges import Ranges, pairs
from kvcached.storage import frame
from kvcached.storage.backend import STORED_KEY_BYTES, Block, Outcome, Result, Storage
from kvcached.storage.frame import FRAME_BYTES, StoredBlock, StoredKind
from kvcached.storage.messages import Backup, BlockFormat, Done, Fetch, Forget, Ping, Query, Request
from kvcached_client.blocks import header as host_header
from kvcached_client.blocks.header import BlockName, HeaderKind
from kvcached_client.blocks.host_layout import HEADER_BYTES
from kvcached_client.types import KEY_SIZE_BYTES

T = TypeVar("T")


class _Slot(NamedTuple):
    """A block's name, and its place in the host pool on each shard."""

    name: BlockName
    headers: list[memoryview]
    parts: list[memoryview]


class HostCopies:
    """Carries out requests. Used by several threads.

    Args:
        memory: the host pool.
        backend: the storage backend.
        timeout_s: how long one call of the backend may take.
    """

    def __init__(self, memory: memoryview, backend: Storage, timeout_s: float) -> None:
        self._memory = memory
        self._backend = backend
        self._timeout_s = timeout_s

    def carry_out(self, request: Request) -> Done:
        """Carry out a request. Never raises: an error of the backend is in the report."""
        try:
            done = self._carry_out(request)
        except Exception as error:  # noqa: BLE001 - a backend may raise anything, and the daemon has to hear of it
            done = Done(sequence=request.sequence, failed=True, error=f"{type(error).__name__}: {error}")
        return done

    def _carry_out(self, request: Request) -> Done:
        match request:
            case Query():
                return Done(sequence=request.sequence, count=self._find(request.format.stored(), request.keys))
            case Fetch():
                return self._fetch(request)
            case Backup():
                return self._back_up(request)
            case Forget():
                return Done(
                    sequence=request.sequence, count=self._backend.clear(request.prefix, timeout_s=self._timeout_s)
                )
            case Ping():
                self._backend.exists([bytes(STORED_KEY_BYTES)], timeout_s=self._timeout_s)
                return Done(sequence=request.sequence)

    def _find(self, kind: StoredKind, keys: bytes) -> int:
        prefix, found = kind.prefix(), 0
        for some in _batches([prefix + key for key in _split(keys)], self._backend.capabilities.batch_blocks):
            there = self._backend.exists(some, timeout_s=self._timeout_s)
            if not all(there):
                return found + there.index(False)
            found += len(some)
        return found

    # --- from storage -----------------------------------------------------------------------------------------------

    def _fetch(self, request: Fetch) -> Done:
        kind, stored = request.format, request.format.stored()
        headers = HeaderKind(kind.header_namespace, kind.fingerprint, kind.header_generation)
        good = wrong = 0
        for some in _batches(list(self._slots(kind, request.span)), self._backend.capabilities.batch_blocks):
            for slot in some:
                for header in slot.headers:
                    header[:] = bytes(HEADER_BYTES)  # also over a claim: no other process writes here
            frames = _frames(len(some))
            blocks = [_block(stored, slot, page) for slot, page in zip(some, frames, strict=True)]
            results = self._backend.get(blocks, timeout_s=self._timeout_s)
            for slot, page, result in zip(some, frames, results, strict=True):
                failure = result.outcome is Outcome.FAILED
                block = self._proven(stored, slot, page) if result.outcome is Outcome.DONE else None
                if block is None or not _is_next(block, slot.name):
                    wrong += result.outcome is Outcome.DONE
                    self._drop_wrong(stored, slot, result)
                    return _done(request.sequence, good, result if failure else None, wrong=wrong)
                for header, checksum in zip(slot.headers, block.checksums, strict=True):
                    packed = host_header.pack(headers, slot.name, checksum, request.epoch, request.transfer)
                    host_header.write(header, packed)
                good += 1
        return Done(sequence=request.sequence, count=good)

    def _proven(self, kind: StoredKind, slot: _Slot, page: memoryview) -> StoredBlock | None:
        block = frame.unpack(bytes(page), kind, slot.name.key)
        return block if block is not None and frame.is_sound(block, slot.parts) else None

    def _drop_wrong(self, kind: StoredKind, slot: _Slot, result: Result) -> None:
        if result.outcome is Outcome.DONE and self._backend.capabilities.deletes:
            self._backend.delete([kind.prefix() + slot.name.key], timeout_s=self._timeout_s)

    # --- to storage -------------------------------------------------------------------------------------------------

    def _back_up(self, request: Backup) -> Done:
        stored = request.format.stored()
        slots = [slot for span in request.spans for slot in self._slots(request.format, span)]
        done = written = 0
        for some in _batches(slots, self._backend.capabilities.batch_blocks):
            keys = [stored.prefix() + slot.name.key for slot in some]
            there = self._backend.exists(keys, timeout_s=self._timeout_s)
            missing = [slot for slot, is_there in zip(some, there, strict=True) if not is_there]
            failure = self._put(request.format, stored, missing)
            if failure is not None:
                first, result = failure
                done += next(at for at, slot in enumerate(some) if slot is first)
                return _done(request.sequence, done, result, written=written)
            done, written = done + len(some), written + len(missing)
        return Done(sequence=request.sequence, count=done, written=written)

    def _put(self, kind: BlockFormat, stored: StoredKind, slots: Sequence[_Slot]) -> tuple[_Slot, Result] | None:
        """Write blocks; returns the first that could not be written, and why."""
        if not slots:
            return None
        headers = HeaderKind(kind.header_namespace, kind.fingerprint, kind.header_generation)
        whole: list[_Slot] = []
        blocks: list[Block] = []
        for slot, page in zip(slots, _frames(len(slots)), strict=True):
            sums = [host_header.stored_checksum(header, headers, slot.name) for header in slot.headers]
            known = tuple(each for each in sums if each is not None)
            if len(known) < len(sums):  # the slot does not hold that block: a bit has changed; a load finds that, too
                continue
            page[:] = frame.pack(stored, StoredBlock(slot.name.key, slot.name.parent, slot.name.depth, known))
            whole.append(slot)
            blocks.append(_block(stored, slot, page))
        results = self._backend.put(blocks, timeout_s=self._timeout_s) if blocks else []
        failed = [
            (slot, result) for slot, result in zip(whole, results, strict=True) if result.outcome is not Outcome.DONE
        ]
        return failed[0] if failed else None

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


def _block(kind: StoredKind, slot: _Slot, page: memoryview) -> Block:
    return Block(kind.prefix() + slot.name.key, (page, *slot.parts))


def _is_next(block: StoredBlock, name: BlockName) -> bool:
    """Whether a block's depth and parent are those of the chain; the right key alone is not enough."""
    return (block.parent, block.depth) == (name.parent, name.depth)


def _done(sequence: int, count: int, failure: Result | None, *, written: int = 0, wrong: int = 0) -> Done:
    failed = failure is not None and failure.outcome is Outcome.FAILED
    error = "" if failure is None else f"{failure.outcome}: {failure.detail}"
    return Done(sequence=sequence, count=count, written=written, wrong=wrong, failed=failed, error=error)


def _frames(count: int) -> list[memoryview]:
    """Page-aligned memory for so many frames."""
    raw = np.zeros((count + 1) * FRAME_BYTES, np.uint8)
    start = -raw.ctypes.data % FRAME_BYTES
    whole = raw.data[start : start + count * FRAME_BYTES]
    return [whole[at * FRAME_BYTES : (at + 1) * FRAME_BYTES] for at in range(count)]


def _split(keys: bytes) -> list[bytes]:
    return [keys[at : at + KEY_SIZE_BYTES] for at in range(0, len(keys), KEY_SIZE_BYTES)]


def _each(slots: Ranges[int]) -> Iterator[int]:
    return (slot for first, count in pairs(slots) for slot in range(first, first + count))


def _batches(things: Sequence[T], size: int) -> Iterable[Sequence[T]]:
    return (things[at : at + size] for at in range(0, len(things), size))
