"""What a shard is to copy between its blocks and the host pool, as the engine's scheduler or the daemon says it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from kvcached_client.types import TransferId


class Indices(Protocol):
    """Whole numbers: a numpy array of one dimension is one, and an `array.array`."""

    def __len__(self) -> int: ...

    def tolist(self) -> Any:  # noqa: ANN401 - what numpy says of it
        """The numbers as a list."""


@dataclass(frozen=True, slots=True, eq=False)
class JobSpan:
    """Consecutive blocks of one chain.

    Attributes:
        depth: of the first block: blocks before it in its chain.
        parent: key of the block before the first; empty at depth 0.
        keys: of the blocks, 16 bytes each.
        blocks: where they are on the shard, one index for each: in the engine's tensors, or in the device pool.
        slots: where they are in the host pool, one slot for each.
    """

    depth: int
    parent: bytes
    keys: bytes
    blocks: Indices
    slots: Indices


@dataclass(frozen=True, slots=True, eq=False)
class BlockJob:
    """One transfer, the same for every shard.

    Attributes:
        transfer: its id, from `prepare_store` or `prepare_load`.
        generation: of the namespace, from the same answer: blocks of another one are not used.
        spans: at least one block in all.
        start: depth of the first block that the daemon was asked for: it counts a load's bad blocks from there. A job
            may have fewer of them.
    """

    transfer: TransferId
    generation: int
    spans: tuple[JobSpan, ...]
    start: int = 0
