"""The headers of many host slots at once: what `host_header` does with one, in a fraction of its time for each.

A header is a row of 128 bytes here; its fields are those of `host_header`.
"""

from __future__ import annotations

import struct
from operator import itemgetter
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from kvcached_client import host_header
from kvcached_client.host_header import KEY_BYTES, BlockName, HeaderKind
from kvcached_client.slabs import HEADER_BYTES

Rows = npt.NDArray[np.uint8]
#: The same rows as 16 words each.
Words = npt.NDArray[np.uint64]

_KEY: Final = slice(48, 64)
_PARENT: Final = slice(64, 80)
_CHECKSUM: Final = slice(80, 96)
_WRITER: Final = slice(96, 112)  #: epoch and transfer: which store it was, which readers do not ask
_DEPTH: Final = slice(112, 116)
_BODY_BYTES: Final = 120
_SEAL: Final = slice(_BODY_BYTES, HEADER_BYTES)
#: All of a header before its seal.
_BODY: Final = struct.Struct(f"{_BODY_BYTES}s{HEADER_BYTES - _BODY_BYTES}x")
_WORD: Final = np.dtype("<u8")
_CLAIM_START: Final = np.frombuffer(host_header.CLAIM_START, _WORD)[0]


class BlockNames(NamedTuple):
    """What blocks are called, one row for each: keys and parents of 16 bytes, and depths."""

    keys: Rows
    parents: Rows
    depths: npt.NDArray[np.int64]


class HeaderTable:
    """Reads and writes headers of one host pool, whose size is a multiple of 128 bytes.

    Places are those of headers, in bytes from the start of the pool, one for each block.
    """

    def __init__(self, memory: memoryview) -> None:
        words = HEADER_BYTES // _WORD.itemsize
        self._words: Words = np.frombuffer(memory, _WORD).reshape(-1, words)

    def invalidate(self, places: npt.NDArray[np.int64]) -> None:
        """Say that the slots hold no blocks. Claims stay."""
        rows = places // HEADER_BYTES
        self._words[rows[self._words[rows, 0] != _CLAIM_START]] = 0

    def claim(self, places: npt.NDArray[np.int64], epoch: int, session: int) -> None:
        """Say who may be writing the slots."""
        rows = places // HEADER_BYTES
        words = np.frombuffer(host_header.pack_claim(epoch, session), _WORD)
        self._words[rows, 1:] = words[1:]
        self._words[rows, 0] = words[0]

    def clear(self, place: int, size_bytes: int) -> None:
        """Zero what lies from `place` on, whatever it is; both are multiples of 128."""
        self._words[place // HEADER_BYTES : (place + size_bytes) // HEADER_BYTES] = 0

    def copy(self, place: int, count: int) -> Words:
        """So many headers from `place` on, as rows of 16 words. Writers do not change what was copied."""
        first = place // HEADER_BYTES
        return self._words[first : first + count].copy()

    def write(self, places: npt.NDArray[np.int64], headers: Rows) -> None:
        """Say that the slots hold the blocks of these headers. The bytes of the blocks must be there already."""
        rows, words = places // HEADER_BYTES, headers.view(_WORD)
        self._words[rows, 1:] = words[:, 1:]
        self._words[rows, 0] = words[:, 0]  # last, and in one write for each header

    def read(self, places: npt.NDArray[np.int64]) -> Rows:
        """The headers as they are."""
        return self._words[places // HEADER_BYTES].view(np.uint8)


def pack(kind: HeaderKind, names: BlockNames, checksums: bytes, epoch: int, transfer: int) -> Rows:
    """Valid headers. `checksums` has 16 bytes for each block."""
    headers = _bodies(kind, names, epoch, transfer)
    headers[:, _CHECKSUM] = _rows_of(checksums, KEY_BYTES)
    headers[:, _SEAL] = seals(headers)
    return headers


def stored_checksums(headers: Rows, kind: HeaderKind, names: BlockNames) -> tuple[npt.NDArray[np.bool], Rows]:
    """Which of the slots hold the very blocks of these names, and the checksums they were stored with."""
    wanted = _bodies(kind, names, 0, 0)
    for untold in (_CHECKSUM, _WRITER):
        wanted[:, untold] = headers[:, untold]
    wanted[:, _SEAL] = seals(headers)
    differences = wanted.view(_WORD) ^ headers.view(_WORD)
    return (differences == 0).all(axis=1), headers[:, _CHECKSUM]


def _bodies(kind: HeaderKind, names: BlockNames, epoch: int, transfer: int) -> Rows:
    """Headers without checksums and seals."""
    nobody = BlockName(bytes(KEY_BYTES), b"", 0)
    template = host_header.pack(kind, nobody, bytes(KEY_BYTES), epoch, transfer)
    headers = np.tile(np.frombuffer(template, np.uint8), (len(names.keys), 1))
    headers[:, _KEY], headers[:, _PARENT] = names.keys, names.parents
    headers[:, _DEPTH] = _rows_of(names.depths.astype("<u4").tobytes(), _DEPTH.stop - _DEPTH.start)
    return headers


def seals(headers: Rows) -> Rows:
    """What the seals of these headers ought to be, as their last eight bytes."""
    bodies = map(itemgetter(0), _BODY.iter_unpack(headers.tobytes()))
    digests = np.fromiter(map(xxh3_64_intdigest, bodies), _WORD, len(headers))
    return digests.view(np.uint8).reshape(-1, _WORD.itemsize)


def _rows_of(data: bytes, size: int) -> Rows:
    return np.frombuffer(data, np.uint8).reshape(-1, size)
