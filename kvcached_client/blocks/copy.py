"""The copier of blocks between the pages of a shard and the host pool.

A `CopyPlan` computes which bytes go where, in batches of pieces: batches of one layer or of some layers at once, or
batches of whole blocks. A `Copier` copies batches. `MemoryCopier` is the one for mapped memory; it releases the
interpreter lock while it copies, so that other threads continue. A copier for another kind of memory takes the same
batches.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import accumulate, repeat
from typing import Final, NamedTuple, Protocol

from xxhash import xxh3_128

from kvcached_client.blocks.checksums import Checksums, Runs
from kvcached_client.blocks.pages import LayerPages
from kvcached_client.failpoints import failpoint

try:
    from kvcached_client.blocks import _native_copy
except ImportError:  # the extension is built only where a C compiler is installed
    native_copy_all: Callable[[array[int] | memoryview, int, int], None] | None = None
    native_copy_summed: Callable[[array[int] | memoryview, int, int, int], bytes | None] | None = None
else:
    native_copy_all = _native_copy.copy_all
    native_copy_summed = _native_copy.copy_summed

_PIECE_NUMBERS: Final = 3
#: Upper bound of the pieces in a batch of whole blocks (a block with more pieces is a batch of its own), so that the
#: plan of a large transfer stays small, and one batch is summed while the next ones are copied.
PIECES_MAX: Final = 2048
#: Likewise of the bytes: a device begins a batch when all of it has been planned and told. So the first one is small,
#: and each may be so many times as large as the one before. Threads that copy at once hinder each other in between.
FIRST_BATCH_BYTES_MAX: Final = 4 << 20
BATCH_GROWTH: Final = 4
BATCH_BYTES_MAX: Final = 64 << 20
#: The last batch of a transfer has so many bytes and pieces at most, unless a block has more: they are copied while who
#: waits for the batch before wakes up.
END_BYTES_MAX: Final = 8 << 20
END_PIECES_MAX: Final = 256
#: From so many pieces on, numpy plans them.
_PIECES_FOR_NUMPY: Final = 256


class Batch(NamedTuple):
    """Pieces that are copied together, in any order.

    Attributes:
        pieces: int64 triples: offset from `destination`, offset from `source`, size, all in bytes. No piece overlaps
            another one's destination.
        destination: an address.
        source: an address.
        per_block: how many pieces each block has; those of a block follow each other, in the order of the layers.
        layers: so many more layers of all blocks are copied when this batch is; 0 = the next batches belong to them.
        is_end: nothing of the transfer is behind it, and it has at most `END_BYTES_MAX` and `END_PIECES_MAX`.
    """

    pieces: array[int]
    destination: int
    source: int
    per_block: int = 1
    layers: int = 0
    is_end: bool = False


class Copier(Protocol):
    """Copies batches, one after the other. Used by one thread for each direction."""

    def copy(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Copy batches; yields each batch once all its bytes have arrived, in the order of the batches.

        A copier that copies asynchronously may take further batches before it yields one.
        """

    def copy_summed(self, batches: Iterable[Batch], per_sum: int) -> Iterator[bytes]:
        """As `copy`, with checksums of the bytes that arrived.

        Args:
            batches: their pieces are groups of `per_sum`; a group is one block.
            per_sum: number of pieces in a block.

        Returns:
            For each batch, the xxh3_128 of its blocks, 16 bytes a block.
        """

    def sums(self, blocks: Iterable[Runs]) -> Generator[bytes]:
        """The xxh3_128 of blocks in the memory of this process.

        Take all of them, or close the generator: until then other threads may read the memory.
        """

    def layers_at_once(self, page_bytes: int, blocks: int) -> int:
        """How many layers of so many blocks are best copied by one batch, where they are at even distances."""

    def allocations(self, addresses: Sequence[int]) -> Sequence[int]:
        """Names of the allocations that addresses on the shard are in. Layers of several are not copied at once."""


