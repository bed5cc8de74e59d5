"""A small vLLM with two groups of layers on memory that outlives it; see `warm_world`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from kvcached_client.blocks.engine_table import Row
from tests.vllm_connector.mini_daemon import BLOCK
from tests.vllm_connector.mini_hybrid import SHARDS, MiniHybrid, Sampled, Work, hash_in_group
from tests.vllm_connector.mini_parts import Pool
from tests.vllm_connector.mini_states import SIZES, ListedStates
from tests.vllm_connector.mini_world import GroupsWorld
from tests.vllm_connector.rig import FakeRequest
from tests.vllm_connector.warm_world import Remains, TellingSide, WarmWorld, WatchedPool


class GroupRemains(Remains):
    """What outlives an engine with groups. Where bytes were computed before a clear is not known here."""

    def note(self, request: FakeRequest) -> None:
        """Note what the names of a request's blocks stand for."""
        for group, size in enumerate(SIZES):
            for tokens in range(size, len(request.block_hashes) * BLOCK + 1, size):
                name = hash_in_group(request.block_hashes[tokens // BLOCK - 1], group)
                self.tokens.setdefault(name, request.tokens[:tokens])

    def check(self, rows: Sequence[Row]) -> None:
        """Each named block holds what its name says, on all shards."""
        for row in rows:
            tokens, group = self.tokens[row.name], row.name[-1]
            for shard in range(SHARDS):
                states = ListedStates()
                states._shard = shard
                for at, token in enumerate(tokens):
                    states.compute(token, at)
                expected = states._lists[group][-SIZES[group] :]
                assert self.memory[shard].get(row.block) == expected, f"block {row.block} holds something else"


class DyingHybrid(MiniHybrid):
    """May be killed in the middle of a pass."""

    world: WarmGroupsWorld

    def schedule(self) -> None:
        super().schedule()
        self.world.numbers.append(self.world.last_number)

    def _compute(self, work: Work) -> Sampled:
        for at in range(work.start, work.stop):
            self.world.fuse.burn()
            sampled = super()._compute(work._replace(start=at, stop=at + 1))
        return sampled._replace(work=work)


class WarmGroupsWorld(WarmWorld, GroupsWorld):
    """As `WarmWorld`, with an engine of two groups of layers."""

    sizes = SIZES

    def __init__(self, seed: int, remains: GroupRemains) -> None:
        super().__init__(seed, remains)
        self.prefixes = [[place * 3 % 11 for place in range(length)] for length in (20, 37)]  # of all lives

    def tables_of(self, live: Any) -> list[list[int]]:
        tables: list[list[int]] = live.tables
        return tables

    def pool_of(self, rng: random.Random) -> Pool:
        return WatchedPool(self.remains.blocks, is_null_free=True)

    def engine_of(self, rng: random.Random) -> Any:
        side: Any = TellingSide(self)
        vllm = DyingHybrid(rng, side, self.pool, depth=rng.choice([1, 2]))
        vllm.world = self
        vllm.memory = self.remains.memory
        return vllm
