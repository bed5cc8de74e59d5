"""Copies into and out of the host pool as workers and engines' shards make them, half a block at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import xxhash

from kvcached_client.blocks import header as host_header
from kvcached_client.blocks.header import BlockName
from kvcached_client.types import KEY_SIZE_BYTES
from tests.simulation.memory import Holder, Memory, Shape
from tests.simulation.process import Process

#: Of a header, what comes last and in one write.
_FIRST_WRITE_BYTES = 8


class Cancelled(Exception):
    """The process does not go on with a copy."""


class HostBlock(NamedTuple):
    """A block and its place in the host pool."""

    name: BlockName
    slot: int


def host_blocks(keys: bytes, slots: Iterable[int], *, depth: int, parent: bytes) -> list[HostBlock]:
    """Consecutive blocks of a chain, the first of which has so many before it."""
    blocks = []
    for index, slot in enumerate(slots):
        key = keys[index * KEY_SIZE_BYTES : (index + 1) * KEY_SIZE_BYTES]
        blocks.append(HostBlock(BlockName(key, parent, depth + index), slot))
        parent = key
    return blocks


class HostCopier:
    """One shard's access to the host pool, for one namespace at one generation.

    Args:
        pause: how long the next half of a block takes, in microseconds.
        goes_on: whether the process goes on with it; where it does not, `Cancelled` ends the copy.
    """

    def __init__(
        self,
        process: Process,
        host: Memory,
        shape: Shape,
        shard: int,
        generation: int,
        pause: Callable[[], int],
        goes_on: Callable[[], bool] = lambda: True,
    ) -> None:
        self._process = process
        self._host = host
        self._shape = shape
        self._shard = shard
        self._generation = generation
        self._pause = pause
        self._goes_on = goes_on

    async def store(
        self, holder: Holder, blocks: list[HostBlock], read: Callable[[int], bytes], *, epoch: int, transfer: int
    ) -> None:
        """Write blocks: headers vanish first and come back last, each in two writes, the second of which makes it one.

        `read` gives the bytes of a block by its index.
        """
        host, shape, shard = self._host, self._shape, self._shard
        for block in blocks:
            header_span = shape.header(block.slot, shard)
            host.touch(holder, header_span)
            host_header.invalidate(host.view(header_span))
        for index, block in enumerate(blocks):
            data, (start, end) = read(index), shape.block(block.slot, shard)
            middle = (end - start) // 2
            host.write(holder, start, data[:middle])
            await self._take_time(f"store {transfer}: half of block {index} in slot {block.slot}")
            host.write(holder, start + middle, data[middle:])
        starts = [shape.header(block.slot, shard)[0] for block in blocks]
        headers = [self._header(block, epoch, transfer) for block in blocks]
        for start, header in zip(starts, headers, strict=True):
            host.write(holder, start + _FIRST_WRITE_BYTES, header[_FIRST_WRITE_BYTES:])
        for index, (block, start, header) in enumerate(zip(blocks, starts, headers, strict=True)):
            await self._take_time(f"store {transfer}: header {index} but for its beginning")
            host.write(holder, start, header[:_FIRST_WRITE_BYTES])
            # A whole header is the writer's word: a daemon that finds one on every shard takes the block for stored.
            host.give_up_spans(holder, shape.spans([block.slot], shard))

    def _header(self, block: HostBlock, epoch: int, transfer: int) -> bytes:
        checksum = xxhash.xxh3_128_digest(self._host.view(self._shape.block(block.slot, self._shard)))
        return host_header.pack(self._shape.kind(self._generation), block.name, checksum, epoch, transfer)

    async def load(self, block: HostBlock, write: Callable[[int, bytes], None], what: str) -> None:
        """Read a block: its two halves go to `write`, each with its offset."""
        start, end = self._shape.block(block.slot, self._shard)
        middle = (start + end) // 2
        write(0, self._host.read((start, middle)))
        await self._take_time(what)
        write(middle - start, self._host.read((middle, end)))

    async def _take_time(self, what: str) -> None:
        await self._process.sleep(self._pause(), what)
        if not self._goes_on():
            raise Cancelled

    def is_there(self, block: HostBlock) -> bool:
        """Whether a slot holds this very block, by its header and its checksum."""
        header = self._host.view(self._shape.header(block.slot, self._shard))
        checksum = host_header.stored_checksum(header, self._shape.kind(self._generation), block.name)
        place = self._host.view(self._shape.block(block.slot, self._shard))
        return checksum is not None and checksum == xxhash.xxh3_128_digest(place)
