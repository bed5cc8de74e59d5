"""Reads the headers of pools when a daemon starts: which blocks they hold, and which sessions may still write.

Processes may write to the headers meanwhile, and a header may hold any bytes. Headers are therefore copied before they
are checked, and a header whose seal does not fit is ignored. A block counts if its header is the same in all parts of
its slab. Its bytes are checked by the first load, not here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvcached.memory.header_table import HeaderTable, Words
from kvcached_client.blocks import header as host_header
from kvcached_client.blocks.header import HeaderKind
from kvcached_client.blocks.host_layout import HEADER_BYTES, HostGeometry
from kvcached_client.types import KEY_SIZE_BYTES

#: How many headers are copied and checked together, or all of one slab if that has more: 8 MiB on each shard.
_BATCH_HEADERS: Final = 1 << 16
_WORD: Final = np.dtype("<u8")
_DEPTH_END: Final = np.uint64(1 << 32)
#: Words of a header.
_KIND: Final = slice(0, 6)  #: magic, format, valid, generation, namespace, fingerprint
_KEY: Final = slice(6, 8)
_PARENT: Final = slice(8, 10)
_EPOCH: Final = 12
_TRANSFER: Final = 13  #: the session of a claim
_DEPTH: Final = 14
_SEAL: Final = 15
_NO_PARENT: Final = np.zeros(2, _WORD)
#: The words in which all shards of a block agree: all but checksum and seal.
_COMMON: Final = (slice(0, 10), slice(12, 15))


#: Epoch and session of a claim whose seal does not fit: its writer was replacing it by the header of a block.
UNKNOWN_OWNER: Final = (0, 0)


class FoundClaims(NamedTuple):
    """Which sessions may be writing: a row for each slot, or several if its shards name several. In no order.

    Some rows may name `UNKNOWN_OWNER`.
    """

    slots: npt.NDArray[np.int64]
    epochs: npt.NDArray[np.uint64]
    sessions: npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class FoundBlocks:
    """The blocks of one namespace, ordered by slot within each slab, with the slabs in the order of the call.

    A key may occur more than once: a block that was evicted and stored again has two good headers. A block's parent may
    be missing. No slot occurs twice, and no slot that has a claim occurs.

    Attributes:
        keys: 16 bytes, one row for each block.
        parents: the key of the block before it; zeros at depth 0, and only there.
        depths: the number of blocks before it in its chain, below 2**32.
        slots: its slot.
        epochs, transfers: which store wrote it. A later store has a larger epoch, or the same and a larger transfer.
        claims: those of every epoch and session, even if other shards' headers of the slot hold a block.
    """

    keys: npt.NDArray[np.uint8]
    parents: npt.NDArray[np.uint8]
    depths: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    epochs: npt.NDArray[np.uint64]
    transfers: npt.NDArray[np.uint64]
    claims: FoundClaims

    def __len__(self) -> int:
        """The number of blocks."""
        return len(self.slots)


def scan(table: HeaderTable, geometry: HostGeometry, kind: HeaderKind, slabs: Iterable[int]) -> FoundBlocks:
    """Read the headers of all slots of a namespace, in all parts. Never fails on what it finds there.

    Args:
        table: the host pool's (`HostHeaders.table`).
        geometry: how the namespace's blocks lie in the pool.
        kind: the fields that all headers of its present generation have in common.
        slabs: the slabs of the namespace.

    Raises:
        ValueError: there is no such slab.
    """
    blocks = [_columns(_no_slots(), _no_words())]
    claims = [FoundClaims(_no_slots(), _no_numbers(), _no_numbers())]
    for slots, headers in _batches(table, geometry, list(slabs)):
        good = _good_blocks(headers, kind)
        blocks.append(_columns(slots[good], headers[0][good]))
        claims += [_claims(slots, of_shard) for of_shard in headers]
    keys, parents, depths, found, epochs, transfers = map(np.concatenate, zip(*blocks, strict=True))
    return FoundBlocks(keys, parents, depths, found, epochs, transfers, _distinct(claims))


def scan_device(table: HeaderTable, kind: HeaderKind) -> FoundBlocks:
    """Read the headers of a device pool: one for each slot. Never fails on what it finds there; there are no claims."""
    headers = table.copy(0, table.rows)
    good = _good_blocks([headers], kind)
    keys, parents, depths, slots, epochs, numbers = _columns(good, headers[good])
    nobody = FoundClaims(_no_slots(), _no_numbers(), _no_numbers())
    return FoundBlocks(keys, parents, depths, slots, epochs, numbers, nobody)


def _batches(
    table: HeaderTable, geometry: HostGeometry, slabs: list[int]
) -> Iterator[tuple[npt.NDArray[np.int64], list[Words]]]:
    """Slots, and copies of their headers on each shard."""
    per_slab = geometry.slots_per_slab
    if not per_slab:
        return
    batch = max(1, _BATCH_HEADERS // per_slab)
    within = np.arange(per_slab, dtype=np.int64)
    for at in range(0, len(slabs), batch):
        firsts = [slab * per_slab for slab in slabs[at : at + batch]]
        headers = [
            _joined([table.copy(geometry.header_offset(first, shard), per_slab) for first in firsts])
            for shard in range(geometry.parts)
        ]
        yield np.concatenate([first + within for first in firsts]), headers


def _joined(parts: list[Words]) -> Words:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _columns(slots: npt.NDArray[np.int64], headers: Words) -> tuple[npt.NDArray[Any], ...]:
    """The columns of `FoundBlocks`: keys, parents, depths, slots, epochs, transfers."""
    keys, parents = _as_keys(headers[:, _KEY]), _as_keys(headers[:, _PARENT])
    depths = headers[:, _DEPTH].astype(np.int64)
    return keys, parents, depths, slots, headers[:, _EPOCH].copy(), headers[:, _TRANSFER].copy()


def _good_blocks(headers: list[Words], kind: HeaderKind) -> npt.NDArray[np.int64]:
    """Which rows are the same block on every shard. Cheap checks come first: a seal costs more than all of them."""
    template = host_header.pack(kind, host_header.BlockName(b"", b"", 0), b"", 0, 0)
    start = np.frombuffer(template, _WORD)[_KIND]
    good: npt.NDArray[np.int64] = np.flatnonzero(headers[0][:, 0] == start[0])
    first = headers[0][good]
    is_good = _agree(first[:, _KIND], start) & (first[:, _DEPTH] < _DEPTH_END)
    # Only a first block has no parent. No store of ours writes other headers.
    is_good &= (first[:, _DEPTH] == 0) == _agree(first[:, _PARENT], _NO_PARENT)
    for other in headers[1:]:
        for common in _COMMON:
            is_good &= _agree(first[:, common], other[good, common])
    good = good[is_good]
    for of_shard in headers:
        good = good[_sealed(of_shard[good])]
    return good


def _agree(words: Words, wanted: Words) -> npt.NDArray[np.bool_]:
    """Which rows equal the wanted words. Column by column: a reduction over short rows costs several times as much."""
    same = np.ones(len(words), bool)
    for column in range(words.shape[1]):
        same &= words[:, column] == wanted[..., column]
    return same


def _claims(slots: npt.NDArray[np.int64], headers: Words) -> FoundClaims:
    start = np.frombuffer(host_header.CLAIM_START, _WORD)[0]
    claimed = np.flatnonzero(headers[:, 0] == start)
    is_whole = _sealed(headers[claimed]).astype(np.uint64)  # 1, or 0: then what it says is the unknown owner's
    return FoundClaims(slots[claimed], headers[claimed, _EPOCH] * is_whole, headers[claimed, _TRANSFER] * is_whole)


def _distinct(claims: list[FoundClaims]) -> FoundClaims:
    """The claims without repetitions: several shards may name the same session for a slot."""
    slots, epochs, sessions = (np.concatenate(column) for column in zip(*claims, strict=True))
    rows = np.unique(np.stack([slots.astype(np.uint64), epochs, sessions], axis=1), axis=0)
    return FoundClaims(rows[:, 0].astype(np.int64), rows[:, 1].copy(), rows[:, 2].copy())


def _sealed(headers: Words) -> npt.NDArray[np.bool_]:
    if not len(headers):
        return np.zeros(0, bool)
    return np.asarray(headers[:, _SEAL] == np.frombuffer(host_header.seals(headers.tobytes()), _WORD))


def _as_keys(words: Words) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(words).view(np.uint8).reshape(-1, KEY_SIZE_BYTES)


def _no_words() -> Words:
    return np.zeros((0, HEADER_BYTES // _WORD.itemsize), _WORD)


def _no_slots() -> npt.NDArray[np.int64]:
    return np.zeros(0, np.int64)


def _no_numbers() -> npt.NDArray[np.uint64]:
    return np.zeros(0, _WORD)
