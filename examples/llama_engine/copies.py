"""Copies under way between the engine's blocks and the daemon's host pool, as the scheduler sees them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from examples.llama_engine.block_pool import BlockPool
from examples.llama_engine.copy_pipes import CopyPipes
from examples.llama_engine.messages import CopyOrder
from kvcached_client.blocks.jobs import BlockJob
from kvcached_client.keys import KeyChain
from kvcached_client.offload import PreparedLoad, PreparedStore

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
        self._start(plan.job(chain.keys, table), on_end, is_store=False)

    def store(self, plan: PreparedStore, chain: KeyChain, table: Sequence[int]) -> None:
        """Copy computed blocks of a request to where the daemon has room for them. What fails is not cached."""
        self._start(plan.job(chain.keys, table), lambda _: None, is_store=True)

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

    def _start(self, job: BlockJob, on_end: Callable[[set[int]], None], *, is_store: bool) -> None:
        while len(self._under_way) >= COPIES_MAX:
            self.collect(wait=True)
        order = CopyOrder(id=next(self._ids), is_store=is_store, job=job.to_bytes())
        self._pool.hold(job.blocks)
        self._under_way[order.id] = _UnderWay(job.blocks, len(self._pipes), on_end)
        self._pipes.order(order)
