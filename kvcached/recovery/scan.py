"""What the headers of pools tell a daemon that starts: which blocks there are, and who may still be writing.

Writers may be at work meanwhile, and every byte may be anything: headers are copied first and judged afterwards, and
nothing in them is believed without its seal. A block counts where all parts of its slab hold the same one. Its bytes
are not looked at; the first load of each does that.
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

#: Headers that are copied and judged together, or those of one slab where that has more: 8 MiB on each shard.
_BATCH_HEADERS: Final = 1 << 16
_WORD: Final = np.dtype("<u8")
_DEPTH_END: Final = np.uint64(1 << 32)
#: Words of a header.
_KIND: Final = slice(0, 6)  #: magic, format, valid, generation, namespace, fingerprint
_KEY: Final = slice(6, 8)
_PARENT: Final = slice(8, 10)
_EPOCH: Final = 12
_TRANSFER: Final = 13  #: of a claim: the session
_DEPTH: Final = 14
_SEAL: Final = 15
_NO_PARENT: Final = np.zeros(2, _WORD)
#: In which all shards of a block agree: all but checksum and seal.
_COMMON: Final = (slice(0, 10), slice(12, 15))


#: Epoch and session of a claim whose seal does not fit: its writer was about to put a block's header in its place.
UNKNOWN_OWNER: Final = (0, 0)


class FoundClaims(NamedTuple):
    """Who may be writing: a row for each slot, or several where its shards name several. In no order.

    Some may be of `UNKNOWN_OWNER`.
    """

    slots: npt.NDArray[np.int64]
    epochs: npt.NDArray[np.uint64]
    sessions: npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class FoundBlocks:
    """The blocks of one namespace, by slot within each slab, slabs as they were named.

    A key may be there more than once, for a block that was evicted and stored again has two headers, both good;
    and a block's parent may be missing. No slot is there twice, and none that has a claim.

    Attributes:
        keys: of 16 bytes, one row for each block.
        parents: the same of the block before it; zeros at depth 0 and only there.
        depths: blocks before it in its chain, below 2**32.
        slots: where it is.
        epochs, transfers: which store it was; a later one is of a larger epoch, or of the same and a larger transfer.
        claims: of any epoch and session, whatever else is in the slots' headers of other shards.
    """

    keys: npt.NDArray[np.uint8]
    parents: npt.NDArray[np.uint8]
    depths: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    epochs: npt.NDArray[np.uint64]
    transfers: npt.NDArray[np.uint64]
    claims: FoundClaims

    def __len__(self) -> int:
        """How many blocks."""
        return len(self.slots)


def scan(table: HeaderTable, geometry: HostGeometry, kind: HeaderKind, slabs: Iterable[int]) -> FoundBlocks:
    """Read the headers of all slots of a namespace, in all parts. Never fails on what it finds there.

    Args:
        table: of the host pool (`HostHeaders.table`).
        geometry: the pool as the namespace sees it.
        kind: what the headers of its present generation have in common: 16 bytes of namespace and of layout each.
        slabs: those that the namespace has.

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
    """What is told of blocks: keys, parents, depths, slots, epochs, transfers."""
    keys, parents = _as_keys(headers[:, _KEY]), _as_keys(headers[:, _PARENT])
    depths = headers[:, _DEPTH].astype(np.int64)
    return keys, parents, depths, slots, headers[:, _EPOCH].copy(), headers[:, _TRANSFER].copy()


def _good_blocks(headers: list[Words], kind: HeaderKind) -> npt.NDArray[np.int64]:
    """Which rows are the same block on every shard, cheap questions first: a seal costs more than all of them."""
    template = host_header.pack(kind, host_header.BlockName(b"", b"", 0), b"", 0, 0)
    start = np.frombuffer(template, _WORD)[_KIND]
    good: npt.NDArray[np.int64] = np.flatnonzero(headers[0][:, 0] == start[0])
    first = headers[0][good]
    is_good = _agree(first[:, _KIND], start) & (first[:, _DEPTH] < _DEPTH_END)
    # Only a first block has no parent. Headers that say otherwise are of no writer of ours.
    is_good &= (first[:, _DEPTH] == 0) == _agree(first[:, _PARENT], _NO_PARENT)
    for other in headers[1:]:
        for common in _COMMON:
            is_good &= _agree(first[:, common], other[good, common])
    good = good[is_good]
    for of_shard in headers:
        good = good[_sealed(of_shard[good])]
    return good


def _agree(words: Words, wanted: Words) -> npt.NDArray[np.bool]:
    """Which rows are as wanted. Column by column: a reduction over short rows costs several times as much."""
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
    """Shards that name the same session for a slot say one thing."""
    slots, epochs, sessions = (np.concatenate(column) for column in zip(*claims, strict=True))
    rows = np.unique(np.stack([slots.astype(np.uint64), epochs, sessions], axis=1), axis=0)
    return FoundClaims(rows[:, 0].astype(np.int64), rows[:, 1].copy(), rows[:, 2].copy())


def _sealed(headers: Words) -> npt.NDArray[np.bool]:
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
