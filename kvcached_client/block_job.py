"""What a shard is to copy between the engine's tensors and the host pool, as its scheduler says it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcached_client.types import TransferId


@dataclass(frozen=True, slots=True, eq=False)
class JobSpan:
    """Consecutive blocks of one chain.

    Attributes:
        depth: of the first block: blocks before it in its chain.
        parent: key of the block before the first; empty at depth 0.
        keys: of the blocks, 16 bytes each.
        blocks: where they are in the engine's tensors, one index for each.
        slots: where they are in the host pool, one slot for each.
    """

    depth: int
    parent: bytes
    keys: bytes
    blocks: npt.NDArray[np.integer[Any]]
    slots: npt.NDArray[np.integer[Any]]


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
