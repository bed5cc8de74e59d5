"""Loads that workers were ordered to make."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from kvcached_client.types import TransferId


@dataclass(slots=True)
class OrderedLoad:
    """A load in flight: its blocks, and the depth from which on they are bad.

    Attributes:
        session: number of the session.
        transfer: the copy.
        start: depth of the first block.
        blocks: ids in vLLM's pool.
        bad_from: depth of the first block that is bad.
    """

    session: int
    transfer: TransferId
    start: int
    blocks: tuple[int, ...]
    bad_from: int | None = None

    def note_bad(self, block_ids: Collection[int]) -> None:
        """Note bad blocks; some may belong to other loads."""
        for depth, block in enumerate(self.blocks, self.start):
            if block in block_ids:
                self.bad_from = depth if self.bad_from is None else min(self.bad_from, depth)
                return
