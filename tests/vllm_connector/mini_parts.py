"""The parts of a small vLLM: what its model computes, and its pool of blocks."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


def kv_of(before: str, token: int, shard: int) -> str:
    """What the model computes for a token."""
    return hashlib.md5(f"{before} {token} {shard}".encode(), usedforsecurity=False).hexdigest()[:8]


def next_token(kv: str) -> int:
    """What it samples from that."""
    return int(kv, 16) % 11


def reference(prompt: Sequence[int], count: int) -> list[int]:
    """Output of a model that computes everything."""
    tokens, kv = list(prompt), ""
    for token in prompt:
        kv = kv_of(kv, token, 0)
    while len(tokens) < len(prompt) + count:
        tokens.append(next_token(kv))
        kv = kv_of(kv, tokens[-1], 0)
    return tokens[len(prompt) :]


@dataclass(eq=False)
class Block:
    """A block of the device pool: its users, and what is cached in it."""

    block_id: int
    users: int = 0
    block_hash: bytes | None = None
    block_hash_num_tokens: int | None = None


class Pool:
    """Blocks with reference counts, and vLLM's own prefix cache."""

    def __init__(self, count: int, *, has_cache: bool) -> None:
        self.blocks = [Block(index) for index in range(count)]
        self.free = deque(range(count))
        self.cached: dict[bytes, int] = {}
        self.has_cache = has_cache

    def touch(self, blocks: Sequence[Any]) -> None:
        for block in blocks:
            if not block.users:
                self.free.remove(block.block_id)
            block.users += 1

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        for block in ordered_blocks:
            block.users -= 1
            assert block.users >= 0
            if not block.users:
                self.free.append(block.block_id)

    def take(self, count: int) -> list[int] | None:
        if len(self.free) < count:
            return None
        taken = [self.free.popleft() for _ in range(count)]
        for index in taken:
            block = self.blocks[index]
            if block.block_hash is not None:
                self.cached.pop(block.block_hash, None)
            block.block_hash, block.users = None, 1
        return taken

    def give_back(self, block_ids: Iterable[int]) -> None:
        self.free_blocks(self.blocks[index] for index in block_ids)

    def remember(self, block_id: int, block_hash: bytes, tokens: int) -> None:
        """Find a full block by the hash of so many tokens."""
        block = self.blocks[block_id]
        if self.has_cache and block_hash not in self.cached and block.block_hash is None:
            block.block_hash, block.block_hash_num_tokens = block_hash, tokens
            self.cached[block_hash] = block_id

    def forget_all(self) -> bool:
        """As `reset_prefix_cache`: not while blocks are in use."""
        if any(block.users for block in self.blocks):
            return False
        for block in self.blocks:
            block.block_hash = None
        self.cached.clear()
        return True