class MemoryCopier:
    """A `Copier` of mapped memory. The memory must stay mapped while the copier is used."""

    def copy(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """See `Copier.copy`."""
        for batch in passing(batches):
            copy_all(batch.pieces, batch.destination, batch.source)
            yield batch

    def copy_summed(self, batches: Iterable[Batch], per_sum: int) -> Iterator[bytes]:
        """See `Copier.copy_summed`."""
        for batch in passing(batches):
            yield copy_summed(batch.pieces, per_sum, batch.destination, batch.source)

    def sums(self, blocks: Iterable[Runs]) -> Generator[bytes]:
        """See `Copier.sums`: this thread makes them, since processors are the engine's."""
        return Checksums(threads=0).each(blocks)

    def layers_at_once(self, page_bytes: int, blocks: int) -> int:
        """See `Copier.layers_at_once`: the next layer can be used the sooner."""
        del page_bytes, blocks
        return 1

    def allocations(self, addresses: Sequence[int]) -> Sequence[int]:
        """See `Copier.allocations`."""
        return [0] * len(addresses)


def passing(batches: Iterable[Batch]) -> Iterator[Batch]:
    """The same batches; a test may stop the process before each."""
    for batch in batches:
        failpoint("blocks.copy")
        yield batch


class CopyPlan:
    """Cuts transfers of whole blocks into batches.

    Blocks are indices on the shard. Places are the blocks' byte offsets in the host pool, one for each block. All of
    them must exist, and each may be named only once.

    Args:
        layers: layers of the shard, in their order in a block of the host pool.
        host_address: address at which the host pool is mapped.
    """

    def __init__(self, layers: Sequence[LayerPages], host_address: int) -> None:
        self._layers = layers
        self._host_address = host_address
        sizes = [layer.page_bytes for layer in layers]
        self._insides = list(accumulate(sizes[:-1], initial=0))  #: offset of each layer in a block of the host pool
        self._block_bytes = sum(sizes)

    @property
    def pieces_per_block(self) -> int:
        """Number of pieces for each block in `by_block`."""
        return len(self._layers)

    def layer_groups(self, copier: Copier, blocks: int) -> list[range]:
        """The layers in groups that are copied by one batch each: neighbours at even distances, with pages of one size.

        Args:
            copier: that copies them.
            blocks: how many of each layer.
        """
        groups: list[range] = []
        allocations = copier.allocations([layer.address for layer in self._layers])
        for index, layer in enumerate(self._layers):
            last = groups[-1] if groups else range(0)
            may_be_one = last and allocations[last.start] == allocations[index] and self._is_even(last, index)
            if may_be_one and len(last) < copier.layers_at_once(layer.page_bytes, blocks):
                groups[-1] = range(last.start, index + 1)
            else:
                groups.append(range(index, index + 1))
        return groups

    def by_layer(
        self, blocks: Sequence[int], places: Sequence[int], groups: Sequence[range] | None = None
    ) -> Iterator[Batch]:
        """Batches from the host pool to the shard, group by group of the layers, a piece for each block and layer.

        A group of many bytes is several batches. If one layer holds all bytes of a block, blocks that are neighbours on
        both sides share a piece.

        Args:
            blocks: on the shard.
            places: of the same blocks in the host pool.
            groups: of `layer_groups`; None = each layer is one.
        """
        shared: dict[tuple[int, int, int, int], array[int]] = {}  # layers with pages of one size share their pieces
        groups = groups or [range(index, index + 1) for index in range(len(self._layers))]
        for group in groups:
            layer, inside = self._layers[group.start], self._insides[group.start]
            shape = layer.page_bytes, layer.stride_bytes
            size_bytes = layer.page_bytes * len(group)
            lengths = repeat(BATCH_BYTES_MAX // size_bytes)
            end_max = _end_max(size_bytes, len(group)) if group is groups[-1] else 0
            for some, is_end in _spans(len(blocks), lengths, end_max):
                done = len(group) if some.stop == len(blocks) else 0
                if len(group) > 1:
                    pieces = self._pieces(blocks[some], places[some], group, to_host=False)
                    yield Batch(pieces, 0, self._host_address, len(group), done, is_end)
                    continue
                key = some.start, some.stop, *shape
                if key not in shared:
                    is_whole = shape == (self._block_bytes, self._block_bytes)
                    shared[key] = (_merged if is_whole else _pages)(blocks[some], places[some], *shape)
                yield Batch(shared[key], layer.address, self._host_address + inside, layers=done, is_end=is_end)

    def by_block(self, blocks: Sequence[int], places: Sequence[int], *, to_host: bool) -> Iterator[Batch]:
        """Batches of whole blocks, in either direction; each block has a piece for each layer, in their order."""
        layers = range(len(self._layers))
        bases = (self._host_address, 0) if to_host else (0, self._host_address)
        lengths = (min(PIECES_MAX // len(layers), size_bytes // self._block_bytes) for size_bytes in _growing_sizes())
        for some, is_end in _spans(len(blocks), lengths, _end_max(self._block_bytes, len(layers))):
            pieces = self._pieces(blocks[some], places[some], layers, to_host=to_host)
            yield Batch(pieces, *bases, len(layers), is_end=is_end)

    def _pieces(self, blocks: Sequence[int], places: Sequence[int], layers: range, *, to_host: bool) -> array[int]:
        """For each block, a piece for each of some layers. Addresses on the shard, offsets in the host pool."""
        if len(blocks) * len(layers) >= _PIECES_FOR_NUMPY:
            return self._many_pieces(blocks, places, layers, to_host=to_host)
        pages, insides = self._layers[layers.start : layers.stop], self._insides[layers.start : layers.stop]
        pieces = array("q", bytes(8 * _PIECE_NUMBERS * len(blocks) * len(layers)))
        shard_column, host_column = (1, 0) if to_host else (0, 1)
        pieces[shard_column::_PIECE_NUMBERS] = array(
            "q", [address + block * stride for block in blocks for address, _, stride in pages]
        )
        pieces[host_column::_PIECE_NUMBERS] = array("q", [at + inside for at in places for inside in insides])
        pieces[2::_PIECE_NUMBERS] = array("q", [page.page_bytes for page in pages]) * len(blocks)
        return pieces

    def _many_pieces(self, blocks: Sequence[int], places: Sequence[int], layers: range, *, to_host: bool) -> array[int]:
        """The same, ten times as fast where there are many. A worker of small transfers never imports numpy."""
        import numpy as np  # noqa: PLC0415 - as said

        addresses, sizes, strides = np.array(self._layers[layers.start : layers.stop], np.int64).T
        pieces = np.empty((len(blocks), len(layers), _PIECE_NUMBERS), np.int64)
        shard_column, host_column = (1, 0) if to_host else (0, 1)
        pieces[:, :, shard_column] = addresses + np.array(blocks, np.int64)[:, None] * strides
        pieces[:, :, host_column] = np.array(places, np.int64)[:, None] + self._insides[layers.start : layers.stop]
        pieces[:, :, 2] = sizes
        return array("q", pieces.tobytes())

    def _is_even(self, group: range, index: int) -> bool:
        """Whether a layer continues a group of them."""
        one, other = self._layers[index - 1], self._layers[index]
        if one[1:] != other[1:]:
            return False
        first, second = self._layers[group.start], self._layers[group.start + 1]
        return other.address - one.address == second.address - first.address


def _growing_sizes() -> Iterator[int]:
    """Bytes of each batch of a transfer, at most."""
    size_bytes = FIRST_BATCH_BYTES_MAX
    while True:
        yield size_bytes
        size_bytes = min(BATCH_GROWTH * size_bytes, BATCH_BYTES_MAX)


def _end_max(size_bytes: int, pieces: int) -> int:
    """How many blocks the end of a transfer has, at most, of so many bytes and pieces each; 0 = there is no end."""
    return min(END_BYTES_MAX // size_bytes, END_PIECES_MAX // pieces)


def _spans(count: int, lengths: Iterator[int], end_max: int) -> Iterator[tuple[slice, bool]]:
    """The blocks of each batch, and whether it is the end of the transfer.

    Args:
        count: of all blocks.
        lengths: how many each batch has, at most, or one.
        end_max: how many the end has, at most; 0 = there is none.
    """
    first = 0
    while first < count:
        stop = min(count, first + max(1, next(lengths)))
        if stop == count and 0 < end_max < count - first:
            stop = count - end_max
        yield slice(first, stop), stop == count and stop - first <= end_max
        first = stop


def _pages(blocks: Sequence[int], places: Sequence[int], page_bytes: int, stride_bytes: int) -> array[int]:
    """A piece for each block, from its place to its page in a layer."""
    pieces = array("q", bytes(8 * _PIECE_NUMBERS * len(blocks)))
    pieces[0::_PIECE_NUMBERS] = array("q", [block * stride_bytes for block in blocks])
    pieces[1::_PIECE_NUMBERS] = array("q", places)
    pieces[2::_PIECE_NUMBERS] = array("q", [page_bytes]) * len(blocks)
    return pieces


def _merged(blocks: Sequence[int], places: Sequence[int], block_bytes: int, _: int) -> array[int]:
    """As few pieces as possible, for blocks that are contiguous on the shard."""
    pieces = array("q")
    end = (-1, -1)
    for block, place in zip(blocks, places, strict=True):
        start = block * block_bytes, place
        if start == end:
            pieces[-1] += block_bytes
        else:
            pieces.extend((*start, block_bytes))
        end = start[0] + block_bytes, place + block_bytes
    return pieces


def copy_all(pieces: array[int] | memoryview, destination: int, source: int) -> None:
    """Copy pieces of memory.

    Args:
        pieces: int64 triples: offset from `destination`, offset from `source`, size, all in bytes. No piece may overlap
            another one's destination.
        destination: address of memory that is mapped as far as the pieces reach.
        source: likewise.
    """
    if native_copy_all is not None:
        native_copy_all(pieces, destination, source)
        return
    move = ctypes.memmove
    triples = iter(pieces)
    for target, origin, size in zip(triples, triples, triples, strict=True):
        move(destination + target, source + origin, size)


def copy_summed(pieces: array[int] | memoryview, per_sum: int, destination: int, source: int) -> bytes:
    """Copy pieces of memory, with checksums of what was copied.

    Args:
        pieces: as in `copy_all`.
        per_sum: number of pieces that share a checksum.
        destination: as in `copy_all`.
        source: as in `copy_all`.

    Returns:
        xxh3_128 of each group's bytes, in the order of the pieces, 16 bytes for each group.

    Raises:
        ValueError: the number of pieces is no multiple of `per_sum`.
    """
    if native_copy_summed is not None:
        sums = native_copy_summed(pieces, per_sum, destination, source)
        if sums is not None:
            return sums
    numbers = per_sum * _PIECE_NUMBERS
    if per_sum < 1 or len(pieces) % numbers:
        raise ValueError(f"{len(pieces)} numbers are no groups of {per_sum} pieces")
    return b"".join(
        _copy_group(pieces[first : first + numbers], destination, source) for first in range(0, len(pieces), numbers)
    )


def _copy_group(pieces: array[int] | memoryview, destination: int, source: int) -> bytes:
    checksum = xxh3_128()
    for first in range(0, len(pieces), _PIECE_NUMBERS):  # summed piece by piece, while the CPU cache holds the piece
        copy_all(pieces[first : first + _PIECE_NUMBERS], destination, source)
        _, origin, size = pieces[first : first + _PIECE_NUMBERS]
        checksum.update((ctypes.c_ubyte * size).from_address(source + origin))
    return checksum.digest()
