"""Rearranges blocks between the host pool, as engines with a number of shards have them, and their canonical layout.

A part of the host pool holds ``[runs, parts of the shard, bytes]`` of a block, storage ``[parts, runs, bytes]`` of all
shards (`CanonicalLayout`). So a block that four shards have stored is read by two, or by eight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kvcached_client.blocks.host_layout import CanonicalLayout, HostGeometry


class Rearrangement(NamedTuple):
    """How the blocks of one namespace are rearranged.

    Attributes:
        runs: runs of bytes in a block.
        parts: parts of a block on all shards together.
        part_bytes: size of one.
        host_parts: parts of the host pool that hold the block.
    """

    runs: int
    parts: int
    part_bytes: int
    host_parts: int

    @classmethod
    def of(cls, layout: CanonicalLayout, geometry: HostGeometry) -> Rearrangement:
        """That of a layout which divides these blocks (`CanonicalLayout.divides`)."""
        size_bytes = geometry.parts * geometry.block_bytes
        return cls(layout.runs, layout.parts, size_bytes // layout.parts, geometry.parts)

    def to_canonical(self, host: Sequence[memoryview], value: memoryview) -> None:
        """Copy a block, from the parts of the host pool to the bytes that storage gets."""
        for part, (ours, theirs) in zip(host, self._views(value), strict=True):
            ours[...] = _bytes(part).reshape(theirs).transpose(1, 0, 2)

    def to_host(self, value: memoryview, host: Sequence[memoryview]) -> None:
        """Copy a block, from the bytes that storage has to the parts of the host pool."""
        for part, (ours, theirs) in zip(host, self._views(value), strict=True):
            _bytes(part).reshape(theirs)[...] = ours.transpose(1, 0, 2)

    def split(self, value: memoryview) -> list[memoryview]:
        """The parts of a block in storage."""
        return [value[at : at + self.part_bytes] for at in range(0, value.nbytes, self.part_bytes)]

    def checksums(self, value: memoryview) -> tuple[bytes, ...]:
        """Of the parts of a block in storage."""
        return tuple(xxhash.xxh3_128_digest(part) for part in self.split(value))

    def _views(self, value: memoryview) -> list[tuple[npt.NDArray[np.uint8], tuple[int, int, int]]]:
        """For each part of the host pool: its parts in storage, and the shape that they have in the host pool."""
        here = self.parts // self.host_parts
        whole = _bytes(value).reshape(self.host_parts, here, self.runs, self.part_bytes // self.runs)
        return [(ours, (self.runs, here, self.part_bytes // self.runs)) for ours in whole]


def _bytes(memory: memoryview) -> npt.NDArray[np.uint8]:
    return np.frombuffer(memory, np.uint8)
