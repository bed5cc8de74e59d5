"""A stand-in for daemon and SDK in one process: a prefix dictionary, a free list, and plain memory as the pool."""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvcached_client.attach import AttachConnection
from kvcached_client.attach_protocol import Joined
from kvcached_client.errors import ErrorCode, request_error
from kvcached_client.keys import KeyChain
from kvcached_client.layout import Layout
from kvcached_client.memory import MappedPool
from kvcached_client.types import KEY_SIZE_BYTES


def fake_pool(layout: Layout, slots: int, shard: int = 0) -> MappedPool:
    """The SDK's own views over memory that no daemon knows of."""
    size_bytes = layout.pool_bytes(slots)
    joined = Joined(kind="memfd", shard=shard, epoch=1, layout=layout, slots=slots, pool_bytes=size_bytes)
    with socket.socket() as closed:
        connection = AttachConnection(closed)
    return MappedPool(connection, joined, (ctypes.c_ubyte * size_bytes)())


class FakeClient:
    """What the scheduler uses of `kvcached_client.Client`. Unpinned blocks are evicted last committed first."""

    def __init__(self, layout: Layout, slots: int) -> None:
        self.layout = layout
        self.slots = slots
        self.free = list(range(slots))
        self.cached: dict[bytes, int] = {}  # key → slot, in order of commit
        self.pins: dict[int, int] = {}
        self.calls: list[str] = []

    def chain(self, tokens: Sequence[int] = ()) -> KeyChain:
        return KeyChain(bytes(32), self.layout.block_size, tokens)

    def acquire(self, request: str, chain: KeyChain, *, cache: str = "all") -> FakeLease:
        self.calls.append(f"acquire {request}")
        hit = self._match(chain)
        for slot in hit:
            self.pin(slot)
        try:
            exclusive = self.take(-(-chain.token_count // chain.block_size) - len(hit))
        except Exception:
            for slot in hit:
                self.unpin(slot)
            raise
        return FakeLease(self, request, chain, hit, exclusive, cache)

    def _match(self, chain: KeyChain) -> list[int]:
        hit: list[int] = []
        for key in split_keys(chain, 0, (chain.token_count - 1) // chain.block_size):
            if key not in self.cached:
                break
            hit.append(self.cached[key])
        return hit

    def take(self, count: int) -> list[int]:
        evictable = [key for key, slot in self.cached.items() if not self.pins.get(slot)]
        if count > len(self.free) + len(evictable):
            raise request_error(ErrorCode.NO_CAPACITY, f"{count} slots wanted", "release, or try later")
        while len(self.free) < count:
            self.free.append(self.cached.pop(evictable.pop()))
        return [self.free.pop(0) for _ in range(count)]

    def pin(self, slot: int) -> None:
        self.pins[slot] = self.pins.get(slot, 0) + 1

    def unpin(self, slot: int) -> None:
        self.pins[slot] -= 1

    def check_all_returned(self) -> None:
        """Every slot is free or cached, and none is pinned."""
        assert sorted([*self.free, *self.cached.values()]) == list(range(self.slots))
        assert not any(self.pins.values())


class FakeLease:
    """What the scheduler uses of `kvcached_client.Lease`."""

    def __init__(
        self, client: FakeClient, request: str, chain: KeyChain, hit: list[int], exclusive: list[int], cache: str
    ) -> None:
        self._client = client
        self._request = request
        self._chain = chain
        self._table = hit + exclusive
        self._pinned = list(hit)
        self._depth = len(hit)
        self._prompt_blocks = chain.block_count
        self._cache = cache
        self.hit_blocks = len(hit)

    @property
    def hit_tokens(self) -> int:
        return self.hit_blocks * self._chain.block_size

    @property
    def block_table(self) -> npt.NDArray[np.int32]:
        return np.asarray(self._table, dtype=np.int32)

    def allocate(self, tokens: int) -> None:
        missing = -(-tokens // self._chain.block_size) - len(self._table)
        if missing > 0:
            self._client.calls.append(f"allocate {self._request} {tokens}")
            self._table += self._client.take(missing)

    def commit(self, computed_tokens: int) -> None:
        cap = {"all": self._chain.block_count, "prompt": self._prompt_blocks, "nothing": 0}[self._cache]
        end = max(self._depth, min(computed_tokens // self._chain.block_size, cap))
        if end > self._depth:
            self._client.calls.append(f"commit {self._request} {end}")
        for index, key in enumerate(split_keys(self._chain, self._depth, end), self._depth):
            if key not in self._client.cached:
                self._client.cached[key] = self._table[index]
                self._client.pin(self._table[index])
                self._pinned.append(self._table[index])
        self._depth = end

    def finish(self, computed_tokens: int) -> None:
        self.commit(computed_tokens)
        self._client.calls.append(f"release {self._request}")
        self._client.free += [slot for slot in self._table if slot not in self._pinned]
        for slot in self._pinned:
            self._client.unpin(slot)


def split_keys(chain: KeyChain, start: int, stop: int) -> list[bytes]:
    """The keys of the blocks [start, stop), one by one."""
    packed = chain.key_range(start, stop)
    return [packed[at : at + KEY_SIZE_BYTES] for at in range(0, len(packed), KEY_SIZE_BYTES)]
