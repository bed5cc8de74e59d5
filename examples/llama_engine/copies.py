"""Copies under way between the engine's blocks and the daemon's host pool, as the scheduler sees them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from examples.llama_engine.block_pool import BlockPool
from examples.llama_engine.copy_pipes import CopyPipes
from examples.llama_engine.messages import CopyOrder, CopySpan
from kvcached_client.keys import KeyChain
from kvcached_client.offload import Piece, PreparedLoad, PreparedStore

#: Further ones wait for one of them. More than requests run at a time, and less than the pipes to the shards hold.
COPIES_MAX = 64


@dataclass(slots=True)
class _UnderWay:
    blocks: list[int]
    answers_due: int
    on_end: Callable[[set[int]], None]
    bad: set[int] = field(default_factory=set)


class Copies:
    """Starts copies and notices when they are over, which is when every shard is through.

    Until then they hold their blocks: whoever gave them back in the meantime, nobody else gets them.

    Args:
        pipes: to the shards.
        pool: of the blocks.
    """

    def __init__(self, pipes: CopyPipes, pool: BlockPool) -> None:
        self._pipes = pipes
        self._pool = pool
        self._ids = itertools.count(1)
        self._under_way: dict[int, _UnderWay] = {}

    def __len__(self) -> int:
        return len(self._under_way)

    def load(
        self, plan: PreparedLoad, chain: KeyChain, table: Sequence[int], on_end: Callable[[set[int]], None]
    ) -> None:
        """Fill the first blocks of a request; `on_end` gets those that did not arrive on every shard, by index."""
        span = _span(chain, table, Piece(0, len(plan.slots)), plan.slots.tobytes())
        self._start(plan, [span], table[: len(plan.slots)], on_end, is_store=False)

    def store(self, plan: PreparedStore, chain: KeyChain, table: Sequence[int]) -> None:
        """Copy computed blocks of a request to where the daemon has room for them. What fails is not cached."""
        spans: list[CopySpan] = []
        blocks: list[int] = []
        done = 0
        for piece in plan.pieces:
            spans.append(_span(chain, table, piece, plan.slots[done : done + piece.blocks].tobytes()))
            blocks += table[piece.start : piece.start + piece.blocks]
            done += piece.blocks
        self._start(plan, spans, blocks, lambda _: None, is_store=True)

    def collect(self, *, wait: bool) -> None:
        """Note what shards have said; if `wait`, when at least one of them has said something.

        Raises:
            ShardDied: a shard has ended.
        """
        for answer in self._pipes.done(wait=wait):
            copy = self._under_way[answer.id]
            copy.bad.update(answer.bad)
            copy.answers_due -= 1
            if not copy.answers_due:
                del self._under_way[answer.id]
                self._pool.drop(copy.blocks)
                copy.on_end(copy.bad)

    def _start(
        self,
        plan: PreparedLoad | PreparedStore,
        spans: list[CopySpan],
        blocks: Sequence[int],
        on_end: Callable[[set[int]], None],
        *,
        is_store: bool,
    ) -> None:
        while len(self._under_way) >= COPIES_MAX:
            self.collect(wait=True)
        order = CopyOrder(
            id=next(self._ids), is_store=is_store, transfer=plan.transfer, generation=plan.generation, spans=spans
        )
        self._pool.hold(blocks)
        self._under_way[order.id] = _UnderWay(list(blocks), len(self._pipes), on_end)
        self._pipes.order(order)


def _span(chain: KeyChain, table: Sequence[int], piece: Piece, slots: bytes) -> CopySpan:
    start, stop = piece.start, piece.start + piece.blocks
    return CopySpan(
        depth=start,
        parent=chain.key_range(start - 1, start) if start else b"",
        keys=chain.key_range(start, stop),
        blocks=np.asarray(table[start:stop], np.int32).tobytes(),
        slots=slots,
    )
